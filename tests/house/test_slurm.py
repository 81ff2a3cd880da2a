"""deploy/slurm and sweeps as jobs, on a real SLURM of two nodes. See tests/support/slurmlab.py and
docs/operate/slurm.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import (
    LAUNCH,
    LIMIT_SECONDS,
    ROOT,
    checkpoints,
    metrics,
    read,
    run,
    wait_until,
    weights,
)
from tests.support.slurmlab import LOOK_SECONDS, NoSlurmError, SlurmLab, packages, why_not

pytestmark = pytest.mark.timeout(
    300
)  # jobs of several processes each, on a machine that may be busy

TRAIN = "deploy/slurm/train.sbatch"
NET = '''
import os
import time


from torch import nn


class Net(nn.Module):
    """`delay` seconds pass in each training call of a job's first start; once it is started again it hurries."""

    def __init__(self, delay=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.delay = delay

    def forward(self, images):
        if self.training and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(self.delay)
        return self.layers(images)
'''
WORDS = (
    *(
        "model._target_=patient.Net",
        "trusted_modules=[patient]",
        "data.limit=200",
        "schedule=constant",
    ),
    *("train.epochs=1000", "train.evaluate_every_epochs=1000", "checkpoint.every_steps=1000000"),
    *("launch.threads_per_process=1", "train.log_every_steps=1"),
)
"""Training that saves when it is told to stop and at its end, and at no other time."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    try:
        unpacked = packages()
    except NoSlurmError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "patient.py").write_text(NET)
    (folder / "train.sbatch").write_text(edited())
    with SlurmLab(2, unpacked, folder) as lab:
        lab.env |= {"PYTHON": sys.executable, "PYTHONPATH": str(folder)}
        yield lab


def edited() -> str:
    """The script as a user leaves it who has another thing to train."""
    lines = (ROOT / TRAIN).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.startswith("words=("))
    lines[number] = f"words=({' '.join(WORDS)})"
    return "\n".join(lines) + "\n"


@dataclass
class Job:
    number: str
    run_dir: Path
    words: tuple[str, ...]


@pytest.fixture(scope="module")
def limited(slurm: SlurmLab) -> Iterator[Job]:
    """Two nodes with two processes each, whose time limit comes near once they train, and far again
    when they wait in the queue. slurmctld looks at limits every 30 s: other tests run meanwhile."""
    run_dir = slurm.folder / "limited"
    words = ("+model.delay=0.1", "train.max_steps=600")
    number = slurm.submit(
        f"{slurm.folder}/train.sbatch", f"run_dir={run_dir}", *words, options=["--nodes=2"]
    )
    slurm.wait_while_alive(number, lambda: begun(run_dir), "first step")
    set_limit(
        slurm, number, minutes(slurm.show(number)["RunTime"]) + 1
    )  # less than its 120 s of warning

    def lift() -> None:
        slurm.wait_for(number, "PENDING")
        set_limit(slurm, number, 600)

    lifting = threading.Thread(target=lift, daemon=True)
    lifting.start()
    yield Job(number, run_dir, words)
    lifting.join(LIMIT_SECONDS)


def set_limit(slurm: SlurmLab, job: str, limit: int) -> None:
    slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")


def minutes(clock: str) -> int:
    """Whole minutes in SLURM's 00:01:59."""
    hours, rest, _ = clock.split(":")
    return 60 * int(hours) + int(rest)


def begun(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and bool(metrics(run_dir))


on_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not())


# --- mistakes, before SLURM is asked --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("srun", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}),
        ("mpirun", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}),
    ],
)
def test_a_launcher_per_gpu_is_refused(
    command: str, variables: dict[str, str], tmp_path: Path
) -> None:
    """`srun --ntasks-per-node=8 python launch.py` would start 64 processes for 8 GPUs."""
    done = run(f"run_dir={tmp_path}/run", env=variables)
    assert done.returncode == 2
    said = f"launch.nnodes=1: {command} started 8 launchers, and each would start all processes"
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_sweep_for_slurm_where_there_is_none_is_refused(tmp_path: Path) -> None:
    words = ("-m", "hydra/launcher=slurm", "optimizer.lr=0.1,0.2", f"run_dir={tmp_path}/sweep")
    done = run(*words, env={"PATH": str(Path(sys.executable).parent)})
    assert done.returncode == 2
    assert (
        "hydra/launcher=slurm: there is no srun on this host; start the sweep where `sbatch` works"
        in done.stderr
    )


def test_the_script_is_one_that_bash_reads() -> None:
    done = subprocess.run(["bash", "-n", TRAIN], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "saved", "restarts", "requeued"),
    [
        (75, True, 0, True),
        (143, True, 3, True),
        (143, False, 0, False),
        (75, True, 100, False),
        (70, True, 0, False),
    ],
)
def test_a_job_goes_back_into_the_queue_if_it_can_go_on(
    tmp_path: Path, code: int, saved: bool, restarts: int, requeued: bool
) -> None:
    for name, body in (("srun", f"exit {code}"), ("scontrol", 'echo "$@" >> told')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    if saved:
        (tmp_path / "here/checkpoints/step_00000004").mkdir(parents=True)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(
        ["bash", ROOT / TRAIN, "run_dir=here"],
        cwd=tmp_path,
        env={**env, "SLURM_RESTART_COUNT": str(restarts)},
    )
    assert done.returncode == code
    assert (tmp_path / "told").exists() == requeued


@pytest.mark.parametrize(("restarts", "told"), [(99, "requeue 7"), (100, "cancel 7")])
def test_nodes_without_the_script_requeue_no_oftener(
    tmp_path: Path, restarts: int, told: str
) -> None:
    srun = """
        while [[ $1 == -* ]]; do shift; done
        touch here/meeting_point.json
        "$@"
        exit 1
    """
    programs = {
        "srun": srun,
        "launcher": "exit 75",
        "sleep": "true",
        "scontrol": 'echo "$@" >> told',
        "scancel": 'echo "cancel $@" >> told',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "here").mkdir()
    subprocess.run(
        ["bash", ROOT / TRAIN, "run_dir=here", "launch.nnodes=2:4"],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "PYTHON": str(tmp_path / "launcher"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_STEP_LAUNCHER_PORT": "1",
        },
    )
    assert (tmp_path / "told").read_text().strip() == told


# --- a cluster ------------------------------------------------------------------------------------


@on_slurm
@pytest.mark.slow
def test_trials_are_slurm_jobs_and_resume(slurm: SlurmLab) -> None:
    sweep = slurm.folder / "sweep"
    words = (
        *WORDS,
        "+model.delay=0.1",
        "train.max_steps=40",
        "launch.nproc_per_node=1",
        f"run_dir={sweep}",
    )
    asked = ("hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=2")
    command = (
        *LAUNCH,
        "-m",
        "hydra/launcher=slurm",
        *asked,
        "optimizer.lr=0.01,0.02",
        *words,
    )
    with slurm.popen(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: process.poll() is not None or begun(sweep / "0"), "step of trial 0")
        assert process.poll() is None, process.communicate()
        (array,) = {line.split("_")[0] for line in jobs_of(slurm, "--array") if "_" in line}
        slurm.call("scancel", "--signal=USR1", f"{array}_0")  # as SLURM does before the time limit
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert slurm.show(f"{array}_0")["Restarts"] == "1"
    (log,) = (sweep / ".submitit").rglob("*_0_0_log.out")
    assert re.search(r"^steps .*, from step \d+$", log.read_text(), re.M)
    rows = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    assert sorted((row["trial"], row["status"]) for row in rows) == [
        (trial, "completed") for trial in range(2)
    ]
    assert [read(sweep / str(trial), "summary.json")["steps"] for trial in range(2)] == [40] * 2
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if "completed" in line] == ["0", "1"], out
    assert any(line.startswith("best trial ") for line in lines)


@on_slurm
@pytest.mark.slow
@pytest.mark.nightly
def test_a_cancelled_job_saves_and_leaves_nothing(slurm: SlurmLab, limited: Job) -> None:
    run_dir = slurm.folder / "cancelled"
    words = ("+model.delay=0.02", "train.epochs=1000000")
    job = slurm.submit(
        f"{slurm.folder}/train.sbatch", f"run_dir={run_dir}", *words, options=["--nodes=1"]
    )
    slurm.wait_while_alive(job, lambda: begun(run_dir), "first step")
    slurm.call("scancel", job)
    known = slurm.wait_for(job, "CANCELLED")
    assert known["Restarts"] == "0"
    while job in jobs_of(slurm):  # COMPLETING: SLURM waits for its processes
        time.sleep(LOOK_SECONDS)
    assert not slurm.processes(str(run_dir))
    assert read(run_dir, "summary.json")["status"] == "preempted"
    assert checkpoints(run_dir) == [f"step_{metrics_end(run_dir):08}"]
    assert weights(run_dir)


@on_slurm
@pytest.mark.slow
@pytest.mark.nightly
def test_job_at_its_time_limit_resumes_to_same_weights(
    slurm: SlurmLab, limited: Job, tmp_path: Path
) -> None:
    known = slurm.wait_for(limited.number, "COMPLETED")
    said = slurm.said(limited.number)
    assert known["Restarts"] == "1", said
    assert said.count("exit code 75; back into the queue") == 1
    assert "from step " in said
    summary = read(limited.run_dir, "summary.json")
    assert (summary["status"], summary["world_size"], summary["steps"]) == ("completed", 4, 600)
    assert not slurm.processes(str(limited.run_dir))
    alone = run(
        *WORDS,
        *limited.words,
        "model.delay=0",
        "launch.nproc_per_node=4",
        f"run_dir={tmp_path}/alone",
        env={"PYTHONPATH": str(slurm.folder)},
    )
    assert alone.returncode == 0, alone.stderr
    assert weights(limited.run_dir) == weights(tmp_path / "alone")


@on_slurm
@pytest.mark.slow
@pytest.mark.nightly
def test_nodes_are_taken_away_and_the_job_goes_on(tmp_path: Path) -> None:
    """The last of three, then the first, where SLURM has the job's script: with it srun is gone."""
    (tmp_path / "patient.py").write_text(NET)
    (tmp_path / "train.sbatch").write_text(edited())
    run_dir = tmp_path / "run"
    words = (
        "+model.delay=0.1",
        "train.max_steps=500",
        "launch.nproc_per_node=1",
        "launch.timeout_seconds=10",
        "launch.nnodes=1:3",
        "launch.max_restarts=5",
        f"run_dir={run_dir}",
    )
    try:
        lab = SlurmLab(4, packages(), tmp_path)
    except NoSlurmError as error:
        pytest.skip(str(error))
    with lab as slurm:  # node0 has slurmctld
        slurm.env |= {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
        options = ["--nodes=3", "--exclude=node0", "--no-kill"]
        job = slurm.submit(f"{tmp_path}/train.sbatch", *words, options=options)
        slurm.wait_while_alive(job, lambda: begun(run_dir), "first step")
        for node, known in ((3, "node[1-2]"), (1, "node2")):
            step = metrics_end(run_dir)
            slurm.hosts[node].power_off()
            slurm.wait_while_alive(
                job, lambda step=step: metrics_end(run_dir) > step + 20, "step after a loss"
            )
            slurm.wait_while_alive(
                job, lambda known=known: slurm.show(job)["NodeList"] == known, "loss that SLURM saw"
            )
        known = slurm.wait_for(
            job, "CANCELLED"
        )  # by the one that is left: the script and its exit code were on node1
        assert known["Restarts"] == "0"
    summary = read(run_dir, "summary.json")
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 500, 1)
    assert (len(summary["recoveries"]), summary["steps_redone"]) == (2, 0)
    assert sorted(line["step"] for line in metrics(run_dir) if line["kind"] == "train") == [
        *range(1, 501)
    ]


def jobs_of(slurm: SlurmLab, *options: str) -> list[str]:
    """The jobs that wait or run."""
    return slurm.call("squeue", "--noheader", "--format=%i", *options).split()


def metrics_end(run_dir: Path) -> int:
    """The last step of which there is a line; 0 before the first, or while a resume rewrites them."""
    return max((line["step"] for line in metrics(run_dir)), default=0)
