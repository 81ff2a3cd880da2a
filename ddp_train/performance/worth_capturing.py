"""Does it pay to capture a step as a CUDA graph, and does it fit? One step that is taken kernel by kernel shows it."""

from __future__ import annotations

import time

import torch

from ddp_train.distributed.process_group import from_all_ranks

HOST_SHARE = 0.5
"""Of the time of a step, in which the host launches it. Above, the GPU waits for the host, at least after each line of
metrics.jsonl: VGG-16 at 79 % is 4.7 % faster captured (docs/benchmarks/models.md). Below, the host gets ahead."""
ROOM = 0.9
"""Part of a GPU's memory that may be needed. The rest is for workspaces, and lost between blocks."""


class CaptureTrial:
    """Measures one step: `begin` before its forward pass, `end` after its update."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.host_share = self.memory_share = 0.0

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        self.began = time.perf_counter()

    def end(self) -> None:
        """A graph keeps the memory of a step for itself, and a short batch or an evaluation may need as much again."""
        launched = time.perf_counter()
        torch.cuda.synchronize(self.device)
        self.host_share = (launched - self.began) / (time.perf_counter() - self.began)
        allocated = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        has = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        self.memory_share = (2 * allocated["peak"] - allocated["current"]) / has

    def why_not(self) -> str:
        """Why no rank captures; "" if all do. An exchange: to be asked on all ranks after the same step."""
        shares = torch.tensor([self.host_share, self.memory_share], device=self.device)
        host, memory = from_all_ranks(shares).view(-1, 2).amax(0).tolist()
        return reason_against(host, memory)


def reason_against(host_share: float, memory_share: float) -> str:
    """The largest shares over all ranks: one rank that waits for its host holds up the others."""
    if host_share < HOST_SHARE:
        return f"the host launches a step in {host_share:.0%} of the time that it takes"
    if memory_share > ROOM:
        return f"steps and an evaluation might need {memory_share:.0%} of a GPU's memory"
    return ""
