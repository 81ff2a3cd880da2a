"""A value in a file is what it is on a command line, or is refused with file and line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_train.config.composition import read_config
from ddp_train.config.earlier_runs import EarlierRun
from ddp_train.config.keys import kinds_of
from ddp_train.config.overrides import read_overrides
from ddp_train.config.yaml_files import ambiguous, dump_yaml, error_text, load_yaml, read_file
from ddp_train.errors import ConfigError
from tests.support.commands import PROGRAM
from tests.support.configs import CONF, own_presets

ALIKE = ("3", "-3", "1_000", "1e-3", "1e3", ".5", "5.", "+5", "true", "FALSE", "null", "09", "0o17")
TEXTS = ("2020-01-01", "None", "y", "n", "größe", "a b", "Infinity")
YAML_ALONE = ("010", "-010", "1:30", "1:30:05", "0x10", "0b11", "1__0", "yes", "No", "on", "off")


def on_a_command_line(text: str) -> Any:
    return read_overrides(PROGRAM, [f"key={text}"]).given["key"]


@pytest.mark.parametrize("text", [*ALIKE, *TEXTS])
def test_value_is_that_of_the_command_line(text: str) -> None:
    assert not [*ambiguous(f"key: {text}")]
    assert repr(load_yaml(f"key: {text}")["key"]) == repr(on_a_command_line(text))


@pytest.mark.parametrize("text", [*YAML_ALONE, "inf", "-inf", "nan", "NaN"])
def test_reading_of_yaml_alone_is_found(text: str) -> None:
    (found,) = ambiguous(f"a:\n  b: [1, {text}]")
    assert (found.line, found.key, found.text) == (2, "a.b", text)
    assert found.by_hydra == on_a_command_line(text) or math.isnan(found.by_hydra)
    message = found.message("conf/x.yaml")
    assert message.startswith(f"conf/x.yaml: line 2: a.b: {text} is ")
    remedy, _, quoted = message.rpartition("; write ")[2].partition(", or ")
    assert load_yaml(quoted.removesuffix(" in quotes")) == text
    assert not [*ambiguous(f"a: {remedy}")]
    meant = found.by_hydra if isinstance(found.by_yaml, str) else found.by_yaml
    assert load_yaml(remedy) == meant or math.isnan(meant)


@pytest.mark.parametrize("text", [*ALIKE, *TEXTS, *YAML_ALONE, "12e4567", ".inf"])
def test_text_that_is_written_stays_a_text(text: str) -> None:
    written = dump_yaml({"key": text})
    assert load_yaml(written) == yaml.safe_load(written) == {"key": text}


def test_value_of_an_override_of_a_study_is_read_alike() -> None:
    (found,) = ambiguous("010")
    assert found.message("study.repeats=010").startswith("study.repeats=010: 010 is 8 in YAML, ")


def test_a_key_that_takes_both_readings_keeps_its_value() -> None:
    def settled(text: str, key: str) -> bool:
        (found,) = ambiguous(f"x: {text}")
        return found.is_settled(kinds_of(key))

    assert settled("yes", "deterministic") and settled("off", "deterministic")
    assert settled("007", "train.epochs") and settled("inf", "optimizer.lr")
    assert not settled("010", "train.epochs") and not settled("yes", "train.epochs")
    assert not settled("yes", "name") and not settled("007", "model.my_width")
    assert not settled("010", "train.early_stopping.patience")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f: line 3: a is there twice; keep one of them"),
        ("a: {b: 1, b: 2}", "f: line 1: b is there twice; keep one of them"),
        ("a: [1,2", "f: line 1: is not valid YAML: expected ',' or ']'"),
        ("\ta: 1", "f: line 1: is not valid YAML: found character '\\t'"),
        ("a: 1\n---\nb: 2", "f: line 2: is not valid YAML: but found another document"),
    ],
)
def test_broken_file_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        load_yaml(text)
    assert error_text(caught.value, "f").startswith(message)


def test_key_of_a_merged_mapping_may_come_again() -> None:
    assert load_yaml("x: &x {a: 1}\ny: {<<: *x, a: 2}")["y"] == {"a": 2}


def test_presets_of_the_package_are_read_alike() -> None:
    for path in CONF.rglob("*.yaml"):
        assert not [*ambiguous(path.read_text())], path


@pytest.mark.usefixtures("folder_without_gpus")
def test_presets_and_what_they_include_are_checked() -> None:
    run = "# @package _global_\n"
    twice = "  - override /optimizer: slow\n"
    program = own_presets(
        experiment__base=f"{run}train: {{epochs: 010}}\ndeterministic: yes\n",
        experiment__mine=f"{run}defaults:\n  - base\n{twice}{twice}  - _self_\n",
        optimizer__slow="name: sgd\nlr: 1:30\n",
        experiment__unused="epochs: 010\n",
        experiment__class=f"{run}model: {{_target_: torch.nn.Linear, hidden: 007}}\n",
    )
    _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert [problem.partition(" is ")[0] for problem in problems] == [
        "conf/experiment/base.yaml: line 2: train.epochs: 010",
        "conf/experiment/mine.yaml: override /optimizer",
        "conf/optimizer/slow.yaml: line 2: lr: 1:30",
    ]
    _, problems = read_config(program, read_overrides(program, ["experiment=class"]))
    assert "model.hidden: 007 is 7 in YAML" in problems[0], "an argument may be a text"
    Path("conf/experiment/mine.yaml").write_bytes(f"{run}name: gr\xf6sse\n".encode("latin-1"))
    _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert problems == ["conf/experiment/mine.yaml: line 2: is not UTF-8; save it as UTF-8"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train: {epochs: 010}", "train.epochs: 010 is 8 in YAML, and 10 or a text on a command"),
        ("train: {epochs: 1, epochs: 2}", "epochs is there twice; keep one of them"),
    ],
)
def test_config_of_an_earlier_run_is_read_alike(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "edited.yaml"
    path.write_text(f"model: {{}}\ndata: {{}}\noptimizer: {{lr: 1e-3}}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        EarlierRun.of_file(path)
    assert f"config={path}: line 4: {message}" in str(caught.value)
    with pytest.raises(ConfigError):
        read_file(path, "f")
    path.write_text("model: {}\ndata: {}\noptimizer: {lr: 1e-3}\ntrain: {}\n")
    assert EarlierRun.of_file(path).values["optimizer"]["lr"] == 0.001
