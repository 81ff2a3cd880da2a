"""The places of samples in a tar file: an index, built once and kept beside it."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ddp_train.errors import DataError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
"""Extensions that make the field `image`."""
INDEX = ".index.npz"
PART = ".part"
"""The index of DIR/a.tar is DIR/a.tar.index.npz; one that is being written ends in .part."""
VERSION = 1
BLOCK = 512
"""Bytes; tar files consist of blocks."""
CHUNK = 1 << 20
"""Bytes of padding that are read at a time."""
UNPACKERS = {b"\x1f\x8b": "gunzip", b"BZ": "bunzip2", b"\xfd7": "unxz", b"\x28\xb5": "unzstd"}
"""The program that unpacks a file, by its first two bytes."""
FILES_ALONE = (
    "write it again with regular files only: tar --sort=name --dereference --hard-dereference -cf"
    " SHARD.tar ..."
)
SORT = "write it again with sorted names: tar --sort=name -cf SHARD.tar ..."
WRITE_AGAIN = "write the shard again, or fetch it again"


Stamp = tuple[int, int, int]
"""Version of the index, size in bytes and time of the last change in ns of a tar file."""


@dataclass(frozen=True)
class ShardIndex:
    """The index of one tar file.

    Members are in the order of the file; those of a sample follow each other.
    """

    stamp: Stamp
    """The stamp of the tar file that it was built from."""
    fields: list[str]
    """The names of its fields; `members` has their places here."""
    members: np.ndarray
    """[sample, field, offset of the content, its bytes] for each member, int64 [m, 4]."""


def stamp_of(file: BinaryIO) -> Stamp:
    """The stamp of an open tar file."""
    status = os.fstat(file.fileno())
    return VERSION, status.st_size, status.st_mtime_ns


def index_of(path: str) -> ShardIndex:
    """The index of a tar file: the one beside it, or a new one.

    A new one is kept where that can be written.

    Raises DataError if the tar file is damaged.
    """
    index_path = Path(path + INDEX)
    try:
        with Path(path).open("rb") as file:
            stamp = stamp_of(file)
            kept = _load(index_path)
            if kept is not None and kept.stamp == stamp:
                return kept
            index = _IndexBuilder(path, stamp).build(file)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", "name .tar files that can be read"
        ) from error
    _save(index, index_path, Path(path))
    return index


def place_table(path: str, index: ShardIndex, fields: Sequence[str]) -> np.ndarray:
    """Offset and bytes of the given fields of each sample, int64 [samples, fields, 2].

    Raises DataError if a sample lacks one of them.
    """
    samples = int(index.members[-1, 0]) + 1 if len(index.members) else 0
    table = np.full((samples, len(fields), 2), -1, np.int64)
    for place, field in enumerate(fields):
        if field in index.fields:
            is_field = index.members[:, 1] == index.fields.index(field)
            members = index.members[is_field]
            table[members[:, 0], place] = members[:, 2:]
    lacking = np.argwhere(table[:, :, 0] < 0)
    if len(lacking):
        sample, place = lacking[0].tolist()
        members = index.members[index.members[:, 0] == sample]
        available = ", ".join(index.fields[field] for field in members[:, 1])
        offset = int(members[0, 2])
        raise DataError(
            f"{path} at byte {offset} ({member_name(path, offset)}): its sample has {available} and"
            f" no {fields[place]}",
            "add it, or name the fields that all samples have, for example"
            " 'data.fields=[image,cls]'",
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


class _IndexBuilder:
    """Reads a tar file from its beginning to its end."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        self.path = path
        self.stamp = stamp
        self.fields: dict[str, int] = {}
        """Names of fields, and their numbers."""
        self.members: list[tuple[int, int, int, int]] = []
        self.keys: set[str] = set()
        """Folder and name, before the first dot, of each sample."""
        self.key: str | None = None
        """The key of the last sample."""
        self.fields_of_sample: set[int] = set()

    def build(self, file: BinaryIO) -> ShardIndex:
        for member in _members(self.path, file):
            self._add(member)
        table = np.array(self.members, np.int64).reshape(-1, 4)
        return ShardIndex(self.stamp, list(self.fields), table)

    def _add(self, member: tarfile.TarInfo) -> None:
        """Note a file, if it is of a sample. Raises DataError if it is out of place."""
        folder, _, base = member.name.rpartition("/")
        name, dot, extension = base.partition(".")
        if not name or not dot:
            return  # of no sample: a README, or what an operating system hides there
        key = f"{folder}/{name}"
        if key != self.key:
            self._start_sample(key, member)
        extension = extension.lower()
        field_name = "image" if extension in IMAGE_EXTENSIONS else extension
        field = self.fields.setdefault(field_name, len(self.fields))
        if field in self.fields_of_sample:
            problem = f"{member.name} is the second {field_name} of its sample"
            raise _damaged(self.path, member.offset, problem, "leave one of them out")
        self.fields_of_sample.add(field)
        self.members.append((len(self.keys) - 1, field, member.offset_data, member.size))

    def _start_sample(self, key: str, member: tarfile.TarInfo) -> None:
        if key in self.keys:
            problem = f"the files of the sample {key.lstrip('/')} are not next to each other"
            raise _damaged(self.path, member.offset, problem, SORT)
        self.keys.add(key)
        self.key = key
        self.fields_of_sample = set()


