"""Data sets that have changed, or differ between processes, are noticed."""

from __future__ import annotations

from random import SystemRandom

import pytest
import torch
from torch import Tensor

from ddp_train.assembly.data_digests import common_digests, scored_digests, warn_of_collate
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import Collate, UserDataset
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from tests.support.jobs import table
from tests.support.ranks import on_ranks
from tests.support.user_data import Rows


class Drawn(Rows):
    """Draws with a generator of its own, which is not keyed."""

    draws = SystemRandom()

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((2,), self.draws.random()), 0


def test_a_set_that_is_scored_and_has_changed_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not one that draws its samples anew, nor one of a checkpoint that knows no digests."""
    then = scored_digests(Splits(table(9), table(7), table(4)), {})
    assert list(then) == ["validation", "test"] and caplog.text == ""
    assert scored_digests(Splits(table(8), table(7), table(4)), then) == then and caplog.text == ""
    drawn = Splits(table(9), UserDataset(Drawn("train"), 0))
    scored_digests(drawn, scored_digests(drawn, {}))
    assert caplog.text == ""
    scored_digests(Splits(table(9), table(6), UserDataset(Rows("train", 100), 0)), then)
    assert (
        "the test set has changed since the checkpoint: it has 6 samples, and had 7; scores before and after"
        in caplog.text
    )
    assert "the validation set has changed since the checkpoint: " in caplog.text


def read_by(world: World) -> list[str]:
    """What the last process finds if it reads other files than the others."""
    same = table(9)
    other = world.rank == 2
    found = []
    for splits in (
        Splits(table(8) if other else same, same),
        Splits(same, same, table(4 - other)),
        Splits(same, table(7) if other else same),
        Splits(UserDataset(Rows("train", 100 * other), 0), same),
    ):
        with pytest.raises(PeerError) as caught:
            common_digests(splits, splits.train, "cpu")
        found.append(f"{caught.value}")
    drawn = UserDataset(Drawn("train"), 0)
    assert common_digests(Splits(drawn, drawn), drawn, "cpu") == {"count": "20"}
    assert common_digests(Splits(same, same), same, "cpu") == common_digests(
        Splits(same, drawn), same, "cpu"
    )
    return found


class Counted(Rows):
    """Its samples depend on the number of earlier calls."""

    calls = 0

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.calls += 1
        return torch.full((2,), float(self.calls)), 0


class Augmented(Rows):
    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.rand(2), 0


@pytest.mark.parametrize(("kind", "is_told"), [(Drawn, True), (Counted, True), (Augmented, False)])
def test_samples_that_change_with_each_reading_are_told_and_not_compared(
    kind: type, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = UserDataset(kind("train"), 0)
    found = common_digests(Splits(source, source), source, "cpu")
    assert ("some samples, read twice, are not the same" in caplog.text) == is_told
    assert (found == {"count": "20"}) == is_told


def added_up(samples: list[tuple[Tensor, int]]) -> Tensor:
    inputs = torch.stack([row for row, _ in samples])
    return inputs + inputs.sum()


def noisy(samples: list[tuple[Tensor, int]]) -> Tensor:
    inputs = torch.stack([row for row, _ in samples])
    return inputs + torch.randn(2)


def stacked(samples: list[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([row for row, _ in samples])


@pytest.mark.parametrize(
    ("collate", "what"),
    [(added_up, "mixes the samples"), (noisy, "draws random"), (stacked, ""), (None, "")],
)
def test_a_collate_fn_whose_rows_depend_on_each_other_is_told(
    collate: Collate | None, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_rng_state()
    warn_of_collate(UserDataset(Augmented("train"), 0, collate=collate))
    assert torch.equal(before, torch.get_rng_state())
    assert what in caplog.text and bool(what) == bool(caplog.text)


def test_processes_that_read_different_data_are_refused() -> None:
    found, *others = on_ranks(3, read_by)
    assert all(other == found for other in others)
    sizes = ["training set", "validation set", "test set"]
    assert [size in text for size, text in zip(sizes, found, strict=False)] == [True] * 3
    assert (
        "(rank 0: 9, rank 1: 9, rank 2: 8)" in found[0]
        and "a digest of the samples is not the same" in found[3]
    )
