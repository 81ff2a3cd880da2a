"""torch's flight recorder: the last collectives of this process, to be compared with those of the
others when a run hangs (resilience/collectives.py)."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d

from ddp_train.distributed.process_group import backend


def dump() -> bytes:
    """The record as torch gives it (JSON). No collective is recorded while a CUDA graph is
    replayed."""
    if backend() == "nccl":
        return c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]  # pyright: ignore
    return c10d._dump_fr_trace_json()  # type: ignore[attr-defined]  # pyright: ignore
