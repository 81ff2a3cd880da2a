"""The trained model of a run, for use outside of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.assembly import checkpoint_model
from ddp_train.checkpoints import reader
from ddp_train.config.code_checks import code_problems
from ddp_train.config.freeze import bind_frozen
from ddp_train.config.user_code import build_transforms
from ddp_train.data.corpus.codec import Bytes, Tokenizer
from ddp_train.data.raw_input import (
    ImageInput,
    TextInput,
    ToInput,
    TransformedInput,
    number_input,
)
from ddp_train.errors import ConfigError, DataError
from ddp_train.inference.predictions import checked_columns, labels_of
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config
from ddp_train.tasks.task import has_own_columns

Predict = Callable[[nn.Module, Tensor], Mapping[str, Tensor]]
"""Model and a batch of inputs -> columns."""


class Trained(nn.Module):
    """A trained model with its preprocessing and its predictions.

    It is a torch.nn.Module: calling it calls the model.
    """

    def __init__(
        self,
        model: nn.Module,
        task: str,
        classes: list[str] | None,
        to_input: ToInput,
        predict: Predict,
    ) -> None:
        super().__init__()
        self.model = model
        """The torch.nn.Module that the run trained, in eval mode."""
        self.task = task
        """The name of the built-in task that it was trained for, or `custom`."""
        self.classes = classes
        """The names of the classes in the order of the model's outputs; None if the data set has
        none."""
        self._to_input = to_input
        self._predict = predict

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def preprocess(self, sample: Any) -> Tensor:
        """Turn a raw sample into an input of the model, a tensor without a batch dimension.

        The preprocessing is that of the run's evaluations.

        sample: for image data sets, a path, a PIL image, or pixels: [h, w], [h, w, c] or [c, h, w],
            uint8, or floats from 0 to 1. For data=text, a str. For a data set of your own, the
            path of an image, or any object that the run's `data.test_transform` takes.
        """
        return self._to_input(sample)

    @torch.no_grad()
    def predict(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Predict raw samples, all in one batch.

        samples: a list of what `preprocess` takes.

        Returns {column: values} with the columns of mode=predict, each a tensor [n, ...] on the
        CPU. A classification has `prediction` and `probability`, and, if the classes have names,
        `label`, a list of names.

        Raises ConfigError if the task cannot predict from inputs alone or its code is not trusted,
        DataError if `samples` is empty or their shapes differ, and TaskError if a task of your own
        does not return one row per sample.
        """
        if isinstance(samples, str | PathLike) or not len(samples):
            raise DataError(
                f"predict takes a list of samples, not {samples!r}", "pass predict([SAMPLE, ...])"
            )
        inputs = [self.preprocess(sample) for sample in samples]
        shapes = list(dict.fromkeys(tuple(input.shape) for input in inputs))
        if len(shapes) > 1:
            raise DataError(
                f"the samples have inputs of different shapes: {' and '.join(map(str, shapes))}",
                "pass samples of one size",
            )
        weight = next(self.model.parameters())
        batch = torch.stack(inputs).to(weight.device)
        if batch.is_floating_point():
            batch = batch.to(weight.dtype)
        predictions = self._predict(self.model, batch)
        columns: dict[str, Any] = {name: value.cpu() for name, value in predictions.items()}
        labels = labels_of(columns.get("prediction"), self.classes)
        if labels is not None:
            columns["label"] = labels
        return columns


def load(
    run: str | PathLike[str],
    which: str = "auto",
    average: bool = False,
    trusted_modules: Sequence[str] = (),
) -> Trained:
    """Load the trained model of a run, in eval mode, on the CPU.

    It needs neither the data set nor a process group.

    run: a run directory, or one of its checkpoints.
    which: the checkpoint of a run directory: `best`, `last`, or `auto`: the best if it was kept,
        else the last.
    average: True loads the averaged weights (of train.ema_decay) in place of the current ones.
    trusted_modules: names of the packages with your own model, task or transforms. A checkpoint
        names that code, and it is only imported from packages in this list.

    Returns a `Trained`. Raises DataError if there is no valid checkpoint or not the one asked for,
    and ConfigError if the model's code is not trusted or does not exist.
    """
    checkpoint = reader.find(str(run), Path(run), which)
    assert checkpoint, "it is named, and find raises if it is not valid"
    manifest = reader.read_manifest(checkpoint)
    if "config" not in manifest:
        raise DataError(
            f"{checkpoint} has no config, so its model cannot be built: it was saved by"
            " ddp_train.session or save_checkpoint",
            "build the model as that script does, then"
            f" model.load_state_dict(safetensors.torch.load_file('{checkpoint / reader.MODEL}'))",
        )
    config, problems = bind_frozen(manifest["config"])
    problems += code_problems("model", config.model, trusted_modules)
    if problems:
        raise ConfigError(problems)
    model = checkpoint_model.model_of(config, manifest)
    reader.load_model(checkpoint, model, reader.weights_file(checkpoint, average))
    task = manifest["task"]
    to_input = input_maker(config, manifest, trusted_modules)
    predict = predict_function(config, task, trusted_modules)
    return Trained(model, task, manifest.get("classes"), to_input, predict).eval()


def predict_function(config: Config, task_name: str, trusted_modules: Sequence[str]) -> Predict:
    """The function from a batch of inputs to columns.

    That of a task that cannot predict raises ConfigError when called.
    """
    task = None
    problems = []
    if task_name == "custom":
        problems = code_problems("task", config.task, trusted_modules)
    if not problems:
        task = checkpoint_model.task_of(config, task_name)
    if task_name == "language_model":
        problems = [
            "predict: a language model has a prediction for each token of a sample, not one for"
            " the sample; call the model itself for its logits, or use mode=predict"
        ]
    elif task and not has_own_columns(task):
        lacks = f"the task {type(task).__name__} has no predictions(self, model, inputs)"
        problems = [f"predict: {lacks}; give it that method, or call the model"]

    def predict(model: nn.Module, inputs: Tensor) -> Mapping[str, Tensor]:
        if problems or task is None:
            raise ConfigError(problems)
        return checked_columns(task.predictions(model, inputs), len(inputs), task)

    return predict


def input_maker(
    config: Config, manifest: dict[str, Any], trusted_modules: Sequence[str]
) -> ToInput:
    """The function from a raw sample to an input.

    That of a data set whose code is not trusted raises ConfigError when called.
    """
    data = config.data
    if manifest.get("image"):
        return ImageInput(**manifest["image"])
    if data.name == "text":
        codec = Tokenizer(data.tokenizer) if data.tokenizer else Bytes()
        return TextInput(codec.encode)
    if not isinstance(data, CustomDataConfig):
        return number_input
    problems = code_problems("data", data, trusted_modules)
    if problems:

        def refuse(_: Any) -> Tensor:
            raise ConfigError(problems)

        return refuse
    if data.test_transform is None:
        return TransformedInput(build_transforms("data.transform", data.transform))
    return TransformedInput(build_transforms("data.test_transform", data.test_transform))
