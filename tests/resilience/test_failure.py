"""Failures, made of exceptions, exit codes and hangs."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_train.resilience import failure_report, hang_detector
from ddp_train.resilience.failure import (
    NO_SAMPLE,
    failure_from,
    failure_from_exit,
    failure_from_hang,
    is_peer_error,
)
from ddp_train.resilience.heartbeat import RankStatus, StatusSnapshot
from ddp_train.resilience.stacks import STOPPED
from ddp_train.telemetry.json_files import read_objects


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(3, 2, 1), nn.LayerNorm(3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_inputs_of_another_number_type_have_a_remedy(layer: nn.Module, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError) as caught:
        layer(torch.zeros(3, 3, dtype=dtype))
    failure = failure_from(caught.value, 0, RankStatus(), Path("log"), "")
    assert "return float32 (numpy's default is float64)" in failure.remedy
    other = RuntimeError(
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"
    )
    assert failure_from(other, 0, RankStatus(), Path("log"), "").remedy == "see the traceback", (
        "another device"
    )


@pytest.mark.parametrize("operation", ["batch_norm_backward_elemt", "batch_norm_backward_reduce"])
def test_second_derivatives_of_batch_norm_on_gpus_have_a_remedy(operation: str) -> None:
    error = RuntimeError(f"derivative for aten::{operation} is not implemented")
    failure = failure_from(error, 0, RankStatus(), Path("log"), "")
    assert "run.wrap(ddp_train.synchronised(model))" in failure.remedy


def test_names_of_plain_ddp_have_a_remedy() -> None:
    weights = nn.Linear(3, 2).state_dict()
    for name, is_plain in (("module.weight", True), ("modules", False)):
        with pytest.raises(KeyError) as caught:
            weights[name]
        failure = failure_from(caught.value, 0, RankStatus(), Path("log"), "")
        assert ("Leave out `module.`" in failure.remedy) == is_plain


def test_a_layer_that_takes_no_sample_has_a_remedy() -> None:
    error = RuntimeError("Cannot pack empty tensors.")
    error.add_note(NO_SAMPLE)
    failure = failure_from(error, 0, RankStatus(), Path("log"), "")
    assert NO_SAMPLE in failure.detail and "drop_last=True" in failure.remedy


def test_an_oom_kill_is_distinguished_from_other_kills() -> None:
    arguments = -signal.SIGKILL, 2, RankStatus(step=7, phase="forward"), Path("logs/rank_2.log")
    failure = failure_from_exit(
        *arguments, oom_killed=True, sizes="rank 0 1.00 GiB, rank 1 9.00 GiB"
    )
    assert (failure.kind, failure.rank, failure.step, failure.phase) == ("oom", 2, 7, "forward")
    assert "rank 1 9.00 GiB" in failure.detail and "train.accumulation_steps" in failure.remedy
    assert failure_from_exit(*arguments, oom_killed=False, sizes="").kind == "died"


def test_a_process_that_a_signal_has_stopped_is_no_slow_one() -> None:
    snapshot = StatusSnapshot(9, 7, 7, "forward")
    for reason, remedy in (
        (STOPPED, "kill -CONT PID"),
        ("it is behind", "raise launch.timeout_seconds"),
    ):
        hang = hang_detector.Hang(1, snapshot, 9.0, reason, "", "", [])
        assert remedy in failure_from_hang(hang, Path("log"), 5.0).remedy


def test_a_hang_at_the_start_names_the_limit_that_has_passed() -> None:
    before, after = (StatusSnapshot(9, 0, batches, "forward") for batches in (1, 2))
    hang = hang_detector.Hang(1, before, 120.1, "", "", "", ["frame"])
    failure = failure_from_hang(hang, Path("log"), 8.0)
    assert failure.detail == (
        "no progress for 120.1 s (the limit is 120 s before the second batch, and later"
        " launch.timeout_seconds=8)"
    )
    assert failure.remedy.endswith("raise launch.timeout_seconds above 120")
    later = failure_from_hang(replace(hang, snapshot=after), Path("log"), 8.0)
    assert later.detail == "no progress for 120.1 s (launch.timeout_seconds=8)"
    patient = failure_from_hang(hang, Path("log"), 600.0)
    assert "(launch.timeout_seconds=600)" in patient.detail


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    """Real-time signals, which Python names but for the first and the last."""
    library = "find out who sent this signal, or which library uses it"
    for number, name, remedy in (
        (37, "signal 37", library),
        (signal.SIGTERM, "SIGTERM", "see the output of this rank, above or in logs/rank_1.log"),
    ):
        failure = failure_from_exit(
            -number, 1, RankStatus(), Path("logs/rank_1.log"), oom_killed=False, sizes=""
        )
        assert failure.remedy == remedy
        assert (failure.kind, failure.exit_code) == ("died", 70) and failure.detail.endswith(
            f"killed by {name}"
        )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory:"
            " you tried"
        ),
        RuntimeError(
            "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side"
            " assertions."
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        dist.DistBackendError(
            "unhandled cuda error, NCCL version 2.28.9\nCuda failure 2 'out of memory'"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_oom_is_recognised_from_every_library(error: Exception) -> None:
    failure = failure_from(
        error, 1, RankStatus(step=3, phase="forward"), Path("log"), "rank 1 9.00 GiB"
    )
    assert failure.kind == "oom" and "rank 1 9.00 GiB" in failure.detail
    assert (
        failure_from(
            RuntimeError("CUDA error: an illegal memory access"), 1, RankStatus(), Path(), ""
        ).kind
        != "oom"
    )


def test_a_batch_that_died_with_its_loader_is_recognised(tmp_path: Path) -> None:
    """The connection over which its memory is fetched breaks, as that to a lost rank does."""
    code = compile("raise error", "/site-packages/torch/multiprocessing/reductions.py", "exec")
    for error in (EOFError(), ConnectionResetError(104, "Connection reset by peer")):
        with pytest.raises(type(error)) as caught:
            exec(code, {"error": error})
        seen = caught.value
        failure = failure_from(seen, 1, RankStatus(step=3, phase="data"), tmp_path / "log", "")
        assert (
            failure.kind == "data_worker"
            and failure.detail.startswith("a loader process died: ")
            and not is_peer_error(seen)
        )
    assert is_peer_error(RuntimeError("Read error [127.0.0.1]:1234: Connection reset by peer"))


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("is killed by signal: Killed. ", "lower train.global_batch_size"),
        ("is killed by signal: Bus error. ", "docker run --shm-size=8g"),
        ("is killed by signal: Real-time signal 3. ", "use tuning.num_workers=0"),
        (
            "exited unexpectedly with exit code 2. Details are lost due to multiprocessing.",
            "use tuning.num_workers=0",
        ),
    ],
)
def test_a_loader_process_is_told_with_what_it_died_of(cause: str, remedy: str) -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) {cause}")
    for seen in (error, error.__cause__):
        failure = failure_from(seen, 1, RankStatus(step=3, phase="data"), Path("log"), "")
        assert failure.kind == "data_worker" and cause.strip() in failure.detail
        assert remedy in failure.remedy and ("lower" in failure.remedy) == ("Killed" in cause)


@pytest.mark.parametrize(
    ("error", "file", "remedy"),
    [
        (OSError(24, "Too many open files"), "torch/storage.py", "ulimit -n 65536"),
        (
            OSError(28, "No space left on device"),
            "multiprocessing/synchronize.py",
            "docker run --shm-size=8g",
        ),
        (
            RuntimeError("unable to write to file </torch_5_1_0>: No space left on device (28)"),
            "",
            "--shm-size=8g",
        ),
        (OSError(28, "No space left on device"), "mine.py", "see the traceback"),
        (
            RuntimeError("out of resource: shared memory, Required: 9"),
            "triton.py",
            "see the traceback",
        ),
        (
            ValueError("Expected more than 1 value per channel when training, got"),
            "f.py",
            "cannot train on one sample",
        ),
    ],
)
def test_limits_of_the_host_are_told_with_what_raises_them(
    error: Exception, file: str, remedy: str
) -> None:
    with pytest.raises(type(error)) as caught:
        exec(compile("raise error", f"/lib/{file}", "exec"), {"error": error})
    assert remedy in failure_from(caught.value, 1, RankStatus(), Path("log"), "").remedy


def test_connection_of_the_user_is_not_one_to_a_rank(tmp_path: Path) -> None:
    """A data set behind a server: an innocent rank was blamed, six seconds later."""
    by_loader = (
        f"Caught {ConnectionResetError.__name__} in DataLoader worker process 0.\nConnection reset"
        " by peer"
    )
    for error in (ConnectionResetError(104, "Connection reset by peer"), RuntimeError(by_loader)):
        assert not is_peer_error(error)
        failure = failure_from(error, 1, RankStatus(step=3, phase="data"), tmp_path / "log", "")
        assert failure.kind == "exception" and "Connection reset by peer" in failure.detail


def frame(file: str, function: str) -> str:
    return f'  File "{file}", line 3 in {function}'


def test_terminal_shows_own_calls_of_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torchs = frame("/usr/lib/python3/site-packages/torch/optim/sgd.py", "step")
    lines = [
        frame("<frozen runpy>", "_run_code"),
        *[torchs] * 20,
        frame(f"{tmp_path}/mine.py", "train"),
        torchs,
        frame("/elsewhere/helper.py", "wait"),
        torchs,
        "its loader process 7 (most recent call last):",
        torchs,
        frame(f"{tmp_path}/data.py", "read"),
    ]
    shown = failure_report.stack_of(1, lines, Path("logs/rank_1.log")).splitlines()
    assert shown == [
        "stack of rank 1 (most recent call last):",
        frame("mine.py", "train"),
        frame("/elsewhere/helper.py", "wait"),
        torchs,
        "its loader process 7 (most recent call last):",
        frame("data.py", "read"),
        "(23 frames left out; all are in logs/rank_1.log)",
    ]
    assert failure_report.stack_of(1, [], Path("log")) == ""


def test_an_earlier_failure_is_kept(tmp_path: Path) -> None:
    failure_report.set_aside(tmp_path)
    assert not [*tmp_path.iterdir()], "there was none"
    for text in ('{"kind": "died", "rank": 1}', "{cut o"):
        (tmp_path / failure_report.FILE).write_text(text)
        failure_report.set_aside(tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / failure_report.EARLIER]
    first, second = read_objects(tmp_path / failure_report.EARLIER)
    assert (first["kind"], first["rank"], second["damaged"]) == ("died", 1, "{cut o")
    assert first["time"] > 1.7e9
