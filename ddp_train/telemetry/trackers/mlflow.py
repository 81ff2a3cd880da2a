"""MLflow. Torch-free."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_train.telemetry.trackers.tracker import Scalars, TrackedRun, Tracker

if TYPE_CHECKING:
    from numpy import ndarray

PARAMETERS_AT_ONCE = 100
PARAMETER_LETTERS = 6_000
TAG_LETTERS = 5_000
"""MLflow's limits on one call, on the value of a parameter, and on a tag."""
STATUS = {"completed": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


class Mlflow(Tracker):
    """A run at MLFLOW_TRACKING_URI: a server, a database, a folder."""

    package = "mlflow"
    # The file store is refused by default.
    environment: ClassVar = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}

    def __init__(self) -> None:
        self.run_id = ""
        """Known as soon as there is a run: an `open` that failed later continues with it."""

    def open(self, run: TrackedRun, run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri())
        self.step = run.first_step
        self.run_id = self.run_id or run_id or self._new_run(run)
        known = self._parameters()
        if known is None:  # another place than before, or the run was deleted
            self.run_id = self._new_run(run)
            known = {}
        self.client.update_run(self.run_id, "RUNNING")
        new = [
            Param(name, str(value)[:PARAMETER_LETTERS])
            for name, value in run.hyperparameters.items()
            if name not in known
        ]
        for start in range(0, len(new), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.run_id, params=new[start : start + PARAMETERS_AT_ONCE])
        return self.run_id

    def write(self, step: int, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        self.step = step
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def write_image(self, step: int, name: str, image: ndarray) -> None:
        self.client.log_image(self.run_id, image, f"{name}/step_{step:08}.png")

    def write_text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.run_id, text, f"{name}/step_{step:08}.txt")

    def write_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        text = json.dumps({"columns": columns, "data": rows}, default=str)
        self.client.log_text(self.run_id, text, f"{name}/step_{step:08}.json")

    def close(self, status: str, summary: dict[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        self.write(self.step, {f"summary/{name}": float(value) for name, value in numbers.items()})
        for name in summary.keys() - numbers.keys():
            self.client.set_tag(self.run_id, name, str(summary[name])[:TAG_LETTERS])
        self.client.set_terminated(self.run_id, STATUS[status])

    def _new_run(self, run: TrackedRun) -> str:
        experiment = self.client.get_experiment_by_name(run.project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(run.project)
        return self.client.create_run(experiment_id, run_name=run.name).info.run_id

    def _parameters(self) -> dict[str, str] | None:
        """Hyperparameters that the run has already; None if there is no such run."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(self.run_id).data.params
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise


def tracking_uri() -> str | None:
    """The folder `mlruns` where nothing else can work; None: MLflow decides.

    MLflow takes MLFLOW_TRACKING_URI, or a database, which needs a package that mlflow-skinny lacks.
    """
    from mlflow.tracking import is_tracking_uri_set

    if is_tracking_uri_set() or importlib.util.find_spec("sqlalchemy"):
        return None
    return Path("mlruns").absolute().as_uri()
