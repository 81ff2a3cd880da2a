"""`metrics=[...]`: metrics of torchmetrics are those of the whole data set, on any number of
processes."""

from __future__ import annotations

import importlib.util
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.metrics import build_selection, check_metrics, directions
from ddp_train.config import code_checks, metrics
from ddp_train.config.bind import bind
from ddp_train.config.freeze import load_frozen
from ddp_train.config.packages import SOURCE
from ddp_train.config.prepare import prepare
from ddp_train.data.datasets import ArraySource
from ddp_train.data.rng import global_states
from ddp_train.data.splits import Splits
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
from ddp_train.engine.scoring import join_scores
from ddp_train.engine.selection import Best
from ddp_train.errors import ConfigError, DataError
from ddp_train.options.schema import Config
from ddp_train.tasks.builtin import Classification, Multilabel, Regression, Segmentation
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.score import Score
from ddp_train.tasks.task import ModelWithTask, can_predict
from ddp_train.tasks.user_task import complete
from ddp_train.telemetry.score_lines import headline, score_line
from ddp_train.text import snake_case
from tests.support.commands import PROGRAM
from tests.support.jobs import config_of, job_of
from tests.support.ranks import on_ranks

if INSTALLED := importlib.util.find_spec("torchmetrics") is not None:
    import torchmetrics
    from torchmetrics import classification as of_classes
    from torchmetrics import regression as of_numbers

    Base: type = torchmetrics.Metric
else:
    Base = object
needs_library = pytest.mark.skipif(
    not INSTALLED, reason="torchmetrics is not installed: pip install '.[metrics]'"
)

CLASSES = 4
DRAW = torch.Generator().manual_seed(3)
LOGITS = torch.randn(23, CLASSES, generator=DRAW)
LABELS = torch.randint(0, CLASSES, (23,), generator=DRAW)
NUMBERS = LOGITS[:, 0] + 0.3 * torch.randn(23, generator=DRAW)


class EveryReduction(Base):
    """A state of each kind: the sum, mean, maximum, minimum and list of a batch, and two reductions
    of its own."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        for kind in ("sum", "mean", "max", "min"):
            self.add_state(
                kind,
                torch.tensor(-math.inf if kind == "max" else math.inf if kind == "min" else 0.0),
                kind,
            )
        self.add_state("each", [], "cat")
        self.add_state("labels", torch.tensor(0), "sum")
        self.add_state("product", torch.tensor(1.0), lambda of_batches: of_batches.prod(0))
        self.add_state("stacked", torch.zeros(2), None)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        largest = outputs.amax(1)
        self.sum = self.sum + largest.sum()
        self.mean = largest.mean()
        self.max, self.min = (
            torch.maximum(self.max, largest.max()),
            torch.minimum(self.min, largest.min()),
        )
        self.each.append(largest)
        self.labels = self.labels + targets.sum()
        self.product = self.product * (1 + largest.mean() / 100)
        self.stacked = torch.stack([largest.sum(), largest.max()])

    def compute(self) -> dict[str, Tensor]:
        each = torch.cat(self.each) if isinstance(self.each, list) else self.each
        kept = {
            name: getattr(self, name) for name in ("sum", "mean", "max", "min", "labels", "product")
        }
        order = (each * torch.arange(len(each))).sum()
        return {**kept, "order": order, "stacked": self.stacked.view(-1, 2).sum(0)[0]}


class Random(Base):
    """Draws numbers, as BootStrapper does."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("drawn", torch.tensor(0.0), "sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.drawn = self.drawn + torch.rand(()) + np.random.rand() + random.random()

    def compute(self) -> Tensor:
        return self.drawn + torch.rand(()) + np.random.rand() + random.random()


