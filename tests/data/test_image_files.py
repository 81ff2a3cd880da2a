"""Pixels of image files: those that a file was written with, from whatever reads it, or an error.

All pictures are of one colour, which no crop and no change of size alters.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor, v2

from ddp_train.data.image_files import in_mode
from ddp_train.data.image_folder.decoder import is_usual_jpeg
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.raw_input import ImageInput
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.data.sample_transforms import apply_transform
from ddp_train.data.shards import decode_field
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import DataError

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding:DeprecationWarning", "ignore:Palette images with Transparency"
)
SIDE = 8
RED = (200, 100, 50)
WIDE = "an image of PIL's mode .*, whose values may lie outside of 0 to 255"


def png(numbers: tuple[int, ...], bits: int, colour_type: int) -> bytes:
    """A PNG file of one colour, by the specification (ISO 15948)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        end = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + end

    if bits == 16:
        row = struct.pack(f">{len(numbers)}H", *numbers) * SIDE
    elif bits == 8:
        row = bytes(numbers) * SIDE
    else:
        row = int("".join(f"{numbers[0]:0{bits}b}" * SIDE), 2).to_bytes(bits * SIDE // 8)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, bits, colour_type, 0, 0, 0)
    rows = zlib.compress((b"\0" + row) * SIDE)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def of_mode(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (SIDE, SIDE), colour)


def of_palette(**info: object) -> Image.Image:
    image = of_mode("P", 3)
    image.putpalette([0, 0, 0, 1, 1, 1, 2, 2, 2, *RED])
    image.info.update(info)
    return image


TURNED = Image.Exif()
TURNED[0x0112] = 6
KNOWN = {
    "gray of 1 bit": (png((1,), 1, 0), (255, 255, 255)),
    "gray of 2 bits": (png((2,), 2, 0), (170, 170, 170)),
    "gray of 4 bits": (png((3,), 4, 0), (51, 51, 51)),
    "gray of 8 bits": (png((77,), 8, 0), (77, 77, 77)),
    "gray with alpha": (png((77, 9), 8, 4), (77, 77, 77)),
    "colours of 16 bits": (png((200 * 257, 100 * 257, 50 * 257), 16, 2), RED),
    "colours and alpha of 16 bits": (png((200 * 257, 100 * 257, 50 * 257, 9), 16, 6), RED),
    "colours with alpha": (png((*RED, 9), 8, 6), RED),
    "palette": (saved(of_palette(), "PNG"), RED),
    "palette with transparency": (saved(of_palette(transparency=b"\0\1\2\3"), "PNG"), RED),
    "animated": (
        saved(of_palette(), "GIF", save_all=True, append_images=[of_mode("P", 0)]),
        RED,
    ),
    "webp": (saved(of_mode("RGBA", (*RED, 9)), "WEBP", lossless=True, exact=True), RED),
    "bmp": (saved(of_mode("RGB", RED), "BMP"), RED),
    "tiff in CMYK": (saved(of_mode("CMYK", (0, 100, 200, 55)), "TIFF"), (200, 122, 43)),
    "tiff in LAB": (saved(of_mode("LAB", (128, 128, 128)), "TIFF"), (119, 119, 119)),
    "jpeg": (saved(of_mode("RGB", RED), "JPEG", quality=100), RED),
    "progressive jpeg": (saved(of_mode("RGB", RED), "JPEG", quality=100, progressive=True), RED),
    "turned jpeg": (saved(of_mode("RGB", RED), "JPEG", quality=100, exif=TURNED), RED),
    "gray jpeg": (saved(of_mode("L", 77), "JPEG", quality=100), (77, 77, 77)),
    "jpeg in RGB": (saved(of_mode("RGB", RED), "JPEG", quality=100, keep_rgb=True), RED),
    "jpeg in CMYK": (
        saved(of_mode("CMYK", (0, 100, 200, 55)), "JPEG", quality=100),
        (200, 122, 43),
    ),
}
"""Files, and the RGB that each shows."""
OF_MANY_BITS = {
    "gray png of 16 bits": png((40_000,), 16, 0),
    "tiff of 16 bits": saved(of_mode("I;16", 40_000), "TIFF"),
    "tiff of 16 bits, big end first": saved(of_mode("I;16B", 40_000), "TIFF"),
    "tiff of 32 bits": saved(of_mode("I", 70_000), "TIFF"),
    "tiff of floats": saved(of_mode("F", 0.5), "TIFF"),
    "pgm of 16 bits": b"P5 8 8 65535\n" + b"\x9c\x40" * 64,
}


def folder_with(content: bytes, root: Path) -> Path:
    """Files of all kinds are told by their content: the name is that of a JPEG."""
    path = root / "images/one/picture.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path.parents[1]


def centre(pixels: torch.Tensor) -> torch.Tensor:
    return pixels[..., SIDE // 2, SIDE // 2].float().flatten()


def readings(root: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """The functions that read the picture in a folder, to a colour of 0 to 255."""
    path = root / "one/picture.jpg"
    number = np.zeros(1, np.int64)

    def by_folder(decode: str) -> torch.Tensor:
        return centre(FolderSource(root, SIDE, False, 0, decode).get_batch(number, None)[0])

    def by_gpu_decoder() -> torch.Tensor:
        source = FolderSource(root, SIDE, False, 0, "gpu")
        crops = source.crops_on(torch.device("cpu"), source.read(number), number, None)
        return centre(crops)

    def by_torchvision() -> torch.Tensor:
        return centre(255 * UserDataset(ImageFolder(str(root)), 0).get_batch(number, None)[0])

    plain = ImageInput((3, SIDE, SIDE), (0.0,) * 3, (1.0,) * 3, crop=True)
    return {
        "pil": lambda: by_folder("pil"),
        "processes": lambda: by_folder("processes"),
        "gpu": by_gpu_decoder,
        "torchvision": by_torchvision,
        "shards": lambda: centre(decode_field("image", path.read_bytes())),
        "predict": lambda: centre(255 * plain(path)),
    }


@pytest.mark.parametrize("kind", KNOWN)
def test_pixels_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    content, colour = KNOWN[kind]
    for name, read in readings(folder_with(content, tmp_path)).items():
        found = read()
        assert (found - torch.tensor(colour)).abs().max() <= 1.01, (name, found)


@pytest.mark.parametrize("kind", OF_MANY_BITS)
def test_numbers_of_many_bits_are_refused(kind: str, tmp_path: Path) -> None:
    root = folder_with(OF_MANY_BITS[kind], tmp_path)
    for name, read in readings(root).items():
        if name == "shards":  # whose member is named by what reads it
            with pytest.raises(ValueError, match=WIDE):
                read()
            continue
        with pytest.raises(DataError, match=rf"picture\.jpg.*: {WIDE}") as caught:
            read()
        assert caught.value.remedy.startswith("scale the values")


IN_PIL = {
    "1": (1, (255, 255, 255)),
    "L": (77, (77, 77, 77)),
    "LA": ((77, 9), (77, 77, 77)),
    "RGB": (RED, RED),
    "RGBA": ((*RED, 9), RED),
    "RGBX": ((*RED, 0), RED),
    "CMYK": ((0, 100, 200, 55), (200, 122, 43)),
    "YCbCr": ((124, 86, 182), RED),
    "HSV": ((14, 191, 200), RED),
    "LAB": ((128, 128, 128), (119, 119, 119)),
}


def test_every_mode_of_pil_shows_its_colour_or_is_refused() -> None:
    images = {mode: (of_mode(mode, colour), shows) for mode, (colour, shows) in IN_PIL.items()}
    images["P"] = (of_palette(), RED)
    images["PA"] = (of_palette().convert("PA"), RED)
    images["RGBa"] = (of_mode("RGBA", (*RED, 128)).convert("RGBa"), RED)
    images["La"] = (of_mode("LA", (77, 128)).convert("La"), (77, 77, 77))
    for mode, (image, colour) in images.items():
        assert image.mode == mode
        for target, shown in (
            ("RGB", colour),
            ("L", (round(np.dot(colour, (0.299, 0.587, 0.114))),)),
        ):
            found = np.array(in_mode(image, target))[0, 0]
            assert np.abs(found.astype(int) - shown).max() <= 2, (mode, target, found)
    for mode in ("I", "I;16", "I;16L", "I;16B", "I;16N", "F"):
        for target in ("RGB", "L"):
            with pytest.raises(ValueError, match=WIDE):
                in_mode(of_mode(mode, 1), target)


def test_a_transform_that_cuts_numbers_off_is_refused() -> None:
    depth = of_mode("I;16", 40_000)
    for transform in (v2.RGB(), v2.Grayscale(), ToTensor()):
        for sample in (depth, (depth, 1), {"depth": depth}):
            if isinstance(sample, dict) and isinstance(transform, ToTensor):
                continue  # takes an image alone
            expected = f"data.transform: .* got {WIDE}"
            if isinstance(transform, ToTensor):  # PIL cuts off nothing there
                expected = "ToTensor makes int16 of an image of PIL's mode I;16: values from 32,768"
            with pytest.raises(DataError, match=expected):
                apply_transform(transform, sample)
    whole = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    scaled, _ = apply_transform(whole, (depth, 1))
    assert scaled.max().item() == pytest.approx(40_000 / 65_535)
    with pytest.raises(DataError, match=WIDE) as caught:
        as_tensors((depth, 1))
    assert "RGB" not in caught.value.remedy


def test_masks_keep_numbers_of_any_bits() -> None:
    for bits in (1, 2, 4, 8):
        most = 2**bits - 1
        for number in {1, most}:
            mask = decode_field("seg.png", png((number,), bits, 0))
            assert mask.unique().tolist() == [number], bits
    assert decode_field("seg.png", png((40_000,), 16, 0)).unique().tolist() == [40_000]


def test_jpegs_of_other_colours_go_to_the_host() -> None:
    def usual(kind: str) -> bool:
        return is_usual_jpeg(np.frombuffer(KNOWN[kind][0], np.uint8))

    for kind in ("jpeg", "progressive jpeg", "turned jpeg", "gray jpeg"):
        assert usual(kind)
    for kind in ("jpeg in RGB", "jpeg in CMYK", "bmp"):
        assert not usual(kind)
    cut = np.frombuffer(KNOWN["jpeg"][0][:-2], np.uint8)
    assert not is_usual_jpeg(cut)


def test_raw_images_of_many_bits_are_named(tmp_path: Path) -> None:
    """Given as an image of PIL, as a path, as an array; to a model that takes gray."""
    gray = ImageInput((1, SIDE, SIDE), (0.0,), (1.0,))
    path = tmp_path / "depth.png"
    path.write_bytes(OF_MANY_BITS["gray png of 16 bits"])
    with pytest.raises(DataError, match=f"depth.png: {WIDE}"):
        gray(path)
    with pytest.raises(DataError, match=f"an image of PIL: {WIDE}"):
        gray(Image.open(path))
    with pytest.raises(DataError, match=r"pixels are of torch\.uint16$"):
        gray(np.full((SIDE, SIDE), 40_000, np.uint16))
    inks = ImageInput((4, SIDE, SIDE), (0.0,) * 4, (1.0,) * 4)
    assert centre(255 * inks(of_mode("CMYK", (0, 100, 200, 55)))).tolist() == pytest.approx(
        [200, 122, 43, 255], abs=1.01
    )
    with pytest.raises(DataError, match="takes 5 channels, which no image of PIL has"):
        ImageInput((5, SIDE, SIDE), (0.0,) * 5, (1.0,) * 5)(of_mode("RGB", RED))
