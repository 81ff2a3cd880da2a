"""Variables that functions and methods of the loop keep, and that its losses depend on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches.carried_numbers import CARRIED
from ddp_train.sessions.watches.lost_variables import LOST
from tests.sessions.kept_numbers import averaging, by_recent
from tests.sessions.loops import net, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on, told_by

baseline = 0.0


class Trainer:
    """A loop in methods: what each step computes is kept in attributes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = run.wrap(net())
        self.optimizer = sgd(self.model)
        self.total = 0.0
        self.recent: list[Tensor] = []
        self.hidden = torch.zeros(1).double()
        self.queue = torch.zeros(4).double()

    def begun(self, data: Any) -> Any:
        """The loader, after the model and its optimizer were named."""
        self.run.resume(model=self.model, optimizer=self.optimizer)
        return self.run.loader(data, global_batch_size=6)

    def fit(self, step: Callable[[Tensor, Tensor], Any], epochs: int = 2) -> None:
        loader = self.begun(rows())
        for _ in self.run.epochs(epochs):
            for x, y in loader:
                self.total += float(self.update(step(x, y)))

    def update(self, losses: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.run.mean(losses)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class WithHidden(Trainer):
    def fit(self, step: Callable[[Tensor, Tensor], Any], epochs: int = 2) -> None:
        loader = self.begun(rows())
        for _ in self.run.epochs(epochs):
            for x, y in loader:
                self.one(x, y)

    def one(self, x: Tensor, y: Tensor) -> None:
        out = self.model(x).squeeze(1)
        losses = (out - self.hidden - y).square()
        self.hidden = self.hidden + 0.1
        self.update(losses)


def hidden_in_a_method(run: Run) -> None:
    trainer = WithHidden(run)
    trainer.fit(trainer.one)


def hidden_of_another_object(run: Run) -> None:
    trainer = WithHidden(run)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            trainer.one(x, y)


def mixed(queue: list[Tensor], x: Tensor) -> Tensor:
    queue.append(x[:1].detach())
    return x + torch.cat(queue).mean(0)


def queue_in_a_function(run: Run) -> None:
    trainer = Trainer(run)
    queue: list[Tensor] = []
    loader = trainer.begun(rows())
    for _ in run.epochs(1):
        for x, y in loader:
            x = mixed(queue, x)
            trainer.update((trainer.model(x).squeeze(1) - y).square())


def above_baseline(values: Tensor) -> Tensor:
    global baseline
    advantages = values - baseline
    if len(values):
        baseline = 0.9 * baseline + 0.1 * values.mean().item()
    return advantages


def global_in_a_function(run: Run) -> None:
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    for _ in run.epochs(1):
        for x, y in loader:
            trainer.update(above_baseline(y) * trainer.model(x).squeeze(1))


def train_epoch(trainer: Trainer, loader: Any, inputs: Tensor, aims: Tensor) -> None:
    for i in loader:
        trainer.update((trainer.model(inputs[i]) - aims[i]).square().squeeze(1))


def aims_of_the_caller(run: Run) -> None:
    trainer = Trainer(run)
    inputs, _ = rows().tensors
    loader = trainer.begun(range(len(inputs)))
    for _ in run.epochs(2):
        with torch.no_grad():
            aims = trainer.model(inputs) + inputs[:, :1]
        train_epoch(trainer, loader, inputs, aims)


def passes_of_the_caller(run: Run) -> None:
    trainer = Trainer(run)
    inputs, aims = rows().tensors
    loader = trainer.begun(range(len(inputs)))
    for _ in run.epochs(1):
        for number in range(2):
            assert number < 2
            train_epoch(trainer, loader, inputs, aims[:, None])


LOST_IN = [
    (hidden_in_a_method, "self.hidden"),
    (hidden_of_another_object, "trainer.hidden"),
    (queue_in_a_function, "queue"),
    (global_in_a_function, "baseline"),
    (aims_of_the_caller, "aims"),
    (passes_of_the_caller, "number"),
]


class Meter:
    """A score, which no loss depends on."""

    def __init__(self) -> None:
        self.sum = torch.zeros(1).double()
        self.count = 0

    def update(self, values: Tensor) -> float:
        self.sum = self.sum + values.detach().sum()
        self.count += len(values)
        return self.sum.item() / max(self.count, 1)


def of_a_log(run: Run) -> None:
    """Scores beside the loss, what is saved, and what a step makes anew."""
    trainer = Trainer(run)
    meter = Meter()
    average = torch.zeros(3).double()

    def losses_and_score(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        out = trainer.model(x).squeeze(1)
        losses = (out - y).square()
        score = meter.update(losses)
        average.add_(losses.detach().sum())
        trainer.recent = [*trainer.recent[-3:], losses.detach()]
        return losses, score

    loader = trainer.begun(rows())
    for epoch in run.epochs(2):
        for x, y in loader:
            weight = scaled(epoch)
            losses, score = losses_and_score(x, y)
            run.log("score", torch.full((len(x),), score))
            trainer.total += float(trainer.update(weight * losses))


def scaled(epoch: int) -> float:
    return 1 / (1 + epoch)


def of_the_trainers_log(run: Run) -> None:
    trainer = Trainer(run)
    trainer.fit(lambda x, y: (trainer.model(x).squeeze(1) - y).square())


def in_a_dict(run: Run) -> None:
    """Beside a number that is printed, and one that is not changed."""
    trainer = Trainer(run)
    state = {"ema": 1.0, "seen": 0.0, "scale": 0.5}
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            losses = (trainer.model(x).squeeze(1) - y).square()
            trainer.update(state["scale"] * losses / state["ema"])
            state["ema"] = 0.9 * state["ema"] + 0.1 * losses.sum().item()
            state["seen"] += len(x)
        print(state["seen"])


def in_a_list(run: Run) -> None:
    trainer = Trainer(run)
    history: list[float] = []
    printed: list[float] = []
    parts: list[float] = []
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            parts.clear()
            losses = (trainer.model(x).squeeze(1) - y).square()
            parts.append(losses.sum().item())
            history.append(parts[0])
            printed.append(parts[0])
            trainer.update(losses / (1 + sum(history[-3:])) + parts[0])
        print(sum(printed))


class Stats:
    def __init__(self) -> None:
        self.mean = 1.0
        self.seen = 0

    def update(self, losses: Tensor) -> None:
        if len(losses):
            self.mean = 0.9 * self.mean + 0.1 * losses.mean().item()
        self.seen += len(losses)


class WithStats(Trainer):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.stats = Stats()

    def one(self, x: Tensor, y: Tensor) -> None:
        stats = self.stats
        losses = (self.model(x).squeeze(1) - y).square()
        self.update(losses / stats.mean)
        stats.update(losses.detach())


def in_an_object(run: Run) -> None:
    trainer = WithStats(run)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            trainer.one(x, y)
        print(trainer.stats.seen)


class Scaled(nn.Module):
    """A loss with a number and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(1).double())

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = (out.squeeze(1) - y + self.shift).square()
        self.shift.add_(0.1)
        self.scale = 0.9 * self.scale + 0.1 * losses.sum().item()
        return losses / self.scale


def in_a_loss(run: Run) -> None:
    """In a module that run.resume got, whose state_dict has the buffer alone."""
    model = run.wrap(net())
    optimizer = sgd(model)
    criterion = Scaled()
    run.resume(model=model, optimizer=optimizer, criterion=criterion)
    for _ in run.epochs(2):
        for x, y in run.loader(rows(), global_batch_size=6):
            optimizer.zero_grad()
            run.mean(criterion(model(x), y)).backward()
            optimizer.step()


def in_an_array(run: Run) -> None:
    trainer = Trainer(run)
    weights = np.ones(2)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            losses = (trainer.model(x).squeeze(1) - y).square()
            trainer.update(losses * torch.as_tensor(weights)[y.long()])
            weights[y.long().numpy()] *= 1.1


def in_another_module(run: Run) -> None:
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            trainer.update(by_recent((trainer.model(x).squeeze(1) - y).square()))


def in_a_closure(run: Run) -> None:
    trainer = Trainer(run)
    averaged = averaging()
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            losses = (trainer.model(x).squeeze(1) - y).square()
            trainer.update(losses / averaged(losses.detach()))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def count_for_a_rate(run: Run) -> None:
    """And one for what is printed, logged and scored."""
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    step = shown = 0
    best = 1e9
    log: dict[str, Any] = {}
    for _ in run.epochs(2):
        for x, y in loader:
            set_rate(trainer.optimizer, 0.2 / (1 + step))
            trainer.update((trainer.model(x).squeeze(1) - y).square())
            step += 1
            shown += 1
            log["lr"] = shown
            if shown % 2 == 0:
                print(shown, log)
                best = min(best, score(trainer, shown))


def score(trainer: Trainer, step: int) -> float:
    trainer.model.eval()
    total = 0.0
    with torch.no_grad():
        for number, x in enumerate(rows().tensors[0].split(5)):
            if number > step:
                break
            total += trainer.model(x).sum().item()
    for name, weight in trainer.model.named_parameters():
        trainer.recent[:] = [weight.detach().norm() * len(name) * step]
    trainer.model.train()
    return total


class WarmUp:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.t = 0

    def step(self) -> None:
        self.t += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, self.t / 10)


def count_of_a_schedule(run: Run) -> None:
    trainer = Trainer(run)
    warm_up = WarmUp(trainer.optimizer)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            trainer.update((trainer.model(x).squeeze(1) - y).square())
            warm_up.step()


def count_that_decides(run: Run) -> None:
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    count = 0
    for _ in run.epochs(2):
        for x, y in loader:
            run.mean((trainer.model(x).squeeze(1) - y).square()).backward()
            count += 1
            if count % 2 == 0:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()


def move(average: nn.Module, model: nn.Module) -> None:
    move.count = count = getattr(move, "count", 0) + 1  # type: ignore[attr-defined]
    share = min(0.9, 1 - 1 / count)
    for moved, weight in zip(average.parameters(), model.parameters(), strict=True):
        moved.data.mul_(share).add_(weight.data, alpha=1 - share)


def count_of_an_average(run: Run) -> None:
    model = run.wrap(net())
    optimizer = sgd(model)
    average = net()
    run.resume(model=model, optimizer=optimizer, average=average)
    for _ in run.epochs(2):
        for x, y in run.loader(rows(), global_batch_size=6):
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()
            move(average, model)


class Decaying(torch.optim.Optimizer):
    """Its count is not in the state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad, alpha=-group["lr"] / self.t)


def count_of_an_optimizer(run: Run) -> None:
    model = run.wrap(net())
    optimizer = Decaying(model.parameters())
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for x, y in run.loader(rows(), global_batch_size=6):
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()


def count_of_batches(run: Run) -> None:
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    for epoch in run.epochs(2):
        for i, (x, y) in enumerate(loader):
            set_rate(trainer.optimizer, 0.2 / (1 + epoch + i / 4))
            trainer.update((trainer.model(x).squeeze(1) - y).square())


def count_of_accumulated(run: Run) -> None:
    """Right: a stop within an epoch waits for the next update."""
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    average = net()
    for _ in run.epochs(2):
        for i, (x, y) in enumerate(loader):
            run.mean((trainer.model(x).squeeze(1) - y).square()).backward()
            if (i + 1) % 2 == 0:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                for moved, weight in zip(
                    average.parameters(), trainer.model.parameters(), strict=True
                ):
                    moved.data.lerp_(weight.data, 0.1)


def count_of_the_run(run: Run) -> None:
    """What is right: run.step."""
    trainer = Trainer(run)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            set_rate(trainer.optimizer, 0.2 / (1 + run.step))
            run.mean((trainer.model(x).squeeze(1) - y).square()).backward()
            if (run.step + 1) % 2 == 0:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()


class Clip:
    """Clips gradients to the median of all norms so far."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, model: nn.Module) -> None:
        norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
        self.norms.append(norm.item())
        nn.utils.clip_grad_norm_(model.parameters(), sorted(self.norms)[len(self.norms) // 2])


def norms_for_a_clip(run: Run) -> None:
    trainer = Trainer(run)
    clip = Clip()
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            trainer.optimizer.zero_grad()
            run.mean((trainer.model(x).squeeze(1) - y).square()).backward()
            clip(trainer.model)
            trainer.optimizer.step()


def in_a_deque(run: Run) -> None:
    """Rows of all processes."""
    trainer = Trainer(run)
    queue: deque[Tensor] = deque(maxlen=30)
    loader = trainer.begun(rows())
    for _ in run.epochs(2):
        for x, y in loader:
            losses = (trainer.model(x).squeeze(1) - y).square()
            if queue:
                losses = losses + (x @ torch.stack(list(queue)).T).mean(1)
            trainer.update(losses)
            queue.extend(ddp_train.all_gather(x)[0])


KEPT_IN = [
    (count_for_a_rate, "step"),
    (count_of_a_schedule, "warm_up.t"),
    (count_that_decides, "count"),
    (count_of_an_average, "move.count"),
    (count_of_an_optimizer, "optimizer.t"),
    (count_of_batches, "i"),
    (norms_for_a_clip, "clip.norms"),
    (in_a_deque, "queue"),
    (in_a_dict, "state['ema']"),
    (in_a_list, "history"),
    (in_an_object, "trainer.stats.mean"),
    (in_a_loss, "criterion.scale"),
    (in_an_array, "weights"),
    (in_another_module, "kept_numbers.recent['mean']"),
    (in_a_closure, "averaged.mean"),
]


NOT_LOST = [of_a_log, of_the_trainers_log, count_of_the_run, count_of_accumulated]


@pytest.mark.parametrize(
    ("loop", "names"), [*LOST_IN, *KEPT_IN, *((loop, "") for loop in NOT_LOST)]
)
def test_what_functions_keep_is_told(
    loop: Callable[[Run], None], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    with session_on(World()) as run:
        loop(run)
    told = [record.getMessage() for record in caplog.records if record.msg == LOST]
    assert told == ([LOST % names] if names else [])


def told_apart(world: World, loop: Callable[[Run], None]) -> list[str]:
    messages, _ = told_by(world, loop)
    return messages


@pytest.mark.parametrize(("loop", "names"), KEPT_IN)
def test_what_is_kept_is_told_once_by_three(loop: Callable[[Run], None], names: str) -> None:
    told, *others = on_ranks(3, told_apart, loop)
    assert [text for text in told if "in no checkpoint" in text] == [LOST % names]
    assert others == [[], []]


def test_a_baseline_in_a_function_is_told_on_three() -> None:
    messages = on_ranks(3, told_apart, global_in_a_function)
    assert messages[0] == [LOST % "baseline", CARRIED % "baseline"]
    assert messages[1:] == [[], []]
    assert on_ranks(3, told_apart, of_a_log) == [[], [], []]
