"""Checkpoints on real file systems: written whole or not at all, trusted only when verified, the
right ones kept."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ddp_train.checkpoints import reader
from ddp_train.checkpoints import writer as writing
from ddp_train.checkpoints.layout import digest_of, newest_step, places
from ddp_train.checkpoints.reader import (
    defect_of,
    find,
    load_checkpoint,
    load_model,
    load_training,
)
from ddp_train.checkpoints.training_state import copies_of, copy_of
from ddp_train.checkpoints.writer import Snapshot, Writer, save_checkpoint, write_checkpoint
from ddp_train.config.freeze import freeze
from ddp_train.engine.selection import Selection
from ddp_train.errors import ConfigError, DataError, StateError, WriteError
from ddp_train.options.schema import Config
from ddp_train.plain_state import problem_of_extra_state
from ddp_train.runs import summary
from ddp_train.tensor_tree import map_tensors


def snapshot(step: int, **manifest: Any) -> Snapshot:
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    training = {"optimizer": {"state": {0: {"step": torch.tensor(float(step))}}}, "scaler": {}}
    return Snapshot(step, dict(model.state_dict()), training, manifest)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    one = snapshot(7, answer=42)
    path = write_checkpoint(tmp_path, one)
    assert find("auto", tmp_path) == path == tmp_path / "checkpoints/step_00000007"
    model = nn.Linear(3, 2)
    load_model(path, model)
    assert torch.equal(model.weight, one.model["weight"])
    assert load_training(path)["optimizer"]["state"][0]["step"] == 7
    manifest = reader.read_manifest(path)
    assert (manifest["step"], manifest["answer"]) == (7, 42)


def test_every_flipped_bit_is_caught(tmp_path: Path) -> None:
    """200 of 200: any bit of any file of a checkpoint, and of no other does the run go on."""
    write_checkpoint(tmp_path, snapshot(1))
    path = write_checkpoint(tmp_path, snapshot(2))
    draw = random.Random(5)
    seed = 5
    files = sorted(path.iterdir())
    assert len(files) == 3
    for number in range(200):
        file = files[number % 3]
        content = bytearray(file.read_bytes())
        place = draw.randrange(len(content))
        bit = draw.randrange(8)
        content[place] ^= 1 << bit
        before = file.read_bytes()
        _ = file.write_bytes(content)
        assert find("auto", tmp_path) == tmp_path / "checkpoints/step_00000001", (
            seed,
            number,
            file,
            place,
            bit,
        )
        file.write_bytes(before)
    assert find("auto", tmp_path) == path


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt", "manifest.json"])
def test_truncated_and_missing_files_are_passed_over(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write_checkpoint(tmp_path, snapshot(1))
    path = write_checkpoint(tmp_path, snapshot(2))
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[: len(content) // 2])
    assert find("auto", tmp_path) == good
    (path / file).unlink()
    assert find("auto", tmp_path) == good
    assert f"is skipped: {file} cannot be " in caplog.messages[-1]
    shutil.rmtree(good)
    with pytest.raises(DataError, match="holds no valid checkpoint"):
        find("auto", tmp_path)


def test_a_folder_of_runs_is_told_from_a_run(tmp_path: Path) -> None:
    for name in ("2026-01-01", "2026-01-02"):
        write_checkpoint(tmp_path / name, snapshot(1))
    with pytest.raises(DataError) as refused:
        find(str(tmp_path), tmp_path)
    assert refused.value.remedy == f"give a run in that folder, for example {tmp_path}/2026-01-02"


def test_weights_that_are_nan_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever wrote them: the run went on from there, and completed without a score."""
    good = write_checkpoint(tmp_path, snapshot(1))
    model = {"weight": torch.tensor([1.0, math.nan]), "norm.running_var": torch.ones(2)}
    write_checkpoint(tmp_path, Snapshot(2, model, {}, {"trained": ["weight"]}))
    assert find("auto", tmp_path) == find(str(tmp_path), tmp_path / "other") == good
    assert "step_00000002 is skipped: weight is NaN in model.safetensors" in caplog.messages[0]
    skipped = {
        "weight": torch.ones(2),
        "unset": torch.tensor([math.nan]),
        "norm.running_var": torch.tensor([math.nan]),
    }
    kept = write_checkpoint(tmp_path, Snapshot(3, skipped, {}, {"trained": ["weight"]}))
    assert find("auto", tmp_path) == kept
    shutil.rmtree(good)
    shutil.rmtree(kept)
    with pytest.raises(DataError, match="holds no valid checkpoint"):
        find("auto", tmp_path)


