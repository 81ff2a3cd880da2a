"""Where tokens come from: text files, as bytes or through a tokenizer, and files of tokens."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.tokens import HELD_AS, TokenSource, Words, mapped, read_bin
from ddp_train.errors import DataError

END = 0
"""The byte that ends each file of a folder. Text holds none."""
END_TOKEN = "<|endoftext|>"
"""Ends each file where a tokenizer has it."""
NOT_LIBRARY = re.compile(
    r"(test|tests|idle_test|(site|dist)-packages|__pycache__|config-.*|_sysconfigdata.*|encodings|pydoc_data)$"
)
"""Folders and files below Python's standard library that are no part of it, hold its tests, differ
by machine, or are tables rather than code: character sets, and the manual as one string."""
TEST_WORDS = {"val", "valid", "validation", "test"}
"""A .bin file with one of these in its name is of the test split."""


class Document(NamedTuple):
    """A file of a corpus."""

    name: str
    content: Tensor
    """uint8 [bytes]."""


def standard_library() -> list[Path]:
    """The .py files of Python's own standard library without its tests, in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [
            name for name in inner if not NOT_LIBRARY.match(name)
        ]  # never into 100,000 files of site-packages
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not NOT_LIBRARY.match(name)
        ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_documents(path: str | None, glob: str) -> list[Document]:
    """The files of a corpus in order of their names: one, those of a folder that match, or the
    standard library.

    Raises DataError if there are none, or if all are empty.
    """
    if path is not None and Path(path).is_file():
        return [Document(Path(path).name, mapped(Path(path), "uint8"))]
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path)
    if path is None:
        files = standard_library()
    else:
        files = sorted(file for file in root.rglob(glob) if file.is_file())
    contents = ((file, np.fromfile(file, np.uint8)) for file in files)
    found = [
        Document(file.relative_to(root).as_posix(), torch.from_numpy(text))
        for file, text in contents
        if len(text)
    ]
    if not found:
        raise DataError(
            f"data.path={path}: no file with content matches data.glob={glob}", "name other files"
        )
    return found


def split(documents: Sequence[Document], test_part: float) -> tuple[list[Document], list[Document]]:
    """Training and test documents, in their order: the same for every seed, process and machine.

    Whole documents are taken for the test split, in an order keyed by their names, as long as they
    fit into its part. Where none fits, as with one file, the end of the corpus is cut off, behind
    an end of line if there is one.
    """
    wanted = test_part * sum(len(document.content) for document in documents)
    chosen = set()
    room = wanted
    for document in sorted(
        documents, key=lambda document: hashlib.sha256(document.name.encode()).digest()
    ):
        if len(document.content) <= room:
            chosen.add(document.name)
            room -= len(document.content)
    if chosen:
        return [d for d in documents if d.name not in chosen], [
            d for d in documents if d.name in chosen
        ]
    *others, last = documents
    place = max(1, len(last.content) - int(wanted))
    cut = _behind_a_line(last.content, place)
    if len(last.content) - cut < wanted / 2:  # lines are long: in the middle of one
        cut = place
    return [*others, Document(last.name, last.content[:cut])], [
        Document(last.name, last.content[cut:])
    ]


def _behind_a_line(content: Tensor, place: int) -> int:
    """The first place from here on that follows an end of line; this one if no line ends soon."""
    ends = (content[place - 1 : place + 10_000] == ord("\n")).nonzero()
    return place + int(ends[0]) if len(ends) else place


