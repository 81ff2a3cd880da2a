"""Runs that use a trained model: mode=evaluate, predict and export."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ddp_train.assembly import checkpoint_model, metrics
from ddp_train.assembly.data_digests import common_digests
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_module, inputs_of
from ddp_train.assembly.strategy import build_strategy
from ddp_train.checkpoints import reader
from ddp_train.checkpoints.scored_checkpoint import score_checkpoint
from ddp_train.data.datasets import BatchSource
from ddp_train.data.sample_facts import class_names
from ddp_train.data.splits import Splits
from ddp_train.errors import ConfigError, DataError
from ddp_train.inference.export import export_model
from ddp_train.inference.predictions import predict_batches, write_predictions
from ddp_train.options.custom import CustomDataConfig
from ddp_train.runs.context import RunContext
from ddp_train.runs.summary import summary_of_model, summary_of_scores
from ddp_train.scored_sets import TEST, kind_of
from ddp_train.text import did_you_mean

FLATTERS = "so that score does not tell how the model does on new data"


@dataclass(frozen=True)
class InferenceRun:
    """A run that uses a trained model. Each method returns the content of summary.json."""

    run: RunContext

    def find_checkpoint(self) -> Path:
        run = self.run
        checkpoint = checkpoint_model.find_checkpoint(run.config, run.world, run.device)
        assert checkpoint, "config.validate asks for one, and finding raises if it is not valid"
        return checkpoint

    def evaluate(self, splits: Splits) -> dict[str, Any]:
        """Score the test sets with a checkpoint, or those that `evaluate.sets` names.

        Raises ConfigError if one of them is not there, and DataError.
        """
        run = self.run
        config = run.config
        checkpoint = self.find_checkpoint()
        sets = splits.test_sets
        if config.evaluate.sets:
            sets = {}
            for name in config.evaluate.sets:
                sets[name] = named_set(splits, "evaluate.sets", name)
        manifest = reader.read_manifest(checkpoint)
        for source in sets.values():
            self._check_data(source, manifest)
        common_digests(splits, splits.test, run.device)
        strategy = build_strategy(config, run.world, run.device)
        module = build_module(config, splits.train, strategy, run.device)
        if module.further_metrics:
            has_average = reader.has_average(checkpoint)
            metrics.check_metrics(config, module, splits, run.device, has_average)
        builder = JobBuilder(config, run.world, run.device, module, strategy, run.status)
        evaluations = builder.build_evaluations(sets)
        description = self._describe(checkpoint)
        began = time.perf_counter()
        scores = score_checkpoint(checkpoint, module.model, evaluations)
        for evaluation in evaluations.values():
            evaluation.close()
        return summary_of_scores(run, scores, module) | _use_of(description, began)

    def predict(self, splits: Splits) -> dict[str, Any]:
        """Write what a checkpoint's model predicts for each sample of a split.

        Raises ConfigError, DataError, TaskError and WriteError.
        """
        run = self.run
        config = run.config
        split = config.predict.split
        checkpoint = self.find_checkpoint()
        source = splits.train
        if split != "train":
            source = named_set(splits, "predict.split", split)
        manifest = reader.read_manifest(checkpoint)
        self._check_data(source, manifest)
        common_digests(splits, source, run.device)
        strategy = build_strategy(config, run.world, run.device)
        module = checkpoint_model.module_of(config, manifest, strategy, run.device)
        self._load_weights(checkpoint, module.model)
        builder = JobBuilder(config, run.world, run.device, module, strategy, run.status)
        evaluation = builder.build_evaluation(source)
        description = self._describe(checkpoint)
        began = time.perf_counter()
        batch_count = -(-len(source) // config.train.evaluate_batch_size)
        rows = predict_batches(evaluation, batch_count, run.device)
        file = run.run_dir / f"predictions.{config.predict.format}"
        columns = {}
        if run.world.is_leader:
            numbers = splits.numbers.get(split, np.arange(len(source)))[: len(source)]
            paths = getattr(source, "paths", None)
            columns = write_predictions(rows, file, numbers, paths, manifest.get("classes"))
        else:
            for _ in rows:  # takes part in the exchange
                pass
        evaluation.close()
        return {
            **summary_of_model(run, "completed", module.model),
            **_use_of(description, began),
            "predictions": {
                "file": str(file),
                "split": split,
                "samples": len(source),
                "columns": columns,
            },
        }

    def export(self) -> dict[str, Any]:
        """Write a checkpoint's model in other forms, each compared with the model.

        Raises ConfigError, DataError and WriteError.
        """
        run = self.run
        checkpoint = self.find_checkpoint()
        manifest = reader.read_manifest(checkpoint)
        # As it is: nothing is tuned.
        model = checkpoint_model.model_of(run.config, manifest)
        self._load_weights(checkpoint, model)
        description = self._describe(checkpoint)
        began = time.perf_counter()
        exports = export_model(model, manifest, run.run_dir, run.config.export.formats)
        return {
            **summary_of_model(run, "completed", model),
            **_use_of(description, began),
            "export": exports,
        }

    def _load_weights(self, checkpoint: Path, model: nn.Module) -> None:
        weights_file = reader.weights_file(checkpoint, self.run.config.checkpoint.average)
        reader.load_model(checkpoint, model, weights_file)

    def _describe(self, checkpoint: Path) -> dict[str, Any]:
        """Show which checkpoint is used. Returns what is known of it."""
        description = reader.described(checkpoint)
        self.run.display.checkpoint(description)
        metric = description["metric"] or ""
        scores = self.run.config.mode == "evaluate"
        if scores and description["which"] == "best" and kind_of(metric.split(".")[0]) == TEST:
            self.run.display.line(f"note: the checkpoint was chosen by its {metric}, {FLATTERS}")
        return description

    def _check_data(self, source: BatchSource, manifest: dict[str, Any]) -> None:
        is_own = isinstance(self.run.config.data, CustomDataConfig)
        refuse_other_data(source, manifest, is_own)


def named_set(splits: Splits, key: str, name: str) -> BatchSource:
    """A set that is scored. Raises ConfigError if there is none of that name.

    key: the one that names it, for the message.
    """
    sets = {**splits.validation_sets, **splits.test_sets}
    if name not in sets:
        guess = did_you_mean(name, list(sets))
        raise ConfigError(
            [f"{key}={name}: there is no set {name}; there are {', '.join(sets)}{guess}"]
        )
    return sets[name]


def _use_of(description: dict[str, Any], began: float) -> dict[str, Any]:
    """Entries of summary.json for a run that used a checkpoint.

    began: clock reading before it was used.
    """
    seconds = time.perf_counter() - began
    return {"steps": description["step"], "seconds": seconds, "evaluated": description}


def refuse_other_data(source: BatchSource, manifest: dict[str, Any], is_own: bool) -> None:
    """Raise DataError if inputs have another shape than in training, or the classes differ.

    manifest: that of the checkpoint.
    is_own: the data set is a class of the user's own, which may have transforms.
    """
    inputs = inputs_of(source.get_batch(np.array([0]), None))
    if "outputs" in manifest and isinstance(inputs, Tensor):
        shape = list(inputs.shape[1:])
        if shape != manifest["input_shape"]:
            remedy = f"use data of the shape {manifest['input_shape']}"
            if is_own:
                remedy += ", or transform them with data.test_transform"
            raise DataError(
                f"an input has the shape {shape}, but the model was trained with"
                f" {manifest['input_shape']}",
                remedy,
            )
    classes_then = manifest.get("classes")
    classes_now = class_names(source)
    if classes_then and classes_now and classes_then != classes_now:
        differing = sorted(set(classes_then) ^ set(classes_now))[:5] or ["their order"]
        raise DataError(
            f"the data set has {len(classes_now)} classes, but the checkpoint has"
            f" {len(classes_then)}; they differ in {', '.join(differing)}",
            "use data with the same classes in the same order",
        )
