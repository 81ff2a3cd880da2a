"""mode=predict and mode=export, and `ddp_train.load`: the same answers for the same samples, by
whatever way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ddp_train
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.data.config import DigitsConfig
from ddp_train.data.datasets import ArraySource
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.raw_input import ImageInput
from ddp_train.errors import ConfigError, DataError, TaskError, WriteError
from ddp_train.inference.export import export_model
from ddp_train.inference.predictions import checked_columns, labels_of, write_predictions
from ddp_train.inference.trained_model import predict_function
from ddp_train.options.custom import CustomDataConfig, CustomTaskConfig
from ddp_train.options.schema import Config
from ddp_train.runs.inference_run import refuse_other_data
from ddp_train.tasks.builtin import Multilabel, Regression, Segmentation
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.task import Task
from tests.checkpoints.test_checkpoint import small_disk
from tests.support.commands import ONE, THREE, environment, fatal_lines, read, run
from tests.support.jobs import datasets_of

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Rows(Dataset):
    classes = ["small", "large"]

    def __init__(self, train=True, labels=True, samples=50):
        self.rows = torch.rand(samples, 4, generator=torch.Generator().manual_seed(int(train)))
        self.labels = labels

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return (row, int(row.sum() > 2)) if self.labels else row


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


class Task:
    wrong = 0

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def predictions(self, model, batch):
        logits = model(batch if isinstance(batch, torch.Tensor) else batch[0])
        return {"margin": logits[self.wrong :, 1] - logits[self.wrong :, 0]}


class Silent:
    def loss(self, model, batch):
        return Task.loss(self, model, batch)


class Short(Task):
    wrong = 1
"""


@pytest.mark.slow
def test_predictions_are_the_same_bytes_on_any_number_of_processes_and_agree_with_all_else(
    tmp_path: Path,
) -> None:
    trained = tmp_path / "run"
    words = [
        "data.limit=120",
        "train.epochs=2",
        "data.validation=0.25",
        "train.ema_decay=0.5",
        "model=cnn",
    ]
    done = run(*words, THREE, f"run_dir={trained}")
    assert done.returncode == 0, done.stderr
    use = ["mode=predict", f"checkpoint.resume={trained}", "train.evaluate_batch_size=16"]
    for name, more in {
        "one": [ONE],
        "three": [THREE],
        "average": [ONE, "checkpoint.average=true"],
        "parts": [THREE, "predict.split=validation", "predict.format=parquet"],
    }.items():
        done = run(*use, *more, f"run_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    said = run(*use, ONE, f"run_dir={tmp_path / 'again'}").stdout
    assert "predictions for 120 samples of test in " in said
    assert "predictions.npz: sample, prediction, probability [10], target, label\n" in said
    assert (tmp_path / "one/predictions.npz").read_bytes() == (
        tmp_path / "three/predictions.npz"
    ).read_bytes()

    found = dict(np.load(tmp_path / "one/predictions.npz"))
    test = datasets_of(DigitsConfig(limit=120))[1]
    summary = read(trained, "summary.json")["test"]
    assert (
        found["sample"].tolist() == list(range(120))
        and found["target"].tolist() == test.targets[:120].tolist()
    )
    assert (found["prediction"] == found["target"]).sum() == summary["correct"]
    averaged = dict(np.load(tmp_path / "average/predictions.npz"))
    losses = -np.log(averaged["probability"][np.arange(120), averaged["target"]])
    assert abs(losses.mean() - summary["ema_loss"]) < 1e-5 and not np.array_equal(
        found["probability"], averaged["probability"]
    )

    from pyarrow import parquet

    part = parquet.read_table(tmp_path / "parts/predictions.parquet").to_pydict()
    whole = datasets_of(DigitsConfig())[0]
    assert len(part["sample"]) == 120 and max(part["sample"]) > 120, (
        "a sample has its number in the training set"
    )
    assert part["target"] == whole.targets[part["sample"]].tolist()
    assert (
        part["label"] == [str(one) for one in part["prediction"]]
        and len(part["probability"][0]) == 10
    )

    model = ddp_train.load(trained)
    for nothing in ([], "one.png"):
        with pytest.raises(DataError, match="takes a list of samples"):
            model.predict(nothing)
    assert model.task == "classification" and model.classes == list("0123456789")
    raw = [(image + 1) / 2 for image in test.inputs[:20]]  # pixels from 0 to 1
    assert model.predict(raw)["label"] == found["label"][:20].tolist()
    np.testing.assert_allclose(
        model.predict(raw)["probability"], found["probability"][:20], atol=1e-5
    )

    done = run(
        "mode=export",
        f"checkpoint.resume={trained}",
        "export.formats=[torch,onnx]",
        f"run_dir={tmp_path}/export",
    )
    assert done.returncode == 0, done.stderr
    program = torch.export.load(tmp_path / "export/model.pt2").module()
    inputs = torch.stack([model.preprocess(image) for image in raw])
    torch.testing.assert_close(program(inputs), model(inputs))
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "export/model.onnx")
    (logits,) = session.run(None, {"input": inputs.numpy()})
    np.testing.assert_allclose(logits, model(inputs).detach(), rtol=1e-3, atol=1e-5)
    facts = json.loads((tmp_path / "export/model.json").read_text())
    assert (facts["classes"], facts["input_shape"], facts["task"]) == (
        model.classes,
        [1, 8, 8],
        "classification",
    )
    assert ImageInput(**facts["image"])(raw[0]).equal(inputs[0])


