"""What Hydra cannot read is answered by a word that it can."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from ddp_train.config.overrides import read_overrides
from tests.support.commands import PROGRAM

GLOB = "encoder.layer.[0-3].*"


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        (f"model.freeze=[{GLOB}]", {"model.freeze": [GLOB]}),
        (f"model.freeze=[*.bias,{GLOB}]", {"model.freeze": ["*.bias", GLOB]}),
        (f"model.freeze=['a b',{GLOB}]", {"model.freeze": ["a b", GLOB]}),
        (r"model.freeze=[layer\.[0-9]+]", {"model.freeze": [r"layer\.[0-9]+"]}),
        (
            f"optimizer.groups=[{{match:{GLOB},lr:0.1}}]",
            {"optimizer.groups": [{"match": GLOB, "lr": 0.1}]},
        ),
        (f"model.names={{a:{GLOB}}}", {"model.names": {"a": GLOB}}),
        ("name=[a]b", {"name": "[a]b"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=it's", {"name": "it's"}),
        ("name=a,b", {"name": "a,b"}),
        ("model.freeze=a.*,b", {"model.freeze": ["a.*", "b"]}),
        ("optimizer.lr==0.1", {"optimizer.lr": 0.1}),
        ("optimizer.lr =0.1", {"optimizer.lr": 0.1}),
        ("train.epochs=3,", {"train.epochs": 3}),
        ("--train.epochs=3", {"train.epochs": 3}),
        ("/optimizer=adamw", {}),
        ("- override /optimizer: adamw", {}),
        ("optimizer: adamw", {}),
    ],
)
def test_remedy_is_read_as_it_is_meant(argument: str, given: dict[str, Any]) -> None:
    (problem,) = read_overrides(PROGRAM, [argument]).problems
    remedy = re.search(r" use (.*)$", problem)
    assert remedy, problem
    (word,) = shlex.split(remedy[1])
    found = read_overrides(PROGRAM, [word])
    assert found.problems == [] and found.given == given
    assert given or found.choices == {"optimizer": "adamw"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optimizer=adamw;", "must be one of adadelta, adam, adamw, "),
        ("train.epochs=1,2", "several values; add -m to sweep over them"),
        ("optimizer=sgd,adam", "several values; add -m to sweep over them"),
        ("data.root=~", "~ is not expanded here; use data.root=$HOME"),
        ("größe=1", "not of the form key=value"),
        ("data.classes=[a,b", "']' is missing at its end"),
    ],
)
def test_no_remedy_that_would_fail_again(argument: str, message: str) -> None:
    (problem,) = read_overrides(PROGRAM, [argument]).problems
    assert message in problem and "quotes" not in problem and "one value" not in problem
