"""Files of tokens, mapped into memory."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_train.errors import DataError

HELD_AS = {"uint8": torch.uint8, "uint16": torch.int16, "uint32": torch.int32}
"""torch gathers no uint16 and uint32 on GPUs. The same bits, widened to int64 and masked, are the
number."""
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""First number of llm.c's files: the version that follows, and the type of the tokens (GPT-2's,
Llama 3's)."""
HEADER_NUMBERS = 256
"""int32 each: magic, version, number of tokens, zeros."""
HEADER_BYTES = 4 * HEADER_NUMBERS
TEST_NAMES = {"val", "valid", "validation", "test"}
"""A .bin file with one of these in its name is of the test split."""


def bin_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to train on and to test with.

    In a folder those with `val` or `test` in their names test.
    """
    if path.is_file():
        return [path], []
    train = []
    test = []
    for file in sorted(path.rglob("*.bin")):
        parts_of_name = set(re.split(r"[^a-z]+", file.name.lower()))
        if TEST_NAMES & parts_of_name:
            test.append(file)
        else:
            train.append(file)
    return train, test


def read_bin(path: Path, dtype: str) -> Tensor:
    """The tokens of a .bin file, mapped.

    With llm.c's header its type is known; without one, as nanoGPT writes it, the file is a plain
    array.

    dtype: of a plain array: uint16 or uint32, little-endian.

    Raises DataError if header and size contradict each other.
    """
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_NUMBERS)
    if len(header) < HEADER_NUMBERS or int(header[0]) not in HEADERS:
        if size % np.dtype(dtype).itemsize:
            raise DataError(
                f"{path} has {size:,} bytes, not a multiple of the size of a token of"
                f" data.dtype={dtype}",
                "set data.dtype to the type that the file was written with, or write the file"
                " again",
            )
        return map_file(path, dtype)
    version, dtype = HEADERS[int(header[0])]
    if header[1] != version:
        raise DataError(
            f"{path} has llm.c's header, version {header[1]}, not {version}",
            "write it with a newer llm.c",
        )
    tokens_in_header = int(header[2])
    tokens = (size - HEADER_BYTES) // np.dtype(dtype).itemsize
    if tokens != tokens_in_header:
        raise DataError(
            f"{path} holds {tokens:,} tokens, but its header says {tokens_in_header:,}",
            "fetch or write the file again",
        )
    return map_file(path, dtype, HEADER_BYTES)


def map_file(path: Path, dtype: str, skip_bytes: int = 0) -> Tensor:
    """A file as a tensor [tokens], mapped into memory.

    Nothing is read before it is used, and all processes of a host share the pages.

    dtype: of the tokens, little-endian; the tensor has the type that holds it, see HELD_AS.

    Raises DataError if the file is empty or cannot be opened.
    """
    little_endian = np.dtype(dtype).newbyteorder("<")
    try:
        content = np.memmap(path, dtype=little_endian, mode="r", offset=skip_bytes)
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.path: {path} cannot be mapped: {error}", "check that it is a file of tokens"
        ) from error
    if dtype != "uint8":
        content = content.view(content.dtype.str.replace("u", "i"))
    with warnings.catch_warnings():  # torch warns that the memory is read-only; nobody writes there
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(content)


def largest_number(tokens: Tensor) -> int:
    """The largest number that the type of these tokens can hold: a mask of its bits."""
    return (1 << 8 * tokens.itemsize) - 1
