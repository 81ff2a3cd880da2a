"""Who a process is, by its environment variables."""

from __future__ import annotations

import os

import pytest

from ddp_train.distributed.environment import (
    LAUNCHER_PID,
    Tasks,
    tasks_started,
    world_from_environment,
)
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ANY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", LAUNCHER_PID)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ANY:
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Tasks()),
        ({"SLURM_PROCID": "0"}, Tasks()),  # the script of a job: no step
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Tasks()),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"},
            Tasks(8, "srun", ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            Tasks(2, "mpirun", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")),
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, Tasks()),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, Tasks(4, "mpirun", ("PMI_SIZE", "PMI_RANK"))),
        (
            {"PALS_RANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"},
            Tasks(4, "mpiexec", ("PMI_SIZE", "PALS_RANKID")),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            Tasks(2, "mpirun", ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")),
        ),
        (
            {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "3"},
            Tasks(3, "flux run", ("FLUX_JOB_SIZE", "FLUX_TASK_RANK")),
        ),
        ({"PMIX_RANK": "3"}, Tasks(4, "prterun", ("PMIX_RANK",))),
        ({"PMIX_RANK": "0"}, Tasks()),
    ],
)
def test_tasks_of_a_batch_system_or_an_mpi_are_counted(
    variables: dict[str, str], expected: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, variables)
    assert tasks_started() == expected


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0", **ADDRESS}, "RANK=0 is not below WORLD_SIZE=0"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "any"},
            "MASTER_PORT=any is not a port",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, LAUNCHER_PID: "1"},
            r"a process of another run \(launcher 1\) has started this",
        ),
    ],
)
def test_variables_of_half_a_world_are_refused(
    variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, variables)
    with pytest.raises(ConfigError, match=f"environment: {problem}"):
        world_from_environment()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS}, World(1, 2, 1, 2)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, LAUNCHER_PID: str(os.getppid())},
            World(1, 2, 1, 2),
        ),
    ],
)
def test_whole_variables_are_a_world(
    variables: dict[str, str], expected: World | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, variables)
    assert world_from_environment() == expected
