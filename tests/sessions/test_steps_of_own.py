"""Updates that take several passes, and what the processes must do alike in them."""

from __future__ import annotations

import contextlib
import logging.handlers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.sessions.settings import UsageError
from examples import sam
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

EPOCHS = 2
SAMPLES = 33
"""In batches of 16: the last one has one, and most processes have none."""
SIZES = [
    1,
    pytest.param(3, marks=pytest.mark.slow),
    pytest.param(4, marks=[pytest.mark.slow, pytest.mark.nightly]),
]
ALONE = World(0, 1, 0, 1)


def shares() -> list[Tensor]:
    """The numbers of the samples of each batch."""
    orders = [torch.as_tensor(epoch_order(0, epoch, SAMPLES)) for epoch in range(EPOCHS)]
    return [share for order in orders for share in order.split(16)]


def sam_on(world: World) -> dict[str, Tensor]:
    with session_on(world) as run:
        return dict(sam.train(run, EPOCHS, SAMPLES).state_dict())


def sam_by_hand() -> dict[str, Tensor]:
    model = sam.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    points, labels = sam.spirals(SAMPLES).tensors
    for share in shares():
        before = [part.detach().clone() for part in model.parameters()]
        functional.cross_entropy(model(points[share]), labels[share]).backward()
        gradients = [part.grad for part in model.parameters() if part.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for part, gradient in zip(model.parameters(), gradients, strict=True):
                part += gradient * 0.05 / (norm + 1e-12)
        optimizer.zero_grad()
        functional.cross_entropy(model(points[share]), labels[share]).backward()
        with torch.no_grad():
            for part, value in zip(model.parameters(), before, strict=True):
                part.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("processes", SIZES)
def test_two_passes_in_a_step_are_those_of_one_process(processes: int) -> None:
    expected = sam_by_hand()
    for found in on_ranks(processes, sam_on):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class SamOptimizer(torch.optim.Optimizer):
    """As it is often written: an optimizer around another one, which takes a closure."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], **options: Any):
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        moves = {p: gradient * 0.05 / (norm + 1e-12) for p, gradient in gradients.items()}
        for part, move in moves.items():
            part.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for part, move in moves.items():
            part.sub_(move)
        self.base.step()
        return loss


def closure_on(world: World, kind: str) -> dict[str, Tensor]:
    with session_on(world) as run:
        model = run.wrap(sam.new_model())
        optimizer, more = optimizer_of(kind, model)
        loader = run.loader(sam.spirals(SAMPLES), global_batch_size=16)
        run.resume(model=model, optimizer=optimizer, **more)
        for _ in run.epochs(EPOCHS):
            for points, labels in loader:

                def closure(points: Tensor = points, labels: Tensor = labels) -> Tensor:
                    optimizer.zero_grad()
                    losses = functional.cross_entropy(model(points), labels, reduction="none")
                    loss = run.mean(losses) + run.mean(losses.square()[:, None]) * 0.1
                    loss.backward()
                    return loss

                if kind == "sam":
                    closure()
                optimizer.step(closure)
        return dict(model.state_dict())


def optimizer_of(kind: str, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    if kind == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"), {}
    optimizer = SamOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    return optimizer, {"base": optimizer.base}


def closure_by_hand(kind: str) -> dict[str, Tensor]:
    model = sam.new_model()
    optimizer, _ = optimizer_of(kind, model)
    points, labels = sam.spirals(SAMPLES).tensors
    for share in shares():

        def closure(share: Tensor = share) -> Tensor:
            optimizer.zero_grad()
            losses = functional.cross_entropy(model(points[share]), labels[share], reduction="none")
            loss = losses.mean() + losses.square().mean() * 0.1
            loss.backward()
            return loss

        if kind == "sam":
            closure()
        optimizer.step(closure)
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lbfgs", "sam"])
def test_closures_step_by_the_loss_of_all(kind: str) -> None:
    expected = closure_by_hand(kind)
    for found in on_ranks(3, closure_on, kind):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def skip_on(world: World) -> str:
    """One process leaves out an update, by its own part of the loss."""
    with session_on(world) as run:
        model = run.wrap(sam.new_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = run.loader(sam.spirals(SAMPLES), global_batch_size=16)
        run.resume(model=model, optimizer=optimizer)
        try:
            for _ in run.epochs(1):
                for points, labels in loader:
                    optimizer.zero_grad()
                    losses = functional.cross_entropy(model(points), labels, reduction="none")
                    run.mean(losses).backward()
                    if run.rank or run.step:
                        optimizer.step()
        except PeerError as error:
            run._steps.loop.open_epoch = None
            return f"{error}"
    return ""


def test_an_update_that_one_process_leaves_out_is_noticed() -> None:
    table = "the number of steps of the optimizers is not the same for all processes (rank 0: 2, rank 1: 3)"
    assert [text.startswith(table) for text in on_ranks(2, skip_on)] == [True, True]


def test_a_loss_for_each_sample_may_have_a_dimension_of_one() -> None:
    with session_on(ALONE) as run:
        model = run.wrap(nn.Linear(2, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = run.loader(sam.spirals(8), global_batch_size=8)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for points, labels in loader:
                outputs = model(points)
                losses = functional.mse_loss(outputs, labels[:, None].double(), reduction="none")
                assert run.mean(losses).item() == pytest.approx(losses.mean().item())
                assert run.mean(losses[:, None]).item() == pytest.approx(losses.mean().item())
                with pytest.raises(UsageError, match="one loss for each pair of samples"):
                    run.mean((outputs - labels.double()).square())
                with pytest.raises(
                    UsageError, match=r"shape \[8, 3\], but the batch has 8 samples$"
                ):
                    run.mean(losses.expand(8, 3))


def updated_by_hand(world: World) -> tuple[Tensor, str, list[str]]:
    """The weights of a loop without an optimizer, what is said of a loss that is a mean there, and
    warnings of a score by all samples on each process."""
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("ddp_train").addHandler(handler)
    inputs = torch.arange(12.0).double().view(6, 2)
    refusal = ""
    weights = torch.empty(0)
    with session_on(world) as run, contextlib.suppress(Interrupted):
        layer = nn.Linear(2, 1, bias=False).double()
        nn.init.ones_(layer.weight)
        model = run.wrap(layer)
        loader = run.loader(inputs, global_batch_size=4, shuffle=False)
        run.resume(model=model)
        for epoch in run.epochs(2):
            try:
                for batch in loader:
                    model.zero_grad()
                    losses = model(batch).square()[:, 0]
                    if epoch:
                        losses.mean().backward()
                    else:
                        run.mean(losses).backward()
                    assert layer.weight.grad is not None
                    layer.weight.data.sub_(1e-3 * layer.weight.grad)
            except UsageError as error:
                refusal = str(error)
                raise Interrupted from None
            weights = layer.weight.detach().clone()
            run.sum(model(inputs).sum().item())
    return weights, refusal, [record.getMessage() for record in handler.buffer]


def test_a_loop_without_an_optimizer_is_that_of_one() -> None:
    weights = torch.ones(1, 2).double()
    inputs = torch.arange(12.0).double().view(6, 2)
    for batch in inputs.split(4):
        weights = weights - 1e-3 * 2 * (batch @ weights.T * batch).mean(0)
    for found, refusal, warnings in on_ranks(2, updated_by_hand):
        torch.testing.assert_close(found, weights)
        assert "from a loss that was not computed by run.mean" in refusal
        assert any("not from run.test_loader" in warning for warning in warnings)
