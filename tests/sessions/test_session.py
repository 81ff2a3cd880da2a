"""`ddp_train.session`: a loop of the user's own on one, two and three processes, through kills,
stops and mistakes."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ddp_train
from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure import failure_from
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.settings import is_interactive
from tests.support import zygote
from tests.support.commands import (
    LIMIT_SECONDS,
    ROOT,
    checkpoints,
    environment,
    fatal_lines,
    hear_signals,
    read,
    weights,
)
from tests.support.session_ranks import session_on

SCRIPT = '''
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import ddp_train

run_dir, fault, *numbers = sys.argv[1:]
rank_at_fault, step_at_fault = map(int, numbers or (0, -1))


class Noisy(Dataset):
    """50 samples; every time one is fetched it is another one."""

    def __init__(self, noise):
        self.rows, self.noise = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double(), noise
        if fault == "unequal" and run.rank == 2:
            self.rows = self.rows.flip(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number] + self.noise * torch.randn(6).double(), int(self.rows[number, 0] > 0)


def at_fault():
    marker = Path(run_dir, "marker")
    if (run.rank, run.step) == (rank_at_fault, step_at_fault) and not marker.exists():
        if fault == "raise":
            raise ValueError("boom")
        if fault == "hang":
            time.sleep(1000)
        marker.touch()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getppid() if "TORCHELASTIC_RUN_ID" not in os.environ else os.getpid(), signal.SIGTERM)
            time.sleep(1)


def main():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    model = run.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = run.loader(Noisy(0.1), global_batch_size=8, num_workers=int(fault == "loaders"))
    test_loader = run.test_loader(Noisy(0), batch_size=4)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(3):
        model.train()
        for inputs, labels in loader:
            at_fault()
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            run.mean(losses).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(inputs) for inputs, _ in test_loader])
            correct = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in test_loader)
        print("EPOCH", json.dumps([epoch, run.sum(correct), run.gather(outputs).tolist()]))


print("BEFORE", os.environ.get("RANK"))
seconds, restarts = 4 if fault == "hang" else 60, int(fault in ("kill", "joined"))
with ddp_train.session(run_dir, max_restarts=restarts, timeout_seconds=seconds) as run:
    main()
print("AFTER", run.rank, len(list(run._steps.models.wrapped[0].parameters())))
'''
STEPS = 7
"""Of an epoch; the last one has 2 samples, so that the third process has none."""


def command(
    folder: Path, *words: object, processes: int | None = 3, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The script in a folder, in processes of a zygote."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    more = {
        "PYTHONPATH": str(ROOT),
        **({"DDP_TRAIN_PROCESSES": str(processes)} if processes else {}),
    }
    argv = options.pop("argv", [sys.executable, str(script)])
    env = environment({**more, **options.pop("env", {})})
    return zygote.run([*argv, *map(str, words)], LIMIT_SECONDS, cwd=folder, env=env, text=True)


def epochs(done: subprocess.CompletedProcess[str]) -> dict[int, Any]:
    lines = [
        line.removeprefix("EPOCH ") for line in done.stdout.splitlines() if line.startswith("EPOCH")
    ]
    return {epoch: rest for epoch, *rest in map(json.loads, lines)}


def same_weights(one: Path, other: Path) -> bool:
    first, second = (
        load_file(path / "checkpoints/step_00000021/model.safetensors") for path in (one, other)
    )
    return all(
        torch.allclose(first[name].double(), second[name].double(), rtol=0, atol=1e-10)
        for name in first
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session")


@pytest.fixture(scope="module")
def calm(folder: Path) -> subprocess.CompletedProcess[str]:
    """Three processes that nobody disturbs."""
    return command(folder, "calm", "none")


@pytest.mark.slow
def test_one_two_and_three_processes_end_alike(
    folder: Path, calm: subprocess.CompletedProcess[str]
) -> None:
    assert calm.returncode == 0, calm.stderr
    assert calm.stdout.count("BEFORE None") == 1 and calm.stdout.count("AFTER") == 1, (
        "of rank 0 alone"
    )
    assert "AFTER 1 6" in (folder / "calm/logs/rank_1.log").read_text()
    assert checkpoints(folder / "calm") == ["step_00000014", "step_00000021"]
    assert read(folder / "calm", "summary.json")["status"] == "completed"
    for processes in (1, 2):
        name = f"on_{processes}"
        done = command(folder, name, "loaders" if processes == 2 else "none", processes=processes)
        assert done.returncode == 0, done.stderr
        assert same_weights(folder / "calm", folder / name)
        for epoch, (correct, outputs) in epochs(done).items():
            assert correct == epochs(calm)[epoch][0]
            torch.testing.assert_close(
                torch.tensor(outputs), torch.tensor(epochs(calm)[epoch][1]), rtol=0, atol=1e-6
            )
            assert len(outputs) == 50


@pytest.mark.slow
def test_a_killed_rank_and_a_stop_end_in_the_same_bytes(
    folder: Path, calm: subprocess.CompletedProcess[str]
) -> None:
    assert calm.returncode == 0, calm.stderr
    killed = command(folder, "killed", "kill", 1, 10)
    assert killed.returncode == 0, killed.stderr
    assert re.search(
        r"LOST died \(rank 1 on .*, step 10, forward\): the process was killed by SIGKILL",
        killed.stderr,
    )
    assert "restarting (1 of 1 restarts), from step 10: no step is lost" in killed.stderr
    assert "resumed from step 10 (epoch 1, after 3 steps)" in killed.stderr
    assert weights(folder / "killed") == weights(folder / "calm")

    stopped = command(folder, "stopped", "stop", 0, 9)
    assert stopped.returncode == 75, stopped.stderr
    step = int(
        re.findall(
            r"stopped after step (\d+) \(epoch 1, \d steps? of it\) and saved", stopped.stderr
        )[0]
    )
    assert 9 < step < 14 and "AFTER" not in stopped.stdout
    assert read(folder / "stopped", "summary.json")["status"] == "preempted"
    shutil.copytree(folder / "stopped", folder / "on_fewer")
    again = command(folder, "stopped", "stop", 0, 9)
    assert again.returncode == 0, again.stderr
    assert f"resumed from step {step} (epoch 1, after {step - 7} step" in again.stderr
    assert weights(folder / "stopped") == weights(folder / "calm")
    assert epochs(again) == {epoch: epochs(calm)[epoch] for epoch in (1, 2)}
    fewer = command(folder, "on_fewer", "stop", 0, 9, processes=2)
    assert fewer.returncode == 0, fewer.stderr
    assert same_weights(folder / "on_fewer", folder / "calm")


@pytest.mark.slow
def test_failures_are_named(folder: Path) -> None:
    raised = command(folder, "raised", "raise", 2, 4)
    assert raised.returncode == 70
    (line,) = fatal_lines(raised.stderr)
    assert re.match(r"FATAL exception \(rank 2 on .*, step 4, forward\): ValueError: boom", line)
    assert 'train.py", line' in raised.stderr and "raised/logs/rank_2.log" in raised.stderr
    assert read(folder / "raised", "failure.json")["rank"] == 2
    unequal = command(folder, "unequal", "unequal")
    assert unequal.returncode == 69
    (line,) = fatal_lines(unequal.stderr)
    assert "run.loader: a digest of the samples is not the same for all processes (rank 0: " in line
    assert "remedy: create the data set inside of `with ddp_train.session" in unequal.stderr
    hung = command(folder, "hung", "hang", 1, 5)
    assert hung.returncode == 71
    (line,) = fatal_lines(hung.stderr)
    assert re.match(
        r"FATAL hang \(rank 1 on .*, step 5, forward\): no progress for .* s \(timeout_seconds=4\)",
        line,
    )
    assert (
        "if the rank is only slow, raise timeout_seconds" in hung.stderr
        and "in at_fault" in hung.stderr
    )


@pytest.mark.slow
def test_a_session_joins_torchrun(folder: Path, calm: subprocess.CompletedProcess[str]) -> None:
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc_per_node=3",
        str(folder / "train.py"),
    ]
    joined = command(
        folder, "joined", "joined", processes=None, argv=torchrun, env={"OMP_NUM_THREADS": "1"}
    )
    assert joined.returncode == 0, joined.stderr
    assert weights(folder / "joined") == weights(folder / "calm") and epochs(joined) == epochs(calm)
    assert (
        joined.stderr.count(
            "note: ddp_train.session: max_restarts=1 has no effect here: use torchrun --max-restarts=1"
        )
        == 1
    )
    assert (
        joined.stderr.count(
            "after a failure the run goes back to its last checkpoint. It cannot keep later"
        )
        == 1
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_of_another_run_is_left_as_it_is(tmp_path: Path, processes: int) -> None:
    (tmp_path / "launched").mkdir()
    (tmp_path / "launched/commands.jsonl").touch()
    (tmp_path / "living").mkdir()
    said = {
        "launched": "is the folder of a run or a sweep of ddp-train",
        "living": f"another run is in {tmp_path}/living, process {os.getpid()} on ",
    }
    with run_lock.acquire(tmp_path / "living" / run_lock.FILE):
        before = sorted(tmp_path.rglob("*"))
        for name, words in said.items():
            done = command(tmp_path, name, "none", processes=processes)
            assert done.returncode == 2 and words in done.stderr, done.stderr
        assert sorted({*tmp_path.rglob("*")} - {tmp_path / "train.py"}) == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_its_peers_leaves_no_failure(tmp_path: Path, rank: int) -> None:
    variables = {
        **{"RANK": str(rank), "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29519 + rank)},
    }
    done = command(tmp_path, "run", "hang", env=variables, processes=None)
    assert done.returncode == 69
    (line,) = fatal_lines(done.stderr)
    missing = "rank 1 cannot reach the store" if rank else "rank 1 of 2 did not respond within 4 s"
    assert f"FATAL peer (rank {rank}): {missing}" in line
    assert [path.name for path in tmp_path.glob("run/*")] == [run_lock.FILE][rank:]


def test_a_session_that_mpirun_starts_twice_is_refused(tmp_path: Path) -> None:
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    done = command(tmp_path, "run", "none", env=variables)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "mpirun started 2 processes of this script, and each of them would" in done.stderr


def test_after_a_mistake_in_a_notebook_the_next_cell_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with (
        pytest.raises(ConfigError, match="whose loss was not computed by run"),
        ddp_train.session(tmp_path, processes=1, device="cpu") as run,
    ):
        _step(lambda run, outputs, targets: (outputs - targets).square().mean())(run)
    model = net()
    model(rows().tensors[0]).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert "FATAL" not in capsys.readouterr().err and not (tmp_path / "failure.json").exists()


def rows(count: int = 10) -> TensorDataset:
    samples = torch.randn(count, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return TensorDataset(samples, samples.sum(1, keepdim=True))


def net() -> nn.Linear:
    return nn.Linear(4, 1, dtype=torch.float64)


def train(
    run: Any,
    model: nn.Module,
    optimizer: Any,
    epochs: int,
    batch: int = 4,
    until: int | None = None,
) -> None:
    """A loop in this process. until: the step before which it sends itself a signal."""
    loader = run.loader(rows(), global_batch_size=batch)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for inputs, targets in loader:
            if run.step == until:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.sigtimedwait([], 0.5)  # the threads that agree on the step
            optimizer.zero_grad()
            run.mean((model(inputs) - targets).square().mean(1)).backward()
            optimizer.step()


def test_one_process_is_the_loop_by_hand_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(7)
    by_hand = net()
    dataset = rows()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        for share in torch.as_tensor(epoch_order(7, epoch, 10)).split(4):
            optimizer.zero_grad()
            (
                by_hand(dataset.tensors[0][share]) - dataset.tensors[1][share]
            ).square().mean().backward()
            optimizer.step()
    before = signal.getsignal(signal.SIGTERM)
    for until in (7, None):
        ends = pytest.raises(SystemExit) if until else nullcontext()
        with ends as stopped, ddp_train.session(tmp_path, processes=1, device="cpu", seed=7) as run:
            model = run.wrap(net())
            train(
                run,
                model,
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                4,
                until=until,
            )
        if until:
            assert stopped and stopped.value.code == 75
    assert "resumed from step 8 (epoch 2, after 2 steps)" in capsys.readouterr().err
    torch.testing.assert_close(
        dict(model.state_dict()), dict(by_hand.state_dict()), rtol=0, atol=1e-12
    )
    assert signal.getsignal(signal.SIGTERM) is before and run.step == 12
    assert checkpoints(tmp_path) == ["step_00000009", "step_00000012"]


class Unsized:
    def __getitem__(self, number: int) -> Any:
        return torch.ones(2)


class Unfilled(Unsized):
    """A buffer that is filled after run.loader is called."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        return {}[number]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def _after_the_loop(run: Any) -> None:
    model = run.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.resume(model=model, optimizer=optimizer)
    list(run.epochs(1))
    run.save()


