"""The options data=text and data=tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ddp_train.options.data import DataConfig
from ddp_train.options.key import key

_LIBRARY_BYTES = 12 * 2**20
"""Of Python's standard library without its tests, about; only whether it fits into a GPU's memory
hangs on it."""


_TOKENIZER = "tokenizer.json of Hugging Face's tokenizers"


@dataclass
class TextConfig(DataConfig):
    """Text files as bytes, or through a tokenizer; by default Python's own standard library,
    without a download."""

    name: str = "text"
    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = "*.txt"
    path: str | None = key(
        None, "file or folder; null: the .py files of Python's standard library", is_path=True
    )
    glob: str | None = key(None, "files of the folder, below it too; null: *.txt")
    length: int = key(256, "tokens of a window, which is a sample", at_least=2)
    test_part: float = key(
        0.05, "part of the text that is held out, whole files where they fit", above=0, below=1
    )
    tokenizer: str | None = key(None, f"{_TOKENIZER}; null: each byte is a token")

    def in_memory_bytes(self) -> int:
        width = (
            4 if self.tokenizer else 1
        )  # of four bytes at most; there are fewer tokens than bytes
        if self.path:
            return width * _bytes_of(self.path, self.glob or self.pattern)
        return width * _LIBRARY_BYTES

    def sample_bytes(self) -> int:
        return 16 * self.length


@dataclass
class TokensConfig(DataConfig):
    """Files of tokens, mapped into memory: .bin as nanoGPT (no header) and llm.c (with one) write
    them."""

    name: str = "tokens"
    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = "*.bin"
    path: str | None = key(
        None,
        "a .bin file, or a folder with some; those with val or test in their names are held out",
    )
    length: int = key(1024, "tokens of a window, which is a sample", at_least=2)
    vocabulary: int = key(50_257, "number of tokens; those of the files are below it", at_least=1)
    dtype: str = key(
        "uint16", "type of the tokens in files without a header", choices=("uint16", "uint32")
    )
    test_part: float = key(
        0.05, "part that is held out where no file is: the end of the last one", above=0, below=1
    )
    tokenizer: str | None = key(None, f"{_TOKENIZER}, to show text that the model writes")
    bytes_per_token: float | None = key(
        None, "bytes of text that a token stands for, for bits_per_byte", above=0
    )

    def in_memory_bytes(self) -> int:
        return _bytes_of(self.path, self.pattern) if self.path else 0

    def sample_bytes(self) -> int:
        return 16 * self.length


@functools.lru_cache(maxsize=1)  # asked several times, and a folder may hold many files
def _bytes_of(path: str, glob: str) -> int:
    """Of a file, or of the files in a folder that match; 0 if there is none."""
    files = [Path(path)] if Path(path).is_file() else Path(path).rglob(glob)
    return sum(file.stat().st_size for file in files if file.is_file())
