"""What a session saves, and what it says of it."""

from __future__ import annotations

import torch
from torch import nn

from ddp_train.sessions.session_checkpoints import apart


def test_buffers_that_each_process_fills_alone_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("codes", torch.zeros(3))
    model[1].register_buffer("scale", torch.ones(1))
    alike = torch.zeros(2, 8)  # mean and variance of the norm, codes, scale
    alike[:, 7] = torch.nan
    others = alike.clone()
    others[1, 0] = 1.0
    assert apart(model, alike) == [] == apart(model, others)
    others[1, 6] = 1.0
    assert apart(model, others) == ["1.codes"]
    assert apart(nn.Linear(1, 1), torch.empty(3, 0)) == []
