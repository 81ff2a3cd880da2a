"""The test process of one rank: imports torch, computes, opens a process group, tries and measures
collectives.

`python -m ddp_lab.doctor.collective_test SPEC`, in the environment of a worker. A process of its
own, so that a collective that hangs can be killed. It prints a line of JSON at the start of each
stage, with the results of the stage before; `collective_runner` reads these lines, and so knows
where each rank is.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.doctor.collective_stages import NEIGHBOURS, CollectiveTestSpec, Stage
from ddp_lab.doctor.nvml import read_load
from ddp_train.distributed.environment import world_from_environment
from ddp_train.distributed.preflight import versions_here
from ddp_train.distributed.process_group import open_store, session
from ddp_train.distributed.world import World
from ddp_train.linux import end_with_parent

SIZES = {"gloo": (2**16, 2**20, 2**24), "nccl": (2**20, 2**24, 2**28)}
"""Bytes of the all-reduces that are measured."""
MEASURE_SECONDS = 0.4
COMPUTE_SECONDS = 0.4
MESSAGE_NUMBERS = 2**16
"""Float32 numbers in a message from one rank to another."""


def main() -> None:
    """Run all stages. A world of one process stops after the computation."""
    end_with_parent()
    spec = CollectiveTestSpec(**json.loads(sys.argv[1]))
    world = world_from_environment()
    assert world, "collective_runner sets the environment of its processes"
    report_stage(
        Stage.RENDEZVOUS,
        versions=versions_here(),
        cuda_available=torch.cuda.is_available(),
        torch_cuda=torch.version.cuda,
    )
    store = PrefixStore(
        f"doctor/collective_test/{spec.run_id}", open_store(world, spec.timeout_seconds)
    )
    store.add("present_hosts", 1)
    while store.add("present_hosts", 0) < world.size:  # all compute at once, as in training
        time.sleep(0.01)
    report_stage(Stage.COMPUTE)
    if spec.device != "cpu":
        torch.cuda.set_device(spec.device)
    computed = compute(spec.device)
    if world.size == 1:
        report_stage(Stage.DONE, compute=computed)
        return
    report_stage(Stage.CONNECT, compute=computed)
    # gloo copies tensors of a GPU through host memory, and has no point-to-point messages for them.
    device = spec.device if spec.backend == "nccl" else "cpu"
    with session(world, device, spec.backend, store, spec.timeout_seconds):
        report_stage(Stage.EXCHANGE)
        exchanged = exchange(world, device)
        report_stage(Stage.MEASURE, exchange=exchanged)
        measured = [measure(size, device) for size in SIZES[spec.backend]]
        report_stage(Stage.SHUT_DOWN, all_reduce=measured)
    report_stage(Stage.DONE)


def report_stage(stage: str, **results: Any) -> None:
    """Print a progress line: the stage that begins now, and the results of the one before."""
    print(json.dumps({"stage": stage, **results}), flush=True)


def compute(device: str) -> dict[str, Any]:
    """Time a matrix product, repeated.

    Returns the device's name and the seconds of one product; for a GPU also its clock during the
    computation and the GPUs that it has no peer access to.
    """
    if device == "cpu":
        a = torch.ones(512, 512)
        seconds = _repeat(lambda: a @ a, lambda: None, COMPUTE_SECONDS)
        return {"name": "cpu", "seconds": statistics.median(seconds)}
    properties = torch.cuda.get_device_properties(device)
    if torch.cuda.get_device_capability(device) >= (8, 0):
        dtype = torch.bfloat16
    else:
        dtype = torch.float16
    a = torch.ones(8192, 8192, dtype=dtype, device=device)
    started = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)

    def synchronize() -> None:
        torch.cuda.synchronize(device)

    once = statistics.median(_repeat(lambda: a @ a, synchronize, COMPUTE_SECONDS / 2))
    count = max(2, int(COMPUTE_SECONDS / once))
    started.record(torch.cuda.current_stream(device))
    for _ in range(count):
        a @ a  # pyright: ignore[reportUnusedExpression]
    ended.record(torch.cuda.current_stream(device))
    time.sleep(COMPUTE_SECONDS / 2)
    load = read_load(str(properties.uuid))  # while it computes
    synchronize()
    seconds = started.elapsed_time(ended) / 1e3 / count
    own = torch.device(device)
    no_peer_access = [
        other
        for other in range(torch.cuda.device_count())
        if own.index != other and not torch.cuda.can_device_access_peer(own, other)
    ]
    return {
        "name": properties.name,
        "seconds": seconds,
        "load": load,
        "no_peer_access": no_peer_access,
    }


def _repeat(work: Callable[[], Any], wait: Callable[[], None], seconds: float) -> list[float]:
    """Call `work` for about so many seconds, after two calls to warm up. Returns the seconds of
    each call.

    wait: returns when the device has finished the call.
    """
    for _ in range(2):
        work()
    wait()
    times = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        before = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - before)
    return times


def exchange(world: World, device: str) -> dict[str, Any]:
    """Every rank sends its number to the ranks that follow it, then all sum up their numbers.

    Returns `wrong`, the [sender, receiver] pairs whose message arrived here with other content, and
    `summed`, whether the sum was right.
    """
    wrong = []
    mine = torch.full((MESSAGE_NUMBERS,), float(world.rank), device=device)
    for distance in range(1, min(world.size - 1, NEIGHBOURS) + 1):
        sender = (world.rank - distance) % world.size
        receiver = (world.rank + distance) % world.size
        received = torch.full_like(mine, -1.0)
        operations = [
            dist.P2POp(dist.isend, mine, receiver),
            dist.P2POp(dist.irecv, received, sender),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if not bool((received == sender).all()):
            wrong.append([sender, world.rank])
    total = mine.clone()
    dist.all_reduce(total)
    return {"wrong": wrong, "summed": bool((total == world.size * (world.size - 1) / 2).all())}


def measure(size: int, device: str) -> dict[str, float]:
    """Time an all-reduce of `size` bytes. Returns the bytes and the seconds of one on the slowest
    rank.

    Prints REPORTS_PER_SIZE progress lines.
    """
    tensor = torch.zeros(size // 4, device=device)

    def repeated(count: int) -> float:
        dist.all_reduce(torch.zeros(1, device=device))
        if tensor.is_cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(device)
        slowest = torch.tensor(
            (time.perf_counter() - began) / count, dtype=torch.float64, device=device
        )
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = slowest.item()
        report_stage(Stage.MEASURE)
        return seconds

    repeated(1)  # warm-up
    once = repeated(1)  # the same value on all ranks, so that all repeat equally often
    if once < MEASURE_SECONDS:
        seconds = repeated(min(50, int(MEASURE_SECONDS / once)))
    else:
        seconds = once
    return {"bytes": size, "seconds": seconds}


if __name__ == "__main__":
    main()
