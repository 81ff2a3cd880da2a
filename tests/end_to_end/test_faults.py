"""Faults that somebody once tried and no test had: of the environment, of files that were touched,
of foreign code."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddp_train.errors import WriteError
from ddp_train.resilience.failure import Failure
from ddp_train.resilience.failure_report import Report, record, traceback_of
from ddp_train.resilience.heartbeat import UNREPORTED, RankStatus
from ddp_train.runs.worker_process import opening_logs
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.log_files import start_logging
from tests.checkpoints.test_checkpoint import small_disk
from tests.support.commands import (
    LAUNCH,
    ONE,
    ROOT,
    SMALL,
    THREE,
    environment,
    fatal_lines,
    processes_of,
    read,
    run,
    running,
)

pytestmark = pytest.mark.timeout(300)  # the machine may be busy


# --- what a command is started with ---------------------------------------------------------------


def ignore_children_and_close_streams() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (0, 1, 2):
        os.close(number)


@pytest.mark.slow
@pytest.mark.true_command
def test_a_run_does_not_mind_what_its_parent_ignores_or_closes(tmp_path: Path) -> None:
    """As by `trap '' CHLD`, and `<&- >&- 2>&-`. Two ranks: sockets must not get the numbers of the
    streams."""
    words = [*SMALL, "launch.nproc_per_node=2", "train.max_steps=3", f"run_dir={tmp_path}/run"]
    with (tmp_path / "said").open("w") as said:
        done = subprocess.run(
            [*LAUNCH, *words],
            cwd=ROOT,
            env=environment(),
            stderr=said,
            stdout=said,
            preexec_fn=ignore_children_and_close_streams,
            timeout=120,
        )
    assert done.returncode == 0, (tmp_path / "said").read_text()
    assert read(tmp_path / "run", "summary.json")["status"] == "completed"
    assert not (tmp_path / "run/failure.json").exists()


@pytest.mark.slow
def test_names_may_have_any_letters_in_any_locale(tmp_path: Path) -> None:
    """Hydra's grammar knows them inside of quotes alone, and LC_ALL=C without Python's remedies
    knows none. Those are read by a new interpreter alone: no zygote forks that command."""
    ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for locale, name in (({}, "name=Größe"), (ascii_alone, "name='Größe'")):
        run_dir = tmp_path / "ünï"
        words = [
            *SMALL,
            ONE,
            "launch.threads_per_process=1",
            "train.max_steps=3",
            "checkpoint.resume=never",
            name,
            f"run_dir={run_dir}",
        ]
        done = run(*words, env=locale)
        assert done.returncode == 0, done.stderr
        assert read(run_dir, "summary.json")["status"] == "completed"
        assert "Größe" in (run_dir / "commands.jsonl").read_text(encoding="utf-8").encode().decode(
            "unicode_escape"
        )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK=0 is set and MASTER_ADDR is not; start with torchrun, or `unset RANK",
        ),
        (
            {"RANK": "x", "WORLD_SIZE": "1"},
            "RANK=x is not a number; start with torchrun, or `unset RANK WORLD_SIZE`",
        ),
    ],
)
def test_what_torchrun_left_in_the_environment_is_named(
    variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    done = run(*SMALL, ONE, f"run_dir={tmp_path}/run", env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_launcher_shows_its_stack_on_sigusr2_and_goes_on() -> None:
    """docs/operate/failures.md recommends that signal for workers; one process id is like another."""
    code = (
        "import os, signal\nfrom ddp_train import __main__ as program\n"
        "program.main = lambda *_: os.kill(os.getpid(), signal.SIGUSR2) or 7\nprogram.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7 and "in run" in done.stderr, done


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    command = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {shlex.join(LAUNCH)} model=mlp"
    done = subprocess.run(
        ["sh", "-c", command], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "the working directory has been removed; change into one that exists" in done.stderr
    assert "Traceback" not in done.stderr


# --- a disk that takes nothing any more -----------------------------------------------------------


def test_a_failure_is_told_where_no_file_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failure = Failure("write", 0, "here", 3, "checkpoint", "full", "free some", "", 73)
    said = io.StringIO()
    with small_disk(tmp_path / "disk", "size=400k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert record(disk, failure, {})
    Report(failure).print(stream=said)
    assert said.getvalue().startswith("FATAL write (rank 0 on here, step 3, checkpoint): full")
    assert "failure.json cannot be written" in caplog.text


def test_a_log_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that becomes read-only while the processes start: then there are no checkpoints
    either."""
    monkeypatch.setattr(logging.getLogger("ddp_train"), "handlers", [])
    (tmp_path / "logs").write_text("no folder")
    log_file = tmp_path / "logs/rank_0.log"
    with (
        pytest.raises(WriteError, match=r"the logs in .*logs cannot be written: File exists"),
        opening_logs(log_file),
    ):
        start_logging(log_file, 0, to_terminal=True)


def test_what_costs_nothing_is_not_fatal() -> None:
    failure = Failure("died", 1, "here", 3, "forward", "killed", "find out", "", 70)
    said = io.StringIO()
    Report(failure).print(is_fatal=False, stream=said)
    assert (
        said.getvalue()
        == "LOST died (rank 1 on here, step 3, forward): killed\n  remedy: find out\n"
    )


