"""Further sets of text and of tokens: read as the corpus is, whole, and never what trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.model import task_of_set
from ddp_train.data.corpus.codec import Bytes
from ddp_train.data.corpus.config import TextConfig, TokensConfig
from ddp_train.data.corpus.windows import TokenFacts, TokenSource
from ddp_train.errors import DataError
from ddp_train.options.schema import Config
from ddp_train.tasks.language_model.task import LanguageModel


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder `trains` with text, and one `beside`."""
    for folder, letters in {"trains": "abcdefghij", "beside": "xy"}.items():
        (tmp_path / folder).mkdir()
        for letter in letters:
            (tmp_path / folder / f"{letter}.txt").write_text(letter * 40)
    return tmp_path


def text_of(folder: Path, **sets: Any) -> TextConfig:
    return TextConfig(path=str(folder / "trains"), length=8, test_part=0.2, **sets)


def test_text_has_further_sets_by_their_paths(text: Path) -> None:
    section = text_of(
        text,
        validation_sets={"both": str(text / "beside")},
        test_sets={"one": str(text / "beside/x.txt")},
    )
    assert not list(section.missing(Config(data=section)))
    splits = open_datasets(Config(data=section))
    both = splits.validation_sets["validation/both"]
    one = splits.test_sets["test/one"]
    assert isinstance(both, TokenSource) and isinstance(one, TokenSource)
    assert (both.tokens, one.tokens) == (2 * 41, 40)
    ids, _ = one.get_batch(np.arange(len(one)), None)
    assert set(ids.flatten().tolist()) == {ord("x")}
    assert section.sets() == ["validation/both", "test", "test/one"]


def test_a_set_of_text_that_trains_is_refused(text: Path) -> None:
    section = text_of(text, test_sets={"a": str(text / "trains/a.txt")})
    with pytest.raises(
        DataError, match=r"data.test_sets.a=.*a.txt: this text is in the training set too"
    ):
        open_datasets(Config(data=section))


def test_a_set_of_text_that_is_not_there_is_named(text: Path) -> None:
    (text / "empty").mkdir()
    section = text_of(
        text,
        validation_sets={"none": str(text / "nowhere"), "no_path": {"a": 1}},
        test_sets={"empty": str(text / "empty")},
    )
    found = [str(problem) for problem in section.missing(Config(data=section))]
    assert [message.partition("=")[0] for message in found] == [
        "data.validation_sets.none",
        "data.validation_sets.no_path",
        "data.test_sets.empty",
    ]
    assert "no *.txt in this folder" in found[2]


def test_tokens_have_further_sets_which_do_not_train(tmp_path: Path) -> None:
    for name, first in {"train": 0, "val": 100, "other": 200}.items():
        np.arange(first, first + 60, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "data").mkdir()
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").rename(tmp_path / "data" / f"{name}.bin")

    def opened(path: str) -> TokenSource:
        section = TokensConfig(
            path=str(tmp_path / "data"), length=8, vocabulary=300, test_sets={"a": path}
        )
        source = open_datasets(Config(data=section)).further["test/a"]
        assert isinstance(source, TokenSource)
        return source

    assert opened(str(tmp_path / "other.bin")).get_batch(np.array([0]), None)[0][0, 0] == 200
    assert opened(str(tmp_path / "data/val.bin")).tokens == 60  # it tests in any case
    with pytest.raises(
        DataError,
        match=r"this text is in the training set too: .*train.bin is one of the training files",
    ):
        opened(str(tmp_path / "data"))


def test_bits_per_byte_are_by_the_bytes_of_the_set() -> None:
    tokens = np.zeros(40, np.uint8)
    task = LanguageModel(bytes_per_token=4.0)
    source = TokenSource(
        [torch.from_numpy(tokens)], 8, 256, None, TokenFacts(Bytes(), bytes_per_token=2.0)
    )
    assert task_of_set(task, source).derive({"loss": math.log(2)})["bits_per_byte"] == 0.5
    assert task.bytes_per_token == 4.0