@pytest.mark.slow
def test_own_data_without_targets_and_a_task_with_columns_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    env = environment({"PYTHONPATH": str(tmp_path)})
    own = [
        "model._target_=mine.Net",
        "data._target_=mine.Rows",
        "train.global_batch_size=24",
        "train.epochs=1",
    ]
    trusted = "trusted_modules=[mine]"
    at_once = "train.evaluate_batch_size=8"
    for name, task in {"plain": [], "task": ["task._target_=mine.Task"]}.items():
        done = run(*own, *task, ONE, f"run_dir={tmp_path / name}", env=env)
        assert done.returncode == 0, done.stderr
    words = ["mode=predict", trusted, at_once, THREE]
    new = ["data.splits={train: {train: true}, test: {train: false, labels: false, samples: 21}}"]
    done = run(
        *words, *new, f"checkpoint.resume={tmp_path}/plain", f"run_dir={tmp_path}/new", env=env
    )
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "new/predictions.npz"))
    assert {*found} == {"sample", "prediction", "probability", "label", "classes"} and len(
        found["label"]
    ) == 21
    assert found["label"].tolist() == [found["classes"][one] for one in found["prediction"]]
    done = run(*words, f"checkpoint.resume={tmp_path}/task", f"run_dir={tmp_path}/margins", env=env)
    assert done.returncode == 0, done.stderr
    assert dict(np.load(tmp_path / "margins/predictions.npz"))["margin"].shape == (50,)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    model = ddp_train.load(tmp_path / "task", trusted_modules=["mine"])
    rows = torch.rand(3, 4)
    assert (model.task, model.predict(rows)["margin"].shape) == ("custom", (3,))
    for wrong, name in ((ConfigError, "Silent"), (TaskError, "Short")):
        config = Config(task=CustomTaskConfig(target=f"mine.{name}"))
        with pytest.raises(wrong, match=f"the task {name}"):
            predict_function(config, "custom", ["mine"])(model.model, rows)
    with pytest.raises(ConfigError, match="if you trust it"):
        predict_function(config, "custom", [])(model.model, rows)
    silent = [
        "task._target_=mine.Silent",
        f"checkpoint.resume={tmp_path}/task",
        f"run_dir={tmp_path}/silent",
    ]
    done = run(*words, *silent, env=env)
    assert (
        done.returncode == 65 and "the task Silent does not say what it predicts" in done.stderr
    ), done.stderr
    short = [
        "task._target_=mine.Short",
        f"checkpoint.resume={tmp_path}/task",
        f"run_dir={tmp_path}/short",
    ]
    done = run(*words, *short, env=env)
    (fatal,) = fatal_lines(done.stderr)
    assert (
        done.returncode == TaskError.exit_code
        and "a tensor [7] as 'margin', for 8 samples" in fatal
    ), done.stderr
    assert not list((tmp_path / "short").glob(".predictions*")), "nothing half written is left"


def columns(*names: str, rows: int = 4) -> dict[str, np.ndarray]:
    return {name: np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) for name in names}


