"""Losses that compare the samples of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.distributed.all_gather import all_gather
from ddp_train.distributed.world import World
from ddp_train.sessions.watches import first_step
from ddp_train.sessions.watches.mixed_rows import MIXED, mixes_rows
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

SAMPLES = 6
INPUTS = torch.randn(2 * SAMPLES, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2])


def outputs_of(rows: int = SAMPLES) -> Tensor:
    return INPUTS[:rows].clone().requires_grad_().tanh()


def hardest(outputs: Tensor) -> Tensor:
    distances = torch.cdist(outputs.detach(), outputs.detach()).fill_diagonal_(torch.inf)
    return (outputs - outputs[distances.argmin(1)]).square().sum(1)


def of_two_views(outputs: Tensor) -> Tensor:
    """NT-Xent over rows that stand in turns: all first views, all second ones."""
    similarity = functional.normalize(outputs) @ functional.normalize(outputs).T
    similarity = similarity.fill_diagonal_(-torch.inf)
    positives = torch.arange(2 * SAMPLES).roll(SAMPLES)
    return functional.cross_entropy(similarity, positives, reduction="none")


def differences_of_views(outputs: Tensor) -> Tensor:
    first, second = outputs.chunk(2)
    return (first - second).square().sum(1)


def differences_of_neighbours(outputs: Tensor) -> Tensor:
    return (outputs[::2] - outputs[1::2]).square().sum(1)


def distances_to_prior(outputs: Tensor) -> Tensor:
    """The squared maximum mean discrepancy, one number for the batch."""
    prior = INPUTS[: len(outputs)]
    return (
        -2 * torch.exp(-torch.cdist(outputs, prior).square()).mean()
        + torch.exp(-torch.cdist(outputs, outputs).square()).mean()
    )


def distances_of_pairs(outputs: Tensor) -> Tensor:
    first, second = torch.triu_indices(SAMPLES, SAMPLES, 1)
    return (outputs[first] - outputs[second]).square().sum(1)


MIXING: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (hardest, SAMPLES),
    (lambda outputs: (outputs - outputs.mean(0)).square().sum(1), SAMPLES),
    (lambda outputs: -(outputs @ outputs.T).log_softmax(0).diag(), SAMPLES),
    (of_two_views, 2 * SAMPLES),
    (distances_to_prior, SAMPLES),
    (lambda outputs: functional.cross_entropy(outputs @ outputs.T, torch.arange(6)), SAMPLES),
    (lambda outputs: outputs.var(0).sqrt().sum(), SAMPLES),
]
SEPARATE: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (lambda outputs: functional.cross_entropy(outputs, TARGETS, reduction="none"), SAMPLES),
    (lambda outputs: (outputs - outputs.detach().mean(0)).square().sum(1), SAMPLES),
    (lambda outputs: outputs.square().sum(), SAMPLES),
    (lambda outputs: outputs.detach().sum(1), SAMPLES),
    (differences_of_views, 2 * SAMPLES),
    (differences_of_neighbours, 2 * SAMPLES),
    (lambda outputs: functional.batch_norm(outputs, None, None, training=True)[:, 0], SAMPLES),
]


@pytest.mark.parametrize(("loss", "rows"), MIXING)
def test_losses_that_compare_samples_are_seen(loss: Any, rows: int) -> None:
    outputs = outputs_of(rows)
    assert mixes_rows(loss(outputs), [outputs, None], SAMPLES)


@pytest.mark.parametrize(("loss", "rows"), SEPARATE)
def test_losses_of_each_sample_are_not(loss: Any, rows: int) -> None:
    outputs = outputs_of(rows)
    assert not mixes_rows(loss(outputs), outputs, SAMPLES)
    assert not mixes_rows(loss(outputs), None, SAMPLES)


def test_losses_of_pairs_are_seen() -> None:
    outputs = outputs_of()
    assert mixes_rows(distances_of_pairs(outputs), outputs, SAMPLES)


def test_outputs_of_all_forward_passes_are_looked_at() -> None:
    first, second = outputs_of(), outputs_of()
    losses = (first - first.mean(0) - second).square().sum(1)
    assert mixes_rows(losses, [first, second], SAMPLES)


def test_time_major_outputs_mix_nothing() -> None:
    """Of a number of times that is a multiple of the number of samples."""
    outputs = torch.randn(2 * SAMPLES, SAMPLES, 4).requires_grad_() * 1
    lengths = torch.full((SAMPLES,), 2)
    labels = torch.ones(SAMPLES, 2, dtype=torch.long)
    log_probs = outputs.log_softmax(2)
    losses = functional.ctc_loss(log_probs, labels, 6 * lengths, lengths, reduction="none")
    assert not mixes_rows(losses, outputs, SAMPLES)
    assert not mixes_rows(losses.sum(), outputs, SAMPLES)
    contrast = log_probs.mean(0) @ log_probs.mean(0).T
    assert mixes_rows(contrast.log_softmax(1).diag(), outputs, SAMPLES)


def test_parameters_beside_the_outputs_mix_nothing() -> None:
    """As the transitions of a conditional random field, or embeddings of all nodes of a graph."""
    transitions = nn.Parameter(torch.randn(4, SAMPLES))
    nodes = torch.randn(10 * SAMPLES, 4).requires_grad_() * 1
    outputs = outputs_of()
    losses = (outputs @ transitions).logsumexp(1) + (outputs @ nodes.T).logsumexp(1)
    assert not mixes_rows(losses, [outputs, transitions, nodes], SAMPLES)


def test_samples_of_unequal_size_mix_nothing() -> None:
    """Nodes of graphs, whose number happens to be twice that of the graphs."""
    nodes = outputs_of(2 * SAMPLES)
    graphs = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5])
    sums = torch.zeros(SAMPLES, 4).index_add(0, graphs, nodes)
    assert not mixes_rows(sums.logsumexp(1), nodes, SAMPLES)
    assert not mixes_rows(sums.logsumexp(1).sum(), nodes, SAMPLES)


@pytest.mark.parametrize(
    "watch", [Tensor.retain_grad, lambda similarity: similarity.register_hook(print)]
)
def test_gradients_that_are_watched_are_not_disturbed(watch: Any, capsys: Any) -> None:
    outputs = outputs_of()
    similarity = outputs @ outputs.T
    watch(similarity)
    assert not mixes_rows(-similarity.log_softmax(1).diag(), outputs, SAMPLES)
    assert not capsys.readouterr().out


class OnceOnly(torch.autograd.Function):
    """The square, by a function whose backward may not be called twice."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.square()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise AssertionError("it was called")


