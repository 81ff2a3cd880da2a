"""Predicted scaling: each part of the model of costs against something that does not know it, all
against MLPerf."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet50, resnext50_32x4d
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.ops.misc import FrozenBatchNorm2d

from ddp_lab.study import cost_model, measured, run_step, simulate
from ddp_lab.study.cost_model import Cluster, Link, Step, predict
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.models.gpt.network import Gpt
from tests.support.commands import ONE, ROOT, SMALL, metrics, run
from tests.support.ranks import on_ranks

LINK = Link(5e-6, 1e9)


def passed_round(size: float, ranks: int, link: Link) -> float:
    """A ring, message by message: a rank sends a part on once it has it from its neighbour and its
    own link is free."""
    took = link.latency_seconds + size / ranks / link.bytes_per_second
    has = np.zeros(ranks)  # when each rank has the part that it sends next
    free = np.zeros(ranks)
    for _ in range(2 * (ranks - 1)):
        free = np.maximum(has, free) + took
        has = np.roll(free, 1)
    return float(has.max())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_a_ring_costs_what_its_messages_cost(ranks: int) -> None:
    assert cost_model.ring(1e7, ranks, LINK) == pytest.approx(passed_round(1e7, ranks, LINK))


def test_many_ranks_far_apart_are_better_off_with_trees() -> None:
    """Small messages: latencies count, and a ring has thousands of them. Large ones on few ranks:
    both are as fast."""
    assert cost_model.double_tree(1e4, 512, LINK) == pytest.approx(2 * 9 * 5e-6 + 2e4 / 1e9)
    assert cost_model.double_tree(1e4, 512, LINK) < cost_model.ring(1e4, 512, LINK) / 40
    assert cost_model.ring(1e9, 4, LINK) < cost_model.double_tree(1e9, 4, LINK)


def test_hosts_exchange_in_as_many_lanes_as_they_have_gpus() -> None:
    cluster = Cluster(4, Link(0.0, 4e9), Link(0.0, 1e9))
    inside = 2 * 3 / 4 * 1e9 / 4e9
    between = 2 * 1 / 2 * (1e9 / 4) / 1e9
    assert cost_model.all_reduce(1e9, 8, cluster) == pytest.approx(inside + between)
    assert cost_model.all_reduce(1e9, 1, cluster) == 0


def ddp_buckets(world: World) -> list[int]:
    model = nn.Sequential(
        *[nn.Linear(512, 512, bias=False) for _ in range(61)]
    )  # 61 MiB, in parts of 1 MiB
    wrapped = nn.parallel.DistributedDataParallel(model)
    passes: list[list[int]] = []

    def note(_: object, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and wants classes
        passes[-1].append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, note)
    for _ in range(2):  # DDP lays out its buckets for good after the first pass
        passes.append([])
        wrapped(torch.ones(1, 512)).sum().backward()
    return passes[-1]


@pytest.mark.slow
def test_the_buckets_are_ddps() -> None:
    (theirs,) = on_ranks(1, ddp_buckets)
    assert cost_model.buckets(61 * 2**20) == theirs


def test_what_the_backward_pass_does_not_hide_is_exposed() -> None:
    """On a slow link all buckets after the first one wait for it; on a fast one only the last
    bucket is seen."""
    step = Step(1.0, 51 * 2**20)
    size = 25 * 2**20
    slow = Cluster(8, Link(0.0, 2**20), LINK)
    found = predict(step, 2, slow)
    first_ready = 1 / 6 + 2 / 3 / 51  # a sixth of the step is before the backward pass
    assert found.exposed == pytest.approx(first_ready + 51 - (1 / 6 + 2 / 3))
    assert found.exchange == pytest.approx(51) and found.seconds == pytest.approx(1 + found.exposed)
    fast = Cluster(8, Link(0.0, 2**30), LINK)
    assert predict(step, 2, fast).exposed == pytest.approx(size / 2**30)
    whole, parts = (predict(step, 2, fast, [51 * 2**20 / count] * count) for count in (1, 51))
    assert whole.exposed == pytest.approx(whole.exchange) == pytest.approx(51 / 1024), (
        "one part waits for the last gradient"
    )
    assert parts.exposed == pytest.approx(whole.exchange / 51), (
        "of small ones only the last is seen"
    )


@pytest.mark.parametrize("ranks", [1, 2, 64, 768])
def test_slowest_rank_is_maximum_of_exponential_delays(ranks: int) -> None:
    delays = np.random.default_rng(0).exponential(0.1, size=(4000, ranks))
    assert 0.1 + cost_model.expected_wait(0.1, ranks) == pytest.approx(
        delays.max(1).mean(), rel=0.02
    )


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_gpus_own_work_is_found_again_in_a_step_of_many(blocks: int) -> None:
    gradient_bytes = measured.FP16 * measured.RESNET50
    series = measured.Series("", gradient_bytes, measured.DGX_H100, ())
    seconds = series.seconds(0.01, measured.Point(64, 64, 1.0, blocks))
    assert seconds > 0.0102
    point = measured.Point(64, 64, 64 / seconds, blocks)
    assert series.own_seconds(point) == pytest.approx(0.01, rel=1e-9)


def test_the_models_of_the_measurements_have_their_parameters() -> None:
    with torch.device("meta"):
        layers = resnext50_32x4d(norm_layer=FrozenBatchNorm2d)
        extra = LastLevelP6P7(256, 256)
        retinanet = RetinaNet(
            _resnet_fpn_extractor(layers, 3, returned_layers=[2, 3, 4], extra_blocks=extra), 264
        )
        for network, count in (
            (resnet50(), measured.RESNET50),
            (retinanet, measured.RETINANET),
            (Gpt(50_304, 1_024, 12, 12, 768), measured.GPT2_124M),
        ):
            assert sum(p.numel() for p in network.parameters() if p.requires_grad) == count
    width = 1_024
    vocabulary = 30_528
    embeddings = (vocabulary + 512 + 2 + 2) * width
    layer = (12 * width + 13) * width
    pooler = (width + 1) * width
    heads = (width + 3) * width + vocabulary + 2 * (width + 1)
    assert embeddings + 24 * layer + pooler + heads == measured.BERT_LARGE


def errors(series: tuple[measured.Series, ...], name: str) -> list[tuple[float, ...]]:
    """In percent, of each point after the first: proportional, and with a fixed part where there is
    one."""
    (found,) = (measured.checks(one) for one in series if one.name.startswith(name))
    assert found[0].proportional is None and found[0].efficiency == 1
    predictions = [(check.point, (check.proportional, check.with_fixed)) for check in found[1:]]
    return [
        tuple(100 * point.error(one) for one in seconds if one is not None)
        for point, seconds in predictions
    ]


def test_predictions_are_as_good_as_the_docs_say() -> None:
    for name in ("ResNet-50, H100", "RetinaNet, H100"):
        (few,), *more = errors(measured.MLPERF, name)
        assert all(abs(fixed) < 5 for _, fixed in more), "on 512, 768 and 2,528 GPUs"
        assert all(-60 < proportional < -25 for proportional in (few, *(one for one, _ in more)))
    for name in ("RetinaNet, GB200", "BERT-large, GB200"):
        _, (proportional, fixed) = errors(measured.MLPERF, name)
        assert -65 < proportional < -50 and -22 < fixed < -15
    for name in ("BERT-large, H100", "BERT-large, H200", "BERT-large, GB200"):
        assert -9 < errors(measured.MLPERF, name)[0][0] < -4, (
            "three quarters of the batch, eight times the GPUs"
        )
    assert errors(measured.MLPERF, "BERT-large, H100")[1] == pytest.approx((-41, 61), abs=1)
    ours = ("ResNet", "GPT-2 124M, H200", "GPT-2 124M, H100")
    assert [errors(measured.OURS, name)[0][0] for name in ours] == pytest.approx(
        [-2.6, -1.0, -2.2], abs=0.05
    )


def test_a_line_through_two_points_meets_them() -> None:
    for series in (*measured.MLPERF, *measured.OURS):
        for point in series.points:
            own = series.own_seconds(point)
            assert 0 < own <= point.step_seconds
            assert series.seconds(own, point) == pytest.approx(point.step_seconds, rel=1e-9)


def percent(error: float, digits: int) -> str:
    """An error as the page writes it."""
    return f"{100 * error:.{digits}f} %"


def test_the_page_of_comparisons_is_what_the_study_says() -> None:
    page = (ROOT / "docs/inside/benchmarks/simulate.md").read_text()
    rows = [
        row for row in page.splitlines() if row.startswith("|") and row.endswith(("% |", "% | |"))
    ]
    expected = []
    for series, digits in ((measured.MLPERF, 0), (measured.OURS, 1)):
        for check in itertools.chain.from_iterable(measured.checks(one)[1:] for one in series):
            point = check.point
            cells = [f"{point.gpus:,}", f"{point.batch:.0f}"]
            cells.append(f"{1e3 * point.step_seconds:.{2 - digits}f}")
            cells += [
                "" if seconds is None else percent(point.error(seconds), digits)
                for seconds in (check.proportional, check.with_fixed)
            ]
            expected.append(cells)
    assert [[cell.strip() for cell in row.split("|")[3:-1]] for row in rows] == expected


@pytest.mark.parametrize(
    ("samples", "world", "accumulation"), [(101, 3, 1), (48, 4, 4), (5, 4, 2), (1000, 7, 1)]
)
def test_shares_are_numpys_parts(samples: int, world: int, accumulation: int) -> None:
    plans = [
        BatchPlan(samples, 28 * world, accumulation, 9, seed=0, rank=rank, world_size=world)
        for rank in range(world)
    ]
    for step in range(plans[0].steps_per_epoch):
        indices = plans[0].global_batch(step)
        count = world * math.ceil(len(indices) / (plans[0].micro_batch_size * world))
        parts = {
            number: part.tolist() for number, part in enumerate(np.array_split(indices, count))
        }
        micro_batches = [
            micro_batch
            for plan in plans
            for micro_batch in plan.micro_batches()
            if micro_batch.step == step
        ]
        assert {
            micro_batch.shard_index: micro_batch.indices[: micro_batch.num_real].tolist()
            for micro_batch in micro_batches
        } == parts


def dry_plan(ranks: int, script: Path) -> dict[str, dict[str, float]]:
    """In a fork of the zygote, as scripts with a session are."""
    script.write_text(
        f"import runpy  # ddp_train.session()\nrunpy.run_module({simulate.DRY_PLAN!r}, None,"
        " '__main__')\n"
    )
    ran = run(str(ranks), command=[sys.executable, str(script)])
    assert ran.returncode == 0, ran.stderr
    return {cost["what"]: cost for cost in json.loads(ran.stdout)}


@pytest.mark.slow
def test_a_rank_of_4096_plans_as_a_single_one_does(tmp_path: Path) -> None:
    one, many = (dry_plan(ranks, tmp_path / "plan.py") for ranks in (1, 4096))
    micro_batches = "micro-batches of a step"
    assert many[micro_batches]["bytes"] == one[micro_batches]["bytes"] == 32 * 8
    assert many[micro_batches]["seconds"] < 10 * one[micro_batches]["seconds"] < 1e-3
    assert many["micro-batches of an evaluation"]["bytes"] < 1e4
    assert many["buffers of a checkpoint, group norm"]["bytes"] == 0
    statistics = "buffers of a checkpoint, batch norm"
    assert many[statistics]["bytes"] == 4096 * one[statistics]["bytes"] == 4096 * 2000 * 8, (
        "gathered from all ranks"
    )


@pytest.mark.slow
def test_the_measured_step_of_a_run(tmp_path: Path) -> None:
    ran = run(
        ONE,
        *SMALL,
        "train.epochs=10",
        "train.log_every_steps=1",
        "tuning=none",
        "tuning.precision=fp64",
        "train.evaluate_every_epochs=10",
        f"run_dir={tmp_path}",
    )
    assert ran.returncode == 0, ran.stderr
    step = run_step.measured_step(tmp_path)
    told = [line for line in metrics(tmp_path) if line["kind"] == "train"]
    seconds = [
        96 / line["samples_per_second"] for line in told if line["step"] % 3 and line["step"] > 1
    ]
    assert step.seconds == pytest.approx(statistics.median(seconds)), (
        "of 96, 96 and 8 samples an epoch has"
    )
    assert step.deviation_seconds == pytest.approx(statistics.stdev(seconds))
    assert step.gradient_bytes == 8 * sum(a * b + b for a, b in [(64, 128), (128, 128), (128, 10)])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="0 logging intervals"):
        run_step.measured_step(tmp_path)


def test_deviation_does_not_depend_on_where_intervals_end() -> None:
    """Steps of 10 ms, give or take 2, told every 50 steps and at the end of each epoch of 70, that
    is after 10 to 50 steps. Every second epoch ends with a smaller batch; what such an interval
    takes must not count."""
    steps = np.random.default_rng(0).normal(0.01, 0.002, size=70_000)
    ends = sorted({*range(50, 70_001, 50), *range(70, 70_001, 70)})
    lines = []
    before = 0
    seen = 0
    for end in ends:
        short = 40 if end % 140 == 0 else 0
        seen += 96 * (end - before) - short
        spent = steps[before:end].sum() + (0.5 if short else 0.0)
        rate = (96 * (end - before) - short) / spent
        lines.append(
            {"kind": "train", "step": end, "samples_seen": seen, "samples_per_second": rate}
        )
        before = end
    intervals = run_step.whole_intervals(lines, 96)
    assert {count for count, _ in intervals} == {10, 20, 30, 40, 50}
    assert run_step.deviation(intervals) == pytest.approx(0.002, rel=0.05)


DRY_PLAN = """
import itertools
import json
import sys

