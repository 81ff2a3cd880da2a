"""Weights & Biases. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ddp_train.telemetry.trackers.tracker import Scalars, TrackedRun, Tracker, new_id

if TYPE_CHECKING:
    from numpy import ndarray

FOLDER = "wandb"
LOGIN_SECONDS = 30


class Wandb(Tracker):
    """Files in the folder `wandb` of the run directory; uploaded only with WANDB_MODE=online.

    Offline, wandb writes to the disk every 15 s, and a killed process loses the rest. A resumed
    run is therefore written from the beginning, into a new folder that replaces the older ones.
    """

    package = "wandb"
    environment: ClassVar = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}

    def open(self, run: TrackedRun, run_id: str | None) -> str:
        import wandb

        run_id = run_id or new_id()
        for older in (run.run_dir / FOLDER).glob(f"offline-run-*-{run_id}"):
            older.rename(older.with_name(f"replaced-{older.name}"))
        # x_disable_stats: hardware is measured by our own monitor.
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, login_timeout=LOGIN_SECONDS
        )
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.run_dir),
            settings=settings,
        )
        self.run.config.update(run.hyperparameters, allow_val_change=True)
        return run_id

    def last_step(self) -> float:
        if self.run.offline:
            return 0
        return self.run.step - 1

    def write(self, step: int, scalars: Scalars) -> None:
        self.run.log(scalars, step=step)

    def write_image(self, step: int, name: str, image: ndarray) -> None:
        import wandb

        self.run.log({name: wandb.Image(image)}, step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self.write_table(step, name, ["text"], [[text]])

    def write_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        table = wandb.Table(columns=[*columns], data=rows, allow_mixed_types=True)
        self.run.log({name: table}, step=step)

    def close(self, status: str, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish(exit_code=0 if status == "completed" else 1)
