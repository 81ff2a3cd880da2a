"""The collective test of all ranks: its processes, and the findings from their results."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ddp_lab.doctor import (
    collective_checks,
    collective_runner,
    collective_stages,
    collective_test,
)
from ddp_lab.doctor.findings import OK, SKIPPED, Finding
from tests.support.commands import (
    wait_until,
)
from tests.support.doctor import (
    answers,
    apart,
    config,
    is_failure,
    is_warning,
    with_fuse,
)
from tests.support.silent_disk import silent_disk

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


@with_fuse
def test_unkillable_process_is_named_and_left_behind(tmp_path: Path) -> None:
    dead = tmp_path / "dead"

    def look() -> Finding:
        process = subprocess.Popen(["cat", str(dead / "file")], stdout=subprocess.PIPE)
        probe = collective_runner.RankProcess(
            process, collective_runner.RankResult(1, "node1", process.pid), tmp_path / "errors"
        )
        wait_until((tmp_path / "dead.asked").exists, "request")
        with mock.patch.object(collective_runner, "END_SECONDS", 0.2):
            collective_runner.kill_all([probe])
        return collective_checks.exchange([answers(1)[0], probe.result], "gloo")

    is_failure(
        apart(silent_disk(dead), look),
        71,
        "rank 1 on node1",
        "in stage 'import torch') survives SIGKILL (state D)",
        "as root, `cat /proc/",
    )


def test_numbers_that_arrive_changed_fail() -> None:
    spoilt = answers(exchange={"wrong": [[1, 2]], "summed": True})
    is_failure(collective_checks.exchange(spoilt, "nccl"), 70, "corrupt: rank 1 to rank 2", "IOMMU")
    is_failure(
        collective_checks.exchange(answers(exchange={"wrong": [], "summed": False}), "nccl"),
        70,
        "corrupt: all-reduce",
    )
    blind = answers(compute={"name": "RTX", "seconds": 1.0, "no_peer_access": [0]})
    is_warning(collective_checks.exchange(blind, "nccl"), "no peer access: rank 2 to GPU 0")
    assert (
        collective_checks.exchange(blind, "gloo").status
        == collective_checks.exchange(answers(), "nccl").status
        == OK
    )


def test_rank_that_keeps_others_waiting_is_named() -> None:
    behind = answers(stage=collective_stages.Stage.CONNECT, code=None)
    behind[0].stage = collective_stages.Stage.EXCHANGE
    behind[0].code = None
    is_failure(
        collective_checks.exchange(behind, "nccl"),
        71,
        "no progress for 30 s in stage 'connect': rank 2 on node2",
        "NCCL_DEBUG",
    )
    is_failure(collective_checks.exchange(behind, "gloo"), 71, "GLOO_SOCKET_IFNAME")
    assert collective_checks.hangs_in_nccl(behind, "nccl") and not collective_checks.hangs_in_nccl(
        behind, "gloo"
    )
    is_failure(
        collective_checks.exchange(behind, "nccl", answers()),
        71,
        "it works with NCCL_P2P_DISABLE=1",
        "ACS",
    )
    is_failure(collective_checks.exchange(behind, "nccl", behind), 71, "NCCL_SHM_DISABLE")
    died = answers(stage=collective_stages.Stage.CONNECT, code=-9)
    is_failure(
        collective_checks.exchange(died, "nccl"),
        70,
        "rank 2 on node2 died in stage 'connect' (signal 9)",
    )
    echo = answers(
        stage=collective_stages.Stage.EXCHANGE, code=1, error="RuntimeError: out of memory"
    )
    echo[0].stage = collective_stages.Stage.EXCHANGE
    echo[0].code = 1
    echo[0].error = "RuntimeError: Connection closed by peer"
    is_failure(collective_checks.exchange(echo, "gloo"), 70, "rank 2", "out of memory")
    assert not collective_checks.hangs_in_nccl(died, "nccl")


def test_slow_gpu_slow_link_and_unsuited_torch_are_named() -> None:
    slow = answers(compute={"name": "NVIDIA H200", "seconds": 1.3})
    is_warning(collective_checks.stragglers(slow), "rank 2 on node2 takes 1.30 times as long")
    assert (
        collective_checks.stragglers(answers(compute={"name": "cpu", "seconds": 1.3})).status == OK
    )
    nvlink = (478e9, "NVLink, 18 links")
    best = collective_checks.bandwidth(answers(), nvlink)
    assert best.status == OK and "84% of 478 GB/s (NVLink, 18 links)" in best.detail, best
    is_warning(collective_checks.bandwidth(answers(), (2 * 478e9, "NVLink")), "42% of 956 GB/s")
    assert (
        collective_checks.bandwidth(
            answers(stage=collective_stages.Stage.CONNECT, all_reduce=None)[:1], nvlink
        ).status
        == SKIPPED
    )
    on_gpus = dataclasses.replace(config(), device="cuda")
    old = answers(1, cuda_available=False)
    is_failure(
        collective_checks.torch_installation(old, on_gpus, (12, 4)),
        70,
        "supports CUDA up to 12.4",
        "update the driver",
    )
    is_failure(
        collective_checks.torch_installation(
            answers(1, cuda_available=False, torch_cuda=None), on_gpus, None
        ),
        70,
        "without CUDA",
    )
    nothing = [
        collective_runner.RankResult(
            0, "node0", 1, code=1, error="ModuleNotFoundError: No module named 'torch'"
        )
    ]
    is_failure(
        collective_checks.torch_installation(nothing, config(), None),
        70,
        "No module named 'torch'",
        "make train",
    )


TALKER = """
import json, sys, time
for stage, seconds in json.loads(sys.argv[1]):
    print(json.dumps({"stage": stage}), flush=True)
    time.sleep(seconds)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages_and_seconds", "ends"),
    [
        (
            [
                (collective_stages.Stage.COMPUTE, 1.8),
                (collective_stages.Stage.CONNECT, 1.8),
                (collective_stages.Stage.DONE, 0),
            ],
            True,
        ),
        (
            [
                (collective_stages.Stage.EXCHANGE, 0.1),
                *[(collective_stages.Stage.MEASURE, 0.3)] * 4,
                (collective_stages.Stage.DONE, 0),
            ],
            True,
        ),
        ([(collective_stages.Stage.EXCHANGE, 60)], False),
        ([(collective_stages.Stage.CONNECT, 60)], False),
    ],
)
def test_silent_process_hangs_after_the_limit_of_its_stage(
    stages_and_seconds: list[tuple[str, float]], ends: bool, tmp_path: Path
) -> None:
    """One second in stages that exchange, three to compute and to connect."""
    with (
        mock.patch.object(collective_runner, "PATIENCE_SECONDS", 1.0),
        mock.patch.object(collective_runner, "START_SECONDS", 1.5),
    ):
        limits = collective_runner.silence_limits(config(), 3, several=False) | {
            collective_stages.Stage.IMPORT: 60.0
        }
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER, json.dumps(stages_and_seconds)], stdout=subprocess.PIPE
    )
    probe = collective_runner.RankProcess(
        process, collective_runner.RankResult(0, "here", process.pid), tmp_path / "errors"
    )
    collective_runner.watch([probe], limits)
    collective_runner.kill_all([probe])
    assert (probe.result.code, probe.result.stage) == (
        (0, collective_stages.Stage.DONE) if ends else (None, stages_and_seconds[0][0])
    )
    assert ends or probe.result.seconds > limits[probe.result.stage]