def test_a_run_without_its_checkpoints_says_it_starts_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find("auto", tmp_path) is None and not caplog.messages
    lines = [
        '{"kind": "train", "step": 3}',
        '{"kind": "test", "step": 6}',
        "damaged",
        '{"kind": "tr',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert find("auto", tmp_path) is None
    assert caplog.messages == [
        f"{tmp_path} had reached step 6 but holds no checkpoint; starting from step 0"
    ]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Of the same step once more: the one that was there is aside, the new one has not taken its
    place."""
    only = write_checkpoint(tmp_path, snapshot(4))
    only.rename(only.with_name("step_00000004.part-corrupt-123"))
    (tmp_path / "checkpoints" / "step_00000004.part-456").mkdir()
    Writer(tmp_path, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000004"]
    assert find("auto", tmp_path) == only


def test_leftovers_of_a_torn_save_are_removed(tmp_path: Path) -> None:
    good = write_checkpoint(tmp_path, snapshot(1))
    for name in ("step_00000002.part-123", "step_00000001.part-old"):
        shutil.copytree(good, good.with_name(name))
    assert find("auto", tmp_path) == good
    Writer(tmp_path, keep=2)
    assert names(tmp_path) == ["step_00000001"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    by = Selection("test", better={"accuracy": "max"})
    writer = Writer(tmp_path, 2, by)
    for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.9, 0.8, 0.6], start=1):
        writer.submit(partial(snapshot, step, test={"loss": 1.0, "accuracy": accuracy}))
    writer.finish()
    assert names(tmp_path) == ["best", "step_00000002", "step_00000005", "step_00000006"]
    regression = Writer(tmp_path / "other", 1, by)
    for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
        regression.submit(partial(snapshot, step, test={"loss": loss, "accuracy": None}))
    regression.finish()
    assert names(tmp_path / "other") == ["best", "step_00000002", "step_00000003"]


def test_a_checkpoint_that_stays_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An immutable file stands for what else cannot go: NFS's .nfs files, those of another user."""
    writer = Writer(tmp_path, keep=1)
    save(writer, 1)
    held = tmp_path / "checkpoints/step_00000001/model.safetensors"
    if subprocess.run(["chattr", "+i", held], capture_output=True).returncode:
        pytest.skip("chattr needs root and a file system that knows it")
    aside = held.parent.with_name("step_00000001.part-old") / held.name
    try:
        save(writer, 2)
        save(writer, 3)
        assert names(tmp_path) == ["step_00000001.part-old", "step_00000003"]
        again = Writer(tmp_path, keep=1)
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            f"{aside.parent} cannot be removed"
        ] * 2, "once by each writer"
    finally:
        subprocess.run(["chattr", "-i", held if held.exists() else aside], check=True)
    save(again, 4)
    assert names(tmp_path) == ["step_00000004"]


def test_a_checkpoint_behind_a_link_is_unlinked(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=1)
    save(writer, 1)
    place = tmp_path / "checkpoints/step_00000001"
    elsewhere = tmp_path / "elsewhere"
    place.rename(elsewhere).joinpath("kept").touch()
    place.symlink_to(elsewhere)
    save(writer, 2)
    assert names(tmp_path) == ["step_00000002"] and (elsewhere / "kept").exists()


def save(writer: Writer, step: int) -> None:
    writer.submit(lambda: snapshot(step))
    writer.finish()


def test_only_what_is_named_as_a_checkpoint_counts(tmp_path: Path) -> None:
    good = write_checkpoint(tmp_path, snapshot(1))
    for name in ("step_8_backup", "step_abcdefgh", "step_00000009x", "step_0000009"):
        shutil.copytree(good, good.with_name(name))
    assert find("auto", tmp_path) == good and newest_step(tmp_path) == 1
    save(Writer(tmp_path, keep=1), 2)
    assert names(tmp_path)[0] == "step_00000002" and len(names(tmp_path)) == 5, "the others stay"


def test_a_file_named_as_a_checkpoint_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write_checkpoint(tmp_path, snapshot(1))
    stray = good.with_name("step_00000099")
    stray.write_text("not mine to rename")
    assert places(tmp_path) == [good] and find("auto", tmp_path) == good
    save(Writer(tmp_path, keep=1), 2)
    assert (
        names(tmp_path) == ["step_00000002", "step_00000099"]
        and stray.is_file()
        and not caplog.text
    )


