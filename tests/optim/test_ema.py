"""The average of the weights: torch's AveragedModel by hand, skipped steps, captured steps,
evaluations, resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_train.checkpoints.checkpoint_hook import CheckpointHook
from ddp_train.checkpoints.training_state import STEPPER, TrainingState
from ddp_train.config.freeze import freeze
from ddp_train.config.metrics import problems
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit, train
from ddp_train.engine.scoring import score_with_average
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.optim.ema import WeightAverage
from ddp_train.optim.stepper import Stepper, UpdateRules
from ddp_train.options.schema import Config
from ddp_train.performance.cuda_graph import GraphedStepper
from ddp_train.runs.training_run import TrainingRun
from ddp_train.runs.worker_process import WorkerProcess
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.score_lines import headline
from tests.support.jobs import config_of, constant, job_of, largest_difference, table
from tests.support.ranks import on_ranks

DECAY = 0.8


def network() -> nn.Sequential:
    """With running statistics, and a parameter that is not trained."""
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    built[0].bias.requires_grad_(False)
    return built


def gradients(model: nn.Module, seed: int, bad: bool = False) -> None:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model(inputs).square().sum().mul(torch.inf if bad else 1).backward()


def averages(average: WeightAverage, model: nn.Module) -> dict[str, Tensor]:
    with average.in_model():
        return {
            name: tensor.clone()
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }


def test_it_is_torchs_averaged_model() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf)
    model.register_buffer(
        "mask", mask.clone()
    )  # as of attention: torch's becomes NaN, ours is the model's own
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    on_host = WeightAverage(model, DECAY)
    on_device = WeightAverage(model, DECAY, may_skip=True)
    before = averages(on_host, model)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items()), (
        "never uninitialised"
    )
    for step in range(12):
        gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:  # a model may put a new tensor in a buffer's place
            model[1].running_mean = model[1].running_mean + 1
        theirs.update_parameters(model)
        on_host.update()
        on_device.update(skipped=torch.zeros(()))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for ours in (on_host, on_device):
            found = averages(ours, model)
            assert torch.equal(found.pop("mask"), mask)
            assert (
                largest_difference(found, {n: theirs.module.state_dict()[n] for n in found}) < 1e-14
            ), step
            assert ours.updates == step + 1
        assert all(
            torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items()
        ), "put back"


def test_a_warm_up_forgets_the_first_weights() -> None:
    layer = nn.Linear(1, 1, bias=False)
    average = WeightAverage(layer, 0.9, warmup=True)
    expected = 0.0
    for step in range(100):
        layer.weight.data.fill_(step)
        average.update()
        decay = 0.0 if step == 0 else min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert averages(average, layer)["weight"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_skipped_step_does_not_count(scaled: bool) -> None:
    model = network().float()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=4.0)
    average = WeightAverage(model, DECAY, may_skip=scaled)
    stepper = Stepper(optimizer, constant(optimizer), scaler, UpdateRules(most_skipped=9), average)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    for step, bad in enumerate((True, False, False, True, False)):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(inputs).square().sum() * (torch.inf if bad else 1)).backward()
        weights = model[0].weight.detach().clone()
        stepper.step()
        assert torch.equal(weights, model[0].weight) == bad
        if not bad:
            theirs.update_parameters(model)
    found = averages(average, model)
    assert average.updates == 3
    if scaled:  # the statistics of the batch of a skipped step may be spoilt
        statistics = model[1].running_mean.clone()
        model[1].running_mean.fill_(torch.nan)
        average.update(skipped=torch.ones(()))
        model[1].running_mean.copy_(statistics)
        assert largest_difference(found, averages(average, model)) == 0
    assert largest_difference(found, {n: theirs.module.state_dict()[n] for n in found}) < 1e-6


def test_sixteen_bits_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.ema_decay=0\.999: an average of bfloat16 parameters would not change",
    ):
        WeightAverage(nn.Linear(2, 2).bfloat16(), 0.999)


# --- captured steps, played on the CPU as in tests/performance/test_cuda_graph.py; tests/end_to_end


def capture(self: Any, data: Any) -> None:
    place = [tensor.clone() for tensor in data]
    self.batch = place
    self.shapes = [tensor.shape for tensor in place]
    self.scale = torch.zeros(())
    self.loss = torch.zeros(())
    self.units = None

    def replay() -> None:
        loss, _ = self.wrapped(tuple(place))
        torch.autograd.backward((loss,), (loss.detach() * 0 + self.scale,))
        self.update()
        self.loss.copy_(loss.detach())

    self.graph = SimpleNamespace(replay=replay)


@pytest.mark.slow
def test_captured_steps_move_it_too() -> None:
    found = []
    for graph in (False, True):
        config = config_of(
            World(),
            Hardware(cpus=1, gpus=1),
            strategy={"name": "single"},
            model={"name": "mlp", "hidden": 8},
            train={"global_batch_size": 8, "epochs": 5, "ema_decay": DECAY, "ema_warmup": True},
            tuning={"cuda_graph": graph, "precision": "fp32", "optimizer": "fused"},
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda, "Stream"))
            for module in ("assembly.job", "performance.cuda_graph"):
                stack.enter_context(
                    mock.patch(f"ddp_train.{module}.on_stream", contextlib.nullcontext)
                )
            stack.enter_context(mock.patch.object(GraphedStepper, "_capture", capture))
            job = job_of(config, World(), (table(44), table(8)), device="cpu")
            train(job, iter(job.batches), until=job.plan.steps)
        assert job.stepper.average.updates == job.plan.steps == 30
        found.append(averages(job.stepper.average, job.module))
    torch.testing.assert_close(
        found[0], found[1], rtol=1e-5, atol=1e-6
    )  # the rate is a tensor in one of them


# --- in a run -------------------------------------------------------------------------------------


MODEL = {"name": "cnn", "channels": 4, "norm": "batch"}


def ordered(world: World) -> tuple[str, Any]:
    """sha256 of the weights and their average, and the score of both."""
    config = config_of(
        world,
        model=MODEL,
        data={"name": "digits", "limit": 50, "mixup": 0.4, "cutmix": 1.0, "random_erasing": 0.5},
        strategy={"name": "ordered", "virtual_shards": 4},
        train={"global_batch_size": 16, "epochs": 2, "ema_decay": DECAY},
    )
    job = job_of(config, world)
    fit(job)
    content = hashlib.sha256()
    for tensor in (
        *job.module.state_dict().values(),
        *averages(job.stepper.average, job.module).values(),
    ):
        content.update(tensor.numpy().tobytes())
    return content.hexdigest(), score_with_average(job.evaluation, job.stepper.average)


@pytest.mark.timeout(300)
def test_ordered_average_has_the_same_bits_on_1_2_and_4_ranks() -> None:
    ((digest, score),) = on_ranks(1, ordered)
    assert score.metrics["ema_loss"] != score.metrics["loss"] and "ema_accuracy" in score.metrics
    for ranks in (2, 4):
        assert on_ranks(ranks, ordered, timeout_seconds=200) == [(digest, score)] * ranks


def section(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"name": "digits", "limit": 96, "validation": 0.2, "mixup": 0.4, "cutmix": 1.0},
        "checkpoint": {
            "every_steps": 3,
            "keep": 99,
            "best": True,
            "best_metric": "validation.ema_accuracy",
        },
        "optimizer": {"name": "adamw", "lr": 0.01},
        "train": {"global_batch_size": 24, "epochs": 2, "ema_decay": DECAY, **more},
    }


def run(world: World, folder: str, **sections: Any) -> dict[str, Any]:
    """A whole run in this process, as a worker does it. What rank 0 wrote as its summary, and what
    it said."""
    config = config_of(world, run_dir=folder, **{**section(), **sections})
    if world.is_leader:
        freeze(config)
    if world.is_leader:
        display = mock.Mock(wraps=Display(active=False))
    else:
        display = Display(active=False)
    TrainingRun(config, WorkerProcess(Path(folder), world), "cpu", display).execute()
    if not world.is_leader:
        return {}
    said = [call.args[0] for call in display.line.call_args_list]
    return {**json.loads(Path(folder, "summary.json").read_text()), "said": said}


def whole_and_resumed(world: World, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of 8 steps, and the same once more from its checkpoint of step 3, in the middle of an
    epoch of 4 steps."""
    whole = run(world, f"{folder}/whole")
    if world.is_leader:
        shutil.copytree(f"{folder}/whole", f"{folder}/again", symlinks=True)
        for place in Path(folder, "again/checkpoints").glob("step_*"):
            if place.name > "step_00000003":
                shutil.rmtree(place)
    torch.distributed.barrier()
    return whole, run(world, f"{folder}/again")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_resumed_within_an_epoch_ends_in_the_same_bytes(tmp_path: Path) -> None:
    whole, again = on_ranks(3, whole_and_resumed, str(tmp_path), timeout_seconds=200)[0]
    one, other = (tmp_path / name / "checkpoints/step_00000008" for name in ("whole", "again"))
    for name in ("model.safetensors", "ema.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    state, resumed = TrainingState.load(one), TrainingState.load(other)
    optimizers = [found.objects[STEPPER]["optimizer"] for found in (state, resumed)]
    torch.testing.assert_close(*optimizers, rtol=0, atol=0)
    torch.testing.assert_close(state.buffers, resumed.buffers, rtol=0, atol=0)
    assert state.average and resumed.average
    torch.testing.assert_close(vars(state.average), vars(resumed.average), rtol=0, atol=0)
    buffers = state.average.buffers
    assert len(buffers) == 3 and buffers.std(0).max() > 0, (
        "each process has statistics of its own samples"
    )
    manifest = json.loads((one / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "ema.safetensors", "training.pt"}
    assert {"ema_accuracy", "ema_loss", "ema_top5"} <= set(manifest["validation"])
    weights = load_file(one / "model.safetensors")
    average = load_file(one / "ema.safetensors")
    assert weights.keys() == average.keys() and largest_difference(weights, average) > 1e-3
    assert whole["test"] == again["test"] and whole["validation"] == again["validation"]
    assert whole["better"]["ema_accuracy"] == "max" and whole["better"]["ema_loss"] == "min"
    assert (
        whole["best"]["metric"] == "validation.ema_accuracy"
        and "ema_accuracy" in whole["best"]["test"]
    )
    assert not again["said"] or "begins" not in str(again["said"]), "it went on"


def begun_and_ended(world: World, folder: str) -> list[dict[str, Any]]:
    """A run with an average, its evaluation, one that goes on without, one that begins anew."""
    found = {"resume": f"{folder}/run", "which": "last"}
    alone = {"strategy": {"name": "single"}}
    train = section()["train"]
    return [
        run(world, f"{folder}/run", **alone),
        run(world, f"{folder}/score", mode="evaluate", **alone, checkpoint=found),
        run(
            world,
            f"{folder}/without",
            **alone,
            checkpoint=found,
            train={**train, "epochs": 3, "ema_decay": None},
        ),
        run(
            world,
            f"{folder}/anew",
            **alone,
            checkpoint={**found, "resume": f"{folder}/without"},
            train={**train, "epochs": 3},
        ),
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_may_begin_or_end_an_average(tmp_path: Path) -> None:
    ((first, evaluated, without, anew),) = on_ranks(
        1, begun_and_ended, str(tmp_path), timeout_seconds=200
    )
    assert evaluated["test"] == first["test"] and "ema_loss" in evaluated["test"]
    assert (
        "note: step_00000008 has an average of the weights, which this run does not continue; to continue the average, add train.ema_decay=0.999"
        in without["said"]
    )
    assert "ema_loss" not in without["test"] and not list(
        tmp_path.glob("without/checkpoints/*/ema.safetensors")
    )
    said = (
        "note: step_00000012 has no average of the weights, so the average starts with the weights after the"
        " next step"
    )
    assert said in anew["said"]
    assert anew["test"]["ema_loss"] == anew["test"]["loss"], (
        "nothing was left to train: it is the weights"
    )


def test_an_evaluation_that_is_stopped_has_no_score() -> None:
    config = config_of(
        World(), model=MODEL, strategy={"name": "single"}, train={"ema_decay": DECAY}
    )
    job = job_of(config, World())
    whole = score_with_average(job.evaluation, job.stepper.average)
    assert whole and whole.metrics["ema_loss"] == whole.metrics["loss"]
    real = evaluate

    def stopped(evaluation: Any) -> Any:
        score = real(evaluation)
        evaluation.stop.requested.set()
        return score

    with mock.patch("ddp_train.engine.scoring.evaluate", stopped):
        assert score_with_average(job.evaluation, job.stepper.average) is None
    assert headline({"accuracy": 0.5, "ema_accuracy": 0.6}) == "50.00% (ema 60.00%)"


def test_average_is_copied_after_the_last_checkpoint_is_written() -> None:
    """So that there are never two snapshots, and half of a third."""
    config = config_of(
        World(), model=MODEL, strategy={"name": "single"}, train={"ema_decay": DECAY}
    )
    calls = mock.Mock()
    metrics_hook = mock.Mock()
    metrics_hook.state.return_value = {}
    hook = CheckpointHook(calls.writer, metrics_hook, {})
    with mock.patch("ddp_train.checkpoints.checkpoint_hook.collect_average", calls.collect):
        hook.save(job_of(config, World()))
    assert [name for name, _, _ in calls.mock_calls] == ["writer.wait", "collect", "writer.submit"]


def test_metrics_of_the_average_are_known_where_there_is_one() -> None:
    config = Config()
    config.checkpoint.best_metric = "test.ema_accuracy"
    (problem,) = problems(config)
    assert (
        str(problem)
        == "checkpoint.best_metric=test.ema_accuracy: there is no average of the weights; add"
        " train.ema_decay=0.999"
    )
    config.train.ema_decay = 0.9
    assert not list(problems(config))
    config.checkpoint.best_metric = "test.ema_acuracy"
    (problem,) = problems(config)
    assert "did you mean ema_accuracy?" in str(problem)
