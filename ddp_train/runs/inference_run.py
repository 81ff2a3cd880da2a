"""What is done with a trained model: mode=evaluate, predict and export."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ddp_train.assembly import checkpoint_model, metrics, setup
from ddp_train.assembly.data_sets import common_digests
from ddp_train.checkpoints import averaged_weights, reader
from ddp_train.data.datasets import BatchSource
from ddp_train.data.sample_facts import class_names
from ddp_train.data.splits import Splits
from ddp_train.errors import ConfigError, DataError
from ddp_train.inference.export import export_model
from ddp_train.inference.predictions import predicted, write_predictions
from ddp_train.options.custom import CustomDataConfig
from ddp_train.runs.context import RunContext


@dataclasses.dataclass(frozen=True)
class Inference(RunContext):
    """One process of a run that does not train. Each method returns the content of summary.json."""

    def found(self) -> Path:
        """The checkpoint."""
        found = checkpoint_model.find_checkpoint(self.config, self.world, self.device)
        assert found, "config.validate asks for a checkpoint, and find raises if it is not valid"
        return found

    def evaluate(self, sources: Splits) -> dict[str, Any]:
        """Scores the test set with a checkpoint."""
        config = self.config
        device = self.device
        found = self.found()
        common_digests(sources, sources.test, device)
        _refuse_other_data(
            sources.test, reader.read_manifest(found), isinstance(config.data, CustomDataConfig)
        )
        strategy = setup.build_strategy(config, self.world, device)
        module = setup.build_module(config, sources.train, strategy, device)
        if module.further:
            scored = averaged_weights.has_average(found)
            metrics.check_metrics(
                config,
                module,
                sources,
                lambda source: setup.scored_batches(config, source, device),
                scored,
            )
        evaluation = setup.build_evaluation(
            config, self.world, device, module, strategy, sources.test, self.status
        )
        evaluated = reader.described(found)
        self.display.checkpoint(evaluated)
        began = time.perf_counter()
        score = averaged_weights.scored_checkpoint(found, evaluation)
        evaluation.close()
        facts = {
            "steps": evaluated["step"],
            "seconds": time.perf_counter() - began,
            "evaluated": evaluated,
        }
        return self.summaries.of(score and {"test": score}, module, **facts)

    def predict(self, sources: Splits) -> dict[str, Any]:
        """Writes what a checkpoint's model predicts for each sample of a split. Raises ConfigError,
        DataError, TaskError and WriteError."""
        config = self.config
        split = self.config.predict.split
        found = self.found()
        source = sources.named(split)
        if source is None:
            raise ConfigError([f"predict.split={split}: there is none; use predict.split=test"])
        manifest = reader.read_manifest(found)
        _refuse_other_data(source, manifest, isinstance(config.data, CustomDataConfig))
        common_digests(sources, source, self.device)
        strategy = setup.build_strategy(config, self.world, self.device)
        module = checkpoint_model.module_of(config, manifest, strategy, self.device)
        weights = reader.weights_file(found, config.checkpoint.average)
        reader.load_model(found, module.model, weights)
        evaluation = setup.build_evaluation(
            config, self.world, self.device, module, strategy, source, self.status
        )
        used = reader.described(found)
        self.display.checkpoint(used)
        file = self.run_dir / f"predictions.{config.predict.format}"
        began = time.perf_counter()
        rows = predicted(
            evaluation, -(-len(source) // config.train.evaluate_batch_size), self.device
        )
        numbers = sources.numbers.get(split, np.arange(len(source)))[: len(source)]
        if self.world.is_leader:
            columns = write_predictions(
                rows, file, numbers, getattr(source, "paths", None), manifest.get("classes")
            )
        else:
            columns = {name: [] for one in rows for name in one}
        evaluation.close()
        seconds = time.perf_counter() - began
        written = {"file": str(file), "split": split, "samples": len(source), "columns": columns}
        return self.summaries.of_use(module.model, used, seconds, predictions=written)

    def export(self) -> dict[str, Any]:
        """Writes a checkpoint's model in other forms, each compared with the model. Raises
        ConfigError, DataError and WriteError."""
        found = self.found()
        manifest = reader.read_manifest(found)
        used = reader.described(found)
        model = checkpoint_model.model_of(
            self.config, manifest, str(found)
        )  # as it is: nothing is tuned
        reader.load_model(found, model, reader.weights_file(found, self.config.checkpoint.average))
        self.display.checkpoint(used)
        began = time.perf_counter()
        written = export_model(model, manifest, self.run_dir, self.config.export.formats)
        return self.summaries.of_use(model, used, time.perf_counter() - began, export=written)


def _refuse_other_data(source: BatchSource, manifest: dict[str, Any], is_own: bool) -> None:
    """Raises DataError if a model of ours was trained with inputs of another shape, or if the
    classes are others: their numbers would mean something else."""
    inputs = checkpoint_model.inputs_of(source.get_batch(np.array([0]), None))
    if (
        "outputs" in manifest
        and isinstance(inputs, Tensor)
        and list(inputs.shape[1:]) != manifest["input_shape"]
    ):
        raise DataError(
            f"an input is {list(inputs.shape[1:])}, and the model was trained with"
            f" {manifest['input_shape']}",
            "name data of that shape"
            + (", or transform them with data.test_transform" if is_own else ""),
        )
    then = manifest.get("classes")
    now = class_names(source)
    if then and now and then != now:
        differing = sorted(set(then) ^ set(now))[:5] or ["their order"]
        raise DataError(
            f"the data have {len(now)} classes and the checkpoint {len(then)}, which differ in"
            f" {', '.join(differing)}",
            "give the data the same classes in the same order: their numbers would mean something"
            " else",
        )
