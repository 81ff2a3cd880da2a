"""The options data=text and data=tokens."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddp_train.data.config import BuiltInDataConfig
from ddp_train.options.data_keys import named_test_sets, named_validation_sets
from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config
from ddp_train.text import shown

_LIBRARY_BYTES = 12 * 2**20
"""About the size of Python's standard library without its tests. It decides only whether that fits
into a GPU's memory."""


_TOKENIZER = "tokenizer.json of Hugging Face's tokenizers"


@dataclass
class CorpusConfig(BuiltInDataConfig):
    """The keys and checks that text and tokens have in common."""

    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = ""
    """The files that are read of a folder."""
    a_set: ClassVar[str] = ""
    """The form in which a further set is given, for messages."""

    def sample_bytes(self) -> int:
        return 16 * self.length

    def missing(self, config: Config) -> Iterator[Problem]:
        yield from super().missing(config)
        found = f"data.tokenizer={self.tokenizer}"
        if self.tokenizer and not Path(self.tokenizer).is_file():
            yield Problem(
                found, "no such file", "name a tokenizer.json, or leave data.tokenizer out"
            )
        elif self.tokenizer and importlib.util.find_spec("tokenizers") is None:
            yield Problem(
                found,
                "needs the package tokenizers",
                f"run {sys.executable} -m pip install tokenizers",
            )
        else:
            yield from self.missing_files()
            yield from self._missing_sets()

    def _missing_sets(self) -> Iterator[Problem]:
        """Find what is wrong with the paths of further sets."""
        for key_of_set, given in self.sets_by_key().items():
            found = f"{key_of_set}={shown(given)}"
            if not isinstance(given, str):
                yield Problem(found, f"must be {self.a_set}")
            elif not Path(given).exists():
                yield Problem(found, "no such file or folder", f"name {self.a_set}")
            elif Path(given).is_dir():
                lacking = self.files_lacking(given, self.files_of_folder)
                if lacking is not None:
                    yield Problem(found, f"no {self.files_of_folder} in this folder{lacking[0]}")

    @property
    def files_of_folder(self) -> str:
        """The pattern of the files that are read of a folder."""
        return self.pattern

    def missing_files(self) -> Iterator[Problem]:
        """Find what is wrong with the path of the corpus."""
        raise NotImplementedError

    def files_lacking(self, path: str, pattern: str) -> tuple[str, str] | None:
        """The kinds of files in a folder that has none of a pattern: in words, and the commonest.

        None if the folder has such a file. Both are "" for a folder without files.
        """
        if any(Path(path).rglob(pattern)):
            return None
        files = [file for file in Path(path).rglob("*.*") if file.is_file()]
        kinds = Counter(file.suffix for file in files).most_common(3)
        if not kinds:
            return "", ""
        counts = ", ".join(f"{count} {suffix}" for suffix, count in kinds)
        return f"; there are {counts}", kinds[0][0]


