"""Presets and overrides become a config: every file composes, every wrong one is named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from unittest import mock

import pytest
import yaml

from ddp_train.assembly.plan import build_plan, warmup_steps
from ddp_train.config import presets
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare
from ddp_train.config.validate import check_rules
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.options.custom import CustomOption
from ddp_train.options.registry import OPTIONS, TRACKERS
from ddp_train.options.schema import Config, schema_of
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from ddp_train.tasks.builtin import Classification
from tests.support.commands import PROGRAM
from tests.support.configs import (
    CONF,
    FILES,
    composed,
    own_presets,
    problems_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
WHOLE_RUNS = ("experiment", "debug")
SEVERAL = ("tracker",)
"""Groups whose options are added to each other; what they have in common is in the main file."""
one_process = pytest.mark.xdist_group("composition")
"""Hydra composes each option once for all of these tests: tests/support/configs.py."""


@pytest.mark.slow
@one_process
@pytest.mark.parametrize("name", FILES)
def test_every_file_composes_and_keeps_the_rules(name: str) -> None:
    group, option = name.split("/")
    words = [f"{group}={option}"]
    if option == "custom":
        words.append(f"{group}._target_=torch.nn.Linear")
    config = composed(*words)
    assert check_rules(config) == []
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    if group in SEVERAL:
        assert list(getattr(config, group).classes) == list(content.get("classes", {}))
        return
    assert group in WHOLE_RUNS or getattr(config, group).name == content["name"]


@pytest.mark.parametrize("name", [name for name in FILES if name.split("/")[0] in WHOLE_RUNS])
def test_a_whole_run_means_what_its_file_says(name: str) -> None:
    config = composed(name.replace("/", "="))
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    for override in content.pop("defaults", []):
        ((key, option),) = override.items()
        group = key.removeprefix("override /")
        named = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())[
            "name"
        ]  # resnet50 is a torchvision
        assert getattr(config, group).name == named
    for key, value in content.items():
        section = getattr(config, key)
        if isinstance(section, CustomOption):
            own = {"_target_": section.target, **section.arguments}
        else:
            own = {}
        for field, expected in value.items() if isinstance(value, dict) else [("", value)]:
            assert own.get(field, getattr(section, field, section)) == expected, f"{key}.{field}"


@pytest.mark.slow
@one_process
@pytest.mark.parametrize("section", OPTIONS)
def test_a_chosen_option_has_the_defaults_of_its_schema(section: str) -> None:
    for option, schema in OPTIONS[section].items():
        if issubclass(schema, CustomOption):
            target = [f"{section}._target_=torch.nn.Linear"]
        else:
            target = []
        expected = dataclasses.replace(
            schema(), **({"target": "torch.nn.Linear"} if target else {})
        )
        assert getattr(composed(*(target or [f"{section}={option}"])), section) == expected


def test_the_main_file_has_the_defaults_of_the_schema() -> None:
    assert composed() == Config()
    assert set(yaml.safe_load((CONF / "config.yaml").read_text())) == {"defaults", "hydra"}


def test_files_hold_only_what_they_change() -> None:
    for name in FILES:
        group, _ = name.split("/")
        if group in (*WHOLE_RUNS, *SEVERAL):
            continue
        content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        schema = schema_of(group, content.pop("name"))
        assert schema, name
        defaults = dataclasses.asdict(schema())
        content.pop("_target_", None)  # data=shards is a class by its path
        assert content.keys() <= defaults.keys(), name
        repeated = {key for key, value in content.items() if value == defaults[key]}
        assert not repeated - {"arch"}, name  # model=resnet18 says what it is


def test_every_option_has_its_file() -> None:
    for section, options in OPTIONS.items():
        assert set(options) <= {path.stem for path in (CONF / section).glob("*.yaml")}
    trackers = {path.stem for path in (CONF / "tracker").glob("*.yaml")}
    assert trackers == {"none", *TRACKERS}
    for name, tracker in TRACKERS.items():
        path = f"{tracker.__module__}.{tracker.__name__}"
        assert composed(f"tracker={name}").tracker.classes == {name: {"_target_": path}}


def test_a_choice_is_composed_once_until_its_file_changes() -> None:
    whole = presets.composed
    with mock.patch("ddp_train.config.presets.composed", wraps=whole) as compose:
        for momentum in (0.3, 0.25):
            program = own_presets(optimizer__mine=f"name: sgd\nmomentum: {momentum}\n")
            for more in (["optimizer.lr=0.5"], ["optimizer.momentum=0.1"], []):
                read = read_overrides(program, ["optimizer=mine", *more])
                optimizer = read_config(program, read)[0].optimizer
                assert (optimizer.lr == 0.5) == ("optimizer.lr=0.5" in more)
                assert optimizer.momentum == (0.1 if "optimizer.momentum=0.1" in more else momentum)
    assert compose.call_count == 2


@pytest.mark.parametrize(
    "key", ["train.epochs", "mode", "train.early_stopping", "train.foo", "strategy.comm_hook"]
)
def test_wrong_environment_value_is_shown_as_typed(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    (problem,) = problems_of(f"{key}=${{oc.env:MY_SECRET}}")
    assert problem.startswith(f"{key}=${{oc.env:MY_SECRET}}: ") and "hunter2" not in problem


def test_values_from_the_environment_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    words = (
        "train.max_steps=${oc.env:STEPS}",
        "optimizer.groups=[{match:a,lr:${oc.env:STEPS}}]",
        "seed=${oc.env:NO,3}",
    )
    config = composed(
        *words, "data.image_size=${oc.env:STEPS}", "data=synthetic", "name=${oc.env:STEPS}"
    )
    assert (config.train.max_steps, config.seed, config.data.image_size, config.name) == (
        7,
        3,
        7,
        "7",
    )
    assert config.optimizer.groups == [{"match": "a", "lr": "7"}]


def test_a_preset_can_be_shortened(tmp_path: Path) -> None:
    words = [
        "experiment=mnist",
        "data.download=true",
        "data.limit=6000",
        "train.epochs=1",
        "run_dir=run",
    ]
    config = prepare(PROGRAM, words, None).config
    for samples, steps in ((5_952, 10), (60_000, 100)):
        assert warmup_steps(config.schedule, build_plan(config, World(), samples)) == steps
    for words, samples, steps in (
        ("experiment=gpt_tiny train.max_steps=50", 20_000, 25),
        ("experiment=mnist train.max_steps=20 data.download=true", 60_000, 10),
        ("experiment=mnist train.epochs=1 schedule.warmup_steps=30 data.download=true", 60_000, 30),
        ("experiment=gpt_tiny schedule.warmup_epochs=0.1", 4_000, 50),
    ):
        config = prepare(PROGRAM, [*words.split(), "run_dir=run"], None).config
        plan = build_plan(config, World(), samples)
        assert warmup_steps(config.schedule, plan) == steps, words
        task = Classification(10)
        rows = plan_rows(PlanFacts(config, plan, task, base_lr=0.1, warmup_steps=steps))
        is_cut = "(cut from 200: schedule.warmup_at_most=0.5" in rows["optimizer"]
        assert is_cut == (steps == 25)
    words = ["experiment=resnet50", "data.root=.", "train.epochs=2"]
    assert not [problem for problem in problems_of(*words) if problem.startswith("schedule.")]


def test_a_number_of_the_environment_may_stand_beside_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, found in (("3", 3), ("2:4", "2:4"), ("auto", "auto")):
        monkeypatch.setenv("GPUS", text)
        assert composed("launch.nproc_per_node=${oc.env:GPUS}").launch.nproc_per_node == found


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [override /tracker: null, _self_]\n",
        "defaults: [override /optimizer: adamw.yaml, _self_]\n",
        "defaults: [model: a, _self_]\n",
    ],
)
def test_what_hydra_takes_in_a_preset_is_taken(text: str) -> None:
    program = own_presets(experiment__mine=f"# @package _global_\n{text}")
    Path("conf/experiment/model").mkdir()
    Path("conf/experiment/model/a.yaml").write_text("# @package _global_\nseed: 5\n")
    assert read_config(program, read_overrides(program, ["experiment=mine"]))[1] == []


def test_a_typed_number_replaces_its_twin_of_a_preset() -> None:
    preset = "# @package _global_\ntrain: {evaluate_every_epochs: 3}\n"
    program = own_presets(experiment__mine=preset)
    words = ["experiment=mine", "train.evaluate_every_steps=7"]
    config, problems = read_config(program, read_overrides(program, words))
    assert not problems
    assert config.train.evaluate_every_steps == 7
    assert config.train.evaluate_every_epochs is None


def test_what_is_no_key_is_no_traceback() -> None:
    program = own_presets(experiment__mine="# @package _global_\ntrain: {1: a, '1': b}\n")
    _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert problems[0] == "train.1=a: no such key (in conf/experiment/mine.yaml)"
    program = own_presets(experiment__mine="# @package _global_\ntrain:\n  epochs: {{epochs}}\n")
    _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert problems == [
        "conf/experiment/mine.yaml: line 3: is not valid YAML: found unhashable key; correct the file"
    ]


@pytest.mark.slow
def test_a_file_that_gives_a_wrong_value_is_named() -> None:
    program = own_presets(
        schedule__mine="name: cosine\nwarmup_steps: many\n",
        experiment__mine="# @package _global_\ntrain: {epoch: 3}\n",
    )
    _, problems = read_config(
        program, read_overrides(program, ["experiment=mine", "schedule=mine"])
    )
    assert problems == [
        "train.epoch=3: no such key; did you mean train.epochs? (in conf/experiment/mine.yaml)",
        "schedule.warmup_steps=many: must be a whole number (in conf/schedule/mine.yaml)",
    ]
    own_presets(
        schedule__cosine="name: cosine\n",
        config="train: {epochs: 3}\n",
        model__no_name="width: 3\n",
    )
    with pytest.raises(ConfigError) as refused:
        program.check()
    assert refused.value.problems == [
        "conf/config.yaml: ddp_train already has a config.yaml; move the keys to"
        " conf/experiment/NAME.yaml, and use experiment=NAME"
    ]
    _, problems = read_config(program, read_overrides(program, []))
    assert problems == [
        "conf/schedule/cosine.yaml: ddp_train already has schedule=cosine; rename the file"
    ]
    assert read_config(program, read_overrides(program, ["schedule=step"]))[1] == []
    own_presets(
        experiment__late="# late\n# @package _global_\nseed: 5\n",
        experiment__early="\n#@package  _global_\nseed: 5\n",
        nginx__a="port: 80\n",
    )
    for ours in ("conf/config.yaml", "conf/schedule/cosine.yaml"):
        Path(ours).unlink()
    program.check()
    _, problems = read_config(program, read_overrides(program, ["experiment=late"]))
    assert problems == [
        "conf/experiment/late.yaml: a preset of a run must begin with the line `# @package"
        " _global_`"
    ]
    assert read_config(program, read_overrides(program, ["experiment=early"]))[1] == []
    (problem,) = read_overrides(program, ["nginx=a"]).problems
    assert problem.startswith("nginx=a: conf/nginx is not a group; rename the folder")
    _, problems = read_config(program, read_overrides(program, ["model=no_name"]))
    assert problems == [
        "conf/model/no_name.yaml: its `name` must be one of cnn, mlp, linear_regression, gelu_mlp, gpt,"
        " torchvision, custom; add `name: cnn`, or `_target_: package.Name`"
    ]


TWICE = "conf/optimizer/twice.yaml: line 3: lr is there twice; keep one of them"
USE = "an option is chosen by `- override /GROUP: OPTION`"


PRESETS: list[tuple[str, str]] = [
    (
        "optimizer:\n  lr: 0.1\n  lr: 0.2",
        "conf/experiment/mine.yaml: line 4: lr is there twice; keep one of them",
    ),
    ("defaults: [override /optimizer: twice]", TWICE),
    (
        "defaults: [optimizer: adamw]",
        "conf/experiment/mine.yaml: defaults: experiment/optimizer: adamw: no such file; " + USE,
    ),
    (
        "defaults: [/optimizer: adamw]",
        "conf/experiment/mine.yaml: Multiple values for optimizer. .*; " + USE,
    ),
    (
        "defaults: [override /optimizer: adamww]",
        "adamww: must be one of adadelta, adam, adamw, custom, .*sgd, twice; ",
    ),
    (
        "defaults: [override /optimizer: adamww]",
        "conf/experiment/mine.yaml: .*; did you mean adamw?",
    ),
    (
        "defaults: [override /optimizr: sgd]",
        "mine.yaml: In 'experiment/mine': Could not override 'optimizr'. .*mean optimizer?; " + USE,
    ),
    (
        "defaults: [bass]",
        "conf/experiment/mine.yaml: defaults: experiment: bass: .*; did you mean base?",
    ),
    (
        "defaults: {optimizer: adamw}",
        "conf/experiment/mine.yaml: .*defaults must be a list (got mapping); " + USE,
    ),
    (
        "defaults: [5]",
        "conf/experiment/mine.yaml: Unsupported type in defaults : int; " + USE,
    ),
    (
        "hooks: {a: 1}",
        "hooks={a:1}: must be a list like [package.Name] or .* (in conf/experiment/mine.yaml)",
    ),
    (
        "optimizer: {groups: {a: 1}}",
        "optimizer.groups={a:1}: must be a list like .* (in conf/experiment/mine.yaml)",
    ),
    (
        "train: [3]",
        "train=[3]: is a section; write keys and values in it, .* (in conf/experiment/mine.yaml)",
    ),
    (
        "optimizer: adamw",
        (
            "optimizer=adamw: a preset chooses an option under `defaults`; write `- override"
            " /optimizer: adamw` there (in"
        ),
    ),
    (
        "optimizer: {lr: '${oc.env'}",
        "optimizer.lr: .*'${oc.env'; write a reference like .* (in conf/experiment/mine.yaml)",
    ),
    ("- a", "must hold keys and values, KEY: VALUE (in conf/experiment/mine.yaml)"),
    (
        (
            "defaults: [base, /experiment/base, _self_, override /tracker:"
            " [tensorboard]]\nname: 2024-01-01"
        ),
        "",
    ),
    (
        (
            "defaults: [/optimizer/sgd@optimizer, override /model: mlp, override"
            " /hydra/sweeper: basic]"
        ),
        "",
    ),
]
"""The content of an experiment, and the problem that it has."""
BASE = "# @package _global_\nseed: 5\n"
TWO_RATES = "name: sgd\nlr: 1\nlr: 2\n"


@pytest.mark.parametrize(("preset", "expected"), PRESETS)
def test_a_wrong_preset_is_one_problem_that_names_it(preset: str, expected: str) -> None:
    program = own_presets(
        experiment__mine=f"# @package _global_\n{preset}\n",
        experiment__base=BASE,
        optimizer__twice=TWO_RATES,
    )
    try:
        _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    except ConfigError as error:
        problems = error.problems
    assert len(problems) == bool(expected), problems
    assert re.search(re.escape(expected).replace(r"\.\*", ".*"), "".join(problems))


def test_wrong_presets_do_not_stop_another() -> None:
    wrong = {
        f"experiment__wrong_{number}": f"# @package _global_\n{preset}\n"
        for number, (preset, _) in enumerate(PRESETS)
    }
    program = own_presets(**wrong, experiment__base=BASE, optimizer__twice=TWO_RATES)
    assert read_config(program, read_overrides(program, ["experiment=base"]))[1] == []


def test_no_file_is_blamed_for_what_the_command_line_said() -> None:
    for words in (["model.channels.x=3"], ["optimizer={lr:0.1}"], ["schedule.name=cosin"]):
        assert "(in conf/" not in " ".join(problems_of(*words))


def test_no_tip_is_on_in_tuning_none() -> None:
    tips = dataclasses.asdict(composed("tuning=none").tuning)
    del tips["prefetch_factor"]
    off = (False, 0, [], "default")
    assert {name for name, value in tips.items() if value not in off} == {
        "name",
        "precision",
        "optimizer",
    }
    assert (tips["precision"], tips["optimizer"]) == ("fp32", "loop")
