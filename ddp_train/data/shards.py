"""Samples in tar files, as webdataset writes them, by their numbers."""

from __future__ import annotations

import errno
import glob
import io
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddp_train.data.image_files import (
    OVER_8_BITS,
    NotPixelsError,
    decode_image,
    gray_levels,
    in_mode,
    is_wide,
    pixels_of,
)
from ddp_train.data.shard_index import (
    IMAGE_EXTENSIONS,
    INDEX,
    PART,
    index_of,
    member_name,
    place_table,
    stamp_of,
)
from ddp_train.errors import DataError

MASK_MODES = ("1", "L", "P")
"""Modes of PIL with one number of 8 bits or less for each pixel."""
OPEN_FILES = 128
"""The most files that a process keeps open; 1,024 are often all that it may."""


class TarShards:
    """A map-style data set over .tar files as webdataset writes them.

    The files of a sample follow each other, and share the name before the first dot: `0001.jpg`,
    `0001.cls`.

    A sample is a dict with a field for each extension: `image` for .jpg, .jpeg, .png and .webp
    (uint8 [3, height, width]), an int for .cls, text for .txt, what .json holds, an array for .npy,
    bytes for others. A longer extension is a field of that name: `seg.png`, a mask if it has one
    channel. Samples are numbered through the files in the order of their names.

    The index of each file is built once, kept beside it where that can be written, and built anew
    when the size of the file or the time of its last change differs. Contents are read at their
    offsets (pread), so that processes that share an open file do not disturb each other.
    """

    def __init__(self, path: str, only: Sequence[str] = ()) -> None:
        """Reads or builds the indexes.

        path: a file, or a pattern with * for several.
        only: the fields that are read; none: all that there are.

        Raises DataError if there is no file, or one that is damaged, compressed, or without a
        field.
        """
        matches = glob.glob(path, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
        # DIR/train-* matches indexes too.
        self.paths = sorted(name for name in matches if not name.endswith((INDEX, PART)))
        if not self.paths:
            raise DataError(
                f"TarShards: no file matches path={path}", "name .tar files, 'DIR/train-*.tar'"
            )
        indexes = [index_of(shard) for shard in self.paths]
        self.stamps = [index.stamp for index in indexes]
        self.fields = list(only) or sorted({name for index in indexes for name in index.fields})
        tables = [
            place_table(shard, index, self.fields)
            for shard, index in zip(self.paths, indexes, strict=True)
        ]
        self.places = np.concatenate(tables)
        """Offset and bytes of each field of each sample, int64 [samples, fields, 2]."""
        self.ends = np.cumsum([len(table) for table in tables])
        self.files: OrderedDict[int, BinaryIO] = OrderedDict()
        """Open tar files, the one that was not used for longest first."""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = int(np.searchsorted(self.ends, number, side="right"))
        sample = {}
        for field, (offset, size) in zip(self.fields, self.places[number].tolist(), strict=True):
            try:
                sample[field] = decode_field(field, self._content(shard, offset, size))
            except NotPixelsError as error:
                where = self._place(shard, offset, number)
                raise DataError(f"{where}: {error}", OVER_8_BITS) from error
            except (ValueError, EOFError, OSError) as error:
                raise DataError(
                    f"{self._place(shard, offset, number)}: cannot be decoded: {error}",
                    "repair the file, or write the shard again",
                ) from error
        return sample

    def _place(self, shard: int, offset: int, number: int) -> str:
        """The place of a member, for messages."""
        path = self.paths[shard]
        return f"{path} at byte {offset} ({member_name(path, offset)}, sample {number})"

    def __getstate__(self) -> dict[str, Any]:
        """The state without open files, for processes that are not forked."""
        return {**vars(self), "files": OrderedDict()}

    def _content(self, shard: int, offset: int, size: int) -> bytes:
        """The content of a member.

        Raises DataError if the tar file has changed since its index was read, ValueError if it is
        cut off.
        """
        file = self._file(shard)
        parts = []
        missing = size
        while missing:
            # 2 GiB at most at once.
            part = os.pread(file.fileno(), missing, offset + size - missing)
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        # After the read, so that what was read is what the index knows.
        if stamp_of(file) != self.stamps[shard]:
            raise DataError(
                f"{self.paths[shard]}: changed since the run opened it", "start the run again"
            )
        if missing:
            raise ValueError(f"{size - missing} of {size} bytes")
        return b"".join(parts)

    def _file(self, shard: int) -> BinaryIO:
        """An open tar file; the one that was not used for longest is closed if there are many."""
        if shard not in self.files:
            try:
                self.files[shard] = Path(self.paths[shard]).open("rb", buffering=0)  # noqa: SIM115  it stays open
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise  # a limit of the host: its report has the remedy
                remedy = "restore the shard"
                if isinstance(error, PermissionError):
                    remedy = f"chmod +r {self.paths[shard]}"
                raise DataError(
                    f"{self.paths[shard]}: {error.strerror or error}", remedy
                ) from error
            while len(self.files) > OPEN_FILES:
                _, unused = self.files.popitem(last=False)
                unused.close()
        self.files.move_to_end(shard)
        return self.files[shard]


def decode_field(field: str, content: bytes) -> Any:
    """A field of a sample.

    Raises ValueError, EOFError or OSError if its content is not what its name says.
    """
    kind = field.rpartition(".")[2]
    if field == "image" or kind in IMAGE_EXTENSIONS:
        return _decode_image(content, may_be_mask=field != "image")
    match kind:
        case "cls":
            return int(content)
        case "txt":
            return content.decode()
        case "json":
            return json.loads(content)
        case "npy":
            return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return content


def _decode_image(content: bytes, may_be_mask: bool) -> Any:
    """An image, uint8 [3, height, width], or a mask, [1, height, width].

    A mask has one channel; its numbers stay as they are, int32 if they have more than 8 bits.
    """
    import torch
    from torchvision import tv_tensors

    image = decode_image(content)
    if may_be_mask and image.mode != "F" and (image.mode in MASK_MODES or is_wide(image.mode)):
        dtype = np.int32 if is_wide(image.mode) else np.uint8
        numbers = np.array(image).astype(dtype) // gray_levels(content)
        return tv_tensors.Mask(torch.from_numpy(numbers)[None])
    return tv_tensors.Image(pixels_of(in_mode(image, "RGB")).contiguous())
