"""Sums over batches that every process had, of which a session warns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_train.distributed.world import World
from ddp_train.sessions.watches import score_watch
from ddp_train.sessions.watches.score_watch import CARRIED, ScoreWatch
from tests.sessions.loops import rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on


def test_sum_over_batches_of_a_test_loader_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    with watch.scoring():
        watch.see_score()
    watch.see_sum(processes=2)
    assert not caplog.records


def test_sum_over_other_batches_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    for _ in range(2):
        watch.see_score()
        watch.see_sum(processes=2)
    assert caplog.text.count("the sum counts each of them 2 times") == 1


def test_one_process_may_sum_what_it_likes(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    watch.see_score()
    watch.see_sum(processes=1)
    assert not caplog.records


def squares(model: nn.Module) -> float:
    """Of all rows, on each process."""
    model.eval()
    with torch.no_grad():
        batches = [model(inputs.float()) for inputs, _ in DataLoader(rows(), batch_size=5)]
    model.train()
    return torch.cat(batches).square().sum().item()


def summed(world: World, what: str) -> list[str]:
    """What is told where a model has scored rows that are not a loader's before `run.sum`.

    what: how the score is added up, or how another number is.
    """
    messages: list[str] = []
    score_watch.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(nn.Linear(4, 1))
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=6)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            score = squares(model)
            shown = model(torch.ones(2, 4)).sum().item()
            total = 0.0
            if what in ("after steps", "of steps"):
                for inputs, _ in loader:
                    loss = run.mean(model(inputs.float()).squeeze(1))
                    loss.backward()
                    optimizer.step()
                    total += run.sum(loss.item()) / run.processes
            if what == "barrier":
                run.sum(0)
            elif what == "mean":
                print(run.sum(score) / run.processes)
            elif what == "of steps":
                print(shown, run.sum(total) / len(rows()))
            else:
                print(run.sum(score) / len(rows()))
    return messages


@pytest.mark.parametrize(
    ("what", "count"),
    [("barrier", 0), ("mean", 0), ("of steps", 0), ("after steps", 1), ("now", 1)],
)
def test_only_sums_that_count_scores_twice_are_told(what: str, count: int) -> None:
    leader, *_ = on_ranks(3, summed, what)
    assert len(leader) == count


class Recurrent(nn.Module):
    """A network whose outputs are inputs for the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4).double()

    def forward(self, inputs: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        after = self.cell(inputs, hidden)
        return after[:, 0], after


def scored(world: World, kind: str) -> list[str]:
    """What is said of a loop over a test loader after an epoch.

    kind: the state is carried from batch to batch, begun anew in each, or used twice in each.
    """
    messages: list[str] = []
    log = score_watch.log
    log.warning = lambda text, *_: messages.append(text)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(Recurrent(), find_unused_parameters=True)
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=10)
        test_loader = run.test_loader(rows(), batch_size=2)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for inputs, labels in loader:
                optimizer.zero_grad()
                run.mean((model(inputs)[0] - labels).square()).backward()
                optimizer.step()
            total = 0.0
            state = None
            with torch.no_grad():
                for inputs, _ in test_loader:
                    if kind != "carried":
                        state = None
                    outputs, state = model(inputs, state)
                    if kind == "twice":
                        outputs, state = model(inputs, hidden=state)
                    state = state.detach()
                    total += outputs.sum().item()
            run.sum(total)
    return messages


@pytest.mark.parametrize(("kind", "told"), [("carried", [CARRIED]), ("anew", []), ("twice", [])])
def test_a_state_that_is_carried_over_test_batches_is_told_once(kind: str, told: list[str]) -> None:
    for messages in on_ranks(3, scored, kind):
        assert messages == told
    assert on_ranks(1, scored, kind) == [[]]
