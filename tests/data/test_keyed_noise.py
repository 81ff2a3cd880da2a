"""Noise of a step that does not depend on the processes: whose it is, how good it is, and what is
refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddp_train
from ddp_train import dropout, noise_like, rand_like, randint_like
from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batch
from ddp_train.data.keyed_noise import Rows
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.training_step import CURRENT, TrainingStep, scored, thrown_away
from ddp_train.errors import ConfigError, DataError
from tests.support.keyed_numbers import KeyedNumbers

Draw = Callable[..., Tensor]
DRAWS: list[Draw] = [noise_like, rand_like, lambda x, **rows: dropout(x + 1, 0.3, **rows)]


def share_of(*samples: int, step: int = 0, seed: int = 0) -> MicroBatch:
    indices = np.array(samples, np.int64)
    return MicroBatch(0, step, indices, len(samples), 1.0, True, seed=seed)


def drawn(*samples: int, draw: Draw = noise_like, width: int = 5, **key: int) -> Tensor:
    """The first two calls of a step: [2, samples, width]."""
    x = torch.zeros(len(samples), width)
    with TrainingStep(share=share_of(*samples, **key)):
        return torch.stack([draw(x), draw(x)])


@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_is_its_sample_wherever_it_is(draw: Draw) -> None:
    whole = drawn(7, 3, 9, 4, draw=draw)
    assert torch.equal(drawn(9, 7, draw=draw), whole[:, [2, 0]])
    assert not torch.equal(whole[0], whole[1])
    for other in (drawn(7, 3, 9, 4, draw=draw, step=1), drawn(7, 3, 9, 4, draw=draw, seed=1)):
        assert not torch.equal(other, whole)


def test_numbers_are_those_of_a_second_program() -> None:
    samples = [5, 0, 12]
    x = torch.zeros(3, 2, 4, dtype=torch.float64)
    with TrainingStep(share=share_of(*samples, step=4, seed=9)):
        found = [noise_like(x), rand_like(x), dropout(x + 1, 0.3), randint_like(x, -2, 5)]
    numbers = KeyedNumbers(samples, seed=9, step=4)
    expected = [numbers.normal(2, 4), numbers.uniform(2, 4), numbers.kept(0.3, 2, 4)]
    expected.append(numbers.whole(-2, 5, 2, 4).double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_noise_is_standard_normal_and_uncorrelated() -> None:
    noise = torch.stack([drawn(*range(400), width=100, step=step) for step in range(3)]).double()
    count = noise.numel()  # 240,000: standard errors are 0.002 times 1, 1.4, 2.4 and 4.9
    for power, (moment, error) in enumerate([(0, 1), (1, 1.4), (0, 3.9), (3, 9.8)], 1):
        assert abs((noise**power).mean() - moment) < 4 * error / count**0.5, power
    neighbours = {
        "steps": (noise[1:], noise[:-1]),
        "calls": (noise[:, 1:], noise[:, :-1]),
        "samples": (noise[:, :, 1:], noise[:, :, :-1]),
        "places": (noise[..., 1:], noise[..., :-1]),
    }
    for name, (one, other) in neighbours.items():
        assert abs((one * other).mean()) < 4 / one.numel() ** 0.5, name
        assert abs((one**2 * other**2).mean() - 1) < 4 * 2.9 / one.numel() ** 0.5, name
    share_of_tail = (noise.abs() > 3).double().mean()
    assert abs(share_of_tail - 0.0027) < 4 * (0.0027 / count) ** 0.5


def test_chances_of_dropout_and_whole_numbers_are_even() -> None:
    x = torch.ones(500, 200)
    with TrainingStep(share=share_of(*range(500))):
        kept = dropout(x, 0.1)
        faces = randint_like(x, 6, dtype=torch.int64).flatten().bincount(minlength=6)
    assert set(kept.unique().tolist()) == {0, kept.max().item()}
    assert kept.max() == pytest.approx(1 / 0.9)
    assert abs((kept == 0).double().mean() - 0.1) < 4 * 0.3 / x.numel() ** 0.5
    expected = x.numel() / 6
    assert ((faces - expected) ** 2 / expected).sum() < 20.5  # chi squared of 5: one in 1,000


def test_each_dtype_has_the_same_numbers_cut_off() -> None:
    wide = torch.zeros(40, 300, dtype=torch.float64)
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with TrainingStep(share=share_of(*range(40))):
            x = wide.to(dtype)
            found[dtype] = rand_like(x).double(), noise_like(x).double(), dropout(x + 1) > 0
            assert rand_like(x).dtype == noise_like(x).dtype == dtype
    uniform, noise, kept = found[torch.float64]
    for dtype, (cut, rounded, same) in found.items():
        step = torch.finfo(dtype).eps
        assert ((uniform - cut >= 0) & (uniform - cut < step)).all() and cut.max() < 1
        assert ((rounded - noise).abs() <= step * noise.abs()).all() and torch.equal(same, kept)


def test_rows_may_be_views_parts_or_shared() -> None:
    samples = (8, 2, 6)
    shape = (len(samples), 4, 2)  # four for each sample

    def tensor_of(rows: Rows, *chosen: int) -> Tensor:
        with TrainingStep(share=share_of(*chosen)):
            return noise_like(torch.zeros(4 * len(chosen), 2), rows=rows)

    with TrainingStep(share=share_of(*samples)):
        whole = noise_like(torch.zeros(shape))
    assert torch.equal(tensor_of("parts", *samples), whole.flatten(0, 1))
    assert torch.equal(tensor_of("views", *samples), whole.transpose(0, 1).flatten(0, 1))
    assert torch.equal(tensor_of("parts", 6), tensor_of("views", 6))
    assert torch.equal(tensor_of("shared", 8, 2), tensor_of("shared", 6, 5))
    with TrainingStep(share=share_of(1, 2)):
        shared = (
            noise_like(torch.zeros(()), rows="shared"),
            noise_like(torch.zeros(1), rows="shared"),
        )
    assert shared[0] != shared[1]


def test_an_evaluation_draws_by_sample_inside_a_step_too() -> None:
    x = torch.zeros(2, 3)
    with scored(evaluation_batch(0, np.array([3, 5]))):
        first = noise_like(x)
    with TrainingStep(share=share_of(3, 5, step=7)):
        before = noise_like(x)
        with scored(evaluation_batch(4, np.array([5, 3]))):
            again = noise_like(x)
        after = noise_like(x)
    assert torch.equal(again, first.flip(0))
    with TrainingStep(share=share_of(3, 5, step=7)):
        assert torch.equal(noise_like(x), before) and torch.equal(noise_like(x), after)
    expected = KeyedNumbers([3, 5], epoch=None).normal(3)
    torch.testing.assert_close(first, expected.float())


def test_without_a_batch_they_are_torchs_own() -> None:
    x = torch.ones(2, 3)
    torch.manual_seed(1)
    found = [noise_like(x), rand_like(x), dropout(x, 0.5), randint_like(x, 2, 9)]
    torch.manual_seed(1)
    expected = [torch.randn_like(x), torch.rand_like(x), nn.functional.dropout(x, 0.5)]
    expected.append(torch.randint_like(x, 2, 9))
    assert all(map(torch.equal, found, expected))
    assert dropout(x, 0.9, training=False) is x and not dropout(x, 1.0).any()


class Block(nn.Module):
    """Draws twice in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = dropout(self.linear(x).tanh(), 0.3)
        return x + noise_like(x) * x


