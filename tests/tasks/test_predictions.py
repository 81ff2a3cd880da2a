"""Predictions are trees of tensors: a detection task has the metrics of the whole data set."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
from ddp_train.errors import ConfigError, TaskError
from ddp_train.tasks.predictions import Predictions, length_of
from ddp_train.tasks.return_checks import checked_predictions
from tests.support.jobs import config_of, job_of
from tests.support.ranks import on_ranks

INSTALLED = importlib.util.find_spec("torchmetrics") is not None
needs_library = pytest.mark.skipif(
    not INSTALLED, reason="torchmetrics is not installed: pip install '.[metrics]'"
)

HERE = __name__
IMAGES = 23
MOST_BOXES = 4


class Scenes:
    """Images that each have another number of boxes, the first one none.

    A batch: box candidates [n, MOST_BOXES, 4], and for each image a dict of its true boxes.
    """

    outputs = 4

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(4)
        corners = 50 * torch.rand(IMAGES, MOST_BOXES, 2, generator=draw)
        sizes = 10 + 20 * torch.rand(IMAGES, MOST_BOXES, 2, generator=draw)
        self.boxes = torch.cat([corners, corners + sizes], dim=2)
        self.candidates = self.boxes + 6 * torch.randn(self.boxes.shape, generator=draw)

    def __len__(self) -> int:
        return IMAGES

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> Any:
        targets = [self.target(int(number)) for number in indices]
        return self.candidates[torch.as_tensor(indices)], targets

    def target(self, number: int) -> dict[str, Tensor]:
        boxes = self.boxes[number, : number % (MOST_BOXES + 1)]
        return {"boxes": boxes, "labels": torch.zeros(len(boxes), dtype=torch.int64)}

    def select(self, numbers: np.ndarray) -> Scenes:
        raise NotImplementedError


class Shift(nn.Module):
    """Candidates, shifted by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, candidates: Tensor) -> Tensor:
        return candidates + self.shift


class Detection:
    """Every image has one to three predicted boxes: those of the largest scores."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        candidates, targets = batch
        total = model(candidates).square().sum()
        return total, len(targets)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        candidates, targets = batch
        outputs = [self.detections(boxes) for boxes in model(candidates)]
        return outputs, targets

    def detections(self, boxes: Tensor) -> dict[str, Tensor]:
        count = 1 + int(boxes[0, 0]) % 3
        scores = torch.sigmoid(boxes[:count, 0] / 50)
        labels = torch.zeros(count, dtype=torch.int64)
        return {"boxes": boxes[:count], "scores": scores, "labels": labels}


class PredictsNames(Detection):
    """Gives what no metric takes."""

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return ["a cat"], batch[1]


METRICS: list[dict[str, Any]] = [{"_target_": "tests.tasks.recall_metric.Recall", "name": "boxes"}]
if importlib.util.find_spec("pycocotools"):
    METRICS.append({"_target_": "torchmetrics.detection.MeanAveragePrecision", "name": "map"})


def config_with(world: World, task: str, metrics: list[dict[str, Any]] = METRICS) -> Any:
    return config_of(
        world,
        metrics=metrics,
        trusted_modules=[HERE.partition(".")[0]],
        model={"_target_": f"{HERE}.Shift"},
        task={"_target_": f"{HERE}.{task}"},
        data={"name": "digits", "placement": "host"},
        strategy={"name": "ddp" if world.size > 1 else "single"},
        train={"evaluate_batch_size": 5, "global_batch_size": 12},
    )


def scored(world: World) -> dict[str, float]:
    job = job_of(config_with(world, "Detection"), world, (Scenes(), Scenes()))
    score = evaluate(job.evaluation)
    assert score
    return score.metrics


@needs_library
def test_detection_has_its_metrics_on_any_number_of_processes() -> None:
    scenes = Scenes()
    task = Detection()
    alone = scored(World())
    assert on_ranks(3, scored) == [alone] * 3
    outputs = [task.detections(boxes) for boxes in scenes.candidates]
    targets = [scenes.target(number) for number in range(IMAGES)]
    from tests.tasks.recall_metric import Recall

    recall: Any = Recall()
    recall.update(outputs, targets)
    expected = recall.compute()
    assert 0.1 < alone["boxes_recall"] < 0.9
    assert alone["boxes_recall"] == pytest.approx(expected["recall"].item())
    assert alone["boxes_order"] == pytest.approx(expected["order"].item(), rel=1e-6)
    if len(METRICS) > 1:
        from torchmetrics.detection import MeanAveragePrecision

        precision = MeanAveragePrecision()
        precision.update(outputs, targets)
        assert alone["map_map"] == pytest.approx(precision.compute()["map"].item(), rel=1e-6)


@needs_library
def test_predictions_that_are_no_tensors_are_refused() -> None:
    job = job_of(config_with(World(), "PredictsNames"), World(), (Scenes(), Scenes()))
    with pytest.raises(TaskError, match="PredictsNames returned"):
        evaluate(job.evaluation)


@needs_library
def test_a_metric_that_takes_no_lists_is_named() -> None:
    error = {"_target_": "torchmetrics.regression.MeanSquaredError"}
    config = config_with(World(), "Detection", [error])
    job = job_of(config, World(), (Scenes(), Scenes()))
    taken = "cannot take outputs a list of 5 and targets a list of 5"
    with pytest.raises(ConfigError, match=taken):
        evaluate(job.evaluation)


@pytest.mark.parametrize(
    ("samples", "length"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(1), torch.zeros(5)], 2),
        ({"boxes": torch.zeros(4, 4), "labels": torch.zeros(4)}, 4),
        ((torch.zeros(4, 4), [torch.zeros(1)] * 4), 4),
        ({"boxes": torch.zeros(4, 4), "labels": torch.zeros(3)}, None),
        ([], 0),
    ],
)
def test_a_tree_of_tensors_has_one_length(samples: Any, length: int | None) -> None:
    assert length_of(samples) == length


def test_the_second_half_of_predictions_corresponds() -> None:
    outputs = {"boxes": torch.arange(5), "scores": [torch.zeros(n) for n in range(5)]}
    targets = (torch.arange(5), torch.arange(5))
    half = Predictions(outputs, targets).second_half()
    assert half.outputs["boxes"].tolist() == [2, 3, 4]
    assert [len(scores) for scores in half.outputs["scores"]] == [2, 3, 4]
    assert [part.tolist() for part in half.targets] == [[2, 3, 4], [2, 3, 4]]
    uneven = Predictions(outputs, torch.arange(4))
    assert uneven.second_half() is uneven


@pytest.mark.parametrize(
    "returned", [torch.zeros(3), (torch.zeros(3),), (torch.zeros(3), None), ({"a": 1}, [])]
)
def test_what_predict_must_return_is_said(returned: Any) -> None:
    with pytest.raises(TaskError) as raised:
        checked_predictions(returned, Detection())
    assert raised.value.remedy == (
        "return (outputs, targets): tensors, or lists and dicts of tensors"
    )
