"""Samples in tar files, as webdataset writes them, by their numbers: an index says where in which
file each lies."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddp_train.errors import DataError

IMAGES = ("jpg", "jpeg", "png", "webp")
"""Extensions that make the field `image`."""
MORE_BITS = ("I", "I;16", "I;16B")
"""Modes of PIL with one number of 16 bits or more for each pixel."""
INDEX = ".index.npz"
PART = ".part"
"""The index of DIR/a.tar is DIR/a.tar.index.npz; one that is being written ends in .part."""
VERSION = 1
BLOCK = 512
CHUNK = 1 << 20
"""Bytes; tar files consist of blocks."""
OPEN_FILES = 128
"""The most files that a process keeps open; 1,024 are often all that it may."""


@dataclass(frozen=True)
class _Index:
    """Of one tar file. Members are in the order of the file; those of a sample follow each
    other."""

    stamp: np.ndarray
    """[version, size in bytes, time of the last change in ns] of the tar file that it was built
    from."""
    fields: np.ndarray
    """The names of fields, str [k]."""
    members: np.ndarray
    """[sample, field, offset of the content, its bytes] for each member, int64 [m, 4]."""


class TarShards:
    """A map-style data set over .tar files in which the files of a sample follow each other and
    share the name before the first dot: `0001.jpg`, `0001.cls`.

    A sample is a dict with a field for each extension: `image` for .jpg, .jpeg, .png and .webp
    (uint8 [3, height, width]), an int for .cls, text for .txt, what .json holds, an array for .npy,
    bytes for others. A longer extension is a field of that name: `seg.png`, a mask if it has one
    channel. Samples are numbered through the files in the order of their names.

    The index of each file is built once, kept beside it where that can be written, and built anew
    when the size of the file or the time of its last change differs. Contents are read at their
    offsets (pread), so that processes that share an open file do not disturb each other.
    """

    def __init__(self, path: str, only: Sequence[str] = ()) -> None:
        """path: a file, or a pattern with * for several. only: the fields that are read; none: all
        that there are.

        Raises DataError if there is no file, or one that is damaged, compressed, or without a
        field.
        """
        found = glob.glob(path, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
        self.paths = sorted(
            name for name in found if not name.endswith((INDEX, PART))
        )  # DIR/train-* has these too
        if not self.paths:
            raise DataError(
                f"TarShards: no file matches path={path}", "name .tar files, 'DIR/train-*.tar'"
            )
        indexes = [_index_of(shard) for shard in self.paths]
        self.stamps = [tuple(index.stamp.tolist()) for index in indexes]
        self.fields = list(only) or sorted(
            {str(name) for index in indexes for name in index.fields}
        )
        tables = [
            _table(shard, index, self.fields)
            for shard, index in zip(self.paths, indexes, strict=True)
        ]
        self.places = np.concatenate(tables)
        """Offset and bytes of each field of each sample, int64 [samples, fields, 2]."""
        self.ends = np.cumsum([len(table) for table in tables])
        self.files: OrderedDict[int, BinaryIO] = OrderedDict()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = int(np.searchsorted(self.ends, number, side="right"))
        sample = {}
        for field, (offset, size) in zip(self.fields, self.places[number].tolist(), strict=True):
            try:
                sample[field] = decoded(field, self._content(shard, offset, size))
            except (ValueError, EOFError, OSError) as error:
                name = member_name(self.paths[shard], offset)
                raise DataError(
                    f"{self.paths[shard]} at byte {offset} ({name}, sample {number}): cannot be"
                    f" decoded: {error}",
                    "repair the file, or write the shard again",
                ) from error
        return sample

    def __getstate__(self) -> dict[str, Any]:
        """Without open files, for processes that are not forked."""
        return {**vars(self), "files": OrderedDict()}

    def _content(self, shard: int, offset: int, size: int) -> bytes:
        """What a member holds. Raises DataError if the tar file has changed since its index was
        read."""
        file = self._file(shard)
        parts = []
        missing = size
        while missing and (
            part := os.pread(file.fileno(), missing, offset + size - missing)
        ):  # 2 GiB at most at once
            parts.append(part)
            missing -= len(part)
        if (
            _stamp(file) != self.stamps[shard]
        ):  # after the read, so that what was read is what the index knows
            raise DataError(
                f"{self.paths[shard]}: changed since the run opened it", "start the run again"
            )
        if missing:
            raise ValueError(f"{size - missing} of {size} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _file(self, shard: int) -> BinaryIO:
        """An open tar file; the one that was not used for longest is closed if there are many."""
        if shard not in self.files:
            try:
                file = Path(self.paths[shard]).open("rb", buffering=0)  # noqa: SIM115  it stays open
            except OSError as error:
                raise DataError(
                    f"{self.paths[shard]}: {error.strerror or error}", "restore the shard"
                ) from error
            self.files[shard] = file
            while len(self.files) > OPEN_FILES:
                self.files.popitem(last=False)[1].close()
        self.files.move_to_end(shard)
        return self.files[shard]


def decoded(field: str, content: bytes) -> Any:
    """A field of a sample. Raises ValueError, EOFError or OSError if its content is not what its
    name says."""
    kind = field.rpartition(".")[2]
    if field == "image" or kind in IMAGES:
        return _image(content, may_be_mask=field != "image")
    if kind == "cls":
        return int(content)
    if kind == "txt":
        return content.decode()
    if kind == "json":
        return json.loads(content)
    if kind == "npy":
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return content


def _image(content: bytes, may_be_mask: bool) -> Any:
    """uint8 [3, height, width]; or a mask, [1, height, width], of an image with one channel: its
    numbers as they are, int32 if they have more than 8 bits."""
    import torch
    from PIL import Image
    from torchvision import tv_tensors

    try:
        image = Image.open(io.BytesIO(content))
        if may_be_mask and image.mode in ("1", "L", "P", *MORE_BITS):
            kind = np.int32 if image.mode in MORE_BITS else np.uint8
            return tv_tensors.Mask(torch.from_numpy(np.array(image).astype(kind))[None])
        if image.mode in MORE_BITS:  # PIL would cut them off at 255
            raise ValueError(
                f"an image of PIL's mode {image.mode}, whose numbers are no pixels of 0 to 255"
            )
        pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        text = str(error)
        raise ValueError(
            text if "<_io.BytesIO" not in text else "no image format that PIL knows"
        ) from error
    return tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1).contiguous())


def _stamp(file: BinaryIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return VERSION, status.st_size, status.st_mtime_ns


def _index_of(path: str) -> _Index:
    """The index of a tar file: the one beside it, or a new one. Raises DataError if the tar file is
    damaged."""
    beside = Path(path + INDEX)
    with _opened(path) as file:
        stamp = _stamp(file)
        with contextlib.suppress(
            OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile
        ):  # none, or damaged
            with np.load(beside, allow_pickle=False) as held:
                kept = _Index(held["stamp"], held["fields"], held["members"])
            if tuple(kept.stamp.tolist()) == stamp:
                return kept
        index = _built(path, file, stamp)
    part = ""
    try:
        descriptor, part = tempfile.mkstemp(
            PART, f"{beside.name}.", beside.parent
        )  # hosts may share pids, and folders
        with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor
            with contextlib.suppress(PermissionError):  # who may read the shard may read its index
                os.fchmod(descriptor, Path(path).stat().st_mode & 0o666)
            np.savez(file, stamp=index.stamp, fields=index.fields, members=index.members)
        Path(part).replace(beside)
    except OSError:  # a folder that cannot be written: the index is built at each start
        if part:
            Path(part).unlink(missing_ok=True)
    return index


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", "name .tar files that can be read"
        ) from error


def _built(path: str, file: BinaryIO, stamp: tuple[int, int, int]) -> _Index:
    fields: dict[str, int] = {}
    members = []
    keys = set()
    key = None
    for member in _members(path, file):
        folder, _, base = member.name.rpartition("/")
        name, dot, extension = base.partition(".")
        if not name or not dot:
            continue  # of no sample: a README, or what an operating system hides there
        if f"{folder}/{name}" != key:
            key = f"{folder}/{name}"
            if key in keys:
                raise _damaged(
                    path,
                    member.offset,
                    f"the files of {key.lstrip('/')} do not follow each other",
                    _SORT,
                )
            keys.add(key)
        extension = extension.lower()
        field = fields.setdefault("image" if extension in IMAGES else extension, len(fields))
        members.append((len(keys) - 1, field, member.offset_data, member.size))
        if len(members) > 1 and any(
            one[:2] == members[-1][:2] for one in members[-1 - len(fields) : -1]
        ):
            second = f"{member.name} is the second {list(fields)[field]} of its sample"
            raise _damaged(path, member.offset, second, "leave one of them out")
    table = np.array(members, np.int64).reshape(-1, 4)
    return _Index(np.array(stamp, np.int64), np.array(list(fields), np.str_), table)


_SORT = "write it anew with sorted names: tar --sort=name -cf SHARD.tar ..."


def _members(path: str, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The files in a tar file. Raises DataError at the place where it is damaged; tarfile itself
    would take a header that it cannot read for the end."""
    archive = None
    at = 0
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  the file is closed where it was opened
        while (member := archive.next()) is not None:
            at = archive.offset
            archive.members.clear()  # type: ignore[attr-defined]  it would keep all of them
            if member.issparse() or not (member.isfile() or member.isdir()):
                raise _damaged(
                    path, member.offset, f"{member.name} is a link or a sparse file", _SORT
                )
            if member.isfile():
                yield member
    except tarfile.TarError as error:
        with Path(path).open("rb") as start:
            packed = start.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")
        if packed:
            raise _damaged(
                path, 0, "is compressed, so that no place in it can be read", "unpack it: gunzip"
            ) from error
        raise _damaged(path, archive.offset if archive else at, str(error)) from error
    file.seek(at)
    end = file.read(BLOCK)
    if end != bytes(BLOCK):
        raise _damaged(
            path,
            at,
            "no header of a file, and not the end of the archive" if end else "it is cut off here",
        )
    # the end is two blocks of zeros, and padding: one alone may be a header that was lost
    at += BLOCK
    if len(chunk := file.read(BLOCK)) < BLOCK:
        raise _damaged(path, at, "it is cut off here")
    while chunk:
        if content := chunk.lstrip(b"\0"):
            raise _damaged(
                path, at + len(chunk) - len(content), "content behind the end of the archive"
            )
        at += len(chunk)
        chunk = file.read(CHUNK)


