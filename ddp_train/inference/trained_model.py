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

Predictions = Callable[[nn.Module, Tensor], Mapping[str, Tensor]]
"""Model and a batch of inputs -> columns."""


class Trained(nn.Module):
    """A trained model with what it takes to use it. Called, it is the model."""

    def __init__(
        self,
        model: nn.Module,
        task: str,
        classes: list[str] | None,
        to_input: ToInput,
        predictions: Predictions,
    ) -> None:
        super().__init__()
        self.model = model
        """As the run built it, in eval mode."""
        self.task = task
        """The name of the built-in task that it was trained for; `custom`."""
        self.classes = classes
        """The names of the classes in the order of the model's outputs; None if the data set had no
        names for them."""
        self._to_input = to_input
        self._predictions = predictions

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def preprocess(self, sample: Any) -> Tensor:
        """An input of the model, without the dimension of the batch, from a raw sample, as the
        samples that the run scored were made.

        sample: of image data sets a path, an image of PIL, or pixels ([h, w], [h, w, c] or [c, h,
        w]; uint8, or from 0 to 1); of data=text a text; of your own data set what its
        `data.test_transform` takes, or a path of an image.
        """
        return self._to_input(sample)

    @torch.no_grad()
    def predict(self, samples: Sequence[Any]) -> dict[str, Any]:
        """The columns of mode=predict for raw samples: for a classification `prediction`,
        `probability`, and `label`, the names, if there are any. All samples are one batch.

        Raises ConfigError for a task without predictions for inputs alone, or whose code is not
        trusted, DataError for samples that cannot be one batch, TaskError if a task of your own
        does not return a row per sample.
        """
        if isinstance(samples, str | PathLike) or not len(samples):
            raise DataError(
                f"predict({samples!r}): takes a list of samples", "pass predict([SAMPLE, ...])"
            )
        own = next(self.model.parameters())
        inputs = [self.preprocess(sample) for sample in samples]
        shapes = list(dict.fromkeys(tuple(one.shape) for one in inputs))
        if len(shapes) > 1:
            raise DataError(
                f"samples become inputs of {' and '.join(map(str, shapes))}",
                "pass those of one size",
            )
        batch = torch.stack(inputs).to(own.device)
        batch = batch.to(own.dtype) if batch.is_floating_point() else batch
        columns = {
            name: value.cpu() for name, value in self._predictions(self.model, batch).items()
        }
        labels = labels_of(columns.get("prediction"), self.classes)
        return columns if labels is None else {**columns, "label": labels}


def load(
    run: str | PathLike[str],
    which: str = "auto",
    average: bool = False,
    trusted_modules: Sequence[str] = (),
) -> Trained:
    """The model of a run with its trained weights, in eval mode, on the CPU. Neither data nor
    processes are needed.

    run: a run directory, or one of its checkpoints. which: of a run's checkpoints the `best`, the
    `last`, or with auto the best if it is kept. average: the average of the weights
    (train.ema_decay) in their place. trusted_modules: the packages of your own code, for a model, a
    task or transforms that are none of ours: what a checkpoint names is not loaded unasked.

    Raises DataError if there is no valid checkpoint or not what is asked for, ConfigError if its
    model's code is not trusted or does not exist.
    """
    found = reader.find(str(run), Path(run), which)
    assert found, "it is named, and find raises if it is not valid"
    manifest = reader.read_manifest(found)
    config, problems = bind_frozen(manifest["config"])
    problems += code_problems("model", config.model, trusted_modules)
    if problems:
        raise ConfigError(problems)
    model = checkpoint_model.model_of(config, manifest, str(found))
    reader.load_model(found, model, reader.weights_file(found, average))
    task = checkpoint_model.task_name(config, manifest) or "custom"
    to_input = _to_input(config, manifest, trusted_modules)
    return Trained(
        model, task, manifest.get("classes"), to_input, _predictions(config, task, trusted_modules)
    ).eval()


def _predictions(config: Config, name: str, trusted_modules: Sequence[str]) -> Predictions:
    """What makes columns of a batch of inputs. That of a task that cannot raises ConfigError when
    called."""
    problems = code_problems("task", config.task, trusted_modules) if name == "custom" else []
    task = None if problems else checkpoint_model.task_of(config, name)
    if name == "language_model":
        problems = [
            "predict: a language model predicts no sample; call the model, or use mode=predict"
        ]
    elif task and not has_own_columns(task):
        lacks = f"the task {type(task).__name__} has no predictions(self, model, inputs)"
        problems = [f"predict: {lacks}; give it that method, or call the model"]

    def predictions(model: nn.Module, inputs: Tensor) -> Mapping[str, Tensor]:
        if problems or task is None:
            raise ConfigError(problems)
        return checked_columns(task.predictions(model, inputs), len(inputs), task)

    return predictions


def _to_input(config: Config, manifest: dict[str, Any], trusted_modules: Sequence[str]) -> ToInput:
    """What makes inputs of raw samples. That of a data set whose code is not trusted raises
    ConfigError when called."""
    data = config.data
    if facts := manifest.get("image"):
        return ImageInput(**facts)
    if data.name == "text":
        return TextInput((Tokenizer(data.tokenizer) if data.tokenizer else Bytes()).encode)
    if not isinstance(data, CustomDataConfig):
        return number_input
    key = "transform" if data.test_transform is None else "test_transform"
    items = getattr(data, key)
    if problems := code_problems("data", data, trusted_modules):

        def refuse(_: Any) -> Tensor:
            raise ConfigError(problems)

        return refuse
    return TransformedInput(build_transforms(f"data.{key}", items))