def test_silence_limits_grow_with_the_world_up_to_the_timeout() -> None:
    few, many = (
        collective_runner.silence_limits(config(), size, several=True) for size in (3, 2048)
    )
    assert (
        many[collective_stages.Stage.CONNECT] > few[collective_stages.Stage.CONNECT] + 1000
        and many[collective_stages.Stage.EXCHANGE] == few[collective_stages.Stage.EXCHANGE] == 20
    )
    hasty = collective_runner.silence_limits(
        config(launch={"timeout_seconds": 2.0}), 3, several=False
    )
    assert (
        hasty[collective_stages.Stage.COMPUTE]
        == hasty[collective_stages.Stage.CONNECT]
        == hasty[collective_stages.Stage.EXCHANGE]
        == 2
        < hasty[collective_stages.Stage.IMPORT]
    )


def test_measuring_rank_prints_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        row = collective_test.measure(2**16, "cpu")
    finally:
        dist.destroy_process_group()
    words = capfd.readouterr().out.splitlines()
    assert (
        row["bytes"] == 2**16
        and words == ['{"stage": "all-reduce"}'] * collective_stages.REPORTS_PER_SIZE
    )
    assert all(
        len(sizes) == collective_stages.NUM_SIZES for sizes in collective_test.SIZES.values()
    )
