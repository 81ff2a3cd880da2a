"""TensorBoard: event files in the run directory. Torch is imported with the first run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ddp_train.telemetry.trackers.tracker import Scalars, TrackedRun, Tracker, new_id

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor, nn

FOLDER = "tensorboard"
HISTOGRAM_BINS = 64
WATCHED = ("train/loss", "test/loss", "test/accuracy")
"""Metrics of the page HPARAMS."""


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run directory.

    A resumed run hides the points of the steps that it repeats, and writes them again.
    """

    package = "tensorboard"
    left_by_runs = (FOLDER,)

    def open(self, run: TrackedRun, run_id: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.run_dir / FOLDER
        self.is_new = not any(folder.glob("events.*"))
        self.first_step = run.first_step
        self.step = run.first_step
        repeated_from = None if self.is_new else run.first_step + 1
        self.writer = SummaryWriter(str(folder), purge_step=repeated_from)
        experiment, start, self.end = hparams(run.hyperparameters, dict.fromkeys(WATCHED, 0.0))
        if self.is_new:
            self._add(experiment)
            self._add(start)
        self.writer.flush()
        if run_id and not self.is_new:
            return run_id
        return new_id()

    def last_step(self) -> float:
        return self.first_step

    def write(self, step: int, scalars: Scalars) -> None:
        self.step = step
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        # A process may be killed at any time, and metrics.jsonl loses nothing then.
        self.writer.flush()

    def show_model(self, model: nn.Module, inputs: Tensor) -> None:
        """Write a batch of images and the graph of the model, in a new run.

        inputs: [n, ...]; images are [n, 1 or 3, height, width].
        """
        if not self.is_new:
            return
        if inputs.ndim == 4 and inputs.shape[1] in (1, 3):
            low, high = inputs.aminmax()
            span = (high - low).clamp(min=1e-12)
            self.writer.add_images("images", (inputs - low) / span, 0)
        self.writer.add_graph(model, inputs[:1])

    def show_weights(self, step: int, weights: dict[str, Tensor]) -> None:
        """Write a histogram of each parameter."""
        for name, weight in weights.items():
            self.writer.add_histogram(
                f"weights/{name}",
                weight.float().numpy(),
                step,
                bins=HISTOGRAM_BINS,  # pyright: ignore[reportArgumentType]
            )
        self.writer.flush()

    def write_image(self, step: int, name: str, image: ndarray) -> None:
        self.writer.add_image(name, image, step, dataformats="HWC")
        self.writer.flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, text, step)
        self.writer.flush()

    def write_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Write it in Markdown, which TensorBoard draws."""
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        self.write_text(step, name, text)

    def close(self, status: str, summary: dict[str, Any]) -> None:
        if summary:
            text = json.dumps(summary, indent=1)
            self.writer.add_text("summary", f"```\n{text}\n```", self.step)
        if status == "completed":
            self._add(self.end)
        self.writer.close()

    def _add(self, part: Any) -> None:
        self.writer.file_writer.add_summary(part)  # pyright: ignore[reportOptionalMemberAccess]
