"""How many trials run at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from ddp_train.options.sections import LaunchConfig, SweepConfig
from ddp_train.sweeps import plan as sweep_plan
from ddp_train.sweeps.plan import SweepPlan, plan_sweep
from ddp_train.sweeps.pool import (
    LauncherSettings,
    TrialPool,
    pool_of,
    read_settings,
    with_settings,
)
from tests.support.commands import (
    PROGRAM,
)


def test_direct_launcher_settings_are_shared_by_trials() -> None:
    """Threads and loader processes are planned for so many trials at a time."""
    gpus = Hardware(cpus=8, gpus=4, gpu_name="NVIDIA H200", compute_capability=(9, 0))

    def planned(device: str, *words: str) -> TrialPool | list[str]:
        settings, problems = read_settings([f"hydra.launcher.{word}" for word in words])
        config, more = with_settings(Config(), settings)
        resolved = dataclasses.replace(config, device=device, launch=LaunchConfig(nproc_per_node=1))
        return problems + more or pool_of(config, [resolved], 5, gpus, settings)

    assert planned("cuda", "gpus_per_trial=2") == TrialPool(2, 2)
    assert (
        planned("cuda", "gpus_per_trial=1", "devices=[0, 2]")
        == planned("cuda", "devices=[0,2]")
        == TrialPool(2, 1)
    )
    assert planned("cuda", "gpus_per_trial=0", "processes_at_once=2") == TrialPool(2, 0)
    assert planned("cpu", "processes_at_once=3") == TrialPool(3, 0)
    assert planned("cpu", "processes_at_once=null") == TrialPool(1, 0)
    assert planned("cpu", "processes_at_once=0") == [
        "hydra.launcher.processes_at_once=0: must be a whole number, at least 1"
    ]
    asked = Config(sweep=SweepConfig(gpus_per_trial=1))
    _, problems = with_settings(asked, LauncherSettings(gpus_per_trial=2))
    assert problems == [
        "hydra.launcher.gpus_per_trial=2: contradicts sweep.gpus_per_trial=1; leave one of them out"
    ]


@pytest.mark.slow
def test_keys_of_a_sweep_are_refused_where_they_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Hardware(cpus=8, gpus=4, gpu_name="NVIDIA H200", compute_capability=(9, 0))
    monkeypatch.setattr(sweep_plan, "detect_hardware", lambda _: gpus)

    def planned(*more: str) -> SweepPlan:
        return plan_sweep(PROGRAM, ["-m", "seed=1,2", f"run_dir={tmp_path}", *more])

    def words(*more: str) -> tuple[str, ...]:
        return planned(*more).hydra_arguments

    assert not any("pool" in word for word in words()), "each trial takes all GPUs"
    assert {"hydra/launcher=pool", "hydra.launcher.gpus_per_trial=2"} < set(
        words("sweep.gpus_per_trial=2")
    )
    assert not any(
        "pool" in word for word in words("sweep.gpus_per_trial=2", "hydra/launcher=basic")
    )
    for given, message in (
        ("sweep.gpus_per_trial=8", "sweep.gpus_per_trial=8: this host has 4"),
        (
            "sweep.gpus_per_trial=1,2",
            "sweep.gpus_per_trial: all trials share this key, so it cannot be swept",
        ),
        (
            "checkpoint.mirror=file:///tmp/x",
            "checkpoint.mirror=file:///tmp/x: all trials would copy their checkpoints",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            words(given)

    with pytest.raises(ConfigError, match=r"sweep\.gpus_per_trial=8: this host has 4"):
        words("hydra.launcher.gpus_per_trial=8")
    assert planned("hydra.launcher.gpus_per_trial=1").pool == TrialPool(2, 1), "as sweep.* does"
    with pytest.raises(
        ConfigError, match=r"sweep\.gpus_per_trial=1: launch\.nproc_per_node=2 needs 2 GPUs"
    ):
        words("sweep.gpus_per_trial=1", "launch.nproc_per_node=2")
