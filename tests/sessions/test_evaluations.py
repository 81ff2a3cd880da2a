"""Evaluations within an epoch of a loop of the user's own: several sets, and no trace in training."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_train.distributed.world import World
from ddp_train.sessions.settings import UsageError
from tests.support.commands import run
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

CODE = """
import sys
import torch, ddp_train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

often = sys.argv[1] == "often"
def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x[:, :3].argmax(1))
def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = run.loader(rows(50, 1), global_batch_size=8)
    tests = {"clean": run.test_loader(rows(21, 2), batch_size=5), "noisy": run.test_loader(rows(11, 3), batch_size=4)}
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        for inputs, labels in loader:
            if often and run.step % 2 == 0:
                score(model, tests)
            model.train()
            optimizer.zero_grad()
            loss = run.mean(F.cross_entropy(model(inputs), labels, reduction="none"))
            loss.backward()
            optimizer.step()
    print("end", sum(p.double().sum().item() for p in net.state_dict().values()))
@torch.no_grad()
def score(model, tests):
    model.eval()
    for name, loader in tests.items():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
        print(run.step, name, run.sum(correct))
with ddp_train.session("runs_" + sys.argv[1]) as run:
    main()
"""


@pytest.mark.slow
def test_scores_every_few_batches_change_no_training(tmp_path: Path) -> None:
    """Dropout and batch norm on three ranks; the sum of all that was trained, to the last digit."""
    script = tmp_path / "train.py"
    script.write_text(CODE)
    ends = []
    for word in ("often", "seldom"):
        command = [sys.executable, str(script)]
        done = run(word, command=command, cwd=tmp_path, env={"DDP_TRAIN_PROCESSES": "3"})
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        ends.append(next(line for line in lines if line.startswith("end ")))
        assert any(line.startswith("12 noisy ") for line in lines) == (word == "often")
    assert ends[0] == ends[1]


def statistics(world: World, kept_from: int) -> Tensor:
    """Batch norm's mean after eight steps, in which each process took its own samples.

    kept_from: the step before which an iterator over the test loader begins, and is kept.
    """
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(inputs, inputs.sum(1))
    with session_on(world) as session:
        norm = nn.BatchNorm1d(3)
        model = session.wrap(nn.Sequential(norm, nn.Linear(3, 1)), sync_batch_norm=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = session.loader(rows, global_batch_size=8)
        test_loader = session.test_loader(rows, batch_size=8)
        session.resume(model=model, optimizer=optimizer)
        kept = iter(test_loader)
        for _ in session.epochs(2):
            if session.step == kept_from:
                next(kept)
            for some, targets in loader:
                if session.step == kept_from == 1:
                    next(kept)
                optimizer.zero_grad()
                session.mean((model(some)[:, 0] - targets) ** 2).backward()
                optimizer.step()
        return norm.state_dict()["running_mean"]


def test_iterator_that_is_kept_changes_no_statistics() -> None:
    kept = on_ranks(2, statistics, 4)
    torch.testing.assert_close(kept, on_ranks(2, statistics, -1), rtol=0, atol=0)


def test_loss_within_a_loop_over_a_test_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="used in several training steps"):
        statistics(World(0, 1, 0, 1), 1)


def test_processes_of_a_loader_end_with_it() -> None:
    rows = TensorDataset(torch.randn(8, 3), torch.zeros(8))
    others = set(multiprocessing.active_children())
    with session_on(World(0, 1, 0, 1)) as session:
        loader = None
        for _ in range(2):
            loader = session.test_loader(rows, batch_size=4, num_workers=1)
            assert len(list(loader)) == 2
            assert len(set(multiprocessing.active_children()) - others) == 1
        loader = None
        assert set(multiprocessing.active_children()) <= others
