"""Tar files of samples: their index, what is read at a place, and damage with its place."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.data import shard_index, shards
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.data.shard_index import INDEX
from ddp_train.data.shards import TarShards, decode_field
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from tests.support.jobs import config_of, loader_of


def shard(path: Path, numbers: range, **more: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("README"), io.BytesIO())
        for number in numbers:
            image = io.BytesIO()
            Image.new("RGB", (5, 4), (number, 0, 255)).save(image, "PNG")
            values = io.BytesIO()
            np.save(values, np.full(3, number, np.float32))
            mask = io.BytesIO()
            Image.new("L", (5, 4), number).save(mask, "PNG")
            files = {
                "png": image.getvalue(),
                "cls": b"%d\n" % (number % 3),
                "v.npy": values.getvalue(),
            }
            files |= {"seg.png": mask.getvalue(), **more}
            for extension, content in files.items():
                info = tarfile.TarInfo(f"./{number:03}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def test_samples_of_tar_files_have_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path / "a-0.tar", range(5), json=b'{"k": [1, 2]}', txt="\u00e4".encode())
    shard(tmp_path / "a-1.tar", range(5, 9), txt=b"x", json=b"[]")  # another order of fields
    found = TarShards(str(tmp_path / "a-*.tar"))
    assert len(found) == 9 and found.fields == ["cls", "image", "json", "seg.png", "txt", "v.npy"]
    sample = found[6]
    assert (sample["cls"], sample["json"], found[2]["txt"], sample["v.npy"].tolist()) == (
        0,
        [],
        "\u00e4",
        [6.0] * 3,
    )
    assert sample["image"].shape == (3, 4, 5) and sample["image"][:, 0, 0].tolist() == [6, 0, 255]
    pair = as_tensors((sample["image"], sample["seg.png"]))
    assert (
        pair[0].dtype == torch.float32
        and pair[1].unique().tolist() == [6]
        and pair[1].shape == (4, 5)
    )
    monkeypatch.setattr(shard_index, "tarfile", None)
    again = TarShards(str(tmp_path / "a-*.tar"), only=["v.npy"])
    assert [again[n]["v.npy"][0] for n in (0, 4, 5, 8)] == [
        0,
        4,
        5,
        8,
    ], "the index is read from its file"
    monkeypatch.undo()

    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    found.files.clear()
    assert [found[n]["cls"] for n in (8, 0, 7, 1)] == [2, 0, 1, 1] and len(found.files) == 1
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: whole(file, min(size, 50), offset))
    assert found[1]["image"][:, 0, 0].tolist() == [
        1,
        0,
        255,
    ], "the system gives 2 GiB at most at once"
    monkeypatch.undo()
    assert found[7]["cls"] == 1, "and the file stays open"
    shard(tmp_path / "a-1.tar", range(5, 20), txt=b"x", json=b"[]")
    with pytest.raises(DataError, match=r"a-1\.tar: changed since the run opened it"):
        found[7]
    assert len(TarShards(str(tmp_path / "a-*.tar"))) == 20, (
        "and an index of another file is not believed"
    )
    (tmp_path / f"a-0.tar{INDEX}").write_bytes(b"PK damaged")
    (tmp_path / f"a-0.tar{INDEX}.x.part").touch()
    assert len(TarShards(str(tmp_path / "a-*"))) == 20, "an index is no shard"
    assert (tmp_path / f"a-0.tar{INDEX}").stat().st_mode == (tmp_path / "a-0.tar").stat().st_mode
    (tmp_path / f"a-0.tar{INDEX}.x.part").unlink()

    config = config_of(
        World(),
        data={
            "_target_": "ddp_train.data.shards.TarShards",
            "splits": {
                name: {"path": str(tmp_path / f"a-{n}.tar")}
                for n, name in enumerate(("train", "test"))
            },
            "fields": ["image", "cls"],
            "outputs": 3,
            "weights": str(tmp_path / "w.npy"),
        },
        tuning={"num_workers": 2},
        strategy={"name": "single"},
    )
    assert dataclasses.replace(config, mode="evaluate").data.weights, "which need not be there"
    train = open_datasets(dataclasses.replace(config, mode="evaluate")).train
    assert train.dataset.fields == ["image", "cls"], "no other is read"  # pyright: ignore
    train.get_batch(
        np.array([0]), 0
    )  # the file is open before the processes of the loader are forked
    micro_batches = list(BatchPlan(len(train), 2, 1, 3, 0).micro_batches())
    for given in loader_of(train, micro_batches, config.tuning, "cpu"):
        assert (
            given.inputs[:, 0, 0, 0] * 255
        ).round().tolist() == given.micro_batch.indices.tolist()


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    heads = [at for at in range(0, len(content), 512) if content[at : at + 2] == b"./"]
    if kind == "header":
        content[heads[3]] ^= 1
    if kind == "cut":
        del content[heads[4] + 700 :]
    if kind == "cut between files":
        del content[heads[4] :]
    if kind == "cut in its end":
        del content[content.rindex(b"IEND") // 512 * 512 + 1024 :]
    if kind == "lost header":
        content[heads[4] : heads[4] + 512] = bytes(512)
    if kind == "two archives":
        content = bytearray(2 * bytes(content))
    if kind == "no field":
        content[heads[1] + 6 : heads[1] + 9] = b"clx"
        head = content[heads[1] : heads[1] + 512]
        head[148:156] = b" " * 8
        content[heads[1] + 148 : heads[1] + 156] = b"%06o\0 " % sum(head)
    if kind == "image":
        content[heads[0] + 512 : heads[0] + 540] = bytes(28)
    path.write_bytes(gzip.compress(bytes(content)) if kind == "gzip" else bytes(content))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("header", r"a\.tar at byte 3584: neither the header of a file"),
        ("cut", r"a\.tar at byte \d+: unexpected end of data"),
        ("cut between files", r"a\.tar at byte 4608: it is cut off here"),
        ("cut in its end", r"a\.tar at byte \d+: it is cut off here"),
        ("lost header", r"a\.tar at byte 5120: content after the end of the archive"),
        ("two archives", r"a\.tar at byte 20480: content after the end of the archive"),
        ("gzip", r"a\.tar at byte 0: it is compressed"),
        (
            "no field",
            (
                r"a\.tar at byte 1024 \(\./000\.png\): its sample has image, clx, v\.npy, seg\.png"
                r" and no cls"
            ),
        ),
        (
            "image",
            r"a\.tar at byte 1024 \(\./000\.png, sample 0\): cannot be decoded: no image format",
        ),
    ],
)
def test_damage_is_found_with_its_place(kind: str, message: str, tmp_path: Path) -> None:
    damage(shard(tmp_path / "a.tar", range(3)), kind)
    with pytest.raises(DataError, match=message) as caught:
        TarShards(str(tmp_path / "a.tar"), only=["image", "cls"])[0]
    assert caught.value.remedy


def test_images_with_other_numbers_than_pixels() -> None:
    def coded(image: Image.Image) -> bytes:
        held = io.BytesIO()
        image.save(held, "PNG")
        return held.getvalue()

    depth = coded(Image.fromarray(np.array([[40_000, 3]], np.uint16)))
    mask = decode_field("depth.png", depth)
    assert (mask.tolist(), mask.dtype, type(mask).__name__) == (
        [[[40_000, 3]]],
        torch.int32,
        "Mask",
    )
    bits = Image.new("1", (2, 1), 1)
    assert decode_field("seg.png", coded(bits)).tolist() == [[[1, 1]]]
    assert decode_field("image", coded(bits)).unique().tolist() == [255]
    with pytest.raises(
        ValueError, match=r"PIL's mode I.*, whose values may lie outside of 0 to 255"
    ):
        decode_field("image", depth)
    zipped = io.BytesIO()
    np.savez(zipped, np.ones(2))
    with pytest.raises(ValueError, match="magic"):
        decode_field("npy", zipped.getvalue())


def test_shards_that_are_no_set_of_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches path="):
        TarShards(str(tmp_path / "*.tar"))
    shard(tmp_path / "twice.tar", range(2), jpg=b"")
    with pytest.raises(DataError, match=r"\./000\.jpg is the second image of its sample"):
        TarShards(str(tmp_path / "twice.tar"))
    with tarfile.open(tmp_path / "mixed.tar", "w") as archive:
        for name in ("0.cls", "1.cls", "0.txt"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(
        DataError, match="at byte 1024: the files of the sample 0 are not next to each other"
    ):
        TarShards(str(tmp_path / "mixed.tar"))


def test_a_folder_that_cannot_be_written_needs_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(tmp_path / "a.tar", range(2))
    monkeypatch.setattr(
        shard_index.np, "savez", lambda *_, **__: (_ for _ in ()).throw(OSError("read-only"))
    )
    assert len(TarShards(str(tmp_path / "a.tar"))) == 2
    assert os.listdir(tmp_path) == ["a.tar"]  # noqa: PTH208
