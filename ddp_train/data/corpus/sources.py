"""The splits of `data=text` and `data=tokens`; `config` has their keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddp_train.data.corpus.codec import Bytes, Tokenizer
from ddp_train.data.corpus.documents import read_documents, split_documents
from ddp_train.data.corpus.token_files import bin_files, read_bin
from ddp_train.data.corpus.windows import TokenFacts, TokenSource
from ddp_train.errors import DataError


@dataclass(frozen=True)
class TextFiles:
    """Text files as bytes, or through a tokenizer. The fields are the keys of TextConfig."""

    path: str | None
    glob: str | None
    length: int
    test_part: float
    tokenizer: str | None
    seed: int

    def open(self) -> tuple[TokenSource, TokenSource]:
        """The training and the test split. Raises DataError."""
        documents = read_documents(self.path, self.glob or "*.txt")
        train_documents, test_documents = split_documents(documents, self.test_part)
        codec = Tokenizer(self.tokenizer) if self.tokenizer else Bytes()
        train = codec.encode_documents(train_documents)
        test = codec.encode_documents(test_documents)
        bytes_per_token = 1.0
        if self.tokenizer:
            test_bytes = sum(len(document.content) for document in test_documents)
            bytes_per_token = test_bytes / max(1, len(test))
        where = f"data.path={self.path or 'null (the standard library)'}"
        facts = TokenFacts(codec, bytes_per_token, where)
        return (
            TokenSource([train], self.length, codec.vocabulary, self.seed, facts),
            TokenSource([test], self.length, codec.vocabulary, None, facts),
        )


@dataclass(frozen=True)
class TokenFiles:
    """Files of tokens. The fields are the keys of TokensConfig."""

    path: str | None
    length: int
    vocabulary: int
    dtype: str
    test_part: float
    tokenizer: str | None
    bytes_per_token: float | None
    seed: int

    def open(self) -> tuple[TokenSource, TokenSource]:
        """The training and the test split. Raises DataError."""
        where = f"data.path={self.path}"
        train_files, test_files = bin_files(Path(str(self.path)))
        if not train_files:
            raise DataError(
                f"{where}: no .bin file to train on", "name a file, or a folder with *.bin"
            )
        train = [read_bin(file, self.dtype) for file in train_files]
        test = [read_bin(file, self.dtype) for file in test_files]
        if len({part.dtype for part in train + test}) > 1:
            raise DataError(
                f"{where}: its files hold tokens of 16 and of 32 bits", "keep one kind there"
            )
        if not test:
            train, test = self._cut_off_end(train)
        codec = Tokenizer(self.tokenizer) if self.tokenizer else None
        facts = TokenFacts(codec, self.bytes_per_token, where)
        return (
            TokenSource(train, self.length, self.vocabulary, self.seed, facts),
            TokenSource(test, self.length, self.vocabulary, None, facts),
        )

    def _cut_off_end(self, parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parts without the end that tests, and that end."""
        *others, last = parts
        test_tokens = int(self.test_part * sum(len(part) for part in parts))
        cut = max(1, len(last) - test_tokens)
        return [*others, last[:cut]], [last[cut:]]
