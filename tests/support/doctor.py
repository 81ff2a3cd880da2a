"""Helpers of the tests of mode=doctor."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.doctor import (
    collective_runner,
    collective_stages,
)
from ddp_lab.doctor.findings import FAILURE, WARNING, Finding
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from tests.support.jobs import config_of
from tests.support.netlab import why_not
from tests.support.silent_disk import why_none

with_fuse = pytest.mark.skipif(bool(why_not() or why_none()), reason=why_not() or why_none())


on_linux_as_root = pytest.mark.skipif(bool(why_not()), reason=why_not())


DOCTOR = ("mode=doctor", "launch.threads_per_process=1")
"""With one thread the zygote forks its probes."""


NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x40000000  # linux/sched.h: mounts, host name, network


def config(size: int = 3, **sections: Any) -> Config:
    return config_of(World(0, size, 0, size), Hardware(cpus=2), **sections)


def apart(
    prepare: Callable[[], Any],
    look: Callable[..., Finding],
    *arguments: Any,
    namespaces: bool = True,
) -> Finding:
    """look(*arguments) in a child that has done `prepare`, in mounts, a host name and a network of
    its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if namespaces:
                assert ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACES) == 0, os.strerror(
                    ctypes.get_errno()
                )
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            prepare()
            said = asdict(look(*arguments))
        except BaseException as error:  # noqa: BLE001  it travels to the test
            said = {"check": "child", "status": "broken", "detail": repr(error)}
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    return Finding(**said)


def tmpfs(folder: Path, size: str) -> Callable[[], Any]:
    return lambda: subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True
    )


def is_failure(finding: Finding, code: int, *words: str) -> None:
    assert (finding.status, finding.exit_code) == (FAILURE, code), finding
    assert finding.remedy and all(word in f"{finding.detail} {finding.remedy}" for word in words), (
        finding
    )


def is_warning(finding: Finding, *words: str) -> None:
    assert finding.status == WARNING, finding
    assert finding.remedy and all(word in f"{finding.detail} {finding.remedy}" for word in words), (
        finding
    )


def answers(count: int = 3, **changes: Any) -> list[collective_runner.RankResult]:
    """Of processes that are well; `changes` are those of the last one."""
    rows = [{"bytes": 2**20, "seconds": 1e-3}, {"bytes": 2**28, "seconds": 2**28 / 300e9}]
    made = []
    for rank in range(count):
        results = {
            "versions": {"python": "3", "torch": "2", "cuda": "13", "nccl": "2"},
            "cuda_available": True,
            "torch_cuda": "13.0",
            "compute": {"name": "NVIDIA H200", "seconds": 1.0, "no_peer_access": []},
            "exchange": {"wrong": [], "summed": True},
            "all_reduce": rows,
        }
        made.append(
            collective_runner.RankResult(
                rank,
                f"node{rank}",
                100 + rank,
                collective_stages.Stage.DONE,
                30.0,
                code=0,
                results=results,
            )
        )
    for name, value in changes.items():
        if name in ("stage", "stopped", "code", "error"):
            setattr(made[-1], name, value)
        else:
            made[-1].results[name] = value
    return made
