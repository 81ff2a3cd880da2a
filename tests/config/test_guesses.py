"""What was probably meant by a glob that matches nothing."""

from __future__ import annotations

import pytest

from ddp_train.text import did_you_mean_glob, unmatched

NAMES = (
    *("encoder.*", "layers.*", "layers.1.*", "classifier.*", "conv1.*", "head.*", "fc.*", "1.*"),
    *("1.weight", "1.bias", "encoder.norm.weight"),
)


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("1.wieght", "1.weight"),
        ("1", "1.*"),
        ("encodr.*", "encoder.*"),
        ("layer.*", "layers.*"),
        ("layer[0-3].*", "layers.*"),
        ("layer.1.*", "layers.1.*"),
        ("*classifer*", "classifier.*"),
        ("encoder.norm.weigth", "encoder.norm.weight"),
        ("(head)", "head.*"),
    ],
)
def test_a_slip_in_a_glob_is_seen(glob: str, meant: str) -> None:
    assert did_you_mean_glob(glob, NAMES) == f"; did you mean {meant}?"


@pytest.mark.parametrize(
    "glob",
    ["3.*", "bert.*", "norm.*", "cls.*", "*_norm*", "*bn*", "*", "?.*", "0.*", "pool.*", "lora_*"],
)
def test_other_names_are_no_slips(glob: str) -> None:
    assert not did_you_mean_glob(glob, NAMES)
    (problem,) = unmatched("model.freeze=[{}]", [glob + "x"], ["1.weight", "fc.bias"])
    assert problem.endswith(
        "matches no parameter; there are, for example, 1.*, fc.*, 1.weight, fc.bias"
    )


def test_first_and_last_modules_are_named_where_there_are_many() -> None:
    modules = ["conv1", "bn1", "layer2", "layer3", "layer4", "fc"]
    names = [f"{module}.weight" for module in modules]
    (problem,) = unmatched("model.freeze=[{}]", ["head.*"], names)
    assert problem.endswith("; there are, for example, conv1.*, bn1.*, ..., layer4.*, fc.*")
