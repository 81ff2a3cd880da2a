"""Transforms change masks and boxes with their image; wrong ones are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2
from torchvision.tv_tensors import _dataset_wrapper

from ddp_train.data.sample_transforms import apply_transform
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError, DataError
from tests.support.user_data import V2, Noise, batch, opened


class NoTransform:
    """Whose objects cannot be called."""


class ToCorner(v2.Transform):
    """One's own, as torchvision asks for it."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.crop(inpt, 0, 0, 2, 2)


class Clips(datasets.VisionDataset):
    """UCF101, without its films."""

    def __init__(self, output_format: str = "THWC") -> None:
        self.video_clips = type("", (), {"output_format": output_format})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (
            {"transform": [f"{V2}.ToImage", f"{V2}.RandAugment"]},
            ["data.transform=", "RandAugment would draw", f"'data.test_transform=[{V2}.ToImage]'"],
        ),
        (
            {"transform": [{"_target_": f"{V2}.RandomCrop", "size": 4}]},
            ["'data.test_transform=[]', with a CenterCrop for the random crop"],
        ),
        (
            {"test_transform": [f"{V2}.RandAugment"]},
            ["data.test_transform=", "would draw", "data.test_transform=[]"],
        ),
        (
            {"transform": [f"{V2}.RandAugmnt"]},
            ["data.transform[0]._target_=", "did you mean RandAugment?"],
        ),
        (
            {"transform": [{"_target_": f"{V2}.Resize", "sise": 3}]},
            ["data.transform[0]._target_=", "sise=3"],
        ),
        (
            {"transform": [f"{__name__}.NoTransform"]},
            ["data.transform[0]._target_=", "is not callable"],
        ),
        (
            {"transform": [f"{V2}.functional.resize"]},
            ["call other functions in a class of your own"],
        ),
        (
            {"fields": ["image"]},
            ["data.fields=[image]: a sample of FakeData is a tuple, not a dict; leave the key out"],
        ),
        (
            {"collate_fn": "tests.support.user_data.joinde"},
            ["data.collate_fn=", "did you mean joined?"],
        ),
    ],
)
def test_wrong_transforms_are_named(keys: dict[str, Any], parts: list[str]) -> None:
    arguments = {"size": 4, "image_size": [3, 8, 8]}
    with pytest.raises(ConfigError) as caught:
        batch(
            opened(
                "torchvision.datasets.FakeData",
                arguments=arguments,
                splits={"test": {"size": 2}},
                **keys,
            )[0],
            0,
        )
    (problem,) = caught.value.problems
    assert all(part in problem for part in parts), problem


def test_masks_and_boxes_change_with_their_image() -> None:
    image = tv_tensors.Image(torch.arange(16).view(1, 4, 4))
    mask = tv_tensors.Mask(torch.arange(16).view(1, 4, 4))
    for of_both in (
        ToCorner(),
        nn.Sequential(v2.RandomVerticalFlip(1), ToCorner()),
        transforms.Compose(
            [v2.RandomHorizontalFlip(1), transforms.RandomApply([v2.RandomRotation(90)], 1)]
        ),
    ):
        changed, target = apply_transform(of_both, (image, mask))
        assert changed.tolist() == target.tolist() != image.tolist()
    box = tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(4, 4))  # pyright: ignore
    for alone in (transforms.CenterCrop(2), nn.Sequential(v2.CenterCrop(2), nn.Flatten()), Noise()):
        for target, kind in ((mask, "Mask"), ({"boxes": [box]}, "BoundingBoxes")):
            with pytest.raises(
                ConfigError,
                match=rf"data\.transform: \w+ changes the image alone, .* has a {kind} ",
            ):
                apply_transform(alone, (image, target))
    assert apply_transform(transforms.CenterCrop(2), (image, 3))[0].shape == (1, 2, 2)


def test_what_torchvision_does_not_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = _dataset_wrapper.video_classification_wrapper_factory
    monkeypatch.setitem(_dataset_wrapper.WRAPPER_FACTORIES, Clips, wrapper)
    monkeypatch.setattr(Clips, "__module__", "torchvision.datasets.ucf101")
    with pytest.raises(
        ConfigError,
        match=r"_target_: torchvision does not .* with these arguments: .*output_format=TCHW",
    ):
        UserDataset(Clips(), 0)
    with pytest.raises(DataError, match="Stream has no __getitem__") as caught:
        UserDataset(Stream(), 0)
    assert "or an iterable one, which has __iter__" in caught.value.remedy
