"""The text files of a corpus, and which of them test."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.corpus.token_files import map_file
from ddp_train.errors import DataError

NOT_LIBRARY = re.compile(
    r"(test|tests|idle_test|(site|dist)-packages|__pycache__|config-.*|_sysconfigdata.*|encodings|pydoc_data)$"
)
"""Folders and files below Python's standard library that are no part of it, hold its tests, differ
by machine, or are tables rather than code: character sets, and the manual as one string."""
LONGEST_LINE = 10_000
"""Bytes in which the end of a line is looked for."""


class Document(NamedTuple):
    """A file of a corpus."""

    name: str
    content: Tensor
    """uint8 [bytes]."""


def standard_library() -> list[Path]:
    """The .py files of Python's own standard library without its tests, in order of their names."""
    root = _library_root()
    files = []
    for folder, inner, names in os.walk(root):
        # Never into 100,000 files of site-packages.
        inner[:] = [name for name in inner if not NOT_LIBRARY.match(name)]
        for name in names:
            if name.endswith(".py") and not NOT_LIBRARY.match(name):
                files.append(Path(folder, name))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_documents(path: str | None, glob: str) -> list[Document]:
    """The files of a corpus in order of their names.

    path: a file, or a folder; None: the standard library.
    glob: which files of the folder.

    Raises DataError if there are none, or if all are empty.
    """
    if path is None:
        root = _library_root()
        files = standard_library()
    elif Path(path).is_file():
        file = Path(path)
        return [Document(file.name, map_file(file, "uint8"))]
    else:
        root = Path(path)
        files = sorted(file for file in root.rglob(glob) if file.is_file())
    documents = []
    for file in files:
        content = np.fromfile(file, np.uint8)
        if len(content):
            name = file.relative_to(root).as_posix()
            documents.append(Document(name, torch.from_numpy(content)))
    if not documents:
        raise DataError(
            f"data.path={path}: no file with content matches data.glob={glob}",
            "use another data.glob, or a data.path with text",
        )
    return documents


def split_documents(
    documents: Sequence[Document], test_part: float
) -> tuple[list[Document], list[Document]]:
    """Training and test documents, in their order: the same for every seed, process and machine.

    Whole documents test, in an order keyed by their names, as long as they fit into the part. Where
    none fits, as with one file, the end of the corpus is cut off, behind an end of line if there is
    one.

    test_part: of the bytes, above 0 and below 1.
    """
    test_bytes = test_part * sum(len(document.content) for document in documents)
    names = _names_that_fit(documents, test_bytes)
    if not names:
        return _cut_off_end(documents, test_bytes)
    train = [document for document in documents if document.name not in names]
    test = [document for document in documents if document.name in names]
    return train, test


def _library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _names_that_fit(documents: Sequence[Document], room: float) -> set[str]:
    """Names of whole documents that together have `room` bytes at most."""

    def key(document: Document) -> bytes:
        return hashlib.sha256(document.name.encode()).digest()

    names = set()
    for document in sorted(documents, key=key):
        if len(document.content) <= room:
            names.add(document.name)
            room -= len(document.content)
    return names


def _cut_off_end(
    documents: Sequence[Document], test_bytes: float
) -> tuple[list[Document], list[Document]]:
    *others, last = documents
    place = max(1, len(last.content) - int(test_bytes))
    cut = _end_of_line(last.content, place)
    if len(last.content) - cut < test_bytes / 2:  # lines are long: in the middle of one
        cut = place
    train = [*others, Document(last.name, last.content[:cut])]
    test = [Document(last.name, last.content[cut:])]
    return train, test


def _end_of_line(content: Tensor, place: int) -> int:
    """The first place from here on that follows an end of line; this one if no line ends soon."""
    ends = (content[place - 1 : place + LONGEST_LINE] == ord("\n")).nonzero()
    if not len(ends):
        return place
    return place + int(ends[0])
