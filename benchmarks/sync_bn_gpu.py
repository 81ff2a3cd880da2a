"""Our batch norm over all processes against torch's own, in two processes on two GPUs over NCCL.

    python benchmarks/sync_bn_gpu.py

Both get the same layer and, rank by rank, the same uneven parts of three batches. Compared are
outputs, the gradients of inputs and of weights (summed over the ranks) and the running statistics:
with torch's SyncBatchNorm, and with torch's BatchNorm in one process that has the whole batch.
Without two GPUs it runs over gloo on the CPU, which torch's SyncBatchNorm refuses: what is left is
the second comparison.

Exit code 1 if a difference is above its limit. Differences are relative to the largest number in
what is compared.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.distributed.process_group import session, total
from ddp_train.distributed.world import World
from ddp_train.parallel.sync_batch_norm import synchronised

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}
SPLIT = [5, 11]
"""Samples on rank 0 and rank 1."""
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d(32), ()),
    "2d": (nn.BatchNorm2d(32), (14, 14)),
    "3d": (nn.BatchNorm3d(32), (4, 7, 7)),
    "2d, channels last": (nn.BatchNorm2d(32), (14, 14)),
    "2d, momentum None": (nn.BatchNorm2d(32, momentum=None), (14, 14)),
    "2d, not affine": (nn.BatchNorm2d(32, affine=False), (14, 14)),
}


def trained(
    layer: nn.Module, batches: list[tuple[Tensor, Tensor]], part: slice
) -> dict[str, Tensor]:
    """The state after three training passes over a part of each batch."""
    found = {}
    for number, (inputs, gradients) in enumerate(batches):
        mine = inputs[part].clone(memory_format=torch.preserve_format).requires_grad_()
        outputs = layer(mine)
        outputs.backward(gradients[part])
        assert mine.grad is not None
        found |= {f"outputs {number}": outputs.detach(), f"input gradients {number}": mine.grad}
    found |= {
        f"gradient of {name}": weight.grad
        for name, weight in layer.named_parameters()
        if weight.grad is not None
    }
    return found | {f"statistics {name}": buffer for name, buffer in layer.named_buffers()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest one, over the ranks too."""
    assert ours.keys() == theirs.keys()
    worst = max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours
    )
    worst_of = torch.tensor(worst, dtype=torch.float64, device=next(iter(ours.values())).device)
    dist.all_reduce(worst_of, dist.ReduceOp.MAX)
    return worst_of.item()


def compare(rank: int, kind: str, folder: str, rows: Any) -> None:
    """One process of two."""
    world = World(rank, 2, rank, 2)
    device = world.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder, "store")), world.size)
    with session(world, device, "nccl" if kind == "cuda" else "gloo", store, 60.0):
        for dtype in LIMITS:
            for name, (layer, shape) in CASES.items():
                found = compare_case(layer, shape, "last" in name, rank, device, dtype)
                if world.is_leader:
                    rows.append((name, dtype, found))


def compare_case(
    layer: nn.Module,
    shape: tuple[int, ...],
    channels_last: bool,
    rank: int,
    device: str,
    dtype: torch.dtype,
) -> dict[str, float]:
    """The largest difference from each of torch's layers."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        pair = torch.randn(2, sum(SPLIT), 32, *shape, generator=generator, dtype=torch.float64).to(
            device, dtype
        )
        inputs, gradients = (
            t.contiguous(memory_format=torch.channels_last) if channels_last else t for t in pair
        )
        batches.append((inputs + 3, gradients))
    layer = copy.deepcopy(layer).to(device, dtype)
    for weight in layer.parameters():
        nn.init.uniform_(weight, 0.5, 1.5, generator=torch.Generator(device).manual_seed(2))
    mine = slice(0, SPLIT[0]) if rank == 0 else slice(SPLIT[0], None)

    def of_this_rank(changed: nn.Module, part: slice = mine) -> dict[str, Tensor]:
        found = trained(changed, batches, part)
        if part == mine:
            return {
                name: total(value.clone()) if "gradient of" in name else value
                for name, value in found.items()
            }
        return {
            name: value[mine] if name.startswith(("outputs", "input")) else value
            for name, value in found.items()
        }

    ours = of_this_rank(synchronised(copy.deepcopy(layer)))
    found = {
        "BatchNorm, whole batch": difference(ours, of_this_rank(copy.deepcopy(layer), slice(None)))
    }
    if device != "cpu":
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
        found["SyncBatchNorm"] = difference(ours, of_this_rank(converted))
    return found


def main() -> int:
    kind = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        rows = manager.list()
        torch.multiprocessing.spawn(compare, (kind, folder, rows), nprocs=2)
        found = list(rows)
    print(
        f"2 x {torch.cuda.get_device_name(0) if kind == 'cuda' else 'cpu'}, torch"
        f" {torch.__version__}\n"
    )
    print(
        "| layer | type | against torch's | largest difference | allowed |\n|---|---|---|---|---|"
    )
    too_large = 0
    for name, dtype, differences in found:
        for against, worst in differences.items():
            print(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {against} | {worst:.2g} |"
                f" {LIMITS[dtype]:g} |"
            )
            too_large += not worst <= LIMITS[dtype]
    print(f"\n{too_large} above the limit" if too_large else "\nall within the limits")
    return too_large > 0


if __name__ == "__main__":
    sys.exit(main())
