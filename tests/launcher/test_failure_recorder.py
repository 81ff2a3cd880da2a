"""What the launcher records of a failure, and the exit code that follows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_train.distributed.world import World
from ddp_train.launcher.failure_recorder import FailureRecorder
from ddp_train.launcher.workers import Workers
from ddp_train.launcher.workload import Workload
from ddp_train.options.schema import Config
from tests.support.jobs import config_of

pytestmark = pytest.mark.timeout(300)  # the machine may be busy


def recorder_of(config: Config) -> FailureRecorder:
    """A recorder for three workers, without processes."""
    config.launch.nproc_per_node = 3
    return FailureRecorder(config, Workers(Path(str(config.run_dir)), 3), Workload())


@pytest.mark.parametrize("reported_code", [73, 0])
def test_a_failure_that_a_worker_printed_is_not_recorded_again(
    reported_code: int, tmp_path: Path
) -> None:
    """On a full disk there is no failure.json, by which the first report is known."""
    config = config_of(World(0, 3, 0, 3), strategy={"name": "ddp"}, run_dir=str(tmp_path / "gone"))
    recorder = recorder_of(config)
    codes = [73, None, -9]
    recorder.workers.board.ranks[0].reported_code = reported_code
    recorder.workers.processes = [SimpleNamespace(returncode=code) for code in codes]  # type: ignore[misc]
    report = recorder.record_exit([0, 2], codes)
    assert (report is None) is bool(reported_code)
    assert recorder.exit_code(codes) == 73
    recorder.workers.board.close()


@pytest.mark.parametrize(("reported", "code"), [(65, 65), (0, 70)])
def test_exit_code_is_that_of_the_reported_failure(
    reported: int, code: int, tmp_path: Path
) -> None:
    config = config_of(World(0, 3, 0, 3), strategy={"name": "ddp"}, run_dir=str(tmp_path))
    recorder = recorder_of(config)
    recorder.workers.board.ranks[0].reported_code = reported
    assert recorder.exit_code([None, 70, None]) == code
    recorder.workers.board.close()
