"""Images, texts and tables of the user's own, in trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp_train
from ddp_train.errors import LogError
from ddp_train.telemetry.trackers.media import Media, pixels_of
from ddp_train.telemetry.trackers.tracker import TrackedRun
from ddp_train.telemetry.trackers.tracking import Tracking


class Album(ddp_train.Tracker):
    """Keeps what it is given; it has no tables."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def open(self, run: TrackedRun, run_id: str | None) -> str:
        self.given.append(run.hyperparameters)
        return "1"

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.given.append((step, [*scalars]))

    def write_image(self, step: int, name: str, image: np.ndarray) -> None:
        self.given.append((step, name, image.shape))

    def write_text(self, step: int, name: str, text: str) -> None:
        self.given.append((step, name, text))

    def close(self, status: str, summary: dict[str, Any]) -> None:
        self.given.append(status)


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 4, 5), (4, 5, 3), (4, 5, 1)])
def test_images_of_any_layout_are_bytes_with_three_channels(shape: tuple[int, ...]) -> None:
    ones = pixels_of("a", torch.ones(shape, requires_grad=True))
    assert (ones.shape, ones.dtype, ones.min()) == ((4, 5, 3), np.uint8, 255)
    assert pixels_of("a", np.full(shape, 7, np.uint8)).max() == 7
    assert pixels_of("a", torch.ones(shape, dtype=torch.bool)).min() == 255


def test_what_is_no_image_is_refused() -> None:
    for image in (torch.ones(8, 3, 4, 5), torch.ones(2, 4, 5), 3.0):
        with pytest.raises(LogError, match="the image has the shape"):
            pixels_of("a", image)


def test_media_reach_the_trackers_that_take_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    album = Album()
    tracking = Tracking({"album": album}, 30.0, 600.0)
    tracking.start(TrackedRun(tmp_path, "", "", {}, 0), [])
    media = Media()
    media.text(1, "before", "nobody listens")
    media.tracking = tracking
    media.image(2, "a/b", torch.zeros(3, 4, 5))
    media.table(2, "table", ["one"], [[1]])
    media.table(2, "another", ["one"], [[1]])
    media.text(3, "text", "hello")
    with pytest.raises(LogError, match="a row has 2 cells, but there are 1 columns"):
        media.table(2, "table", ["one"], [[1, 2]])
    tracking.finish({"status": "completed"})
    assert album.given[1:] == [(2, "a/b", (4, 5, 3)), (3, "text", "hello"), "completed"]
    assert caplog.messages == ["tracker album gets no table: it has no method write_table"]


def test_a_failure_after_a_table_that_a_tracker_cannot_take_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    album = Album()
    tracking = Tracking({"album": album}, 30.0, 600.0)
    tracking.start(TrackedRun(tmp_path, "", "", {}, 0), [])
    media = Media()
    media.tracking = tracking
    media.table(1, "table", ["one"], [[1]])
    album.write = lambda *_: 1 / 0  # type: ignore[assignment]
    tracking.write({"kind": "train", "step": 1, "loss": 1.0})
    tracking.finish({"status": "completed"})
    assert "tracker album failed: ZeroDivisionError" in caplog.text


def test_a_session_sends_its_trackers_lines_and_images(tmp_path: Path) -> None:
    album = Album()
    options: dict[str, Any] = {"processes": 1, "device": "cpu", "log_every_steps": 2}
    with ddp_train.session(
        tmp_path / "run", trackers=[album, "tensorboard"], hyperparameters={"width": 8}, **options
    ) as run:
        model = run.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(TensorDataset(torch.ones(6, 2)), global_batch_size=2)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for (inputs,) in loader:
                losses = model(inputs)[:, 0]
                run.mean(losses).backward()
                optimizer.step()
                run.log("loss", losses)
            run.log_image("weights", model.weight.abs())
            run.log("test/loss", 0.5)
    rates = ["train/samples_per_second", "train/samples_seen"]
    assert album.given[0]["width"] == 8 and album.given[0]["world_size"] == 1
    assert album.given[1:] == [
        (2, ["train/epoch", "train/loss", *rates]),
        (3, "weights", (1, 2, 3)),
        (3, ["train/epoch", "train/loss", *rates]),
        (3, ["test/epoch", "test/loss"]),
        "completed",
    ]
    assert [*(tmp_path / "run/tensorboard").iterdir()]


def test_wrong_trackers_of_a_session_are_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(SystemExit),
        ddp_train.session(tmp_path / "run", processes=1, trackers=["tensorbord"]),
    ):
        pass
    assert not (tmp_path / "run").exists()
    assert "did you mean tensorboard?" in capsys.readouterr().err
