"""The launcher under fire: killed workers, a killed launcher, signals, restarts, neighbours, open
ports."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from ddp_train.telemetry.json_files import read_objects
from tests.support.commands import (
    ENDLESS,
    SMALL,
    THREE,
    fatal_lines,
    foreign_code,
    foreign_net,
    processes_of,
    read,
    run,
    running,
    server_of,
    torchrun,
    wait_until,
    weights,
)
from tests.support.pages import report_in, section_of

pytestmark = pytest.mark.timeout(300)  # the machine may be busy


# --- a worker dies --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_step()
        workers = job.workers()
        assert sorted(workers) == [0, 1, 2]
        os.kill(workers[2], signal.SIGKILL)
        began = time.monotonic()
        assert job.end() == 70
        assert time.monotonic() - began < 5
        assert processes_of(job.run_dir) == {}
        failure = read(job.run_dir, "failure.json")
        assert (failure["kind"], failure["rank"], failure["exit_code"]) == ("died", 2, 70)
        assert "SIGKILL" in failure["detail"]
        (fatal,) = fatal_lines(job.said())
        assert "died (rank 2 on" in fatal
        assert "Traceback" not in job.said(), "the survivors' complaints belong into their logs"


@pytest.mark.slow
def test_a_run_that_is_started_again_ends_where_it_would_have(tmp_path: Path) -> None:
    env = foreign_code(tmp_path)
    words = ["train.max_steps=40", "checkpoint.every_steps=5", THREE]
    slow, fast = (foreign_net(deterministic=True, delay=delay) for delay in (0.05, 0.0))
    with running(tmp_path / "run", *slow, *words, "launch.max_restarts=1", env=env) as job:
        for step, rank in ((5, 0), (15, 2)):  # rank 0 holds the store and writes the checkpoints
            job.wait_for_file(f"checkpoints/step_{step:08d}")
            os.kill(job.workers()[rank], signal.SIGKILL)
        assert job.end() == 0, job.said()
        assert job.said().count("restarting (1 of 1 restarts)") == 2, (
            "a new checkpoint refills the budget"
        )
        assert processes_of(job.run_dir) == {}
        assert read(job.run_dir, "summary.json")["status"] == "completed"
        assert read(job.run_dir, "summary.json")["steps"] == 40
        assert not (job.run_dir / "failure.json").exists()
        assert "from step " in job.output.read_text()
    done = run(*fast, *words, f"run_dir={tmp_path}/reference", env=env)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == weights(tmp_path / "reference")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_whose_torchrun_has_died_already_ends_too(tmp_path: Path, rank: int) -> None:
    """Before it could ask the kernel to be ended with it; torch would look for the agent's store
    for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    as_worker = {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    began = time.monotonic()
    done = run(*SMALL, f"run_dir={tmp_path / 'run'}", env=as_worker)
    assert done.returncode == 69
    assert time.monotonic() - began < 30
    (fatal,) = fatal_lines(done.stderr)
    assert fatal.startswith(f"FATAL peer (rank {rank})")
    assert "torchrun's agent, which serves the store, has ended" in fatal


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_by_hand_waits_as_long_as_it_is_told(tmp_path: Path, rank: int) -> None:
    by_hand = {
        **{"RANK": str(rank), "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29521 + rank)},
    }
    words = (*SMALL, f"run_dir={tmp_path / 'run'}", "launch.join_timeout_seconds=1")
    done = run(*words, env=by_hand)
    assert done.returncode == 69
    (fatal,) = fatal_lines(done.stderr)
    missing = "rank 1 cannot reach the store" if rank else "rank 1 of 2 did not respond within 1 s"
    assert missing in fatal
    assert (tmp_path / "run").exists() == (rank == 0)


@pytest.mark.slow
def test_torchrun_restarts_into_the_same_run_directory(tmp_path: Path) -> None:
    marker = tmp_path / "vanished"
    words = foreign_net(fault="vanish once", rank=2, call=5, marker=str(marker))
    done = run(
        *words,
        "name=restarted",
        "train.max_steps=12",
        "checkpoint.every_steps=3",
        command=torchrun("--max-restarts=2"),
        cwd=tmp_path,
        env=foreign_code(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists(), "the fault did not happen"
    (run_dir,) = (tmp_path / "runs/restarted").iterdir()
    summary = read(run_dir, "summary.json")
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 12, 3)
    assert "from step 3" in done.stdout
    assert weights(run_dir)
    assert not (run_dir / "failure.json").exists(), "a completed run has not failed"


@pytest.mark.slow
def test_run_that_fails_alike_three_times_is_ended(tmp_path: Path) -> None:
    words = [*foreign_net(fault="raise", rank=1, call=1), "launch.max_restarts=9", THREE]
    done = run(*words, f"run_dir={tmp_path}/run", env=foreign_code(tmp_path))
    assert done.returncode == 70
    assert len(fatal_lines(done.stderr)) == 3
    assert done.stderr.endswith(
        "not restarted: same failure at the same step in 3 attempts; "
        "restarting again would not help\n"
    )


FAILS_THRICE = """
class Hook:
    def __init__(self, job, run_dir, world):
        self.rank, self.run_dir = world.rank, run_dir

    def due(self, job):
        return job.step + 1

    def act(self, job):
        failures = len([*self.run_dir.glob("failed_*")])
        if self.rank == 1 and failures < 3 and job.step == (1, 3, 6)[failures]:
            (self.run_dir / f"failed_{failures}").touch()
            raise ValueError("once")
"""


@pytest.mark.slow
def test_an_error_of_a_hook_costs_its_own_step_at_most(tmp_path: Path) -> None:
    (tmp_path / "thrice.py").write_text(FAILS_THRICE)
    words = ["train.global_batch_size=60", "train.max_steps=9", "launch.max_restarts=3"]
    hook = ["hooks=[thrice.Hook]", "run_dir=run"]
    done = run("model=mlp", "data.limit=200", *words, THREE, *hook, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = read(tmp_path / "run", "summary.json")
    costs = [(one["rank"], one["kind"], one["steps_redone"]) for one in summary["recoveries"]]
    # 1 where another rank had kept the step as its hooks left it, and rank 1 had not.
    assert [cost[:2] for cost in costs] == [(1, "exception")] * 3
    assert all(redone <= 1 for _, _, redone in costs), costs
    assert summary["steps_redone"] == sum(redone for _, _, redone in costs)
    failures = read_objects(tmp_path / "run/failures.jsonl")
    assert [(one["kind"], one["step"]) for one in failures] == [
        ("exception", step) for step in (1, 3, 6)
    ]
    assert not (tmp_path / "run/failure.json").exists()
    page = (tmp_path / "run/report.html").read_text()
    table = section_of(page, "Failures that the run recovered from")
    assert table["columns"][1]["texts"] == ["exception"] * 3
    assert report_in(page)["findings"][0].startswith("Restarted 3 times")


@pytest.mark.slow
def test_a_restart_that_finds_no_config_says_so_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = foreign_net(
        fault="remove and vanish", rank=2, call=3, marker=str(run_dir / "config.yaml")
    )
    done = run(
        *words, THREE, "launch.max_restarts=2", f"run_dir={run_dir}", env=foreign_code(tmp_path)
    )
    again = done.stderr.partition("restarting (1 of 2 restarts)")[2]
    assert done.returncode == 73 and "Traceback" not in again, done.stderr
    assert (
        len(fatal_lines(again)) == 1
        and f"{run_dir}/config.yaml cannot be read as a process starts" in again
    )
    assert read(run_dir, "failure.json")["kind"] == "write"


SLOW_END = """
import logging
import os
import time

import torch.distributed as dist
from torch import nn

from ddp_train.errors import DataError


class Handler(logging.Handler):
    def emit(self, record):
        pass

    def close(self):
        time.sleep(3)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        if os.environ["RANK"] == "1":
            logging.getLogger().addHandler(Handler())
            dist.destroy_process_group()  # the others learn of it now, not when this process has ended
            raise DataError("its weights are broken", "mend them")
"""


@pytest.mark.slow
def test_rank_slow_to_end_after_report_is_not_restarted(tmp_path: Path) -> None:
    """The others end before it, with 70, for which a run is restarted; what it has reported is
    final."""
    (tmp_path / "slow_end.py").write_text(SLOW_END)
    words = (
        "model._target_=slow_end.Net",
        "trusted_modules=[slow_end]",
        THREE,
        "launch.max_restarts=2",
    )
    done = run(*words, f"run_dir={tmp_path}/run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == read(tmp_path / "run", "failure.json")["exit_code"] == 65, done.stderr
    assert len(fatal_lines(done.stderr)) == 1 and "restart" not in done.stderr


# --- the launcher is stopped ----------------------------------------------------------------------


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_step()
        assert len(job.workers()) == 3
        server = server_of(job.process.pid)
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not processes_of(job.run_dir), "end of the workers", seconds=2)
        wait_until(
            lambda: not Path(f"/proc/{server}").exists(), "end of the fork server", seconds=10
        )


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stopped_launcher_takes_its_workers_with_it(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_step()
        job.process.send_signal(number)
        began = time.monotonic()
        assert job.end() == code
        assert time.monotonic() - began < 5
        assert processes_of(job.run_dir) == {}
        assert job.said() == ""
        assert job.output.read_text().count("\nstopped after step ") == 1
        assert weights(job.run_dir)


@pytest.mark.slow
def test_worker_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    words = foreign_net(fault="deaf", delay=0.05)
    with running(
        tmp_path / "run",
        *words,
        "train.epochs=10000",
        "checkpoint.every_steps=1000000",
        THREE,
        "launch.grace_seconds=3",
        env=foreign_code(tmp_path),
    ) as job:
        job.wait_for_step()
        job.process.terminate()
        began = time.monotonic()
        assert job.end() == 75, "what was kept of the last step is saved"
        assert 2.9 < time.monotonic() - began < 8
        assert processes_of(job.run_dir) == {}
        assert job.said().startswith("stopped by SIGTERM") and job.said().count("\n") == 1