def gradients(call: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Of three blocks, each called by `call`, and of a draw behind them."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block(), Block())
    StepSeed(0, 0, "cpu")(0)
    with TrainingStep(share=share_of(1, 2, 3)):
        x = torch.ones(3, 6, requires_grad=True)
        for block in blocks:
            x = call(block, x)
        (x * noise_like(x)).sum().backward()
    return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_draws_the_same(use_reentrant: bool) -> None:
    expected = gradients(lambda block, x: block(x))
    found = gradients(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant))
    assert len(found) == 6 and all(map(torch.equal, found, expected))


def test_a_compiled_model_draws_the_same() -> None:
    expected = gradients(lambda block, x: block(x))
    found = gradients(lambda block, x: torch.compile(block, backend="eager")(x))
    assert len(found) == 6 and all(map(torch.equal, found, expected))


def test_the_page_replaces_dropout_of_a_network() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/noise.md").read_text()
    (recipe,) = re.findall(r"```python\n(class SampleDropout.*?)```", page, re.S)
    model = nn.Sequential(nn.Sequential(nn.Dropout(0.3)), nn.Dropout(0.1)).train()
    exec(recipe, {"nn": nn, "ddp_train": ddp_train, "model": model})
    with TrainingStep(share=share_of(4, 9)):
        found = model(torch.ones(2, 50))
    with TrainingStep(share=share_of(4, 9)):
        assert torch.equal(found, dropout(dropout(torch.ones(2, 50), 0.3), 0.1))
    assert torch.equal(model.eval()(found), found)