class Differs(Base):
    """On each process, as what a GPU computes may, and each time a little."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        pass

    def compute(self) -> float:
        self.computed += 1
        return 1 + (dist.get_rank() if dist.is_initialized() else 0) + 1e-6 * (self.computed % 2)


class Outside(Base):
    """Counts where no process can find it."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen = getattr(self, "seen", 0) + len(targets)

    def compute(self) -> Tensor:
        seen = self.seen
        self.seen = 0
        return torch.tensor(float(seen))


class Overwritten(Outside):
    """Keeps only what the last batch was."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen = targets.sum().item()

    def compute(self) -> Tensor:
        return torch.tensor(float(self.seen))


def collection() -> Any:
    """As a user's own function makes one."""
    both = [
        of_classes.MulticlassPrecision(CLASSES),
        of_classes.MulticlassRecall(CLASSES, average="none"),
    ]
    return torchmetrics.MetricCollection(both)


def curve() -> Any:
    return of_classes.MulticlassROC(CLASSES)


HERE = __name__
CLASSIFIERS: list[dict[str, Any]] = [
    {
        "_target_": "torchmetrics.classification.MulticlassF1Score",
        "num_classes": CLASSES,
        "average": "macro",
    },
    {
        "_target_": "torchmetrics.classification.MulticlassAUROC",
        "num_classes": CLASSES,
        "name": "auroc",
    },
    {"_target_": f"{HERE}.collection"},
    {"_target_": f"{HERE}.EveryReduction", "name": "of", "better": "max"},
    {"_target_": f"{HERE}.Random"},
    {"_target_": f"{HERE}.Differs"},
]
REGRESSORS: list[dict[str, Any]] = [
    {"_target_": f"torchmetrics.regression.{name}"}
    for name in ("PearsonCorrCoef", "SpearmanCorrCoef", "R2Score")
]
TRUST = [HERE.partition(".")[0]]


def config_with(world: World, items: list[dict[str, Any]], batch: int, **more: Any) -> Config:
    return config_of(
        world,
        metrics=items,
        trusted_modules=TRUST,
        model={"_target_": "torch.nn.Flatten"} | more.pop("model", {}),
        train={"evaluate_batch_size": batch, "global_batch_size": 12} | more.pop("train", {}),
        **more,
    )