def test_a_manifest_with_odd_entries_is_a_defect(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, snapshot(1))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["trained"] = 7
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))
    with pytest.raises(DataError, match="no valid checkpoint"):
        find("auto", tmp_path)


def test_a_disk_that_stays_full_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing: list[OSError | None] = [OSError(28, "No space left on device")]

    def full(archive: object, place: Path) -> None:
        """As torch.save: its error comes while that of the disk is handled."""
        if failing[0]:
            try:
                raise failing[0]
            except OSError:
                text = "[enforce fail at inline_container.cc:671] . unexpected pos 64 vs 0"
                raise RuntimeError(text)  # noqa: B904
        whole(archive, place)

    whole = torch.save
    monkeypatch.setattr(torch, "save", full)
    writer = Writer(tmp_path, keep=1)

    def warnings(step: int) -> list[str]:
        caplog.clear()
        writer.submit(lambda: snapshot(step))
        writer.wait()
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    (first,) = warnings(1)
    assert "step_00000001: No space left on device (" in first and "enforce" not in first
    assert not warnings(2)
    failing[0] = OSError(30, "Read-only file system")
    assert len(warnings(3)) == 1, "another cause"
    failing[0] = None
    assert not warnings(4)
    failing[0] = OSError(30, "Read-only file system")
    assert len(warnings(5)) == 1, "again, since one has been written meanwhile"


def test_limit_of_file_size_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cut_off(archive: object, place: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", cut_off)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    writer = Writer(tmp_path, keep=1)
    writer.submit(lambda: snapshot(1))
    with pytest.raises(WriteError) as caught:
        writer.finish()
    assert "files may have at most 10 bytes (ulimit -f), and about" in str(caught.value)
    assert caught.value.remedy == "raise the limit before the start: ulimit -f unlimited"


def test_a_newer_one_is_verified_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, keep=1)
    writer.submit(lambda: snapshot(1))
    writer.finish()
    whole = writing.write_checkpoint

    def spoiling(run_dir: Path, snapshot: Snapshot, *more: Any) -> Path:
        path = whole(run_dir, snapshot, *more)
        (path / reader.MODEL).write_bytes(b"\0" * (path / reader.MODEL).stat().st_size)
        return path

    monkeypatch.setattr(writing, "write_checkpoint", spoiling)
    writer.submit(lambda: snapshot(2))
    with pytest.raises(WriteError, match="was corrupt when it was read back"):
        writer.finish()
    assert find("auto", tmp_path) == tmp_path / "checkpoints/step_00000001"


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    whole = writing.write_checkpoint

    def slow(run_dir: Path, snapshot: Snapshot, *more: Any) -> Path:
        assert held.wait(10)
        return whole(run_dir, snapshot, *more)

    monkeypatch.setattr(writing, "write_checkpoint", slow)
    state = {"weight": torch.zeros(3)}
    writer = Writer(tmp_path, keep=2)
    writer.submit(lambda: Snapshot(1, map_tensors(copy_of, state), {}, {}))
    state["weight"] += 1  # the next step, while the disk is busy
    held.set()
    writer.finish()
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = torch.ones(3)
    load_model(tmp_path / "checkpoints/step_00000001", model)
    assert model.weight.tolist() == [0, 0, 0], "the state of its step, not of a later one"


def test_what_is_no_matter_of_the_disk_is_raised_at_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2)
    writer.submit(lambda: snapshot(1, unwritable={1, 2}))
    with pytest.raises(TypeError):
        writer.submit(lambda: snapshot(2))


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """A real file system of its own; root ignores permissions, but not this."""
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_not_a_mistake_in_the_config(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        with contextlib.suppress(OSError):
            (disk / "fill").write_bytes(bytes(100_000))
        with pytest.raises(
            ConfigError, match=r"\(No space left on device\); free some space"
        ) as full:
            freeze(Config(run_dir=str(disk)))
        assert full.value.exit_code == WriteError.exit_code
    with pytest.raises(ConfigError, match="use another folder") as refused:
        freeze(Config(run_dir="/proc/nowhere"))
    assert refused.value.exit_code == 2


def test_full_disk_keeps_the_old_checkpoint_and_retries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "size=400k") as disk:
        writer = Writer(disk, keep=1)
        writer.submit(lambda: snapshot(1))
        writer.finish()
        big = Snapshot(2, {"weight": torch.zeros(200_000)}, {}, {})
        writer.submit(lambda: big)
        with pytest.raises(
            WriteError, match=r"step 2 cannot be written .*bytes free, about 800,000 needed"
        ):
            writer.finish()
        assert names(disk) == ["step_00000001"], "nothing half written is left"
        assert find("auto", disk) == disk / "checkpoints/step_00000001"
        assert "training continues" in caplog.text
        writer.submit(lambda: snapshot(3))
        writer.finish()
        assert names(disk) == ["step_00000003"]


