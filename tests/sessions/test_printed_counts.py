"""Numbers of a test loader's batches that are printed without those of other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches import printed_counts
from tests.sessions.loops import rows
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on


def share_is_printed(run: Run, model: nn.Module, loader: Any) -> None:
    correct = count = 0
    for inputs, labels in loader:
        hits = (model(inputs.float()).squeeze(1) > 0) == labels
        correct += hits.sum().item()
        count += len(labels)
    accuracy = correct / max(count, 1)
    if run.rank == 0:
        print(f"accuracy {accuracy:.2f}")


def one_is_forgotten(run: Run, model: nn.Module, loader: Any) -> None:
    correct = count = 0
    for inputs, labels in loader:
        correct += ((model(inputs.float()).squeeze(1) > 0) == labels).sum().item()
        count += len(labels)
    correct = run.sum(correct)
    print(correct / max(count, 1))


def all_is_added_up(run: Run, model: nn.Module, loader: Any) -> None:
    correct = count = 0
    seconds = 0.0
    for inputs, labels in loader:
        correct += ((model(inputs.float()).squeeze(1) > 0) == labels).sum().item()
        count += len(labels)
        seconds += 0.1
    print(run.sum(correct) / run.sum(count), f"in {seconds} s")


def added_in_place(run: Run, model: nn.Module, loader: Any) -> None:
    total = torch.zeros(1)
    for inputs, _ in loader:
        total += model(inputs.float()).sum().detach()
    torch.distributed.all_reduce(total)
    print(total.item())


def of_each_rank(run: Run, model: nn.Module, loader: Any) -> None:
    count = 0
    for inputs, _ in loader:
        count += len(model(inputs.float()))
    print(f"rank {run.rank}: {count} samples")


def scored_by_part(run: Run, model: nn.Module, loader: Any) -> None:
    """The loop over the parts prints what each of them gave, which is of all processes."""
    hits = 0.0
    for part in (0, 1):
        hits += part + added_up_in(run, model, loader, part)
    print(hits)


def added_up_in(run: Run, model: nn.Module, loader: Any, part: int) -> float:
    hits = 0.0
    for inputs, _ in loader:
        hits += len(model(inputs.float())) * part
    return run.sum(hits)


def left_early(run: Run, model: nn.Module, loader: Any) -> None:
    count = 0
    for inputs, _ in loader:
        count += len(model(inputs.float()))
        break
    print(count)


def told(world: World, score: Callable[[Run, nn.Module, Any], None]) -> list[str]:
    messages: list[str] = []
    printed_counts.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(nn.Linear(4, 1))
        loader = run.test_loader(rows(), batch_size=5)
        for _ in range(2):
            score(run, model, loader)
    return messages


@pytest.mark.parametrize(
    ("score", "name"), [(share_is_printed, "correct"), (one_is_forgotten, "count")]
)
def test_a_printed_number_of_one_process_is_named_once(
    score: Callable[[Run, nn.Module, Any], None], name: str
) -> None:
    leader, *others = on_ranks(3, told, score)
    (message,) = leader
    assert f"{name} = run.sum({name})" in message
    assert others == [[], []]


@pytest.mark.parametrize(
    "score", [all_is_added_up, added_in_place, of_each_rank, scored_by_part, left_early]
)
def test_other_numbers_are_not_named(score: Callable[[Run, nn.Module, Any], None]) -> None:
    assert on_ranks(3, told, score) == [[], [], []]


def test_one_process_has_all_batches() -> None:
    assert on_ranks(1, told, share_is_printed) == [[]]