def _step(
    loss_of: Callable[[Any, Any, Any], torch.Tensor], kept: bool = True
) -> Callable[[Any], None]:
    def loop(run: Any) -> None:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(rows(), global_batch_size=4)
        run.resume(model=model, **({"optimizer": optimizer} if kept else {}))
        for _ in run.epochs(1):
            for inputs, targets in loader:
                loss_of(run, model(inputs), targets).backward()
                optimizer.step()

    return loop


def _zipped(run: Any) -> None:
    model = run.wrap(net())
    loader = run.loader(rows(), global_batch_size=4)
    test_loader = run.test_loader(rows(), batch_size=4)
    run.resume(model=model)
    for _ in run.epochs(1):
        list(zip(loader, test_loader, strict=False))


def test_an_error_of_the_first_samples_is_told_from_one_of_training() -> None:
    with pytest.raises(KeyError) as raised, session_on(World()) as run:
        run.loader(Unfilled(), global_batch_size=4)
    failure = failure_from(raised.value, 0, RankStatus(), Path("log"), "")
    assert failure.detail.endswith("(run.loader reads some samples when it is called)")
    assert failure.remedy.startswith("fill the data set before run.loader is called")


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda run: run.wrap(run.wrap(net())), "run.wrap got the same parameters twice"),
    (lambda run: run.loader(rows()), "run.loader: global_batch_size is missing"),
    (lambda run: run.loader(rows(), global_batch_size=0), "run.loader: global_batch_size is 0"),
    (
        lambda run: run.test_loader(Endless(), batch_size=4),
        "run.test_loader: Endless is an iterable data set",
    ),
    (
        lambda run: run.loader(Unsized(), global_batch_size=4),
        "run.loader: Unsized has no __len__, but run.loader divides the samples",
    ),
    (
        lambda run: run.loader(DataLoader(rows()), global_batch_size=4),
        "run.loader got a DataLoader",
    ),
    (
        lambda run: run.test_loader(TensorDataset(torch.empty(0)), batch_size=4),
        "TensorDataset has no samples",
    ),
    (lambda run: list(run.epochs(1)), "run.epochs was called before run.resume"),
    (lambda run: run.resume(model=net()), "run.resume: there is no model yet"),
    (
        lambda run: (run.wrap(net()), run.resume(optimizer=1)),
        "run.resume: the model of run.wrap is not among",
    ),
    (
        lambda run: run.resume(model=run.wrap(net()), lr=0.1),
        "run.resume: lr is a float, without state_dict",
    ),
    (
        lambda run: run.resume(
            model=run.wrap(net()), optimizer=torch.optim.SGD(net().parameters(), lr=0.1)
        ),
        "run.resume: optimizer was built with parameters that are not in the model",
    ),
    (
        lambda run: list(run.loader(rows(), global_batch_size=4)),
        "the loader of run.loader was used outside",
    ),
    (lambda run: run.mean(torch.ones(3)), "run.mean was called outside of a step"),
    (_zipped, "batches of run.test_loader were used in several training steps"),
    (_after_the_loop, "run.save was used outside of an epoch"),
    (
        _step(lambda run, outputs, targets: (outputs - targets).square().mean()),
        "whose loss was not computed by run.mean",
    ),
    (
        _step(lambda run, outputs, targets: run.mean((outputs - targets).square().mean())),
        "run.mean: the losses have the shape [], but the batch has 4 samples",
    ),
    (
        _step(
            lambda run, outputs, targets: run.mean((outputs - targets).square().mean(1)), kept=False
        ),
        "an optimizer (SGD) makes a step, but run.resume did not get it",
    ),
]