def test_rows_of_another_shape_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    def batches() -> Iterator[dict[str, np.ndarray]]:
        yield columns("mask")
        assert list(tmp_path.iterdir()) == [], "nothing that a killed process could leave"
        yield {"mask": np.zeros((4, 3), dtype=np.float32)}

    message = r"mask: a row is \[3\] of float32 in one batch and \[2\] of float32"
    with pytest.raises(TaskError, match=message):
        write_predictions(batches(), tmp_path / "predictions.npz", np.arange(8), None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        path = disk / "predictions.npz"
        write_predictions(iter([columns("output")]), path, np.arange(4), None, None)
        before = path.read_bytes()
        with pytest.raises(WriteError, match="No space left"):
            write_predictions(
                iter([columns("output", rows=9_000)]), path, np.arange(9_000), None, None
            )
        assert path.read_bytes() == before and [one.name for one in disk.iterdir()] == [
            "predictions.npz"
        ]


def test_classes_have_labels_where_they_have_names() -> None:
    assert labels_of(torch.tensor([1, 0, 2]), ["cat", "dog"]) == [
        "dog",
        "cat",
        "2",
    ], "a model may have more outputs"
    assert labels_of(np.array([-1, 10**12]), ["cat", "dog"]) == ["-1", "1000000000000"]
    for other in (
        None,
        np.array([0.5]),
        torch.tensor([0.5]),
        torch.tensor([True]),
        np.array([[1, 0]]),
    ):
        assert labels_of(other, ["cat", "dog"]) is None


def test_classes_of_other_names_are_refused() -> None:
    source = ArraySource(torch.zeros(2, 3), torch.tensor([0, 1]))
    source.classes = ["cat", "fox"]
    facts = {"outputs": 2, "input_shape": [3], "classes": ["cat", "dog", "fox"]}
    with pytest.raises(
        DataError, match="the data have 2 classes and the checkpoint 3, which differ in dog"
    ):
        refuse_other_data(source, facts, is_own=False)
    with pytest.raises(DataError, match=r"an input is \[3\], and the model was trained with \[4\]"):
        refuse_other_data(source, {**facts, "input_shape": [4]}, is_own=True)
    refuse_other_data(source, {**facts, "classes": ["cat", "fox"]}, is_own=False)
    refuse_other_data(source, {}, is_own=False)


class Plain:
    classes = ("a", "b")

    def __init__(self, train: bool, augment: bool = True) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return torch.full((2,), float(self.augment)), number % 2


def test_training_samples_are_predicted_without_augmentation() -> None:
    data = CustomDataConfig(
        target=f"{__name__}.Plain", transform=["torch.nn.Dropout"], test_transform=[]
    )
    first = {}
    for mode in ("predict", "train"):
        first[mode] = open_datasets(Config(mode=mode, data=data)).train.get_batch(
            np.arange(4), None
        )[0]
    assert first["predict"].tolist() == [[0, 0]] * 4 and first["train"].max() == 2


class Returns(nn.Module):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, _: Any) -> Any:
        return self.outputs


def test_columns_that_are_no_rows_of_samples_are_told_by_the_method_that_gave_them() -> None:
    with pytest.raises(
        TaskError, match=r"predictions\(\) of the task Multilabel returned a tensor \[5\]"
    ):
        checked_columns({"prediction": torch.zeros(5)}, 4, Multilabel())
    with pytest.raises(TaskError, match="the task Nodes has no predictions") as caught:
        checked_columns({"output": torch.zeros(5, 2)}, 4, type("Nodes", (Task,), {})())
    assert caught.value.remedy.startswith("add predictions(model, batch)")


def test_the_columns_of_each_task() -> None:
    numbers = torch.tensor([[0.5, -1.0], [2.0, 3.0]])
    many = Multilabel().predictions(Returns(numbers), torch.zeros(2, 4))
    assert many["prediction"].tolist() == [[True, False], [True, True]] and "target" not in many
    assert Regression().predictions(Returns(numbers[:, :1]), (torch.zeros(2, 4), torch.zeros(2)))[
        "prediction"
    ].shape == (2,)
    pixels = Segmentation().predictions(
        Returns({"out": torch.eye(3)[None, :, :, None]}), torch.zeros(1, 3, 3, 1)
    )
    assert pixels["prediction"].tolist() == [[[0], [1], [2]]]
    logits = torch.zeros(2, 3, 7)
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]])
    text = LanguageModel().predictions(Returns(logits), ids)
    assert text["tokens"].tolist() == [3, 1]
    torch.testing.assert_close(text["loss"], torch.full((2,), 7.0).log())


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
        np.full((8, 8), 200),
        np.full((8, 8), 16.0),
        np.full((8, 8), -0.5),
        np.full((8, 8), np.nan),
    ):
        with pytest.raises(DataError, match="pixels of torch"):
            prepare(wrong)
    with pytest.raises(DataError, match="an image of 3 channels, and the model takes 1"):
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


MANIFEST = {"input_shape": [4], "input_dtype": "float32", "outputs": 2, "step": 1}


class Forgetful(nn.Linear):
    """Not the same twice."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + torch.rand(())


class Depends(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.sum() > 0 else input


@pytest.mark.parametrize(
    ("model", "manifest", "error", "message"),
    [
        (Forgetful(4, 2), MANIFEST, DataError, "outputs differ from the model's by"),
        (Depends(4, 2), MANIFEST, DataError, "the model cannot be exported: "),
        (
            nn.Linear(4, 2),
            {},
            ConfigError,
            (
                "a sample of the data does not begin with the model's input; only models whose"
                " input is one tensor"
            ),
        ),
        (Returns({"logits": torch.zeros(2)}), MANIFEST, ConfigError, "the model returns a dict"),
    ],
)
def test_what_cannot_be_exported_is_named(
    model: nn.Module, manifest: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        export_model(model, manifest, tmp_path, ["torch"])
    assert list(tmp_path.iterdir()) == []
