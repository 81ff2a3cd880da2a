"""Devices that sweeps share, and their locks."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from hydra_plugins.ddp_train_pool import _devices
from hydra_plugins.ddp_train_pool._devices import (
    EVERYBODY,
    Devices,
    Gpu,
    Locks,
    PoolError,
    selected_gpus,
)
from hydra_plugins.ddp_train_pool.launcher import PoolLauncher

GPUS = [Gpu("GPU-a1", "H200"), Gpu("GPU-b2", "H200"), Gpu("GPU-c3", "H200", ("MIG-c", "MIG-d"))]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a1", "GPU-b2", "MIG-c", "MIG-d"]),
        ("2, 0", ["MIG-c", "GPU-a1"]),
        ("1,9,0", ["GPU-b2"]),
        ("GPU-b", ["GPU-b2"]),
        ("GPU-c3,MIG-c,MIG-d", ["MIG-c", "MIG-d"]),
        ("MIG-elsewhere,0,0", ["MIG-elsewhere", "GPU-a1"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_visible_devices_allows(
    visible: str | None, expected: list[str]
) -> None:
    assert selected_gpus(visible, GPUS) == expected


def test_devices_by_number_are_those_by_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or two sweeps would lock one GPU under two names."""
    monkeypatch.setattr(_devices, "present_gpus", lambda: GPUS[:2])
    monkeypatch.setattr(
        _devices, "cuda_order", lambda: pytest.fail("GPUs are alike: nobody needs to ask CUDA")
    )
    launcher = PoolLauncher(
        gpus_per_trial=1, devices=["1", "GPU-a1", "GPU-b2"], lock_folder="unused"
    )
    monkeypatch.setattr(_devices, "Locks", lambda _: None)
    assert launcher.open_devices().names == ["GPU-b2", "GPU-a1"]
    with pytest.raises(
        PoolError, match=r"hydra\.launcher\.devices: there is no GPU 2; this host has 2"
    ):
        _devices.asked_gpus(["0", "2"])
    monkeypatch.setattr(_devices, "present_gpus", list)
    assert _devices.asked_gpus(["a", "b", "a"]) == ["a", "b"], "without a driver they are names"


def test_where_gpus_differ_their_numbers_are_those_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's default order is not that of the bus, which NVML has: the faster one is first."""
    monkeypatch.setattr(
        _devices, "present_gpus", lambda: [Gpu("GPU-t4", "T4"), Gpu("GPU-h2", "H200")]
    )
    monkeypatch.setattr(_devices, "cuda_order", lambda: ["GPU-h2", "GPU-t4"])
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert (_devices.visible_gpus("0"), _devices.asked_gpus(["1"])) == (["GPU-h2"], ["GPU-t4"])
    assert _devices.visible_gpus(None) == ["GPU-t4", "GPU-h2"], "all: no number is asked for"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert _devices.visible_gpus("0") == ["GPU-t4"]
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(_devices, "cuda_order", list)
    with pytest.raises(PoolError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs"):
        _devices.visible_gpus("0")
    assert _devices.visible_gpus("GPU-h") == ["GPU-h2"]


@pytest.mark.skipif(not _devices.present_gpus(), reason="needs a GPU")
def test_cuda_itself_knows_the_gpus_that_the_driver_lists() -> None:
    assert sorted(_devices.cuda_order()) == sorted(
        gpu.names[0] for gpu in _devices.present_gpus() or ()
    )


def test_a_folder_of_locks_is_not_replaced_by_another_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found none, and both make it."""
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    mine = Locks(tmp_path / "locks")
    theirs = Locks(tmp_path / "locks")
    assert mine.take("a") is not None and theirs.take("a") is None
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == EVERYBODY


def test_device_is_held_until_all_heirs_have_ended(tmp_path: Path) -> None:
    mine = Locks(tmp_path / "locks")
    theirs = Locks(tmp_path / "locks")
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == EVERYBODY
    lock = mine.take("GPU-a/../b")
    assert (
        lock is not None and theirs.take("GPU-a/../b") is None and theirs.take("GPU-c") is not None
    )
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    os.close(lock)
    assert theirs.take("GPU-a/../b") is None, "the child has it"
    holder.kill()
    holder.wait()
    assert theirs.take("GPU-a/../b") is not None
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {
        "GPU-a_.._b.lock",
        "GPU-c.lock",
    }


def test_foreign_files_in_place_of_locks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PoolError, match=r"hydra\.launcher\.lock_folder=.*/link: .*; use another"):
        Locks(tmp_path / "link")
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(PoolError, match="other users may remove files in it, since its sticky bit"):
        Locks(tmp_path / "real")
    locks = Locks(tmp_path / "own")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "own/a.lock").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "own/b.lock")
    for name in "ab":
        with pytest.raises(PoolError, match=rf"{name}\.lock"):
            locks.take(name)


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    locks = Locks(tmp_path / "locks")
    first = locks.take("a")
    (tmp_path / "locks/a.lock").unlink()
    assert first is not None and locks.take("a") is not None, "of the file that is there now"


def test_devices_are_offered_all_or_none(tmp_path: Path) -> None:
    pool = Devices(["a", "b", "c"], 2, 1, tmp_path / "locks")
    assert pool.at_once == 1
    grant = pool.take(set())
    assert grant is not None and grant.names == ["a", "b"]
    assert pool.take(set()) is None, "one is left, and two are needed"
    grant.release()
    second = pool.take({"a"})
    assert second is not None and second.names == ["b", "c"]
    with pytest.raises(
        PoolError, match=r"gpus_per_trial=4: the number of devices is 3; use .*gpus_per_trial=3$"
    ):
        Devices(["a", "b", "c"], 4, 1, tmp_path / "locks")
