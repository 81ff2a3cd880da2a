"""Starts the real runs of a proof through the launcher, and keeps what they print in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_lab.prove.configs import RealRun, config_of_run
from ddp_lab.study.trials import Outcome, read_outcome
from ddp_train.config.freeze import freeze
from ddp_train.config.program import Program
from ddp_train.launcher import local
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config
from ddp_train.text import counted

LOG = "runs.log"


class StoppedError(Exception):
    """A stop was requested."""


@dataclass
class Runner:
    """Starts runs in folders below `folder`."""

    program: Program
    folder: Path
    stop: StopRequests
    log: int
    """The descriptor of the file LOG."""
    server: ForkServer | None

    def run(self, config: Config, real_run: RealRun) -> Outcome:
        """Run to the end. Raises StoppedError."""
        run_dir = self.folder / real_run.name
        run_config = config_of_run(config, real_run, run_dir)
        freeze(run_config)
        server = None if real_run.in_new_processes else self.server
        began = time.monotonic()
        with printing_to(self.log):
            print(f"--- {real_run.name}: {counted(real_run.processes, 'process')}", flush=True)
            code = local.launch(run_config, self.program.import_path, self.stop, server)
        if self.stop.received:
            raise StoppedError
        return read_outcome(run_dir, code, time.monotonic() - began)


@contextlib.contextmanager
def printing_to(descriptor: int) -> Iterator[None]:
    """Inside, what this process and those that it starts print goes into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    stdout = os.dup(1)
    stderr = os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