@pytest.mark.parametrize(
    ("mistake", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES]
)
def test_each_mistake_is_one_error_that_names_the_line(
    mistake: Callable[[Any], Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(SystemExit) as ended,
        ddp_train.session(tmp_path, processes=1, device="cpu") as run,
    ):
        mistake(run)
    assert ended.value.code == 2
    error = capfd.readouterr().err
    (line,) = fatal_lines(error)
    assert re.search(rf"test_session.py:\d+: .*{re.escape(message)}", line), line
    assert "\n  remedy: " in error and read(tmp_path, "failure.json")["kind"] == "config"


def test_arguments_of_a_session_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for arguments, message in [
        ({"processes": 0}, "processes=0 is less than 1"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"run_dir": tmp_path / "file"}, "is not a folder"),
        ({"keep": 0}, "keep=0 is less than 1"),
    ]:
        with (
            pytest.raises(SystemExit) as ended,
            ddp_train.session(**{"run_dir": tmp_path / "run", **arguments}),
        ):
            pass
        assert ended.value.code == 2 and message in capsys.readouterr().err
    monkeypatch.setenv("DDP_TRAIN_PROCESSES", "two")
    with pytest.raises(SystemExit), ddp_train.session(tmp_path / "run"):
        pass
    assert "DDP_TRAIN_PROCESSES=two is not a number" in capsys.readouterr().err
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.delenv("DDP_TRAIN_PROCESSES")
    in_a_notebook = pytest.raises(ConfigError, match="a notebook or a prompt has no script")
    with in_a_notebook, ddp_train.session(tmp_path / "run", processes=2):
        pass
    assert not (tmp_path / "run").exists()