class Given(nn.Module):
    """The inputs are the outputs. DDP wants a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.zero


def scored(world: World, items: list[dict[str, Any]], batch: int, targets: Tensor) -> Any:
    """The score, twice, and the directions."""
    inputs = LOGITS if targets is LABELS or targets.dtype == torch.int64 else LOGITS[:, 0]
    source = ArraySource(inputs, targets)
    strategy = {"name": "ddp" if world.size > 1 else "single"}
    config = config_with(
        world, items, batch, strategy=strategy, model={"_target_": f"{HERE}.Given"}
    )
    job = job_of(config, world, (source, source))
    drawn = torch.rand(1, generator=torch.default_generator.manual_seed(5))
    torch.manual_seed(5)
    others = global_states()
    found = evaluate(job.evaluation)
    assert global_states() == others, "nobody else's random numbers are disturbed"
    assert torch.equal(torch.rand(1), drawn)
    again = evaluate(job.evaluation)
    for score in (found, again):
        assert score and int(score.metrics.pop("differs", 1)) == 1, "rank 0's is that of all"
    assert found == again
    return found, directions(job.module)


def both(world: World) -> Any:
    return (
        scored(world, CLASSIFIERS, 5, LABELS),  # five batches: two, two and one on three processes
        scored(
            world, CLASSIFIERS, 12, LABELS
        ),  # two batches: the third of three processes has none
        scored(world, REGRESSORS, 5, NUMBERS),
    )


@pytest.mark.slow
@needs_library
def test_metrics_have_the_same_bits_on_any_world() -> None:
    alone = both(World())
    assert on_ranks(3, both) == [alone] * 3
    (of_five, better), (of_twelve, _), (of_regression, _) = alone
    whole = {
        "multiclass_f1_score": of_classes.MulticlassF1Score(CLASSES),
        "auroc": of_classes.MulticlassAUROC(CLASSES),
        "multiclass_precision": of_classes.MulticlassPrecision(CLASSES),
    }
    for found in (of_five, of_twelve):
        for name, metric in whole.items():
            assert found.metrics[name] == pytest.approx(metric(LOGITS, LABELS).item(), rel=1e-6), (
                name
            )
        for place, recall in enumerate(
            of_classes.MulticlassRecall(CLASSES, average="none")(LOGITS, LABELS)
        ):
            assert found.metrics[f"multiclass_recall_{place}"] == pytest.approx(recall.item())
        largest = LOGITS.log_softmax(1).amax(1)
        expected = {
            "sum": largest.sum(),
            "max": largest.max(),
            "min": largest.min(),
            "labels": LABELS.sum(),
            "order": (largest * torch.arange(23)).sum(),
            "stacked": largest.sum(),
        }
        for name, number in expected.items():
            assert found.metrics[f"of_{name}"] == pytest.approx(number.item(), rel=1e-6), name
    means = torch.stack([part.mean() for part in largest.split(5)])
    assert of_five.metrics["of_mean"] == pytest.approx(means.mean().item(), rel=1e-6)
    assert of_five.metrics["of_product"] == pytest.approx((1 + means / 100).prod().item(), rel=1e-6)
    whole = {
        "pearson_corr_coef": of_numbers.PearsonCorrCoef(),
        "spearman_corr_coef": of_numbers.SpearmanCorrCoef(),
        "r2_score": of_numbers.R2Score(),
    }
    for name, metric in whole.items():
        assert of_regression.metrics[name] == pytest.approx(
            metric(LOGITS[:, 0], NUMBERS).item(), rel=1e-5
        ), name
    directions = {
        name: better[name] for name in ("loss", "auroc", "multiclass_recall_2", "of_sum", "random")
    }
    assert directions == {
        "loss": "min",
        "auroc": "max",
        "multiclass_recall_2": "max",
        "of_sum": "max",
        "random": None,
    }


# --- what a task hands over -----------------------------------------------------------------------


def test_each_task_hands_over_what_metrics_take() -> None:
    model = nn.Identity()
    draw = torch.Generator().manual_seed(0)
    # all logits in [0, 1], as probabilities are
    logits = torch.rand(6, 3, generator=draw)
    labels = torch.arange(6) % 3
    outputs, targets = Classification().predict(model, (logits, labels))
    assert (
        torch.equal(outputs, logits.log_softmax(1))
        and torch.equal(targets, labels)
        and (outputs < 0).all()
    )
    assert torch.equal(
        Classification().predict(model, (logits, functional.one_hot(labels).float()))[1], labels
    )
    outputs, targets = Multilabel().predict(model, (logits, (logits > 0.5).float()))
    assert torch.equal(outputs, logits.sigmoid()) and targets.dtype == torch.int64
    assert (
        Regression().predict(model, (logits[:, :1].bfloat16(), logits[:, 0]))[0].dtype
        == torch.float32
    )
    pixels = torch.randn(2, 3, 4, 4, generator=draw)
    masks = torch.randint(0, 3, (2, 4, 4), generator=draw)
    outputs, targets = Segmentation().predict(model, (pixels, masks))
    assert torch.equal(outputs, pixels.log_softmax(1)) and torch.equal(targets, masks)
    words = torch.randn(2, 5, 7, generator=draw)
    following = torch.randint(0, 7, (2, 5), generator=draw)
    following[0, 3:] = -100
    outputs, targets = LanguageModel().predict(model, (words, following))
    assert outputs.shape == (8, 7) and torch.equal(targets, following[following >= 0]), (
        "valid tokens alone"
    )


class Predicts:
    """A task of one's own."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return (model(batch[0]) ** 2).sum(), len(batch[0])

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]


class PredictsSome(Predicts):
    """Units that count have a label."""

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        return model(inputs)[labels >= 0], labels[labels >= 0]


