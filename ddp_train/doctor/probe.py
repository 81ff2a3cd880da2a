"""One rank of the doctor's probe, a process of its own: if a collective hangs, this process is killed and nobody else.

`python -m ddp_train.doctor.probe SPEC`, in the environment of a worker. It writes a line of JSON to standard output
whenever it begins something, with the results of what it has done: whoever watches knows where it stands.
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

from ddp_train.distributed.environment import world_from_environment
from ddp_train.distributed.preflight import versions_here
from ddp_train.distributed.process_group import open_store, session
from ddp_train.distributed.world import World
from ddp_train.doctor.gpu import load_of
from ddp_train.doctor.stages import COMPUTE, CONNECT, DONE, EXCHANGE, LEAVE, MEASURE, MEET, NEIGHBOURS, Spec
from ddp_train.linux import end_with_parent

SIZES = {"gloo": (2**16, 2**20, 2**24), "nccl": (2**20, 2**24, 2**28)}
"""Bytes that are summed over all processes."""
MEASURE_SECONDS, COMPUTE_SECONDS = 0.4, 0.4
EXCHANGED = 2**16
"""Numbers in a message between two processes."""


def main() -> None:
    end_with_parent()
    spec, world = Spec(**json.loads(sys.argv[1])), world_from_environment()
    assert world, "the doctor sets the environment of its probes"
    say(MEET, versions=versions_here(), cuda_available=torch.cuda.is_available(), torch_cuda=torch.version.cuda)
    store = PrefixStore(f"doctor/probe/{spec.run_id}", open_store(world, spec.timeout_seconds))
    store.add("present_hosts", 1)
    while store.add("present_hosts", 0) < world.size:  # all compute at once, as in training
        time.sleep(0.01)
    say(COMPUTE)
    if spec.device != "cpu":
        torch.cuda.set_device(spec.device)
    computed = compute(spec.device)
    if world.size == 1:
        say(DONE, compute=computed)
        return
    say(CONNECT, compute=computed)
    # gloo takes tensors of a GPU through host memory, and cannot send them from one process to one other.
    place = spec.device if spec.backend == "nccl" else "cpu"
    with session(world, place, spec.backend, store, spec.timeout_seconds):
        say(EXCHANGE)
        exchanged = exchange(world, place)
        say(MEASURE, exchange=exchanged)
        measured = [measure(size, place) for size in SIZES[spec.backend]]
        say(LEAVE, all_reduce=measured)
    say(DONE)


def say(stage: str, **results: Any) -> None:
    """What this process begins now, and what it has found out."""
    print(json.dumps({"stage": stage, **results}), flush=True)


def compute(device: str) -> dict[str, Any]:
    """Multiplies the same two matrices again and again. Returns seconds of one product, and a GPU's clock meanwhile."""
    if device == "cpu":
        a = torch.ones(512, 512)
        seconds = _repeat(lambda: a @ a, lambda: None, COMPUTE_SECONDS)
        return {"name": "cpu", "seconds": statistics.median(seconds)}
    properties = torch.cuda.get_device_properties(device)
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    a = torch.ones(8192, 8192, dtype=dtype, device=device)
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def synchronize() -> None:
        torch.cuda.synchronize(device)

    once = statistics.median(_repeat(lambda: a @ a, synchronize, COMPUTE_SECONDS / 2))
    count = max(2, int(COMPUTE_SECONDS / once))
    started.record(torch.cuda.current_stream(device))
    for _ in range(count):
        a @ a  # pyright: ignore[reportUnusedExpression]
    ended.record(torch.cuda.current_stream(device))
    time.sleep(COMPUTE_SECONDS / 2)
    load = load_of(str(properties.uuid))  # while it computes
    synchronize()
    seconds = started.elapsed_time(ended) / 1e3 / count
    blind = [other for other in range(torch.cuda.device_count())
             if torch.device(device).index != other
             and not torch.cuda.can_device_access_peer(torch.device(device), other)]  # fmt: skip
    return {"name": properties.name, "seconds": seconds, "load": load, "no_peer_access": blind}


def _repeat(work: Callable[[], Any], wait: Callable[[], None], seconds: float) -> list[float]:
    """The seconds of each call, warmed up, for about so many seconds."""
    for _ in range(2):
        work()
    wait()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds:
        before = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - before)
    return times


def exchange(world: World, device: str) -> dict[str, Any]:
    """Every process sends its number to those that follow it, then all sum up. Returns who got what it should not.

    wrong: [sender, receiver] pairs seen by this rank; summed: whether the sum was right.
    """
    wrong = []
    mine = torch.full((EXCHANGED,), float(world.rank), device=device)
    for distance in range(1, min(world.size - 1, NEIGHBOURS) + 1):
        sender, receiver = (world.rank - distance) % world.size, (world.rank + distance) % world.size
        got = torch.full_like(mine, -1.0)
        for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, receiver),
                                               dist.P2POp(dist.irecv, got, sender)]):  # fmt: skip
            request.wait()
        if not bool((got == sender).all()):
            wrong.append([sender, world.rank])
    total = mine.clone()
    dist.all_reduce(total)
    return {"wrong": wrong, "summed": bool((total == world.size * (world.size - 1) / 2).all())}


def measure(size: int, device: str) -> dict[str, float]:
    """bytes, and seconds of one all-reduce of so many on the slowest process.

    Meanwhile it says WORDS_OF_A_SIZE times that it goes on.
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
        slowest = torch.tensor((time.perf_counter() - began) / count, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = slowest.item()
        say(MEASURE)
        return seconds

    repeated(1)  # the first one sets up what it needs
    once = repeated(1)  # the same number on all ranks, so that all repeat it as often
    seconds = repeated(min(50, int(MEASURE_SECONDS / once))) if once < MEASURE_SECONDS else once
    return {"bytes": size, "seconds": seconds}


if __name__ == "__main__":
    main()