@dataclass
class TextConfig(CorpusConfig):
    """Text files as bytes, or through a tokenizer; by default Python's own standard library,
    without a download."""

    name: str = "text"
    implementation: ClassVar[str] = "ddp_train.data.corpus.sources:open_text"
    set_implementation: ClassVar[str] = "ddp_train.data.corpus.sources:open_text_set"
    pattern: ClassVar[str] = "*.txt"
    a_set: ClassVar[str] = "a text file, or a folder with some"
    path: str | None = key(
        None, "file or folder; null: the .py files of Python's standard library", is_path=True
    )
    glob: str | None = key(
        None, "which files of the folder and of folders in it are read; null: *.txt"
    )
    length: int = key(256, "tokens of a window, which is a sample", at_least=2)
    test_part: float = key(
        0.05,
        "fraction of the text that is the test set, in whole files where they fit",
        above=0,
        below=1,
    )
    tokenizer: str | None = key(None, f"{_TOKENIZER}; null: each byte is a token")
    validation_sets: dict[str, Any] = named_validation_sets("a text file, or a folder with some")
    test_sets: dict[str, Any] = named_test_sets("a text file, or a folder with some")

    @property
    def files_of_folder(self) -> str:
        return self.glob or self.pattern

    def in_memory_bytes(self) -> int:
        # A token has four bytes at most, and there are fewer tokens than bytes.
        width = 4 if self.tokenizer else 1
        if self.path:
            return width * _bytes_of(self.path, self.files_of_folder)
        return width * _LIBRARY_BYTES

    def missing_files(self) -> Iterator[Problem]:
        is_folder = self.path is not None and not Path(self.path).is_file()
        if self.glob and not is_folder:
            yield Problem(
                f"data.glob={self.glob}",
                "has an effect only on a folder",
                "add data.path=FOLDER, or leave data.glob out",
            )
        if self.path is None or not is_folder:
            return
        found = f"data.path={self.path}"
        if not Path(self.path).is_dir():
            yield Problem(found, "no such file or folder", f"name {self.a_set}")
            return
        pattern = self.files_of_folder
        lacking = self.files_lacking(self.path, pattern)
        if lacking is not None:
            there, commonest = lacking
            use = f"; use 'data.glob=*{commonest}'" if commonest else ""
            yield Problem(found, f"no file matches data.glob={pattern}{there}{use}")


@dataclass
class TokensConfig(CorpusConfig):
    """Files of tokens, mapped into memory: .bin as nanoGPT (no header) and llm.c (with one) write
    them."""

    name: str = "tokens"
    implementation: ClassVar[str] = "ddp_train.data.corpus.sources:open_tokens"
    set_implementation: ClassVar[str] = "ddp_train.data.corpus.sources:open_token_set"
    pattern: ClassVar[str] = "*.bin"
    a_set: ClassVar[str] = "a .bin file, or a folder with some"
    path: str | None = key(
        None,
        "a .bin file, or a folder with some; those with val or test in their names are held out",
    )
    length: int = key(1024, "tokens of a window, which is a sample", at_least=2)
    vocabulary: int = key(
        50_257, "size of the vocabulary; all token ids in the files are below it", at_least=1
    )
    dtype: str = key(
        "uint16", "type of the tokens in files without a header", choices=("uint16", "uint32")
    )
    test_part: float = key(
        0.05,
        "fraction of the tokens that is the test set if no file is held out: the end of"
        " the last file",
        above=0,
        below=1,
    )
    tokenizer: str | None = key(None, f"{_TOKENIZER}, to show text that the model writes")
    bytes_per_token: float | None = key(
        None, "mean number of bytes of text in a token, for the metric bits_per_byte", above=0
    )
    validation_sets: dict[str, Any] = named_validation_sets("a .bin file, or a folder with some")
    test_sets: dict[str, Any] = named_test_sets("a .bin file, or a folder with some")

    def in_memory_bytes(self) -> int:
        return _bytes_of(self.path, self.pattern) if self.path else 0

    def missing_files(self) -> Iterator[Problem]:
        if self.path is None:
            yield Problem(
                "data.path=null",
                "data=tokens needs a .bin file, or a folder with some",
                "add data.path=PATH",
            )
            return
        if Path(self.path).is_file():
            return
        found = f"data.path={self.path}"
        if not Path(self.path).is_dir():
            yield Problem(found, "no such file or folder", f"name {self.a_set}")
            return
        lacking = self.files_lacking(self.path, self.pattern)
        if lacking is not None:
            yield Problem(found, f"no {self.pattern} in this folder{lacking[0]}")


@functools.lru_cache(maxsize=1)  # asked several times, and a folder may hold many files
def _bytes_of(path: str, glob: str) -> int:
    """The size of a file, or of the files in a folder that match; 0 if there is none."""
    files = [Path(path)] if Path(path).is_file() else Path(path).rglob(glob)
    return sum(file.stat().st_size for file in files if file.is_file())