class ScoresAverage(Predicts):
    """Has a metric with the name of the average's."""

    def score(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        return {"ema_loss": self.loss(model, batch)}


class PredictsNothing:
    loss = Predicts.loss

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])


class OnlyLoss:
    loss = Predicts.loss


@needs_library
def test_a_task_of_ones_own_predicts() -> None:
    items = [{"_target_": "torchmetrics.regression.MeanSquaredError", "name": "error"}]
    source = ArraySource(LOGITS[:, 0], NUMBERS)

    def job(task: str) -> Any:
        config = config_with(
            World(),
            items,
            5,
            strategy={"name": "single"},
            model={"_target_": f"{HERE}.Given"},
            task={"_target_": f"{HERE}.{task}"},
        )
        return job_of(config, World(), (source, source))

    found = evaluate(job("Predicts").evaluation)
    assert found and found.metrics["error"] == pytest.approx(
        (LOGITS[:, 0] - NUMBERS).square().mean().item(), rel=1e-6
    )
    assert set(found.metrics) == {"loss", "error"}
    with pytest.raises(
        ConfigError, match=re.escape("the task has no method predict(model, batch)")
    ):
        job("OnlyLoss")
    with pytest.raises(DataError, match=re.escape("predict() of the task")):
        evaluate(job("PredictsNothing").evaluation)
    assert not can_predict(complete(OnlyLoss())) and can_predict(complete(Predicts()))


@needs_library
def test_an_evaluation_that_was_cut_off_leaves_nothing() -> None:
    source = ArraySource(LOGITS, LABELS)
    config = config_with(
        World(), CLASSIFIERS, 5, strategy={"name": "single"}, model={"_target_": f"{HERE}.Given"}
    )
    evaluation = job_of(config, World(), (source, source)).evaluation
    whole = evaluate(evaluation)
    batches = evaluation.batches
    assert whole

    class Cut:
        def __iter__(self) -> Any:
            for number, batch in enumerate(batches):
                if number == 2:
                    evaluation.stop.requested.set()
                yield batch

    evaluation.batches = Cut()
    assert evaluate(evaluation) is None
    evaluation.batches = batches
    evaluation.stop.requested.clear()
    again = evaluate(evaluation)
    for score in (whole, again):
        assert score and score.metrics.pop("differs")
    assert again == whole


# --- before the first step ------------------------------------------------------------------------


def set_up(items: list[dict[str, Any]], labels: Tensor = LABELS, **keys: Any) -> ModelWithTask:
    """The checks that are made where the task is loaded."""
    source = ArraySource(LOGITS, labels)
    config = config_with(
        World(), items, 8, strategy={"name": "single"}, model={"_target_": f"{HERE}.Given"}, **keys
    )
    module = job_of(config, World(), (source, source)).module
    averaged = config.train.ema_decay is not None
    check_metrics(config, module, Splits(source, source), "cpu", averaged)
    return module