class Tokenizer:
    """A tokenizer of Hugging Face's `tokenizers`, from its JSON file."""

    def __init__(self, path: str) -> None:
        """Raises DataError if the package is missing, or the file is none."""
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataError(
                f"data.tokenizer={path}: the package tokenizers is not installed",
                "pip install tokenizers",
            ) from error
        try:
            self.tokenizer: Any = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises plain Exception
            raise DataError(
                f"data.tokenizer={path}: {error}", "name a tokenizer.json of tokenizers"
            ) from error

    @property
    def vocabulary(self) -> int:
        """The number of tokens, added ones included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, documents: Sequence[Document]) -> Tensor:
        """int32 [tokens]; each document ends with END_TOKEN if there is one."""
        end = self.tokenizer.token_to_id(END_TOKEN)
        texts = [
            bytes(document.content.numpy()).decode("utf-8", "replace") for document in documents
        ]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = [
            torch.tensor([*encoding.ids, *([] if end is None else [end])]) for encoding in encodings
        ]
        return torch.cat(ids).to(HELD_AS["uint32"])


class Bytes:
    """In place of a tokenizer: each byte of UTF-8 is a token."""

    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """What is no UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")


def _as_bytes(documents: Sequence[Document]) -> Tensor:
    """uint8 [tokens]: the only document as it is, mapped perhaps; several with END behind each."""
    if len(documents) == 1:
        return documents[0].content
    end = torch.tensor([END], dtype=torch.uint8)
    return torch.cat([part for document in documents for part in (document.content, end)])


def text_sources(
    path: str | None,
    glob: str | None,
    length: int,
    test_part: float,
    tokenizer: str | None,
    seed: int,
) -> tuple[TokenSource, TokenSource]:
    """The splits of `data=text`; see TextConfig for the keys. Raises DataError."""
    where = f"data.path={path or 'null (the standard library)'}"
    splits = split(read_documents(path, glob or "*.txt"), test_part)
    if tokenizer is None:
        words: Words = Bytes()
        train, test = map(_as_bytes, splits)
    else:
        words = made = Tokenizer(tokenizer)
        train, test = map(made.encode_all, splits)
    if tokenizer:
        bytes_per_token = sum(len(document.content) for document in splits[1]) / max(1, len(test))
    else:
        bytes_per_token = 1.0
    return _sources([train], [test], length, words.vocabulary, seed, bytes_per_token, words, where)


def token_sources(
    path: str | None,
    length: int,
    vocabulary: int,
    dtype: str,
    test_part: float,
    tokenizer: str | None,
    bytes_per_token: float | None,
    seed: int,
) -> tuple[TokenSource, TokenSource]:
    """The splits of `data=tokens`; see TokensConfig for the keys. Raises DataError."""
    where = f"data.path={path}"
    train_files, test_files = bin_files(Path(str(path)))
    if not train_files:
        raise DataError(f"{where}: no .bin file to train on", "name a file, or a folder with *.bin")
    train, test = ([read_bin(file, dtype) for file in files] for files in (train_files, test_files))
    if len({part.dtype for part in train + test}) > 1:
        raise DataError(
            f"{where}: its files hold tokens of 16 and of 32 bits", "keep one kind there"
        )
    if not test:
        cut = max(1, len(train[-1]) - int(test_part * sum(map(len, train))))
        test = [train[-1][cut:]]
        train[-1] = train[-1][:cut]
    words = Tokenizer(tokenizer) if tokenizer else None
    return _sources(train, test, length, vocabulary, seed, bytes_per_token, words, where)


def bin_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to train on and to test with: of a folder, those with `val` or `test` in their
    names test."""
    if path.is_file():
        return [path], []
    files = sorted(path.rglob("*.bin"))
    test = [file for file in files if TEST_WORDS & set(re.split(r"[^a-z]+", file.name.lower()))]
    return [file for file in files if file not in test], test


def _sources(
    train: list[Tensor],
    test: list[Tensor],
    length: int,
    vocabulary: int,
    seed: int,
    bytes_per_token: float | None,
    words: Words | None,
    where: str,
) -> tuple[TokenSource, TokenSource]:
    common: dict[str, Any] = {"bytes_per_token": bytes_per_token, "words": words, "where": where}
    return (
        TokenSource(train, length, vocabulary, seed, **common),
        TokenSource(test, length, vocabulary, None, **common),
    )
