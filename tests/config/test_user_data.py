"""Keys of a user's data set: wrong ones are found before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ddp_train.config import code_checks
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config, RequestedRun
from tests.support.commands import PROGRAM
from tests.support.user_data import V2


@pytest.mark.parametrize(
    ("preset", "words", "expected"),
    [
        ("data: {_target_: a.B, size: 8}", "", ""),
        ("defaults: [{override /data: custom}]\ndata: {_target_: a.B, size: 8}", "debug=tiny", ""),
        (
            "data: {_target_: a.B, size: 8, limit: 9}\nmodel: {_target_: a.C}",
            "data.size=9 debug=tiny",
            "",
        ),
        (
            "data: {_target_: a.B}",
            "data=digits",
            "data._target_=a.B: contradicts data=digits; give one of them",
        ),
        ("defaults: [inner, _self_]\ndata: {size: 8}", "debug=tiny", ""),
        (
            "defaults: [/experiment/inner]\nname: x",
            "data=digits",
            "data._target_=a.B: contradicts data=digits; give one of them",
        ),
        (
            "data: {_target_: a.B}",
            "data=another",
            "data._target_=a.B: contradicts data=another; give one of them (in conf/experiment/",
        ),
        (
            "defaults: [inner]\nname: x",
            "data=another",
            "data._target_=a.B: contradicts data=another; give one of them (in conf/experiment/in",
        ),
        (
            "defaults: [inner]",
            "data=the_same",
            "data._target_=a.B: contradicts data=the_same; give one of them (in conf/experiment/in",
        ),
        ("data: {size: 8}\ntrusted_modules: []", "data=the_same", ""),
        (
            "defaults: [inner",
            "",
            "conf/experiment/mine.yaml: line 3: is not valid YAML: expected ',' or ']'",
        ),
    ],
)
def test_a_preset_names_a_data_set_of_ones_own(
    preset: str, words: str, expected: str, tmp_path: Path
) -> None:
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    (conf / "experiment/inner.yaml").write_text("# @package _global_\ndata: {_target_: a.B}\n")
    (conf / "data").mkdir()
    (conf / "data/another.yaml").write_text("_target_: c.D\n")
    (conf / "data/the_same.yaml").write_text("_target_: a.B\n")
    (conf / "experiment/mine.yaml").write_text(f"# @package _global_\n{preset}\n")
    program = dataclasses.replace(PROGRAM, own=conf)
    try:
        config, problems = read_config(
            program, read_overrides(program, ["experiment=mine", *words.split()])
        )
    except ConfigError as error:
        config = Config()
        problems = error.problems
    if expected:
        assert problems[0].replace(str(conf), "conf").startswith(expected), problems
        return
    assert problems == [] and config.data == CustomDataConfig(
        target="a.B",
        arguments={"size": 9 if "=9" in words else 8},
        limit=240 if "tiny" in words else None,
    )
    assert config.trusted_modules == ["a"]


def messages_of(config: Config) -> list[str]:
    """What can be known to be wrong with the data before anything is loaded."""
    run = RequestedRun(config, config, Hardware(cpus=2))
    found = [*config.data.problems(run), *config.data.missing(config)]
    return [str(problem) for problem in (*found, *code_checks.problems(config))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "data.splits.tain.x=1 data.splits.train.x=1",
            "data.splits.tain={x:1}: the splits are train, validation, test; d",
        ),
        (
            "data.splits.train=3 data.splits.test.a=1",
            "data.splits.train=3: must be arguments of your class; use data.splits.train.NA",
        ),
        (
            "data.splits.train.x=1 data.splits.test.x=1",
            "data.splits={train:{x:1},test:{x:1}}: the training and the test set would",
        ),
        (
            "data.splits.train.download=true data.splits.test.augment=false",
            "data.splits={train:{download:true},test:{augment:false}}: the training and the test set would",
        ),
        (
            "data.splits.test.x=1 data.splits.validation.x=2 data.validation=0.1",
            (
                "data.validation=0.1: contradicts data.splits.validation, which gives the validation set; leave"
                " one of them out"
            ),
        ),
        (
            "data.splits.test.x=1 data.splits.validation.x=2 data.validation=0",
            "data.validation=0: contradicts",
        ),
        (
            "data.splits.test.x=1 data.splits.validation.download=true",
            "data.splits={test:{x:1},validation:{download:tr",
        ),
        ("data.weights=nosuch.npy", "data.weights=nosuch.npy: no such file"),
        ("data.transform=[3]", "data.transform[0]=3: must be a class with its arguments"),
        (
            "data.transforms=[{_target_:a.B}]",
            "data.transforms.0._target_: arguments must be plain values, since only data._target_",
        ),
        (
            "data.splits.train.a._target_=a.B",
            "data.splits.train.a._target_: arguments must be plain values",
        ),
        (
            "data.splits.train.api_key=x data.splits.test.a=1",
            "data.splits.train.api_key=(hidden): the config is written",
        ),
        (
            "data.transform=[{_target_:torch.nn.ReLU,inner:{_target_:torch.nn.ReLU,api_key:x}}]",
            "data.transform.0.inner.api_key=(hidden): the config is written to files",
        ),
        (
            "data.test_transform=[{_target_:torch.nn.ReLU,token:x}]",
            "data.test_transform.0.token=(hidden): the config",
        ),
        ("data.transform=[nosuch.Crop]", "data.transform[0]=nosuch.Crop: no module nosuch is in"),
        ("data.collate_fn=joined", "data.collate_fn=joined: must be a dotted path"),
    ],
)
def test_wrong_keys_are_found_before_anything_starts(words: str, message: str) -> None:
    config, problems = read_config(
        PROGRAM, read_overrides(PROGRAM, ["data._target_=torch.nn.Linear", *words.split()])
    )
    found = problems + messages_of(config)
    assert found and found[0].startswith(message), found


def test_named_validation_split_is_known_before_data_are_opened() -> None:
    splits = {"test": {"x": 1}, "validation": {"x": 2}}
    assert CustomDataConfig(splits=splits).has_validation() is True
    assert CustomDataConfig().has_validation() is None


def test_class_that_a_checkpoint_names_must_be_trusted() -> None:
    content = {
        "name": "custom",
        "target": "torchvision.datasets.FakeData",
        "splits": {"test": {"size": 2}},
    }
    content |= {
        "transform": [{"_target_": f"{V2}.RandomApply", "transforms": [{"_target_": "os.system"}]}]
    }
    overrides = read_overrides(
        PROGRAM, ["data.splits.test.root=b", "data.size=3", "data.collate_fn=a.f"]
    )
    config, problems = read_config(PROGRAM, overrides, {"data": {**content, "arguments": {}}})
    assert (problems, config.data.splits, config.data.arguments) == (
        [],
        {"test": {"size": 2, "root": "b"}},
        {"size": 3},
    )
    found = messages_of(config)
    assert [problem.partition(": ")[0] for problem in found] == [
        "data.transform[0].transforms.0._target_=os.system",
        "data.collate_fn=a.f",
    ]