F1 = {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": CLASSES}


@needs_library
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            {"average": "mackro"},
            "_target_=torchmetrics.classification.MulticlassF1Score: ValueError: Expected",
        ),
        (
            {"num_classes": 2},
            "cannot take outputs [8, 4] of torch.float32 and targets [8] of torch.int64",
        ),
        ({"num_clases": 2}, "Unexpected keyword arguments"),
        (
            {"name": "accuracy"},
            "gives a metric accuracy, but the task has a metric of that name; set another name, for"
            " example name: my_accuracy",
        ),
        (
            {"name": "step"},
            "gives a metric step, but lines of metrics.jsonl already have a field of that name; set"
            " another name, for example name: my_step",
        ),
        (
            {"_target_": f"{HERE}.curve", "num_classes": None},
            "curve returns a tuple; use a metric",
        ),
        (
            {"_target_": f"{HERE}.Outside", "num_classes": None},
            "outside keeps numbers outside of its states",
        ),
        (
            {"_target_": f"{HERE}.Overwritten", "num_classes": None},
            "overwritten keeps numbers outside of its states",
        ),
        (
            {"_target_": "torch.nn.Flatten", "num_classes": None},
            "which is not a torchmetrics.Metric or MetricCollection",
        ),
        (
            {"_target_": "torchmetrics.classification.MulticlassF1Scor"},
            "did you mean MulticlassF1Score?",
        ),
        (
            {"_target_": "torchmetrics.classification.f_beta.Tensor"},
            "call other functions in a class of your own",
        ),
    ],
)
def test_what_is_no_metric_for_the_task_is_named_in_setup(
    metric: dict[str, Any], message: str
) -> None:
    item = {name: value for name, value in (F1 | metric).items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        set_up([item])
    assert message in str(raised.value)


@needs_library
def test_a_name_belongs_to_one_metric() -> None:
    """A vector has names that only show when it is computed, and so has a task of one's own."""
    with pytest.raises(
        ConfigError,
        match=r"metrics\[1\].*: gives a metric f1_0, but another metric has that name; set another"
        r" name, for example name: my_f1_0",
    ):
        set_up([F1 | {"average": "none", "name": "f1"}, F1 | {"name": "f1_0"}])
    task = {"_target_": f"{HERE}.ScoresAverage"}
    train = {"ema_decay": 0.9}
    with pytest.raises(ConfigError, match=r"train.ema_decay: a metric of yours is named ema_loss"):
        set_up([], task=task, train=train)
    with pytest.raises(ConfigError, match=r"train.ema_decay: a metric of yours is named ema_loss"):
        join_scores(
            Score({"loss": 1.0, "ema_loss": 2.0}, 3), Score({"loss": 1.5, "ema_loss": 2.5}, 3)
        )


@needs_library
def test_metrics_are_tried_with_the_first_batch_that_has_a_unit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    items = [F1 | {"average": "none", "name": "f1"}]
    task = {"_target_": f"{HERE}.PredictsSome"}
    some = LABELS.clone()
    none = torch.full_like(LABELS, -1)
    some[:8] = -1  # the first batch
    further = set_up(items, some, task=task, objective="test.f1_3").further_metrics
    assert further and further.merged(further.new_states()).keys() == {
        f"f1_{place}" for place in range(CLASSES)
    }
    with pytest.raises(
        ConfigError, match=r"metrics=\[...\]: the loss counts no unit of the scored set"
    ):
        set_up(items, none, task=task)
    source = ArraySource(LOGITS, none)
    config = config_with(
        World(),
        items,
        8,
        task=task,
        strategy={"name": "single"},
        model={"_target_": f"{HERE}.Given"},
    )
    found = evaluate(job_of(config, World(), (source, source)).evaluation)
    assert found and math.isnan(found.metrics["f1"]) and math.isfinite(found.loss)
    assert caplog.messages == [
        "the f1 of an evaluation is nan: the metric may have no value for these samples, for example where"
        " a class has no sample"
    ]


@needs_library
def test_keys_name_metrics_of_the_average() -> None:
    averaged = {"train": {"ema_decay": 0.9}}
    selects = {"checkpoint": {"best_metric": "test.ema_multiclass_f1_score"}}
    set_up([F1], **averaged, **selects)
    set_up([F1 | {"average": "none", "name": "f1"}], **averaged, objective="test.ema_f1_3")
    source = ArraySource(LOGITS, LABELS)
    config = config_with(
        World(),
        [F1],
        8,
        mode="evaluate",
        objective="test.ema_accuracy",
        model={"_target_": f"{HERE}.Given"},
        strategy={"name": "single"},
    )
    module = job_of(config, World(), (source, source)).module

    def check(of_checkpoint: bool) -> None:
        check_metrics(config, module, Splits(source, source), "cpu", of_checkpoint)

    check(True)
    with pytest.raises(
        ConfigError, match=r"the checkpoint has no average of the weights; use objective=test\."
    ):
        check(False)


@needs_library
def test_keys_name_further_metrics() -> None:
    random = {"_target_": f"{HERE}.Random"}
    with pytest.raises(
        ConfigError,
        match=r"a high or a low random is better; add better: max, .* next to",
    ):
        set_up([random], checkpoint={"best_metric": "test.random"})
    with pytest.raises(
        ConfigError, match=r"no metric multiclass_recall_4.*did you mean multiclass_recall_"
    ):
        set_up([CLASSIFIERS[2]], objective="test.multiclass_recall_4")
    config = config_with(World(), [F1], 8, checkpoint={"best_metric": "test.multiclass_f1_score"})
    module = set_up([F1], checkpoint={"best_metric": "test.multiclass_f1_score"})
    source = ArraySource(LOGITS, LABELS)
    best = build_selection(config, directions(module), Splits(source, source), None).best  # type: ignore[arg-type]
    assert isinstance(best, Best)
    for step, value in ((1, 0.2), (2, 0.6), (3, 0.4)):
        best.see(step, {"loss": 1.0, "multiclass_f1_score": value})
    assert best.as_dict() == {
        "metric": "test.multiclass_f1_score",
        "better": "max",
        "value": 0.6,
        "step": 2,
    }


def test_metric_without_a_direction_cannot_select() -> None:
    config = Config()
    config.checkpoint.best_metric = "test.acc"
    (problem,) = metrics.unusable_metrics(config, ["loss", "acc"], {"loss": "min"})
    assert str(problem).endswith(
        'a high or a low acc is better; add the entry "acc": "max", or "min", to the dict `better` of'
        " its class"
    )
    assert not list(
        metrics.unusable_metrics(config, ["loss", "acc"], {"loss": "min", "acc": "max"})
    )


F1_OF_TEN = F1 | {"num_classes": 10}


def asked(*items: Any, **more: Any) -> list[str]:
    """All problems of a config with these items."""
    config, problems = bind({"metrics": list(items), **more})
    found = [*code_checks.problems(config), *metrics.further_problems(config)]
    found += metrics.named_problems(config, False)
    return problems + [str(problem) for problem in found]


def test_what_is_wrong_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_checks, "is_installed", lambda package: True)
    assert (
        asked(F1_OF_TEN, F1_OF_TEN | {"name": "macro", "average": "macro", "better": "max"}) == []
    )
    assert asked(F1_OF_TEN | {"name": "top5"}) == [
        "metrics[0]: task=auto has a metric named top5 too; give this item another name, for example"
        " name: my_top5"
    ]
    assert asked(F1_OF_TEN, F1_OF_TEN | {"better": "high", "name": "a.b"}, F1_OF_TEN) == [
        "metrics[1].name=a.b: must begin with a letter and contain only letters, digits and _",
        "metrics[1].better=high: must be one of max, min",
        (
            "metrics[2]: another item has a metric named multiclass_f1_score too; give this item another"
            " name, for example name: my_multiclass_f1_score"
        ),
    ]
    assert "metrics[0]._target_=null: must be a dotted path, package.Name" in asked(
        {"num_classes": 3}
    )
    assert asked("a") == [
        "metrics=[a]: must be a list like [{_target_: package.Name, argument: 1}]"
    ]
    assert bind({"metrics": {"a": 1}})[1] == [
        "metrics={a:1}: must be a list like [{_target_: package.Name, argument: 1}]"
    ]
    assert asked(F1_OF_TEN | {"name": "step"}) == [
        "metrics[0].name=step: lines of metrics.jsonl already have a field of that name; use another"
        " name, for example name: my_step"
    ]
    assert (
        asked(
            {"_target_": f"{HERE}.collection"},
            {"_target_": f"{HERE}.collection"},
            trusted_modules=TRUST,
        )
        == []
    ), "what a function makes may have other names"
    assert asked(F1_OF_TEN | {"api_key": "hunter2"})[0].startswith(
        "metrics[0].api_key=(hidden): the config is written"
    )
    assert (
        "arguments must be plain values"
        in asked(F1_OF_TEN | {"inner": {"_target_": "os.system"}})[0]
    )
    (typo,) = asked(F1_OF_TEN, objective="test.multiclass_f1_scor")
    assert (
        "has no metric multiclass_f1_scor; it has loss, accuracy, top5, multiclass_f1_score; did"
        " you mean" in typo
    )
    for name in ("multiclass_f1_score", "multiclass_f1_score_3"):
        assert asked(F1_OF_TEN, objective=f"test.{name}") == []
        of_average = {"objective": f"test.ema_{name}"}
        assert asked(F1_OF_TEN, **of_average, train={"ema_decay": 0.9}) == asked(
            F1_OF_TEN, **of_average, mode="evaluate"
        )
        assert asked(F1_OF_TEN, **of_average, train={"ema_decay": 0.9}) == []
        assert asked(F1_OF_TEN, **of_average) == [
            f"objective=test.ema_{name}: there is no average of the weights; add"
            " train.ema_decay=0.999"
        ]
    (typo,) = asked(F1_OF_TEN, objective="test.ema_multiclass_f1_scor", train={"ema_decay": 0.9})
    assert typo.endswith("did you mean ema_multiclass_f1_score?")
    best = bind(
        {"metrics": [F1_OF_TEN | {"name": "f1", "better": "max"}], "train": {"ema_decay": 0.9}}
    )[0]
    assert metrics.direction_of("test.ema_f1", best) == "max"
    monkeypatch.setattr(code_checks, "is_installed", lambda package: False)
    assert asked(F1_OF_TEN) == [
        f"metrics=[...]: torchmetrics is not installed; run {sys.executable} -m pip install"
        f" '{SOURCE}[metrics]'"
    ]


