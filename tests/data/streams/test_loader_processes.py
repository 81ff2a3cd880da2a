"""Loader processes that never wake up after their fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

STUCK = """
import os, sys, time
from pathlib import Path
import numpy as np, torch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.streams import loader_processes
from ddp_train.linux import children_of

class Numbers:
    def get_batch(self, indices, epoch):
        return torch.from_numpy(indices), torch.from_numpy(indices)

    def __len__(self):
        return 24

def stand_still():
    with open(sys.argv[1], "a") as file:
        if file.tell() < int(sys.argv[2]):
            file.write(".")
            file.flush()
            time.sleep(600)

os.register_at_fork(after_in_child=stand_still)
loader_processes.START_SECONDS = 1.0
steps = [MicroBatch(0, step, np.arange(4 * step, 4 * step + 4), 4, 1.0, True) for step in range(6)]
for persistent in (False, True):
    Path(sys.argv[1]).write_text("")
    options = LoaderOptions(num_workers=2, persistent_workers=persistent)
    batches = Loader(Numbers(), steps, "cpu", options)
    for _ in range(2):
        began = time.monotonic()
        found = [batch.inputs.tolist() for batch in batches]
        assert found == [step.indices.tolist() for step in steps], found
        assert not batches.stream.in_flight, batches.stream.in_flight
        print(f"{time.monotonic() - began:.2f}")
    batches.close()
    assert children_of(os.getpid()) == [], children_of(os.getpid())
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_process_that_stands_still_in_its_fork_is_restarted(stuck: int, tmp_path: Path) -> None:
    """As if another thread had held a lock that it needs: it waited for its first batch for ever.
    With 3, the first of the second try is stuck too."""
    command = [sys.executable, "-c", STUCK, str(tmp_path / "stuck"), str(stuck)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    first, second, persistent_first, persistent_second = map(float, done.stdout.split())
    tries = 1 if stuck == 1 else 2
    assert tries < min(first, persistent_first), done.stdout
    assert max(first, persistent_first) < tries + 5, done.stdout
    assert max(second, persistent_second) < 1, "nothing is waited for where all is well"
    assert done.stderr.count("did not start within 1 s; restarting all of them") == 2 * tries, (
        done.stderr
    )
