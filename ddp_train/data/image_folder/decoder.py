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
ADOBE = 0xEE
YCBCR = 1
"""Marker of a segment that Adobe writes, and what it says there of the usual colours."""
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the segment with the size and the colours of the image."""


def is_jpeg(file: np.ndarray) -> bool:
    """True if the content of a file, uint8 [bytes], begins as a JPEG file."""
    return file[:3].tobytes() == JPEG_START


def is_usual_jpeg(file: np.ndarray) -> bool:
    """True for the content of a whole JPEG file, uint8 [bytes], in gray or in YCbCr.

    Others, in CMYK or in RGB, are rare, and decoders differ in what they make of them.
    """
    is_whole = is_jpeg(file) and file[-2:].tobytes() == JPEG_END
    return is_whole and _is_gray_or_ycbcr(file.data)


def _is_gray_or_ycbcr(content: memoryview) -> bool:
    """Reads the segments of a JPEG file up to the one that names its colours (ITU T.81, B.2)."""
    place = 2
    while place + 18 < len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        begin = place + 4
        is_of_adobe = marker == ADOBE and content[begin : begin + 5] == b"Adobe"
        if is_of_adobe and content[begin + 11] != YCBCR:
            return False
        if marker in START_OF_FRAME:
            colours = content[begin + 5]
            names = content[begin + 6 : begin + 6 + 3 * colours : 3].tobytes()
            return colours == 1 or (colours == 3 and names != b"RGB")
        place += 2 + int.from_bytes(content[place + 2 : place + 4])
    return False


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
