"""TensorBoard, Weights & Biases and MLflow behind one short protocol. `tracking` calls each from a
thread of its own.

Their libraries are imported where they are used: some take more than a second, and are installed
only by those who want them. A run that is continued keeps its id in each.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from ddp_train.distributed.environment import mlflow_uri, wandb_mode

Scalars = dict[str, float]
HISTOGRAM_BINS = 64
PARAMETERS_AT_ONCE = 100
PARAMETER_LETTERS = 6_000
TAG_LETTERS = 5_000
"""MLflow takes no more in one call, of the value of a parameter, and of a tag."""
ID_LETTERS = 12


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a run when it is opened."""

    run_dir: Path
    name: str
    project: str
    hyperparameters: dict[str, bool | int | float | str]
    """The frozen config, flat."""
    first_step: int
    """Optimizer steps that are done."""


class Tracker(Protocol):
    """Called from one thread, `open` first. Whatever an error is, it ends no training."""

    name: str
    keeps_up_to: float
    """Once it is open: the last step of those it was told of in earlier processes that it has. It
    must be told of all others again."""

    def open(self, run: Run, run_id: str | None) -> str:
        """run_id: the one that was returned in an earlier process of this run. Returns another if
        that is gone."""
        ...

    def write(self, step: int, scalars: Scalars) -> None:
        """The numbers after so many optimizer steps."""
        ...

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """status: completed, preempted or failed. summary: that of summary.json, flat; empty if
        there is none."""
        ...


class TensorBoard:
    """Event files in the run directory, in the folder `tensorboard`."""

    name = "tensorboard"
    keeps_up_to: float = 0

    def open(self, run: Run, run_id: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.run_dir / self.name
        self.is_new = not any(folder.glob("events.*"))
        self.step = run.first_step
        self.keeps_up_to = run.first_step
        self.writer = SummaryWriter(
            str(folder), purge_step=None if self.is_new else run.first_step + 1
        )
        watched = dict.fromkeys(("train/loss", "test/loss", "test/accuracy"), 0.0)
        experiment, start, self.end = hparams(run.hyperparameters, watched)
        if self.is_new:
            for part in (experiment, start):
                self.writer.file_writer.add_summary(part)  # pyright: ignore[reportOptionalMemberAccess]
        self.writer.flush()
        if run_id and not self.is_new:
            return run_id
        return uuid.uuid4().hex[:ID_LETTERS]

    def write(self, step: int, scalars: Scalars) -> None:
        self.step = step
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        # a process may be killed at any time, and metrics.jsonl loses nothing then
        self.writer.flush()

    def picture(self, model: nn.Module, inputs: Tensor) -> None:
        """What a new run begins with: a batch of images, and the graph of the model. inputs: [n,
        ...]."""
        if not self.is_new:
            return
        if inputs.ndim == 4 and inputs.shape[1] in (1, 3):
            low, high = inputs.aminmax()
            self.writer.add_images("images", (inputs - low) / (high - low).clamp(min=1e-12), 0)
        self.writer.add_graph(model, inputs[:1])

    def histograms(self, step: int, weights: dict[str, Tensor]) -> None:
        """The distribution of each parameter."""
        for name, weight in weights.items():
            self.writer.add_histogram(
                f"weights/{name}",
                weight.float().numpy(),
                step,
                bins=HISTOGRAM_BINS,  # pyright: ignore[reportArgumentType]
            )
        self.writer.flush()

    def close(self, status: str, summary: dict[str, Any]) -> None:
        if summary:
            self.writer.add_text("summary", f"```\n{json.dumps(summary, indent=1)}\n```", self.step)
        if status == "completed":
            self.writer.file_writer.add_summary(self.end)  # pyright: ignore[reportOptionalMemberAccess]
        self.writer.close()


class Wandb:
    """Weights & Biases: files in the run directory, in the folder `wandb`; sent away only if
    WANDB_MODE says so.

    Offline, it writes to the disk every quarter of a minute, and a killed process loses that: a run
    that goes on is told to it from the beginning, in a new folder, which takes the place of the
    older ones.
    """

    name = "wandb"
    keeps_up_to: float = 0

    def open(self, run: Run, run_id: str | None) -> str:
        import wandb

        run_id = run_id or uuid.uuid4().hex[:ID_LETTERS]
        for replaced in (run.run_dir / self.name).glob(f"offline-run-*-{run_id}"):
            replaced.rename(replaced.with_name(f"replaced-{replaced.name}"))
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, login_timeout=30
        )  # figures are ours
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            resume="allow",
            mode=wandb_mode(),  # pyright: ignore
            dir=str(run.run_dir),
            settings=quiet,
        )
        self.keeps_up_to = (
            0 if self.run.offline else self.run.step - 1
        )  # online, it is the server that says
        self.run.config.update(run.hyperparameters, allow_val_change=True)
        return run_id

    def write(self, step: int, scalars: Scalars) -> None:
        self.run.log(scalars, step=step)

    def close(self, status: str, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish(exit_code=0 if status == "completed" else 1)


class Mlflow:
    """MLflow, wherever MLFLOW_TRACKING_URI says: a server, a database, a folder."""

    name = "mlflow"
    keeps_up_to: float = math.inf
    run_id = ""
    """Once there is a run, also if what follows fails: the next attempt goes on with it."""

    def open(self, run: Run, run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self.client = MlflowClient(_mlflow_place())
        self.step = run.first_step
        self.run_id = self.run_id or run_id or self._new_run(run)
        try:
            known = self.client.get_run(self.run_id).data.params
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            # another place than before, or it was deleted
            self.run_id = self._new_run(run)
            known = {}
        self.client.update_run(self.run_id, "RUNNING")
        new = [
            Param(name, str(v)[:PARAMETER_LETTERS])
            for name, v in run.hyperparameters.items()
            if name not in known
        ]
        for at in range(0, len(new), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.run_id, params=new[at : at + PARAMETERS_AT_ONCE])
        return self.run_id

    def _new_run(self, run: Run) -> str:
        experiment = self.client.get_experiment_by_name(run.project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(run.project)
        return self.client.create_run(experiment_id, run_name=run.name).info.run_id

    def write(self, step: int, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        self.step = step
        now = int(time.time() * 1000)
        self.client.log_batch(
            self.run_id, metrics=[Metric(name, value, now, step) for name, value in scalars.items()]
        )

    def close(self, status: str, summary: dict[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        self.write(self.step, {f"summary/{name}": float(value) for name, value in numbers.items()})
        for name in summary.keys() - numbers.keys():
            self.client.set_tag(self.run_id, name, str(summary[name])[:TAG_LETTERS])
        self.client.set_terminated(
            self.run_id, {"completed": "FINISHED", "preempted": "KILLED"}.get(status, "FAILED")
        )


def _mlflow_place() -> str | None:
    """MLFLOW_TRACKING_URI, or MLflow's own default; where it lacks what its databases need, the
    folder `mlruns`."""
    return mlflow_uri() or (
        None if importlib.util.find_spec("sqlalchemy") else Path("mlruns").absolute().as_uri()
    )


KINDS: Sequence[type[TensorBoard | Wandb | Mlflow]] = (TensorBoard, Wandb, Mlflow)
