"""The splits of `data=text` and `data=tokens`; `config` has their keys."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ddp_train.data.corpus.codec import Bytes, Tokenizer
from ddp_train.data.corpus.documents import read_documents, split_documents
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
    bytes_per_token = 1.0
    if tokenizer:
        test_bytes = sum(len(document.content) for document in test_documents)
        bytes_per_token = test_bytes / max(1, len(test))
    where = f"data.path={path or 'null (the standard library)'}"
    facts = TokenFacts(codec, bytes_per_token, where)
    return (
        TokenSource([train], length, codec.vocabulary, seed, facts),
        TokenSource([test], length, codec.vocabulary, None, facts),
    )


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
        raise DataError(f"{where}: no .bin file to train on", "name a file, or a folder with *.bin")
    train = [read_bin(file, dtype) for file in train_files]
    test = [read_bin(file, dtype) for file in test_files]
    if len({part.dtype for part in train + test}) > 1:
        raise DataError(
            f"{where}: its files hold tokens of 16 and of 32 bits", "keep one kind there"
        )
    if not test:
        train, test = _cut_off_end(train, test_part)
    codec = Tokenizer(tokenizer) if tokenizer else None
    facts = TokenFacts(codec, bytes_per_token, where)
    return (
        TokenSource(train, length, vocabulary, seed, facts),
        TokenSource(test, length, vocabulary, None, facts),
    )


def _cut_off_end(parts: list[Tensor], test_part: float) -> tuple[list[Tensor], list[Tensor]]:
    """The parts without the end that tests, and that end."""
    *others, last = parts
    test_tokens = int(test_part * sum(len(part) for part in parts))
    cut = max(1, len(last) - test_tokens)
    return [*others, last[:cut]], [last[cut:]]
