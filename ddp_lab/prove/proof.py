"""One proof: the checks of one process, in a process of their own, then the real runs.

Torch-free.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ddp_lab.doctor.findings import Finding, failure
from ddp_lab.prove.answer import Examined, read_answer
from ddp_lab.prove.configs import for_proof
from ddp_lab.prove.progress import Progress
from ddp_lab.prove.real_runs import RealRuns
from ddp_lab.prove.runner import LOG, Runner, StoppedError, printing_to
from ddp_train.config.freeze import freeze
from ddp_train.config.program import Program
from ddp_train.distributed.child_environments import preload_environment
from ddp_train.launcher.fork_server import MODULE, ForkServer
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config

FOLDER = "proof"
EXAMINE = "ddp_lab.prove.examine"
POLL_SECONDS = 0.02
MARGIN_SECONDS = 60.0
"""Time beyond prove.seconds for the checks of one process: one that has begun is finished."""


class Proof:
    """Checks one job."""

    def __init__(self, asked: Config, program: Program, run_dir: Path, stop: StopRequests) -> None:
        """asked: the resolved job, as it was asked for."""
        self.asked = asked
        self.config = for_proof(asked, run_dir)
        self.program = program
        self.folder = run_dir / FOLDER
        self.stop = stop

    def run(self, progress: Progress) -> list[Finding]:
        """Make all checks. Raises StoppedError."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier proof
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("ab") as log, self._fork_server(log.fileno()) as server:
            examined = self._examine(log.fileno(), progress)
            runner = Runner(self.program, self.folder, self.stop, log.fileno(), server)
            RealRuns(self.config, runner, examined, progress).run()
        return examined.findings

    @contextlib.contextmanager
    def _fork_server(self, log: int) -> Iterator[ForkServer | None]:
        """Import torch while the checks of one process run in another one."""
        if not self.config.prove.runs:
            yield None
            return
        with printing_to(log):
            server = ForkServer(self.program.import_path)
        try:
            yield server
        finally:
            server.close()

    def _examine(self, log: int, progress: Progress) -> Examined:
        """The answer of a process that makes all checks that one can make."""
        freeze(replace(self.config, run_dir=str(self.folder)))
        seconds = max(progress.seconds_left, 1.0)
        arguments = [str(self.folder), str(seconds), str(self.samples_per_micro_batch)]
        command = [sys.executable, *MODULE, EXAMINE, *arguments]
        env = preload_environment(self.program.import_path)
        with (
            self.stop.listening(),
            subprocess.Popen(command, env=env, stdout=log, stderr=log) as process,
        ):
            while process.poll() is None and not self.stop.received:
                if progress.seconds_left <= -MARGIN_SECONDS:
                    break
                time.sleep(POLL_SECONDS)
            process.kill()
        if self.stop.received:
            raise StoppedError
        examined = read_answer(self.folder)
        if examined is None:
            return Examined([self._no_answer(process.returncode)])
        progress.print("checks of one process: done")
        return examined

    def _no_answer(self, code: int) -> Finding:
        """code: exit code of the process, below 0 if it was killed."""
        log = self.folder / LOG
        lines = log.read_text(errors="replace").strip().splitlines()
        why = "they gave no answer in time, or were killed"
        if lines and code >= 0:
            why = lines[-1]
        remedy = (
            f"see {log}. If the checks are only slow, raise prove.seconds, or lower prove.samples"
        )
        detail = f"the checks in one process ended early: {why}"
        return failure(detail, remedy, cause="job").named("job")

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples in a micro-batch of the job itself."""
        train = self.asked.train
        micro_batches = train.accumulation_steps * int(self.asked.launch.nproc_per_node)
        return -(-train.global_batch_size // micro_batches)
