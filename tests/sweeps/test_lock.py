"""One sweep at a time in a directory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.resilience import run_lock
from ddp_train.sweeps.lock import sweep_lock


def test_one_sweep_at_a_time_is_in_a_directory(tmp_path: Path) -> None:
    with sweep_lock(tmp_path), pytest.raises(ConfigError) as refused, sweep_lock(tmp_path):
        pass
    assert f"run_dir={tmp_path}: another sweep is in it, process {os.getpid()} on " in str(
        refused.value
    )
    left = subprocess.Popen(
        ["sleep", "60"]
    )  # of a sweep that was killed: they hold its lock until they have ended
    lock = run_lock.acquire(tmp_path / run_lock.FILE)
    lock.file.truncate(0)
    lock.file.write(json.dumps({"pid": left.pid, "host": socket.gethostname()}))
    lock.file.flush()
    left.kill()
    left.wait()
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: (time.sleep(0.3), lock.release()))
        with sweep_lock(tmp_path):
            pass