@pytest.mark.slow
def test_a_failure_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    """Rank 1 sees that rank 0 is gone, and must not tell of it where there is no failure.json."""
    words = [
        *SMALL,
        "train.epochs=100000",
        "train.evaluate_every_epochs=100000",
        "launch.nproc_per_node=2",
    ]
    with running(
        tmp_path / "run", *words, "checkpoint.every_steps=1000000", "train.log_every_steps=1"
    ) as job:
        job.wait_for_step()
        if subprocess.run(["chattr", "+i", job.run_dir], capture_output=True).returncode:
            pytest.skip("chattr needs root and a file system that knows it")
        try:
            os.kill(job.process.pid, signal.SIGTERM)
            assert job.end() == 73, job.said()
        finally:
            subprocess.run(["chattr", "-i", job.run_dir], check=True)
        (fatal,) = fatal_lines(job.said())
        assert "FATAL write (rank 0 " in fatal and "Traceback" not in job.said()


# --- foreign code that is wrong -------------------------------------------------------------------

WRONG = """
from torch import nn


class Spare(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.spare = nn.Linear(3, 3)

    def forward(self, images):
        return self[1](self[0](images))


class Shape(Spare):
    def forward(self, images):
        return self.head(images)

    def head(self, images):
        return self[1](images)
"""


@pytest.mark.slow
def test_parameters_that_the_loss_does_not_depend_on_are_named(tmp_path: Path) -> None:
    """By torch they are `Parameter indices 2 3`, in a text of nine lines."""
    (tmp_path / "wrong.py").write_text(WRONG)
    words = ["model._target_=wrong.Spare", "data.limit=96", f"run_dir={tmp_path}/run", THREE]
    done = run(*words, env={"PYTHONPATH": str(tmp_path)})
    (fatal,) = fatal_lines(done.stderr)
    assert done.returncode == 65 and "Traceback" not in done.stderr, done.stderr
    assert fatal.endswith("the loss does not depend on 2 parameters: spare.weight, spare.bias")


def test_a_traceback_shows_the_users_lines_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    import wrong

    try:
        try:
            wrong.Shape()(torch.zeros(2, 1, 8, 8))
        except RuntimeError as cause:
            raise ValueError("in what follows") from cause
    except ValueError as error:
        shown = traceback_of(error)
    places = [
        line.split(", ")[0].rpartition("/")[2]
        for line in shown.splitlines()
        if line.startswith('  File "')
    ]
    assert places == [
        'test_faults.py"',
        'wrong.py"',
        'wrong.py"',
        'linear.py"',
        'test_faults.py"',
    ], shown
    assert "frames of libraries left out" in shown and "ValueError: in what follows" in shown
    try:
        torch.zeros(2) @ torch.zeros(3)
        raise AssertionError
    except RuntimeError as error:
        assert "left out" not in traceback_of(error)
    assert traceback_of(WriteError("known", "mend it")) == ""


def test_a_log_shows_progress_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no terminal, and so no bar."""
    now = [100.0]
    monkeypatch.setattr(
        "ddp_train.telemetry.console.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    display = Display(active=True)
    display.start(1_000, lambda: 200)
    for step in (210, 300, 310, 400):
        now[0] += 20
        display.interval(step, f"loss {step}")
    assert capsys.readouterr().out.splitlines() == [
        "step 300/1,000  loss 300  0:04:40 left",
        "step 400/1,000  loss 400  0:04:00 left",
    ]
    Display(active=False).interval(10, "loss")
    assert capsys.readouterr().out == ""


# --- foreign code that ends its process -----------------------------------------------------------

LEAVER = """
import os
from torch import nn


class Net(nn.Sequential):
    def __init__(self, codes):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.codes = codes

    def forward(self, images):
        if os.environ["RANK"] == "1" and self.training:
            os._exit(self.codes[int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
        return super().forward(images)
"""


def test_an_exit_code_is_believed_only_if_it_was_announced() -> None:
    for code in (0, 2, 65, 71, 75, 130, 143):
        status = RankStatus()
        assert status.believed(code) == UNREPORTED
        assert (status.leaving(code), status.believed(code), status.believed(code + 1)) == (
            code,
            code,
            UNREPORTED,
        )
        assert (status.believed(None), status.believed(-9)) == (None, -9)


@pytest.mark.slow
def test_an_exit_that_a_worker_did_not_announce_is_its_crash(tmp_path: Path) -> None:
    """2 was not restarted, 75 and 143 ended as "stopped": a scheduler would start the run again for
    ever."""
    (tmp_path / "leaver.py").write_text(LEAVER)
    done = run(
        "model._target_=leaver.Net",
        "+model.codes=[2,75,143]",
        "data.limit=200",
        "deterministic=false",
        "launch.nproc_per_node=2",
        "launch.max_restarts=5",
        f"run_dir={tmp_path}/run",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 70, done.stderr
    fatal = fatal_lines(done.stderr)
    assert len(fatal) == 3 and all("FATAL died (rank 1 on" in line for line in fatal), done.stderr
    assert [line.partition("exited with code ")[2].split()[0] for line in fatal] == [
        "2",
        "75",
        "143",
    ]
    assert "look for os._exit()" in read(tmp_path / "run", "failure.json")["remedy"]
    assert processes_of(tmp_path / "run") == {}
