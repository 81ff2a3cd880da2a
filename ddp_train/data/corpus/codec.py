"""The text that tokens stand for: bytes, or the pieces of a tokenizer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_train.data.corpus.documents import Document
from ddp_train.data.corpus.token_files import HELD_AS
from ddp_train.errors import DataError

END_BYTE = 0
"""Ends each file of a folder. Text holds none."""
END_TOKEN = "<|endoftext|>"
"""Ends each file where a tokenizer has it."""


class Codec(Protocol):
    """Turns text into tokens and back."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """A tokenizer of Hugging Face's `tokenizers`, from its JSON file."""

    def __init__(self, path: str) -> None:
        """Raises DataError if the package is missing, or the file holds no tokenizer."""
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataError(
                f"data.tokenizer={path}: the package tokenizers is not installed",
                f"run {sys.executable} -m pip install tokenizers",
            ) from error
        try:
            self.tokenizer: Any = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises plain Exception
            raise DataError(
                f"data.tokenizer={path}: {error}",
                "give the path of a tokenizer.json, as the package tokenizers saves it",
            ) from error

    @property
    def vocabulary(self) -> int:
        """The number of tokens, added ones included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def encode_documents(self, documents: Sequence[Document]) -> Tensor:
        """The tokens of documents, int32 [tokens]; each ends with END_TOKEN if there is one."""
        end = self.tokenizer.token_to_id(END_TOKEN)
        end_of_document = [] if end is None else [end]
        texts = [
            bytes(document.content.numpy()).decode("utf-8", "replace") for document in documents
        ]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        rows = [torch.tensor([*encoding.ids, *end_of_document]) for encoding in encodings]
        return torch.cat(rows).to(HELD_AS["uint32"])


class Bytes:
    """In place of a tokenizer: each byte of UTF-8 is a token."""

    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """The text of some bytes. What is not UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")

    def encode_documents(self, documents: Sequence[Document]) -> Tensor:
        """The bytes of documents, uint8 [tokens].

        The only document is returned as it is, mapped perhaps; several end with END_BYTE each.
        """
        if len(documents) == 1:
            return documents[0].content
        end = torch.tensor([END_BYTE], dtype=torch.uint8)
        parts = []
        for document in documents:
            parts += [document.content, end]
        return torch.cat(parts)