def test_a_read_only_disk_is_a_write_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=400k") as disk:
        path = write_checkpoint(disk, snapshot(1))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(WriteError, match="Read-only file system"):
            write_checkpoint(disk, snapshot(2))
        assert find("auto", disk) == path


def test_a_summary_that_cannot_be_written_is_a_write_error(tmp_path: Path) -> None:
    """The disk was full after the last checkpoint: exit code 70 and a traceback."""
    (tmp_path / "summary.json.part").mkdir()
    with pytest.raises(WriteError, match=r"summary\.json cannot be written: .*Is a directory"):
        summary.write(tmp_path, {"status": "completed"})


def test_an_unwritable_folder_is_found_before_the_first_step(tmp_path: Path) -> None:
    Writer(tmp_path, keep=1)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(WriteError, match=r"no checkpoint can be written to .*: Not a directory"):
        Writer(tmp_path, keep=1)
    with small_disk(tmp_path / "disk", "size=400k") as disk:
        write_checkpoint(disk, snapshot(1))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(
            WriteError, match=r"no checkpoint can be written to .*: Read-only file system"
        ):
            Writer(disk, keep=1)


def test_a_pickle_with_code_is_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = write_checkpoint(tmp_path, snapshot(1))
    path = write_checkpoint(tmp_path, snapshot(2))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"optimizer": Evil()}, path / reader.TRAINING)
    manifest = json.loads((path / writing.MANIFEST).read_text())
    manifest.pop("sha256")  # somebody who can write there can make the digests fit
    content = (path / reader.TRAINING).read_bytes()
    manifest["files"][reader.TRAINING] = {
        "bytes": len(content),
        "sha256": reader.sha256_of(path / reader.TRAINING),
    }
    manifest["sha256"] = digest_of(manifest)
    (path / writing.MANIFEST).write_text(json.dumps(manifest))
    assert find("auto", tmp_path) == older
    defect = (
        "training.pt cannot be loaded by torch.load(weights_only=True): it is damaged, or holds"
    )
    assert f"step_00000002 is skipped: {defect}" in caplog.text
    with pytest.raises(DataError, match=re.escape(defect)):
        load_training(path)
    shutil.rmtree(older)
    with pytest.raises(DataError, match="holds no valid checkpoint"):
        find("auto", tmp_path)
    assert not (tmp_path / "ran").exists()


class WithExtraState(nn.Module):
    """A layer that keeps a dict of numbers and a text beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra: Any = {"steps": 3, "name": "of layers"}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = WithExtraState()
    path = save_checkpoint(tmp_path, 1, model.state_dict(), {"epoch": 2})
    assert defect_of(path) is None
    other = WithExtraState()
    other.extra = None
    load_model(path, other)
    assert other.extra == model.extra
    assert torch.equal(other.layer.weight, model.layer.weight)
    found = load_checkpoint(tmp_path)
    assert found
    assert found[1]["_extra_state"] == model.extra
    assert found[2] == {"epoch": 2}


def test_extra_state_that_is_no_plain_data_is_named() -> None:
    model = WithExtraState()
    assert problem_of_extra_state(model) == ""
    model.extra = Path("a")
    assert "the result of get_extra_state for _extra_state is not plain" in problem_of_extra_state(
        model
    )


def test_extra_state_takes_numbers_of_numpy(tmp_path: Path) -> None:
    model = WithExtraState()
    model.extra = {"mean": np.float32(0.5)}
    found = load_checkpoint(save_checkpoint(tmp_path, 1, model.state_dict(), {}).parents[1])
    assert found and found[1]["_extra_state"] == {"mean": 0.5}
    model.extra = {"mean": np.ones(2)}
    with pytest.raises(StateError, match=r"for _extra_state is not plain data: \['mean'\] is a nd"):
        copies_of(model.state_dict())


def test_tied_weights_are_saved_under_each_name(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    weights = {"embedding": tied, "head": tied, "part": tied[:2]}
    path = save_checkpoint(tmp_path, 1, weights, {})
    saved = load_file(path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
