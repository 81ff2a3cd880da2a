"""What was frozen comes back."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import yaml

from ddp_train.config.auto import resolve
from ddp_train.config.freeze import FILE, freeze, load_frozen
from ddp_train.config.prepare import prepare
from ddp_train.config.validate import check
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import RequestedRun
from tests.support.commands import PROGRAM
from tests.support.configs import (
    composed,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
CPU = Hardware(cpus=2)


def test_the_summary_of_an_earlier_run_goes_when_the_next_begins(tmp_path: Path) -> None:
    """And what a process that was killed has half written."""
    names = ("summary.json", "failure.json", "failure.json.part-77", "metrics.jsonl.part")
    for name in names:
        (tmp_path / name).write_text("{}")
    freeze(resolve(composed(f"run_dir={tmp_path}"), CPU, None))
    assert not any((tmp_path / name).exists() for name in names)


CUSTOM = {
    "model": "model._target_=torch.nn.Linear model.in_features=64 model.out_features=10",
    "task": "task._target_=my_package.Contrastive task.temperature=0.1",
    "data": "data._target_=torchvision.datasets.FakeData data.size=8 data.image_size=[3,8,8]",
    "optimizer": "optimizer._target_=torch.optim.SGD optimizer.lr=0.1",
    "schedule": "schedule._target_=torch.optim.lr_scheduler.ExponentialLR schedule.gamma=0.9",
}
EVERY_OPTION = {
    section: [
        CUSTOM[section] if option == "custom" else f"{section}={option}" for option in options
    ]
    for section, options in OPTIONS.items()
}


@pytest.mark.parametrize(
    "line",
    [
        *(
            " ".join(line)
            for line in itertools.zip_longest(*EVERY_OPTION.values(), fillvalue="seed=1")
        ),
        (
            "tuning=none name='null' trusted_modules=[a,b] optimizer.lr=1e-5"
            " strategy.bucket_cap_mb_list=[1,2.5] seed=3"
        ),
        (
            "seed=9223372036854775807 launch.nproc_per_node=4 launch.rdzv_endpoint=host:1 name='1'"
            " run_dir='yes:~no'"
        ),
    ],
)
def test_what_is_frozen_comes_back(line: str, tmp_path: Path) -> None:
    config = resolve(composed(*line.replace("~", "\t").split(" ")), CPU, None)
    text = freeze(config)
    assert load_frozen(text) == config
    run_dir = tmp_path / str(config.run_dir)
    assert (run_dir / FILE).read_text() == text
    assert sorted(path.name for path in run_dir.iterdir()) == [FILE, "logs"]
    assert "!" not in text  # no YAML tag: plain data
    assert yaml.safe_load(text) == dataclasses.asdict(config)
    assert "auto" not in yaml.safe_load(text)["tuning"].values()


def test_what_is_frozen_passes_the_checks_again() -> None:
    """A restart, and a person who feeds a frozen config back, meet the same rules."""
    config = prepare(PROGRAM, ["run_dir=run"], None).config
    assert check(RequestedRun(config, resolve(config, CPU, None), CPU, None)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("seed: 0", "seed: x", "seed=x: must be a whole number"),
        ("momentum:", "momentun:", "optimizer.momentun=0.9: no such key"),
        ("name: sgd", "name: sgdd", "optimizer=sgdd: must be one of"),
        ("mode: train", "- mode", ""),
        ("seed: 0", "seed: !!python/object/apply:os.getcwd []", ""),
        ("strategy:\n  name: ddp", "strategy: 3\nx:\n  name: ddp", "strategy=3: is a section"),
    ],
)
def test_a_spoilt_frozen_config_is_refused(before: str, after: str, expected: str) -> None:
    text = freeze(resolve(composed("run_dir=run"), CPU, None))
    assert before in text
    with pytest.raises(ConfigError) as caught:
        load_frozen(text.replace(before, after))
    assert all(problem.startswith(f"{FILE}: ") for problem in caught.value.problems)
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ["", "3", "[1, 2]", "just words"])
def test_a_frozen_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match="must hold keys and values, KEY: VALUE; restore the file"
    ):
        load_frozen(text)
