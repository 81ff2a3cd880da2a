"""The splits of `data=text` and `data=tokens`; `config` has their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ddp_train.data.corpus.codec import Bytes, Tokenizer
from ddp_train.data.corpus.documents import Document, read_documents, split_documents
from ddp_train.data.corpus.token_files import bin_files, read_bin
from ddp_train.data.corpus.windows import TokenFacts, TokenSource
from ddp_train.errors import DataError

Splits = tuple[TokenSource, TokenSource]
"""The training set and the test set."""


def open_text(
    path: str | None,
    glob: str | None,
    length: int,
    test_part: float,
    tokenizer: str | None,
    seed: int,
) -> Splits:
    """Text files as bytes, or through a tokenizer. Raises DataError.

    The parameters are the keys of TextConfig, and the seed of the windows' offsets.
    """
    documents = read_documents(path, glob or "*.txt")
    train_documents, test_documents = split_documents(documents, test_part)
    codec = Tokenizer(tokenizer) if tokenizer else Bytes()
    train = codec.encode_documents(train_documents)
    test = codec.encode_documents(test_documents)
    where = f"data.path={path or 'null (the standard library)'}"
    facts = TokenFacts(codec, _bytes_per_token(codec, test_documents, test), where)
    return (
        TokenSource([train], length, codec.vocabulary, seed, facts),
        TokenSource([test], length, codec.vocabulary, None, facts),
    )


def open_text_set(
    where: str,
    given: str,
    train: TokenSource,
    path: str | None,
    glob: str | None,
    tokenizer: str | None,
    **_: Any,
) -> TokenSource:
    """A further set of text that is scored, all of it.

    where: key and value that name it, for messages.
    given: a file, or a folder.
    train: the training set, whose tokens and windows it has.

    The other parameters are keys of TextConfig. Raises DataError if it lies in what trains.
    """
    if path is not None and Path(given).resolve().is_relative_to(Path(path).resolve()):
        _refuse_training_text(where, f"it is in data.path={path}")
    documents = read_documents(given, glob or "*.txt")
    codec = Tokenizer(tokenizer) if tokenizer else Bytes()
    tokens = codec.encode_documents(documents)
    facts = TokenFacts(codec, _bytes_per_token(codec, documents, tokens), where)
    return TokenSource([tokens], train.length, codec.vocabulary, None, facts)


def _bytes_per_token(
    codec: Tokenizer | Bytes, documents: Sequence[Document], tokens: Tensor
) -> float:
    if isinstance(codec, Bytes):
        return 1.0
    return sum(len(document.content) for document in documents) / max(1, len(tokens))


def open_tokens(
    path: str,
    length: int,
    vocabulary: int,
    dtype: str,
    test_part: float,
    tokenizer: str | None,
    bytes_per_token: float | None,
    seed: int,
) -> Splits:
    """Files of tokens, mapped into memory. Raises DataError.

    The parameters are the keys of TokensConfig, and the seed of the windows' offsets.
    """
    where = f"data.path={path}"
    train_files, test_files = bin_files(Path(path))
    if not train_files:
        raise DataError(
            f"{where}: no .bin file to train on", "name a .bin file, or a folder with some"
        )
    train = [read_bin(file, dtype) for file in train_files]
    test = [read_bin(file, dtype) for file in test_files]
    if len({part.dtype for part in train + test}) > 1:
        raise DataError(
            f"{where}: some files have 16-bit tokens, others 32-bit tokens",
            "use files whose tokens all have 16, or all have 32 bits",
        )
    if not test:
        train, test = _cut_off_end(train, test_part)
    codec = Tokenizer(tokenizer) if tokenizer else None
    facts = TokenFacts(codec, bytes_per_token, where)
    return (
        TokenSource(train, length, vocabulary, seed, facts),
        TokenSource(test, length, vocabulary, None, facts),
    )


def open_token_set(
    where: str, given: str, train: TokenSource, path: str, dtype: str, **_: Any
) -> TokenSource:
    """A further set of tokens that is scored: all files of a folder, or one.

    where: key and value that name it, for messages.
    given: a file, or a folder.
    train: the training set, whose windows it has.

    The other parameters are keys of TokensConfig. Raises DataError if one of its files trains, or
    if its tokens have another width.
    """
    named_train, named_test = bin_files(Path(given))
    files = sorted(named_train + named_test)
    training_files = {file.resolve() for file in bin_files(Path(path))[0]}
    for file in files:
        if file.resolve() in training_files:
            _refuse_training_text(where, f"{file} is one of the training files")
    parts = [read_bin(file, dtype) for file in files]
    if any(part.dtype != train.parts[0].dtype for part in parts):
        problem = (
            f"{where}: the tokens have another number of bits (16 or 32) than those of"
            f" data.path={path}"
        )
        raise DataError(problem, "write both with the same number of bits")
    facts = replace(train.facts, where=where)
    return TokenSource(parts, train.length, train.vocabulary, None, facts)


def _refuse_training_text(where: str, why: str) -> NoReturn:
    problem = f"{where}: this text is in the training set too: {why}"
    raise DataError(problem, "move the text out of the training data, or name another file")


def _cut_off_end(parts: list[Tensor], test_part: float) -> tuple[list[Tensor], list[Tensor]]:
    """The parts without the end that tests, and that end."""
    *others, last = parts
    test_tokens = int(test_part * sum(len(part) for part in parts))
    cut = max(1, len(last) - test_tokens)
    return [*others, last[:cut]], [last[cut:]]
