"""What a checkpoint takes of a state, and what it says of the rest."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_train.checkpoints import writer as writing
from ddp_train.checkpoints.reader import load_checkpoint
from ddp_train.checkpoints.writer import Snapshot, Writer, save_checkpoint
from ddp_train.errors import StateError
from ddp_train.plain_state import plain_state, problem_of_state

Pair = namedtuple("Pair", "a b")


def test_numbers_of_numpy_become_pythons_of_the_same_value() -> None:
    state = {
        "groups": [{"lr": np.float64(0.1), "betas": (np.float32(0.9), 0.99)}],
        np.int64(3): {np.bool_(True), np.str_("a"), np.bytes_(b"b")},
        "count": Counter({np.int64(7): 2}),
        "complex": np.complex128(1 + 2j),
    }
    plain = plain_state(state, "it")
    assert plain == state
    assert problem_of_state(state) == ""
    kinds = [type(number) for number in (plain["groups"][0]["lr"], *plain, *plain["count"])]
    assert kinds == [float, str, int, str, str, int]
    assert type(plain["count"]) is Counter and type(plain["complex"]) is complex
    assert type(state["groups"][0]["lr"]) is np.float64, "the object's own stays"


def test_the_rest_of_a_state_stays_as_it_is() -> None:
    module = nn.Linear(2, 2)
    state = {"model": module.state_dict(), "best": np.float64(2)}
    plain = plain_state(state, "it")
    assert type(plain["model"]) is OrderedDict and plain["model"]._metadata
    assert plain["model"]["weight"] is state["model"]["weight"]
    readable = {"a": [1, (2.5, None, b"c")], "s": {1}, "e": torch.eye(2).to_sparse()}
    assert plain_state(readable, "it") is readable


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (np.ones(3), "['here'][1] is a ndarray"),
        (np.longdouble(1), "['here'][1] is a longdouble"),
        (defaultdict(list), "['here'][1] is a defaultdict"),
        (deque([1]), "['here'][1] is a deque"),
        (frozenset({1}), "['here'][1] is a frozenset"),
        (Pair(1, 2), "['here'][1] is a Pair"),
        ({"deep": [len]}, "['here'][1]['deep'][0] is a builtin_function_or_method"),
        ({(1, range(3)): 2}, "['here'][1][(1, range(0, 3))] is a tuple"),
    ],
)
def test_what_is_not_plain_is_named_by_its_place(other: Any, problem: str) -> None:
    state = {"lr": np.float64(0.1), "here": [1, other]}
    assert problem_of_state(state) == problem
    with pytest.raises(StateError, match=r"^the state_dict of best is not plain data: ") as caught:
        plain_state(state, "the state_dict of best")
    assert str(caught.value).endswith(problem)


def test_a_state_that_is_no_container_is_named_by_its_type() -> None:
    assert problem_of_state(np.ones(2)) == "it is a ndarray"


def test_a_loop_of_ones_own_saves_numbers_of_numpy(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"w": torch.ones(1)}, {"lr": np.float64(0.1)})
    found = load_checkpoint(tmp_path)
    assert found and found[2] == {"lr": 0.1} and type(found[2]["lr"]) is float
    with pytest.raises(StateError, match=r"\['best'\] is a ndarray"):
        save_checkpoint(tmp_path, 2, {"w": torch.ones(1)}, {"best": np.ones(1)})
    again = load_checkpoint(tmp_path)
    assert again and again[0] == 1


def test_what_is_written_and_not_plain_is_no_matter_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the check before has not seen: the run ends, and the older checkpoint stays."""
    writer = Writer(tmp_path, keep=1)
    writer.submit(lambda: Snapshot(1, {"w": torch.ones(1)}, {}, {}))
    writer.finish()
    bad = Snapshot(2, {"w": torch.ones(1)}, {"best": np.ones(1)}, {})
    writer.submit(lambda: bad)
    with pytest.raises(
        StateError, match=r"resumed from: training.pt cannot be loaded by torch.load"
    ):
        writer.submit(lambda: bad)
    assert json.loads((tmp_path / "checkpoints/step_00000001" / writing.MANIFEST).read_text())
