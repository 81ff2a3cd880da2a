"""JPEG files in memory, decoded by torchvision on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddp_train.errors import ConfigError
from ddp_train.text import first_line

JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"


def is_jpeg(file: np.ndarray) -> bool:
    """True if the content of a file, uint8 [bytes], begins as a JPEG file."""
    return file[:3].tobytes() == JPEG_START


def is_whole_jpeg(file: np.ndarray) -> bool:
    """True if the content of a file, uint8 [bytes], begins and ends as a JPEG file."""
    return is_jpeg(file) and file[-2:].tobytes() == JPEG_END


def decode_jpegs(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode files, uint8 [bytes] each, to uint8 [3, height, width] each.

    Raises RuntimeError if one is corrupt.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    if not files:
        return []
    images = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    return images if isinstance(images, list) else [images]


def decode_or_skip(device: torch.device, files: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Decode JPEG files in memory on `device`: uint8 [3, height, width] each, or None.

    None stands for None, and for corrupt files.
    """
    images: list[Tensor | None] = [None] * len(files)
    present = {row: file for row, file in enumerate(files) if file is not None}
    try:
        decoded = decode_jpegs(list(present.values()), device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # A corrupt file made it fail: one by one.
        for row, file in present.items():
            images[row] = _decode_or_none(file, device)
        return images
    for row, image in zip(present, decoded, strict=True):
        images[row] = image
    return images


def require_decoder(device: torch.device) -> None:
    """Raises ConfigError if torchvision cannot decode a JPEG on this device."""
    from torchvision.io import encode_jpeg

    image = encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
    try:
        decode_jpegs([image] if isinstance(image, Tensor) else image, device)
    except RuntimeError as error:
        problem = (
            f"data.decode=gpu: this torchvision cannot decode on {device}: {first_line(error)}; use"
            " data.decode=processes"
        )
        raise ConfigError([problem]) from error


def _decode_or_none(file: Tensor, device: torch.device) -> Tensor | None:
    try:
        return decode_jpegs([file], device)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
