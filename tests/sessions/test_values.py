"""What the processes bring into `run.sum` and `run.gather`: types, shapes, places, and none."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.world import World
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.values import (
    Kind,
    Part,
    gather_over_ranks,
    meet,
    problem_of_rows,
    problem_of_sum,
    sum_of_numbers,
    sum_over_ranks,
)
from tests.support.ranks import on_ranks

FLOATS = torch.tensor([0.5, 0.25])
BIG = 2**62 + 1


def tensor(*shape: int, dtype: str = "float32") -> Part:
    return Part("", Kind.TENSOR, dtype=dtype, shape=shape)


def number(value: float) -> Part:
    return Part("", Kind.INTEGER if isinstance(value, int) else Kind.FLOAT, number=value)


@pytest.mark.parametrize(
    ("parts", "fit"),
    [
        ((number(0), number(2.5)), True),
        ((number(0), tensor(3)), True),
        ((number(0.0), tensor(2, 3)), True),
        ((number(1), tensor()), True),
        ((number(1), tensor(3)), False),
        ((tensor(3), tensor(4)), False),
        ((tensor(0), tensor(3)), False),
        ((tensor(3), tensor(3, dtype="int64")), True),
        ((number(1), Part("", Kind.UNFIT, found="str")), False),
        ((Part("", Kind.NO_ROWS), number(1)), True),
    ],
)
def test_values_that_can_be_added_up(parts: tuple[Part, ...], fit: bool) -> None:
    assert (problem_of_sum(parts) == "") is fit


@pytest.mark.parametrize(
    ("parts", "fit"),
    [
        ((tensor(2, 3), tensor(0, 3)), True),
        ((tensor(2, 3, dtype="int64"), tensor(0)), True),
        ((tensor(2, 3), Part("", Kind.NO_ROWS)), True),
        ((tensor(2, 3), tensor(1, 3, dtype="float64")), True),
        ((tensor(2, 3), tensor(1, 3, dtype="int64")), False),
        ((tensor(2, 3), tensor(2, 4)), False),
        ((tensor(2), tensor()), False),
        ((tensor(2), number(0)), False),
    ],
)
def test_rows_that_can_be_put_together(parts: tuple[Part, ...], fit: bool) -> None:
    assert (problem_of_rows(parts) == "") is fit


def test_a_description_survives_its_journey() -> None:
    for part in (number(3**200), number(float("inf")), tensor(2, 0, dtype="bfloat16")):
        assert Part.decoded(part.encoded()) == part


def test_sums_of_numbers_are_exact() -> None:
    assert sum_of_numbers([BIG, BIG, 1]) == 2 * BIG + 1
    assert sum_of_numbers([1e16, 1.0, -1e16]) == 1.0
    assert sum_of_numbers([float("inf"), 1]) == float("inf")
    assert np.isnan(sum_of_numbers([float("inf"), float("-inf")]))
    assert sum_of_numbers([1e308, 1e308]) == float("inf")


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UsageError) as error:
        function(*arguments)
    return str(error.value)


def exchanges(world: World) -> dict[str, Any]:
    """What comes out on a rank; the last one has no batch."""
    has_none = world.rank == world.size - 1 and world.size > 1
    none_of = 0 if has_none else 1
    rows = torch.arange(6).view(2, 3) * none_of
    return {
        "float": sum_over_ranks(0 if has_none else 0.1, "cpu"),
        "vector": sum_over_ranks(0 if has_none else FLOATS, "cpu"),
        "scalar": sum_over_ranks(0 if has_none else torch.tensor(2), "cpu"),
        "big": sum_over_ranks(BIG, "cpu"),
        "bool": sum_over_ranks(True, "cpu"),
        "numpy": sum_over_ranks(0 if has_none else np.float32(0.5), "cpu"),
        "array": sum_over_ranks(0 if has_none else np.array([1, 2], np.int8), "cpu"),
        "fraction": sum_over_ranks(Fraction(1, 2), "cpu"),
        "widths": sum_over_ranks(FLOATS if has_none else torch.tensor([1, 2]), "cpu"),
        "complex": sum_over_ranks(torch.tensor([1j]), "cpu"),
        "rows": gather_over_ranks([] if has_none else [rows, rows], "cpu"),
        "untyped": gather_over_ranks(torch.tensor([]) if has_none else rows.bool(), "cpu"),
        "no rows": gather_over_ranks(rows[:0], "cpu"),
        "nothing": gather_over_ranks([], "cpu"),
        "long": texts_from_all_ranks("x" * 600 * world.rank, "cpu"),
    }


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_none_is_neutral_on_every_rank(processes: int) -> None:
    of_ranks = on_ranks(processes, exchanges)
    full = max(1, processes - 1)
    rows = torch.arange(6).view(2, 3)
    for out in of_ranks:
        assert out["float"] == pytest.approx(0.1 * full, abs=1e-16)
        torch.testing.assert_close(out["vector"], FLOATS.double() * full, rtol=0, atol=0)
        torch.testing.assert_close(out["scalar"], torch.tensor(2 * full))
        assert out["big"] == BIG * processes
        assert out["bool"] == processes
        assert out["numpy"] == 0.5 * full
        assert out["array"].tolist() == [full, 2 * full]
        assert out["fraction"] == processes / 2
        assert out["complex"].tolist() == [1j * processes]
        torch.testing.assert_close(out["rows"], rows.repeat(2 * full, 1))
        torch.testing.assert_close(out["untyped"], rows.bool().repeat(full, 1))
        assert out["no rows"].shape == (0, 3) and out["no rows"].dtype == torch.int64
        assert out["nothing"].shape == (0,)
        assert out["long"] == ["x" * 600 * rank for rank in range(processes)]
    if processes > 1:
        torch.testing.assert_close(
            of_ranks[0]["widths"],
            torch.tensor([full + 0.5, 2 * full + 0.25], dtype=torch.float64),
        )


def refusals(world: World) -> list[str]:
    is_last = world.rank == world.size - 1
    shown = [
        refused(sum_over_ranks, None if is_last else 1.0, "cpu"),
        refused(sum_over_ranks, Decimal(1), "cpu"),
        refused(sum_over_ranks, torch.ones(3 + is_last), "cpu"),
        refused(sum_over_ranks, 1 if is_last else torch.ones(3), "cpu"),
        refused(gather_over_ranks, torch.ones(2, 3 + is_last), "cpu"),
        refused(gather_over_ranks, torch.ones(2, dtype=torch.int64 if is_last else None), "cpu"),
    ]
    if is_last:
        shown.append(refused(meet, "the end of an epoch", "cpu"))
    else:
        shown.append(refused(sum_over_ranks, 1, "cpu"))
    return shown


def test_what_cannot_agree_is_refused_on_every_rank() -> None:
    of_ranks = on_ranks(3, refusals)
    expected = [
        "cannot be added up: ranks 0 and 1: the float 1.0; rank 2: a value of the type NoneType",
        "ranks 0, 1 and 2: a value of the type Decimal",
        "ranks 0 and 1: a tensor [3] of float32; rank 2: a tensor [4] of float32",
        "ranks 0 and 1: a tensor [3] of float32; rank 2: the int 1",
        "do not fit together: ranks 0 and 1: a tensor [2, 3] of float32; rank 2: a tensor [2, 4]",
        "ranks 0 and 1: a tensor [2] of float32; rank 2: a tensor [2] of int64",
        "rank 2: the end of an epoch",
    ]
    for messages in of_ranks:
        for message, part in zip(messages, expected, strict=True):
            assert part in message
