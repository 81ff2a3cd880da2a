"""Image files in memory, decoded by PIL, and the modes of PIL's images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_train.errors import DataError
from ddp_train.text import see_page

if TYPE_CHECKING:
    from torch import Tensor

PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_BITS = 24
"""The place of a PNG file's bits per number; that of its colour type follows."""
PNG_GRAY = 0
OVER_8_BITS = (
    "scale the values of the file to 0 to 255 and save it with 8 bits, or return a tensor from a"
    f" data set of your own{see_page('Data')}"
)
"""The remedy for an image whose pixels are not numbers from 0 to 255."""


class NotPixelsError(ValueError):
    """An image has numbers of more than 8 bits, of which nothing says how bright they are."""

    def __init__(self, mode: str) -> None:
        super().__init__(
            f"an image of PIL's mode {mode}, whose values may lie outside of 0 to 255; PIL would"
            " clip these"
        )


def decode_image(content: bytes) -> Any:
    """An image of PIL. Raises ValueError with the cause if the content is not one."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        cause = str(error)
        if "<_io.BytesIO" in cause:
            cause = "no image format that PIL knows"
        raise ValueError(cause) from error
    return image


def rgb_image(path: str) -> Any:
    """A file as an image of PIL in RGB. Raises DataError."""
    try:
        return in_mode(decode_image(Path(path).read_bytes()), "RGB")
    except (OSError, ValueError) as error:
        raise undecodable(path, error) from error


def undecodable(name: str, error: Exception) -> DataError:
    """The error of an image that cannot be had as pixels, whose name is that of a file."""
    if isinstance(error, NotPixelsError):
        return DataError(f"{name}: {error}", OVER_8_BITS)
    return DataError(f"{name} cannot be decoded: {error}", "repair or remove the file")


def is_wide(mode: str) -> bool:
    """True for the modes of PIL with one number of more than 8 bits for each pixel.

    These are `I` and `F`, of 32 bits, and `I;16` in its byte orders. Colours of 16 bits have no
    mode: PIL keeps the higher byte of each, which is their pixel of 0 to 255.
    """
    return mode in ("I", "F") or mode.startswith("I;")


def in_mode(image: Any, mode: str) -> Any:
    """An image of PIL in the mode L, LA, RGB or RGBA; transparency is dropped in L and RGB.

    Raises NotPixelsError if it has numbers of more than 8 bits, and ValueError if PIL cannot
    convert it.
    """
    if is_wide(image.mode):
        raise NotPixelsError(image.mode)
    if image.mode == "La":  # gray that is multiplied by its transparency; PIL leads one way out
        image = image.convert("LA")
    if image.mode in ("LAB", "HSV", "YCbCr") and mode != "RGB":
        image = image.convert("RGB")
    try:
        return image.convert(mode)
    except ValueError as error:
        raise ValueError(f"an image of PIL's mode {image.mode}: {error}") from error


def gray_levels(content: bytes) -> int:
    """The factor by which PIL multiplies the numbers of a gray PNG file; 1 for any other.

    Of 2 or 4 bits, it makes them pixels of 0 to 255.
    """
    is_gray_png = content.startswith(PNG_START) and content[PNG_BITS + 1] == PNG_GRAY
    if not is_gray_png or content[PNG_BITS] not in (2, 4):
        return 1
    return 255 // (2 ** content[PNG_BITS] - 1)


def pixels_of(image: Any) -> Tensor:
    """The pixels of an image of PIL, [channels, height, width]."""
    import torch  # late: a config may name a data set of this room before torch is needed

    pixels = torch.from_numpy(np.array(image))
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1)
