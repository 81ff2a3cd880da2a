"""Tensors whose strides differ between processes: what is exchanged does not depend on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_train import all_gather
from ddp_train.distributed.process_group import send_from_leader, total
from ddp_train.distributed.training_step import CURRENT, TrainingStep
from ddp_train.distributed.world import World
from ddp_train.parallel.sync_batch_norm import synchronised
from ddp_train.sessions.gradients import average_reached, exchanged
from ddp_train.sessions.values import gather_over_ranks, sum_over_ranks
from tests.support.ranks import on_ranks

IMAGES = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 2, 2)


def laid_out(tensor: Tensor, rank: int) -> Tensor:
    """A tensor [a, b, c, d], on rank 0 with its channels last, on rank 1 with gaps between rows."""
    if rank == 0:
        return tensor.contiguous(memory_format=torch.channels_last)
    if rank == 1:
        wider = tensor.new_zeros(*tensor.shape[:3], 2 * tensor.shape[3])
        wider[..., ::2] = tensor
        return wider[..., ::2]
    return tensor.clone()


def exchanges(world: World) -> dict[str, Any]:
    rank = world.rank
    images = laid_out(IMAGES, rank)
    in_place = laid_out(IMAGES, rank)
    total(in_place)
    sent = laid_out(IMAGES * (rank == 0), rank)
    send_from_leader([sent])

    weight = nn.Parameter(laid_out(IMAGES, rank))
    module = nn.ParameterList([weight])
    weight.grad = laid_out(IMAGES * rank, rank)
    average_reached([weight], [weight])
    averaged = weight.grad.clone()
    saved = exchanged(module, {"0": laid_out(IMAGES * rank, rank)})

    leaf = laid_out(IMAGES, rank).requires_grad_()
    factors = laid_out(torch.cat([IMAGES, IMAGES, IMAGES]), rank)
    CURRENT.begin(TrainingStep(True))
    rows, _ = all_gather(leaf)
    (rows * factors).sum().backward()
    norm = synchronised(nn.BatchNorm2d(3).double())
    normed = norm(images)
    CURRENT.end()
    return {
        "sum": sum_over_ranks(images, "cpu"),
        "transposed": sum_over_ranks(images.mT, "cpu").mT,
        "in place": in_place,
        "sent": sent,
        "averaged": averaged * 3,
        "saved": saved["0"] * 3,
        "gathered": gather_over_ranks(images, "cpu"),
        "rows": rows.detach(),
        "gradient of rows": leaf.grad,
        "batch norm": normed.detach(),
    }


def test_exchanges_go_by_place_not_by_memory() -> None:
    thrice = torch.cat([IMAGES, IMAGES, IMAGES])
    expected = {
        "sum": IMAGES * 3,
        "transposed": IMAGES * 3,
        "in place": IMAGES * 3,
        "sent": IMAGES,
        "averaged": IMAGES * 3,
        "saved": IMAGES * 3,
        "gathered": thrice,
        "rows": thrice,
        "gradient of rows": IMAGES * 3,
        "batch norm": nn.BatchNorm2d(3).double()(IMAGES).detach(),
    }
    for rank, out in enumerate(on_ranks(3, exchanges)):
        wrong = [name for name in expected if not torch.allclose(out[name], expected[name])]
        assert not wrong, f"rank {rank}"