def _damaged(
    path: str, offset: int, what: str, remedy: str = "write the shard again, or fetch it again"
) -> DataError:
    return DataError(f"{path} at byte {offset}: {what}", remedy)


def _table(path: str, index: _Index, fields: list[str]) -> np.ndarray:
    """Offset and bytes of the given fields of each sample, int64 [samples, fields, 2]."""
    there = [str(name) for name in index.fields]
    samples = int(index.members[-1, 0]) + 1 if len(index.members) else 0
    table = np.full((samples, len(fields), 2), -1, np.int64)
    for place, field in enumerate(fields):
        of_field = index.members[
            index.members[:, 1] == (there.index(field) if field in there else -1)
        ]
        table[of_field[:, 0], place] = of_field[:, 2:]
    lacking = np.argwhere(table[:, :, 0] < 0)
    if len(lacking):
        sample, place = lacking[0].tolist()
        has = index.members[index.members[:, 0] == sample]
        names = ", ".join(there[field] for field in has[:, 1])
        at = int(has[0, 2])
        raise DataError(
            f"{path} at byte {at} ({member_name(path, at)}): its sample has {names} and no"
            f" {fields[place]}",
            "add it, or name the fields that all samples have, for example data.fields=[image,cls]",
        )
    return table


def member_name(path: str, offset: int) -> str:
    """The name of the file in a tar file whose content begins at `offset`, for messages."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, offset - BLOCK))
            return file.read(100).partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return "?"