def test_other_batches_or_objects_on_a_resume_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def again(batch: int, until: int | None, **more: Any) -> int:
        with (
            pytest.raises(SystemExit) as ended,
            ddp_train.session(tmp_path, processes=1, device="cpu") as run,
        ):
            model = run.wrap(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            (
                train(run, model, optimizer, 2, batch, until)
                if not more
                else run.resume(model=model, optimizer=optimizer, **more)
            )
        return int(str(ended.value.code))

    assert again(4, 1) == 75
    assert again(5, None) == 65
    told = capfd.readouterr().err
    assert "run.loader has changed since then: global_batch_size was 4 and is 5" in told
    assert "use run.epochs(n, whole=True) there" in told
    assert again(4, None, ema=net()) == 65
    assert "run.resume got ema, optimizer; they differ in ema" in capfd.readouterr().err


def test_the_mean_over_tokens_is_that_of_all(tmp_path: Path) -> None:
    with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(rows(), global_batch_size=10, shuffle=False)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for inputs, targets in loader:
                counting = torch.arange(10) % 3 == 0
                losses = (model(inputs) - targets).square()[:, 0]
                loss = run.mean(losses * counting, over=counting)
                torch.testing.assert_close(loss, losses[counting].mean())
                loss.backward()
                optimizer.step()
        assert (
            run.sum(3) == 3
            and run.sum(torch.tensor([0.5])).tolist() == [0.5]
            and (run.rank, run.processes) == (0, 1)
        )
        assert run.sum(0.1) == 0.1 and run.sum(16777217.0) == 16777217, "not rounded to float32"


def test_the_example_changes_ten_lines_of_the_script() -> None:
    before, after = (
        (ROOT / f"examples/own_loop_{name}.py").read_text().splitlines()
        for name in ("before", "after")
    )
    changed = difflib.ndiff(
        [line.strip() for line in before if line], [line.strip() for line in after if line]
    )
    added = [line for line in changed if line.startswith("+ ")]
    assert 5 < len(added) <= 10, added


@pytest.mark.slow
def test_the_example_runs(folder: Path) -> None:
    env = environment({"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": "2"})
    argv = [sys.executable, str(ROOT / "examples/own_loop_after.py")]
    done = zygote.run(argv, LIMIT_SECONDS, cwd=folder, env=env, text=True, preexec_fn=hear_signals)
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"epoch 9: (\d+) of 297", done.stdout)[0]) > 265


