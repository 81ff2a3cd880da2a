"""The trained model for use outside of a run: raw samples, and what is not loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ddp_train
from ddp_train.config.code_checks import code_problems
from ddp_train.data.datasets import ArraySource
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.raw_input import ImageInput
from ddp_train.errors import DataError
from ddp_train.options.custom import CustomModelConfig


def test_raw_images_become_what_the_data_set_gives(tmp_path: Path) -> None:
    """image_folder's crops, and images that are held in memory."""
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        pixels = generator.integers(0, 256, (40, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / name / "one.jpg", quality=95)
    source = FolderSource(tmp_path / "photos", 32, augmented=True, seed=0, decode="processes")
    crops, _ = source.get_batch(np.arange(2), None)
    expected = source.finish(crops, np.arange(2), None, torch.float32)
    found = torch.stack([ImageInput(**source.image_facts())(path) for path in source.paths])
    assert found.equal(expected)

    held = torch.from_numpy(generator.integers(0, 256, (3, 1, 8, 8), dtype=np.uint8))
    array = ArraySource(held, torch.arange(3), (0.2,), (0.3,))
    prepare = ImageInput(**array.image_facts())
    expected = array.get_batch(np.arange(3), None)[0]
    for number, image in enumerate(held):
        assert prepare(Image.fromarray(image[0].numpy())).equal(expected[number])
        assert prepare(image[0].numpy()).equal(expected[number])
        torch.testing.assert_close(prepare(image / 255), expected[number])
    assert prepare(Image.new("RGB", (30, 20))).shape == (1, 8, 8)
    for wrong in (
        np.full((8, 8), 16.0),
        np.full((8, 8), -0.5),
        np.full((8, 8), np.nan),
    ):
        with pytest.raises(DataError, match="pixels of torch"):
            prepare(wrong)
    with pytest.raises(DataError, match=r"pixels are of torch\.int64$") as refused:
        prepare(np.ones((8, 8), dtype=np.int64))
    assert refused.value.remedy == ("pass uint8 (0 to 255), or floating-point numbers from 0 to 1")
    with pytest.raises(DataError, match="an image has 3 channels, but the model takes 1"):
        prepare(np.zeros((8, 8, 3), dtype=np.uint8))
    colours = ImageInput((3, 8, 8), (0.0,) * 3, (1.0,) * 3)
    for height, width in (
        (1, 1),
        (1, 9),
        (3, 9),
        (4, 9),
        (9, 3),
        (40, 40),
    ):  # as small as the number of channels
        red = Image.new("RGB", (width, height), (255, 0, 0))
        assert colours(red).mean((1, 2)).tolist() == [1, 0, 0]
        if height == 3:
            with pytest.raises(DataError, match=r"pixels of shape \[3, 9, 3\] may be"):
                colours(np.array(red))
        else:
            assert colours(np.array(red)).mean((1, 2)).tolist() == [1, 0, 0]
    (tmp_path / "no.jpg").write_text("text")
    with pytest.raises(DataError, match="cannot be read as an image"):
        prepare(tmp_path / "no.jpg")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no valid checkpoint"):
        ddp_train.load(tmp_path)


def test_code_that_a_checkpoint_names_is_not_loaded_unasked() -> None:
    config = CustomModelConfig(target="somebodys.Net")
    (problem,) = code_problems("model", config, [])
    assert "model._target_=somebodys.Net: loads code from outside" in problem
    assert "no module somebodys" in code_problems("model", config, ["somebodys"])[0], (
        "trusted now, and not there"
    )