def test_functions_in_python_are_not_called() -> None:
    outputs = outputs_of()
    square: Any = OnceOnly.apply
    assert not mixes_rows(square(outputs @ outputs.T).mean(), outputs, SAMPLES)


def test_mistakes_of_the_loop_are_raised_by_its_own_backward() -> None:
    outputs = outputs_of()
    similarity = (outputs @ outputs.T).exp()
    loss = similarity.square().mean()
    similarity += 1
    assert not mixes_rows(loss, outputs, SAMPLES)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_the_loops_own_backward_stays_the_same() -> None:
    leaf = INPUTS[:SAMPLES].clone().requires_grad_()
    outputs = leaf.tanh()
    for loss in (distances_to_prior(outputs), hardest(outputs).sum()):
        (expected,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert mixes_rows(loss, outputs, SAMPLES)
        assert leaf.grad is None
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert torch.equal(gradient, expected)


def test_mixed_precision_is_looked_at() -> None:
    outputs = outputs_of()
    with torch.autocast("cpu", torch.bfloat16):
        assert mixes_rows((outputs @ outputs.T).logsumexp(1).sum(), outputs, SAMPLES)
        assert not mixes_rows((outputs @ outputs[0].detach()).square().sum(), outputs, SAMPLES)


def pairs_of_rows(world: World, gathers: bool) -> list[Any]:
    """What a contrastive loop is told, and its gradient.

    gathers: it compares with the samples of all processes."""
    gather: Any = all_gather
    messages: list[str] = []
    first_step.log.warning = messages.append  # type: ignore[method-assign]
    torch.manual_seed(0)
    with session_on(world) as run:
        linear = nn.Linear(4, 4)
        net = nn.Sequential(linear, nn.BatchNorm1d(4))
        model = run.wrap(net, find_unused_parameters=not gathers)
        loader = run.loader(list(INPUTS), global_batch_size=2 * SAMPLES, shuffle=False)
        run.resume(model=model)
        for _ in run.epochs(1):
            for batch in loader:
                outputs = model(batch)
                own = torch.arange(len(outputs))
                others = outputs
                if gathers:
                    others, own = gather(outputs)
                logits = outputs @ others.T
                losses = functional.cross_entropy(logits, own, reduction="none")
                run.mean(losses).backward()
        assert linear.weight.grad is not None
        gradient = linear.weight.grad.clone()
    return [messages, gradient]


@pytest.mark.slow
def test_a_loop_is_told_once_on_three_processes() -> None:
    """With all_gather it has the gradient of one process, and nothing to be told."""
    (_, expected), *_ = on_ranks(1, pairs_of_rows, False)
    told = on_ranks(3, pairs_of_rows, False)
    assert [messages for messages, _ in told] == [[MIXED], [], []]
    for messages, gradient in on_ranks(3, pairs_of_rows, True):
        assert messages == []
        torch.testing.assert_close(gradient, expected)
    assert not torch.allclose(told[0][1], expected)