def test_a_library_for_notebooks_makes_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert not is_interactive()
    shell = types.ModuleType("IPython")
    monkeypatch.setattr(shell, "get_ipython", object, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert is_interactive()


def test_test_batches_are_the_same_for_any_number_of_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
        for processes in (1, 3, 4):
            batches = []
            for rank in range(processes):
                run._steps.world = World(rank, processes, rank, processes)
                loader = run.test_loader(rows(10), batch_size=4)
                assert len(loader) == 3
                batches += [inputs[:, 0] for inputs, _ in loader]
            assert [len(batch) for batch in batches] == [4, 4, 2]
            torch.testing.assert_close(torch.cat(batches), rows(10).tensors[0][:, 0])
        run._steps.world = World()
    assert capfd.readouterr().err.count("note: run.test_loader: there are 3 batches for") == 1


@pytest.mark.slow
def test_a_second_session_needs_a_command_of_its_own(tmp_path: Path) -> None:
    first, second = (
        ddp_train.session(tmp_path / name, processes=1, device="cpu") for name in ("c", "d")
    )
    with first, pytest.raises(SystemExit), second:
        pass
    (tmp_path / "twice.py").write_text(
        "import ddp_train\n"
        "for name in 'ab':\n"
        "    with ddp_train.session(name, processes=2, device='cpu') as run:\n"
        "        run.sum(1)\n"
    )
    env = environment({"PYTHONPATH": str(ROOT)})
    argv = [sys.executable, str(tmp_path / "twice.py")]
    done = zygote.run(argv, LIMIT_SECONDS, cwd=tmp_path, env=env, text=True)
    assert "twice.py:3: ddp_train.session: the processes of this command were" in done.stderr
    assert done.returncode == 70 and read(tmp_path / "a", "summary.json")["status"] == "failed"


def test_a_sum_over_batches_that_every_process_had_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = TensorDataset(torch.ones(6, 2))
    with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
        run._steps.world = run._steps.watches.world = World(0, 2, 0, 2)
        model = run.wrap(nn.Linear(2, 1))
        with torch.no_grad():
            for (inputs,) in run.test_loader(data, batch_size=4):
                model(inputs)
            assert run.sum(3) == 3 and "the sum counts" not in capfd.readouterr().err
            for (inputs,) in DataLoader(data, 4):
                model(inputs)
        for _ in range(2):
            run.sum(3)
        run._steps.world = World()
    assert capfd.readouterr().err.count("the sum counts each of them 2 times; use") == 1, "once"


GROWING = '''
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
import ddp_train


class Growing(Dataset):
    """Other samples and more of them from epoch to epoch, as the loop says."""

    count, level = 8, 0

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return torch.tensor([1.0, number / 10 + self.level]).double()


with ddp_train.session(sys.argv[1]) as run:
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(2, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Growing()
    loader = run.loader(data, global_batch_size=4, num_workers=int(sys.argv[2]))
    tests = run.test_loader(data, batch_size=3)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(3):
        data.count, data.level = 8 + 6 * epoch, epoch
        for rows in loader:
            if (run.rank, run.step) == (0, 3) and not (marker := Path(sys.argv[1], "marker")).exists():
                marker.touch()
                os.kill(os.getppid() if run.processes > 1 else os.getpid(), signal.SIGTERM)
                time.sleep(1)
            optimizer.zero_grad()
            run.mean(model(rows).square().flatten()).backward()
            optimizer.step()
        print("EPOCH", [epoch, run.step, run.sum(sum(len(rows) for rows in tests))])
'''


def weights_of_a_growing_set() -> torch.Tensor:
    """Those of a plain loop in float64 over what a DataLoader without processes would give."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        order = torch.tensor(epoch_order(0, epoch, 8 + 6 * epoch))
        for numbers in order.split(4):
            optimizer.zero_grad()
            rows = torch.stack([torch.ones(4)[: len(numbers)], numbers / 10 + epoch], 1).double()
            model(rows).square().mean().backward()
            optimizer.step()
    return model.weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_data_that_the_loop_changes_are_seen(processes: int, tmp_path: Path) -> None:
    """Length 8, 14 and 20 by epoch, through a stop inside of the second one."""
    (tmp_path / "grow.py").write_text(GROWING)
    more = {"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": str(processes)}
    argv = [sys.executable, str(tmp_path / "grow.py"), "run", "1"]

    def until_it_ends() -> subprocess.CompletedProcess[str]:
        return zygote.run(argv, LIMIT_SECONDS, cwd=tmp_path, env=environment(more), text=True)

    stopped = until_it_ends()
    resumed = until_it_ends()
    assert (stopped.returncode, resumed.returncode) == (75, 0), stopped.stderr + resumed.stderr
    assert re.findall(r"EPOCH (.*)", stopped.stdout + resumed.stdout) == [
        "[0, 2, 8]",
        "[1, 6, 14]",
        "[2, 11, 20]",
    ]
    found = load_file(tmp_path / "run/checkpoints/step_00000011/model.safetensors")["weight"]
    torch.testing.assert_close(found, weights_of_a_growing_set(), rtol=0, atol=1e-10)


RAISES_AFTER_AN_EPOCH = """
import torch

import ddp_train

rows = torch.arange(24.0).view(12, 2)
with ddp_train.session("run", processes=3, device="cpu") as run:
    model = run.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        for (batch,) in run.loader(torch.utils.data.TensorDataset(rows), global_batch_size=6):
            optimizer.zero_grad()
            run.mean(model(batch).square().mean(1)).backward()
            optimizer.step()
        if run.rank == 1:
            raise ValueError("after the last batch")
"""


@pytest.mark.slow
def test_a_failure_between_epochs_names_no_hook_and_the_script_wins(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RAISES_AFTER_AN_EPOCH)
    env = environment({"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": "2"})
    done = zygote.run(
        [sys.executable, str(script)], LIMIT_SECONDS, cwd=tmp_path, env=env, text=True
    )
    assert done.returncode == 70, done.stderr
    failure = read(tmp_path / "run", "failure.json")
    assert (failure["rank"], failure["phase"]) == (1, "end of an epoch"), failure
    note = "note: DDP_TRAIN_PROCESSES=2 has no effect: the script says processes=3\n"
    assert done.stderr.count(note) == 1, done.stderr


TELLS_ITS_COMMAND = """
from pathlib import Path

import ddp_train

with ddp_train.session("run", processes=3, device="cpu") as run:
    words = Path("/proc/self/cmdline").read_text().split("\\0")
    Path(f"command_{run.rank}").write_text(" ".join(words[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-u"]], ids=["forked", "own interpreter"])
def test_a_rank_of_a_session_is_named_in_its_command_line(
    options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TELLS_ITS_COMMAND)
    argv = [sys.executable, *options, "train.py"]
    env = environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        words = " ".join(["-X", f"rank={rank}", *options, "train.py"])
        assert (tmp_path / f"command_{rank}").read_text().rstrip() == words