def test_passes_that_are_thrown_away_take_no_numbers() -> None:
    x = torch.zeros(2, 3)
    expected = drawn(4, 5, width=3)
    with TrainingStep(share=share_of(4, 5)):
        first = noise_like(x)
        with thrown_away():
            noise_like(x)
        assert torch.equal(torch.stack([first, noise_like(x)]), expected)


def test_keyed_noise_does_not_count_as_noise_by_rank() -> None:
    seed = StepSeed(3, 1, "cpu")
    seed(2)
    marks = CURRENT.marks
    drawn(1, 2)
    assert not seed.has_moved(2, CURRENT.marks - marks) and seed.has_moved(2)
    torch.rand(1)
    assert seed.has_moved(2, CURRENT.marks - marks)


def test_a_batch_without_samples_has_none_drawn() -> None:
    empty = MicroBatch(0, 0, np.array([3]), 0, 0.0, True)
    with TrainingStep(share=empty):
        assert noise_like(torch.zeros(0, 4)).shape == (0, 4)
        assert dropout(torch.zeros(0, 4), rows="views").shape == (0, 4)
        stand_in = noise_like(torch.zeros(1, 4))
    torch.testing.assert_close(stand_in, _third_of_three(3).float())


def _third_of_three(sample: int) -> Tensor:
    numbers = KeyedNumbers([sample])
    numbers.bits(4)
    numbers.bits(4)
    return numbers.normal(4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: noise_like(torch.zeros(5, 2)), "has 5 rows, but the batch has 2 samples"),
        (
            lambda: noise_like(torch.zeros(5, 2), rows="parts"),
            "has 5 rows, .*, and rows='parts' needs a multiple of that",
        ),
        (lambda: noise_like(torch.zeros(())), "without rows"),
        (lambda: noise_like(torch.zeros(2), rows=cast("Any", "mine")), "rows='mine'"),
        (
            lambda: noise_like(torch.zeros(2, dtype=torch.int64)),
            "dtype=torch.int64 must be floating-point",
        ),
        (lambda: dropout(torch.zeros(2), 1.5), "p=1.5 is not a probability"),
        (lambda: randint_like(torch.zeros(2), 3, 3), "low=3 must be less than high=3"),
    ],
)
def test_rows_and_arguments_that_do_not_fit_are_refused(
    call: Callable[[], Any], words: str
) -> None:
    with TrainingStep(share=share_of(1, 2)), pytest.raises(DataError, match=words) as refused:
        call()
    assert refused.value.remedy and "add rows=" not in refused.value.remedy
    of_a_session = "take the batches of an evaluation from run.test_loader"
    assert (of_a_session in refused.value.remedy) == ("has 5 rows" in words)


def test_what_cannot_be_keyed_is_refused() -> None:
    x = torch.zeros(2, 3)
    with (
        TrainingStep(share=share_of(1, 2), has_replicas=True),
        pytest.raises(ConfigError, match=r"strategy=dp: ddp_train\.noise_like"),
    ):
        noise_like(x)
    with pytest.raises(DataError, match="the backward pass calls it again") as refused:
        gradients(
            lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        )
    assert "preserve_rng_state=True" in refused.value.remedy


def test_shares_of_a_plan_have_its_seed() -> None:
    plan = BatchPlan(10, 4, 1, 3, seed=7)
    assert {share.seed for share in plan.micro_batches()} == {7}
