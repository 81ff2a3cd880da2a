"""What a session saves, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp_train
from ddp_train.plain_state import problem_of_state


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
