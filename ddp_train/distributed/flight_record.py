"""torch's flight recorder: the last collectives of this process, to be compared with those of the
others when a run hangs (resilience/collectives.py)."""

from __future__ import annotations

from pathlib import Path

from torch._C import _distributed_c10d as c10d

from ddp_train.distributed.process_group import backend


def write(path: Path, part: Path) -> None:
    """Writes the record as torch gives it (JSON) to `part`, and renames that to `path`: no reader
    sees half a record. No collective is recorded while a CUDA graph is replayed."""
    name = "_dump_nccl_trace_json" if backend() == "nccl" else "_dump_fr_trace_json"
    part.write_bytes(getattr(c10d, name)())
    part.replace(path)