def _load(path: Path) -> ShardIndex | None:
    """The index in a file; None if there is none, or a damaged one."""
    try:
        with np.load(path, allow_pickle=False) as held:
            version, size, changed_ns = held["stamp"].tolist()
            return ShardIndex((version, size, changed_ns), held["fields"].tolist(), held["members"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _save(index: ShardIndex, path: Path, shard: Path) -> None:
    """Write an index beside its tar file.

    If the folder cannot be written, it is built at each start.
    """
    part = ""
    try:
        # A new name each time: hosts that share a folder may share numbers of processes too.
        descriptor, part = tempfile.mkstemp(PART, f"{path.name}.", path.parent)
        with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor
            with contextlib.suppress(PermissionError):  # who may read the shard may read its index
                os.fchmod(descriptor, shard.stat().st_mode & 0o666)
            fields = np.array(index.fields, np.str_)
            np.savez(file, stamp=index.stamp, fields=fields, members=index.members)
        Path(part).replace(path)
    except OSError:
        if part:
            Path(part).unlink(missing_ok=True)


def _members(path: str, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The files in a tar file. Raises DataError at the place where it is damaged.

    tarfile itself would take a header that it cannot read for the end.
    """
    archive = None
    end = 0
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  the file is closed where it was opened
        while (member := archive.next()) is not None:
            end = archive.offset
            archive.members.clear()  # type: ignore[attr-defined]  it would keep all of them
            if member.issparse() or not (member.isfile() or member.isdir()):
                problem = f"{member.name} is a link or a sparse file"
                raise _damaged(path, member.offset, problem, FILES_ALONE)
            if member.isfile():
                yield member
    except tarfile.TarError as error:
        unpacker = _unpacker(path)
        if unpacker:
            problem = "it is compressed, but samples are read in random order"
            raise _damaged(path, 0, problem, f"unpack it: {unpacker} {path}") from error
        offset = archive.offset if archive else end
        raise _damaged(path, offset, str(error)) from error
    _check_end(path, file, end)


def _check_end(path: str, file: BinaryIO, end: int) -> None:
    """Raise DataError unless two blocks of zeros, and padding, follow.

    One block alone may be a header that was lost.

    end: where the last member ends.
    """
    file.seek(end)
    first = file.read(BLOCK)
    if not first:
        raise _damaged(path, end, "it is cut off here")
    if first != bytes(BLOCK):
        raise _damaged(path, end, "neither the header of a file nor the end of the archive")
    offset = end + BLOCK
    chunk = file.read(BLOCK)
    if len(chunk) < BLOCK:
        raise _damaged(path, offset, "it is cut off here")
    while chunk:
        content = chunk.lstrip(b"\0")
        if content:
            place = offset + len(chunk) - len(content)
            raise _damaged(path, place, "content after the end of the archive")
        offset += len(chunk)
        chunk = file.read(CHUNK)


def _unpacker(path: str) -> str:
    """The program that unpacks a compressed file; "" for any other file."""
    with Path(path).open("rb") as file:
        return UNPACKERS.get(file.read(2), "")


def _damaged(path: str, offset: int, problem: str, remedy: str = WRITE_AGAIN) -> DataError:
    return DataError(f"{path} at byte {offset}: {problem}", remedy)
