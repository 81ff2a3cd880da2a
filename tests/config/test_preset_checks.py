"""Presets that Hydra composes, and that would not act as they were meant, are refused."""

from __future__ import annotations

import pytest

from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.options.custom import Code, CustomDataConfig
from ddp_train.options.schema import Config
from tests.support.configs import own_presets

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
RUN = "# @package _global_\n"


def read(preset: str, *words: str) -> tuple[Config, list[str]]:
    """The config and the problems of experiment=mine, beside options of the user's own."""
    program = own_presets(
        data__mine="_target_: my.A\nsize: 5\n",
        data__larger="defaults: [mine, _self_]\nsize: 6\n",
        data__other="_target_: my.B\n",
        experiment__with_class=f"{RUN}data: {{_target_: my.B, size: 9}}\n",
        experiment__with_option=f"{RUN}defaults: [override /data: other]\n",
        experiment__mine=f"{RUN}{preset}\n",
    )
    return read_config(program, read_overrides(program, ["experiment=mine", *words]))


@pytest.mark.parametrize(
    ("preset", "problem"),
    [
        (
            "defaults: [with_class, override /data: mine]",
            "data._target_=my.B: contradicts data=mine; give one of them"
            " (in conf/experiment/with_class.yaml)",
        ),
        (
            "defaults: [with_class, override /data: shards]",
            "data._target_=my.B: contradicts data=shards; give one of them"
            " (in conf/experiment/with_class.yaml)",
        ),
        (
            "defaults: [override /data: mine]\ndata: {_target_: my.B}",
            "data._target_=my.B: contradicts data=mine; give one of them"
            " (in conf/experiment/mine.yaml)",
        ),
        (
            "defaults: [override /optimizer: adam]\noptimizer: {name: adamw}",
            "optimizer.name=adamw: contradicts optimizer=adam; give one of them"
            " (in conf/experiment/mine.yaml)",
        ),
    ],
)
def test_preset_cannot_replace_an_option_silently(preset: str, problem: str) -> None:
    assert read(preset)[1] == [problem]


@pytest.mark.parametrize(
    ("preset", "target", "size"),
    [
        ("defaults: [with_option, override /data: mine]", "my.A", 5),
        ("defaults: [override /data: larger]", "my.A", 6),
        ("defaults: [override /data: mine]\ndata: {_target_: my.A, size: 7}", "my.A", 7),
        ("defaults: [with_class]", "my.B", 9),
    ],
)
def test_class_of_the_chosen_option_is_used(preset: str, target: str, size: int) -> None:
    config, problems = read(preset)
    assert problems == []
    assert isinstance(config.data, CustomDataConfig)
    assert config.data.code == Code(target, {"size": size})


def test_preset_may_name_an_option_nobody_chose() -> None:
    config, problems = read("task: {name: regression}")
    assert (problems, config.task.name) == ([], "regression")
    _, problems = read("task: {name: regression}", "task=classification")
    assert problems == [
        "task.name=regression: contradicts task=classification; give one of them"
        " (in conf/experiment/mine.yaml)"
    ]


@pytest.mark.parametrize(
    ("preset", "key", "default"),
    [
        ("optimizer: {name: adam, lr: 0.02}", "optimizer.name=adam", "optimizer=sgd"),
        ("schedule: {name: constant}", "schedule.name=constant", "schedule=cosine"),
    ],
)
def test_a_name_in_an_experiment_is_told_how_to_choose(preset: str, key: str, default: str) -> None:
    section, _, name = key.replace(".name", "").partition("=")
    way = f"defaults: [override /{section}: {name}]"
    assert read(preset)[1] == [
        f"{key}: the keys of {default} stay beside a name; in an experiment choose the option by"
        f" `{way}` (in conf/experiment/mine.yaml)"
    ]
    config, problems = read(f"{way}\noptimizer: {{lr: 0.02}}")
    assert (problems, getattr(config, section).name) == ([], name)


def test_option_among_the_keys_of_the_run_is_refused() -> None:
    _, problems = read("defaults: [/optimizer@_here_: adamw]")
    assert problems == [
        "defaults: /optimizer@_global_: adamw: would set keys of the run, not of optimizer; an option is chosen by"
        " `- override /GROUP: OPTION` (in conf/experiment/mine.yaml)"
    ]


def test_preset_that_includes_itself_is_refused() -> None:
    _, problems = read("defaults: [mine, _self_]")
    assert problems == ["defaults: a preset includes itself; remove that line"]


@pytest.mark.parametrize("keys", ["", "name: sgd\n"])
def test_option_may_build_on_another(keys: str) -> None:
    program = own_presets(
        optimizer__gentle=f"defaults: [sgd, _self_]\n{keys}lr: 0.3\n",
        optimizer__gentler="defaults: [gentle, _self_]\nmomentum: 0.5\n",
    )
    config, problems = read_config(program, read_overrides(program, ["optimizer=gentler"]))
    assert problems == []
    optimizer = vars(config.optimizer)
    assert (optimizer["name"], optimizer["lr"], optimizer["momentum"]) == ("sgd", 0.3, 0.5)