if sys.argv[1] == "64":
    sys.exit("no room")
print(json.dumps([{"seconds": 0.001 * number, "bytes": 10**number} for number in range(6)]))
"""


def test_a_dry_plan_that_fails_keeps_its_row(tmp_path: Path) -> None:
    """The code is that of the folder, from wherever the study was asked for."""
    folder = tmp_path / "ddp_lab" / "study"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "dry_plan.py").write_text(DRY_PLAN)
    found = simulate.dry_plans(tmp_path, ranks=(1, 64))
    assert found.columns[-1] == "failed"
    assert (
        found.rows[0][:-1] == pytest.approx([1, 0, 1e3, 10, 2e3, 3, 4e3, 5, 0.1])
        and found.rows[0][-1] == ""
    )
    assert found.rows[1] == [64, *[None] * 8, "exit code 1; no room"]
    assert simulate.dry_plans(tmp_path, ranks=(1,)).columns == found.columns[:-1]


def test_run_of_several_processes_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("summary.json", '{"world_size": 3}'),
        ("metrics.jsonl", ""),
        ("config.yaml", "train: {}"),
    ):
        (tmp_path / name).write_text(content)
    (tmp_path / "config.yaml").write_text("train: {log_every_steps: 5}")
    with pytest.raises(ConfigError, match="a run of 3 processes"):
        run_step.measured_step(tmp_path)


@pytest.mark.slow
def test_the_study_from_the_command_line(tmp_path: Path) -> None:
    given = [
        "study.step_ms=37.2",
        "study.deviation_ms=0.2",
        "study.gradient_mb=102.2",
        "study.gpus=[1,8,768]",
    ]
    ran = run("mode=study", "study=simulate", "study.dry_plan=false", *given, f"run_dir={tmp_path}")
    assert ran.returncode == 0, ran.stderr
    tables = json.loads((tmp_path / "report.json").read_text())["tables"]
    compared = [f"Cost model compared with {what}" for what in ("MLPerf", "our own measurements")]
    assert [table["title"] for table in tables] == ["Predicted", *compared]
    seconds = [row[2] for row in tables[0]["rows"]]
    assert seconds[0] == pytest.approx(37.2) and 37.2 < seconds[1] < seconds[2] < 2 * 37.2
    ran = run("mode=study", "study=simulate", "model=mlp", "study.gpus=[0]", "study.step_ms=1")
    assert ran.returncode == 2
    for problem in (
        "model=mlp: study=simulate trains nothing",
        "study.gpus=[0]: must be",
        "study.from_run=null: give either",
    ):
        assert problem in ran.stderr
