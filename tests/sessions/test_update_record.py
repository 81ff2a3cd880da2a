"""The gradients that a run of `ddp-train prove train.py` records."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from ddp_train.distributed.environment import GRADIENTS
from ddp_train.sessions.update_record import MOST_STEPS, UPDATES, UpdateRecord


def test_updates_are_recorded_and_taken_back(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    model = nn.Sequential(layer, nn.Dropout(0.5))
    others = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    foreign = torch.optim.SGD(others.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    record = UpdateRecord(tmp_path)
    record.begin(model, [optimizer])
    for number in range(UPDATES):
        assert not record.is_complete(number)
        optimizer.zero_grad()
        (model(torch.ones(4, 3)).sum() * (number + 1)).backward()
        optimizer.step()
        assert torch.equal(layer.weight, before)
    others(torch.ones(4, 3)).sum().backward()
    weight = others.weight.detach().clone()
    foreign.step()
    assert not torch.equal(others.weight, weight)
    assert record.is_complete(UPDATES)
    record.close()
    record.write()
    written = load_file(tmp_path / GRADIENTS)
    assert len(written) == 2 * UPDATES
    assert torch.equal(written["update 2 0.weight"], torch.full((2, 3), 8.0))  # no dropout
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_a_loop_without_updates_ends_too(tmp_path: Path) -> None:
    record = UpdateRecord(tmp_path)
    record.begin(nn.Linear(1, 1), [])
    assert not record.is_complete(1)
    assert record.is_complete(MOST_STEPS)
    record.close()