def test_metrics_of_a_checkpoint_must_be_torchmetrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_checks, "is_installed", lambda package: True)
    assert asked(F1) == []
    for target in (
        "torchmetrics.text.BERTScore",
        "os.system",
        "ddp_train.models.networks.build_cnn",
    ):
        assert "add 'trusted_modules=[" in asked({"_target_": target})[0], target
    assert asked({"_target_": "json.loads"}, trusted_modules=["json"]) == []


def test_the_command_line_names_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it names is trusted, and a value of the environment is not written anywhere."""
    monkeypatch.setattr(code_checks, "is_installed", lambda package: True)
    monkeypatch.setenv("CLASSES", "10")
    monkeypatch.chdir(tmp_path)
    item = "{_target_: json.JSONDecoder, strict: '${oc.env:CLASSES}', name: decoded}"
    prepared = prepare(PROGRAM, [f"metrics=[{item}]", "run_dir=run", "strategy=single"], None)
    assert "${oc.env:CLASSES}" in prepared.text and prepared.config.trusted_modules == ["json"]
    assert load_frozen(prepared.text).metrics == prepared.config.metrics


def test_names_and_lines() -> None:
    for name, expected in {
        "MulticlassF1Score": "multiclass_f1_score",
        "BinaryAUROC": "binary_auroc",
        "R2Score": "r2_score",
        "LanguageModel": "language_model",
        "val/F1": "val_f1",
        "BinaryFBetaScore": "binary_f_beta_score",
    }.items():
        assert snake_case(name) == expected
    score = {"loss": 0.5, "accuracy": 0.75, "auroc": 0.8125, "correct": 3, "samples": 4}
    assert headline(score) == "75.00%  auroc 0.8125"
    assert score_line(score) == "accuracy 75.00% (3/4), auroc 0.8125, loss 0.5000"
    many = {"loss": 0.5, **{f"recall_{place}": 0.5 for place in range(50)}, "samples": 4}
    assert headline(many) == "loss 0.5000  recall_47 0.5000  recall_48 0.5000  recall_49 0.5000"
    assert "recall_19 0.5000, 30 more in summary.json, loss" in score_line(many)
