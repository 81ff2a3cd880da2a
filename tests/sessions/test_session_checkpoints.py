"""What a session saves, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp_train
from ddp_train.plain_state import problem_of_state
from ddp_train.sessions.watches.states_of_ranks import (
    buffers_apart,
    is_batch_norm_apart,
    is_statistic,
)


def test_buffers_that_each_process_fills_alone_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("codes", torch.zeros(3))
    model[1].register_buffer("scale", torch.ones(1))
    alike = torch.zeros(2, 8)  # mean and variance of the norm, codes, scale
    alike[:, 7] = torch.nan
    others = alike.clone()
    others[1, 0] = 1.0
    assert buffers_apart(model, alike) == []
    others[1, 6] = 1.0
    mean, codes = buffers_apart(model, others)
    assert [mean.name, codes.name] == ["0.running_mean", "1.codes"]
    assert is_statistic(mean) and not is_statistic(codes)
    assert is_batch_norm_apart(mean) and not is_batch_norm_apart(codes)
    assert buffers_apart(nn.Linear(1, 1), torch.empty(3, 0)) == []


def test_statistics_of_another_rounding_are_the_same() -> None:
    of_ranks = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0 + 1e-6, 3.0, 4.0]]).double()
    (mean,) = buffers_apart(nn.BatchNorm1d(2), of_ranks)
    assert not is_batch_norm_apart(mean)


@pytest.mark.slow
def test_weights_that_become_nan_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = torch.ones(8, 2)
    inputs[5] = torch.nan
    with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
        model = run.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(TensorDataset(inputs), global_batch_size=4, shuffle=False)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(3):
            for (batch,) in loader:
                optimizer.zero_grad()
                run.mean(model(batch)[:, 0]).backward()
                optimizer.step()
    warnings = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("weight holds a NaN after step 2, and the loop trains on")


def test_what_is_no_plain_data_is_named_by_its_place() -> None:
    """LARS as in public code: its groups hold the functions that choose parameters."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert problem_of_state(optimizer.state_dict()) == ""
    for unreadable in (nn.init.zeros_, lambda parameter: parameter.ndim == 1):
        optimizer.param_groups[0]["weight_decay_filter"] = unreadable
        problem = problem_of_state(optimizer.state_dict())
        assert problem == "['param_groups'][0]['weight_decay_filter'] is a function"
