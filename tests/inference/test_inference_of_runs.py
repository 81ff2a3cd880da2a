"""mode=predict and mode=export of real runs, and the loaded model: the same answers by every way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import ddp_train
from ddp_train.data.config import DigitsConfig
from ddp_train.data.raw_input import ImageInput
from ddp_train.errors import ConfigError, DataError, TaskError
from ddp_train.inference.trained_model import Trained, predict_function
from ddp_train.options.custom import CustomTaskConfig
from ddp_train.options.schema import Config
from tests.support.commands import ONE, THREE, environment, fatal_lines, read, run
from tests.support.jobs import datasets_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("inference")]

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that trained on digits, with a validation set and an average."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    done = run(
        "data.limit=120",
        "train.epochs=2",
        "data.validation=0.25",
        "train.ema_decay=0.5",
        "model=cnn",
        THREE,
        f"run_dir={run_dir}",
    )
    assert done.returncode == 0, done.stderr
    return run_dir


def predict(trained: Path, run_dir: Path, *overrides: str) -> str:
    """Use a trained model. Returns what it prints."""
    batches = "train.evaluate_batch_size=16"
    resume = f"checkpoint.resume={trained}"
    done = run("mode=predict", resume, batches, *overrides, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def predicted(trained: Path) -> Path:
    """The directory of a run in which one process predicted the test set."""
    run_dir = trained.with_name("predicted")
    output = predict(trained, run_dir, ONE)
    assert "predictions for 120 samples of test in " in output
    assert "predictions.npz: sample, prediction, probability [10], target, label\n" in output
    return run_dir


@pytest.fixture(scope="module")
def model(trained: Path) -> Trained:
    return ddp_train.load(trained)


def raw_images() -> list[torch.Tensor]:
    """Twenty test images as users have them, with pixels from 0 to 1."""
    test = datasets_of(DigitsConfig(limit=120))[1]
    return [(image + 1) / 2 for image in test.inputs[:20]]


def test_predictions_of_three_processes_are_the_same_bytes(
    trained: Path, predicted: Path, tmp_path: Path
) -> None:
    predict(trained, tmp_path, THREE)
    of_three = (tmp_path / "predictions.npz").read_bytes()
    assert of_three == (predicted / "predictions.npz").read_bytes()


def test_predictions_agree_with_the_scores(trained: Path, predicted: Path, tmp_path: Path) -> None:
    columns = dict(np.load(predicted / "predictions.npz"))
    test = datasets_of(DigitsConfig(limit=120))[1]
    scores = read(trained, "summary.json")["test"]
    assert columns["sample"].tolist() == list(range(120))
    assert columns["target"].tolist() == test.targets[:120].tolist()
    assert (columns["prediction"] == columns["target"]).sum() == scores["correct"]

    predict(trained, tmp_path, ONE, "checkpoint.average=true")
    averaged = dict(np.load(tmp_path / "predictions.npz"))
    losses = -np.log(averaged["probability"][np.arange(120), averaged["target"]])
    assert abs(losses.mean() - scores["ema_loss"]) < 1e-5
    assert not np.array_equal(columns["probability"], averaged["probability"])


def test_validation_samples_have_the_numbers_of_the_training_set(
    trained: Path, tmp_path: Path
) -> None:
    predict(trained, tmp_path, THREE, "predict.split=validation", "predict.format=parquet")
    columns = parquet.read_table(tmp_path / "predictions.parquet").to_pydict()
    whole = datasets_of(DigitsConfig())[0]
    assert len(columns["sample"]) == 120
    assert max(columns["sample"]) > 120
    assert columns["target"] == whole.targets[columns["sample"]].tolist()
    assert columns["label"] == [str(number) for number in columns["prediction"]]
    assert len(columns["probability"][0]) == 10


def test_the_loaded_model_predicts_the_same(predicted: Path, model: Trained) -> None:
    columns = dict(np.load(predicted / "predictions.npz"))
    assert model.task == "classification"
    assert model.classes == list("0123456789")
    found = model.predict(raw_images())
    assert found["label"] == columns["label"][:20].tolist()
    np.testing.assert_allclose(found["probability"], columns["probability"][:20], atol=1e-5)


@pytest.mark.parametrize("nothing", [[], "one.png"])
def test_a_model_predicts_a_list_of_samples(model: Trained, nothing: list[str] | str) -> None:
    with pytest.raises(DataError, match="takes a list of samples"):
        model.predict(nothing)


def test_exports_compute_what_the_model_does(trained: Path, model: Trained, tmp_path: Path) -> None:
    formats = "export.formats=[torch,onnx]"
    done = run("mode=export", f"checkpoint.resume={trained}", formats, f"run_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("takes any number of samples of 1 x 8 x 8") == 2, done.stdout
    inputs = torch.stack([model.preprocess(image) for image in raw_images()])
    outputs = model(inputs).detach()

    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(inputs), outputs)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(None, {"input": inputs.numpy()})
    np.testing.assert_allclose(logits, outputs, rtol=1e-3, atol=1e-5)

    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["classes"] == model.classes
    assert facts["input_shape"] == [1, 8, 8]
    assert facts["task"] == "classification"
    assert ImageInput(**facts["image"])(raw_images()[0]).equal(inputs[0])


def test_data_without_targets_and_a_task_with_own_columns(
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
    words = ["mode=predict", trusted, at_once]
    new = ["data.splits={train: {train: true}, test: {train: false, labels: false, samples: 21}}"]
    done = run(
        *words,
        *new,
        f"checkpoint.resume={tmp_path}/plain",
        f"run_dir={tmp_path}/new",
        THREE,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "new/predictions.npz"))
    assert {*found} == {"sample", "prediction", "probability", "label", "classes"} and len(
        found["label"]
    ) == 21
    assert found["label"].tolist() == [found["classes"][one] for one in found["prediction"]]
    margins = [f"checkpoint.resume={tmp_path}/task", f"run_dir={tmp_path}/margins", THREE]
    done = run(*words, *margins, env=env)
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
    done = run(*words, *silent, ONE, env=env)
    assert (
        done.returncode == 65 and "the task Silent does not say what it predicts" in done.stderr
    ), done.stderr
    short = [
        "task._target_=mine.Short",
        f"checkpoint.resume={tmp_path}/task",
        f"run_dir={tmp_path}/short",
    ]
    done = run(*words, *short, ONE, env=env)
    (fatal,) = fatal_lines(done.stderr)
    assert (
        done.returncode == TaskError.exit_code
        and "a tensor [7] as 'margin', for 8 samples" in fatal
    ), done.stderr
    assert not list((tmp_path / "short").glob(".predictions*")), "nothing half written is left"


def test_predictions_of_a_folder_without_train(tmp_path: Path) -> None:
    for number in range(12):
        for folder in ("all/train", "all/val", "new/val"):
            place = tmp_path / folder / f"class_{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (20 * number, 0, 0)).save(place / f"{number}.png")
    words = ["data=image_folder", "data.image_size=16", "data.validation=0.5"]
    words += ["model=mlp", "train.epochs=1", "train.global_batch_size=4", ONE]
    done = run(*words, f"data.root={tmp_path}/all", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    said = predict(tmp_path / "run", tmp_path / "predicted", f"data.root={tmp_path}/new")
    assert "predictions for 12 samples of test in " in said
    files = np.load(tmp_path / "predicted/predictions.npz")["file"]
    assert all(str(name).startswith(f"{tmp_path}/new/val/") for name in files)
    resume = f"checkpoint.resume={tmp_path}/run"
    scored = run("mode=evaluate", resume, f"data.root={tmp_path}/new", f"run_dir={tmp_path}/scored")
    assert scored.returncode == 0, scored.stderr
    trains = run(*words, f"data.root={tmp_path}/new", f"run_dir={tmp_path}/other")
    assert trains.returncode == 2 and "new/train must hold a folder per class" in trains.stderr
