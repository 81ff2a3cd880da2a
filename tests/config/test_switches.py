"""No dead switch: every key of the schema changes something that can be observed, for every option
that has it.

Each row names a change and what to look at. The look is at real objects: the built model,
optimizer, loader or DDP, the files of a real run, the environment of the workers. Keys that act on
GPUs only are resolved for a machine with one (`GPU`) and observed at the place where they act: the
flag, the argument, the converted module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from torch import nn

from ddp_lab.doctor.findings import ok
from ddp_lab.prove.answer import Examined
from ddp_lab.prove.configs import for_proof
from ddp_lab.prove.progress import Progress
from ddp_lab.prove.real_runs import RealRuns
from ddp_train.assembly.checkpoint_model import find_checkpoint
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.metrics import build_selection
from ddp_train.assembly.model import build_module, build_task
from ddp_train.assembly.plan import build_plan
from ddp_train.assembly.sampler import sampled_epochs
from ddp_train.assembly.schedule import metric_of, schedule_of
from ddp_train.assembly.strategy import build_strategy
from ddp_train.checkpoints import reader
from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.config.freeze import FILE, freeze
from ddp_train.config.keys import all_keys, field_types, is_section
from ddp_train.config.overrides import read_overrides
from ddp_train.config.validate import check
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import ArraySource, BatchSource
from ddp_train.data.sample_facts import lengths_of
from ddp_train.data.streams.in_process import InProcessStream
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Evaluation
from ddp_train.errors import ConfigError, DataError, NonFiniteLossError
from ddp_train.hardware import Hardware
from ddp_train.launcher import local, multihost
from ddp_train.launcher.attempt import Attempt, AttemptEnd, Launch
from ddp_train.launcher.elastic import Elastic
from ddp_train.launcher.network_location import NetworkLocation
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.workload import Workload, workload_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SCALARS, SECTIONS, Config, RequestedRun
from ddp_train.parallel import compiler_graphs
from ddp_train.parallel.compiler_graphs import FLOPS_PER_BYTE_SENT, buckets_by_flops
from ddp_train.parallel.naming_ddp import BUCKET_MB, ddp_arguments
from ddp_train.parallel.strategy import DistributedDataParallel
from ddp_train.performance import switches
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import SIGNALS, UNSAVED
from ddp_train.runs import worker
from ddp_train.runs.display_facts import advice, text_writer
from ddp_train.runs.plan_report import tuning_rows
from ddp_train.runs.training import Training, start_trackers
from ddp_train.runs.training_run import TrainingRun
from ddp_train.runs.worker_process import WorkerProcess
from ddp_train.scored_sets import sets_of
from ddp_train.sweeps.baseline import Baseline
from ddp_train.sweeps.outcomes import completed_outcome
from ddp_train.sweeps.pool import pool_of
from ddp_train.sweeps.trial_numbers import TrialNumbers
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.trackers import tracking
from tests.support.commands import PROGRAM
from tests.support.jobs import job_of, learning_rates, loader_of, module_of, optimizer_of

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "ddp_train/conf"
CPU = Hardware(cpus=4)
GPU = Hardware(cpus=4, gpus=1, gpu_name="NVIDIA H200", compute_capability=(9, 0))
EIGHT_GPUS = dataclasses.replace(GPU, gpus=8)

NO_SAMPLES = MicroBatch(None, 0, np.arange(0), 0, 0.0, True)
SMALL = "strategy=single model.channels=4 data.limit=48 train.global_batch_size=24 train.epochs=2"
"""A run of 4 steps, 2 per epoch."""
ALSO = {
    "data=linear_regression": "model=linear_regression",
    "data=mnist": "data.root=files",
    "data=fashion_mnist": "data.root=files",
    "data=cifar10": "data.root=files",
    "data=image_folder": "data.root=images",
    "data=text": "data.path=corpus data.length=8 model=gpt",
    "data=tokens": "data.path=numbers data.length=8 model=gpt",
    "model=gpt": "data=text data.path=corpus data.length=8",
    "model=custom": "model._target_=torch.nn.Linear model.in_features=3 model.out_features=2",
    "data=custom": (
        f"data._target_={__name__}.Table data.size=9 trusted_modules=[{__name__.partition('.')[0]}]"
        " model=mlp"
    ),
    "optimizer=custom": "optimizer._target_=torch.optim.SGD optimizer.lr=0.1",
    "schedule=custom": (
        "schedule._target_=torch.optim.lr_scheduler.StepLR schedule.step_size=3 schedule.gamma=0.5"
    ),
    "task=custom": (
        f"task._target_={__name__}.OneTask task.factor=1"
        f" trusted_modules=[{__name__.partition('.')[0]}]"
    ),
}
"""What an option needs beside itself."""


@dataclasses.dataclass
class Case:
    """A config as the user asked for it and as it was resolved."""

    asked: Config
    config: Config
    machine: Hardware

    @property
    def problems(self) -> list[str]:
        return check(RequestedRun(self.asked, self.config, self.machine, None))


def case_of(line: str, machine: Hardware) -> Case:
    """What the entry would make of a command line; Hydra's part, 0.1 s of merging files, is left to
    test_composition."""
    read = read_overrides(PROGRAM, line.split())
    values: dict[str, Any] = {}
    for word in read.arguments:
        if not word.startswith("++"):
            group, _, option = word.partition("=")
            values[group] = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    for key, value in read.given.items():
        section, *inner, name = ["", key] if "." not in key else key.split(".")
        if section:
            place = values.setdefault(section, dataclasses.asdict(getattr(Config(), section)))
        else:
            place = values
        for part in inner:
            place = place[part]
        place[name] = value
    config, problems = bind(values)
    assert read.problems + problems == []
    return Case(config, resolve(config, machine, None), machine)


# --- what can be observed -------------------------------------------------------------------------


def content(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.contiguous().numpy().tobytes()


def samples(case: Case) -> Any:
    """Both splits: their lengths and some samples as training sees them in epoch 0."""
    train, test = open_datasets(case.config)[:2]
    inputs, targets = train.get_batch(np.arange(min(8, len(train))), 0)
    return len(train), len(test), train.outputs, content(inputs), content(targets)


def scored_sets(case: Case) -> Any:
    """The number of samples of each set that is scored, by its name."""
    splits = open_datasets(case.config)
    sets = splits.validation_sets | splits.test_sets
    return {name: len(source) for name, source in sets.items()}


def batch_trained_on(case: Case) -> Any:
    """The first one, as the model gets it, or why there is none."""
    batches = job_of(alone(case), World()).batches
    try:
        batch = next(iter(batches))
    except DataError as error:
        return str(error)
    return content(batch.inputs), content(batch.targets)


def what_opening_says(case: Case) -> Any:
    try:
        return samples(case)
    except ConfigError as error:
        return error.problems


def scored_samples(case: Case) -> Any:
    inputs, targets = open_datasets(case.config).test.get_batch(np.arange(4), None)
    return content(inputs), content(targets)


def reversed_batch(samples: list[Any]) -> Any:
    """A collate_fn of the user's."""
    return torch.stack([sample[0] for sample in samples[::-1]]), torch.tensor(
        [sample[1] for sample in samples[::-1]]
    )


class Torchvision:
    """In place of a data set of torchvision, whose files would have to be downloaded."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012  (read and cleared by `asked_of_torchvision`)

    def __init__(self, root: str, **more: Any) -> None:
        self.asked.append({"root": root, **more})
        self.data = (torch.arange(30 * 64) % 251).byte().view(30, 8, 8)
        self.targets = [0, 1, 2] * 10


class TorchvisionColour(Torchvision):
    def __init__(self, root: str, **more: Any) -> None:
        super().__init__(root, **more)
        self.data = self.data[..., None].repeat(1, 1, 1, 3).numpy()


class Table:
    """A data set as a user would write one."""

    classes = ("small", "large")

    def __init__(self, size: int, train: bool) -> None:
        self.size = size
        self.targets = [number % 2 for number in range(size)]
        self.lengths = [1 + number % 2 for number in range(size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(number)), number % 2

    def get_batch(
        self, numbers: torch.Tensor, epoch: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*(self[number] for number in numbers.tolist()), strict=True)
        return torch.stack(inputs), torch.tensor(targets)

    def to(self, device: torch.device) -> Self:
        return self


class OtherTable(Table):
    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((5,), float(number)), number % 2


class Biased(nn.Sequential):
    """A convolution whose bias has no effect."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))


def asked_of_torchvision(case: Case) -> Any:
    Torchvision.asked.clear()
    seen = samples(case)
    if case.config.data.name == "image_folder":
        return seen
    return list(Torchvision.asked)


def model_in(case: Case) -> nn.Module:
    """The model that trains, on random images or on the data that was asked for."""
    return module_of(case.config, open_datasets(case.config)[0]).model


def model(case: Case) -> Any:
    built = model_in(case)
    return str(built), [tuple(parameter.shape) for parameter in built.parameters()]


def trained_at_first_and_later(case: Case) -> Any:
    job = job_of(alone(case), World())
    names = [
        name for name, parameter in job.module.model.named_parameters() if parameter.requires_grad
    ]
    return names, [hook.due(job) for hook in job.hooks]


def gelu_is_compiled(case: Case) -> Any:
    functions = [layer.function for layer in model_in(case).modules() if hasattr(layer, "function")]
    return [hasattr(function, "_torchdynamo_orig_callable") for function in functions]


def optimizer(case: Case) -> Any:
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    built = optimizer_of(parameters, case.config.optimizer, case.config.tuning.optimizer)
    return type(built), [
        {**group, "params": [p.ndim for p in group["params"]]} for group in built.param_groups
    ]


def groups_of_a_job(case: Case) -> Any:
    optimizer = job_of(alone(case), World()).stepper.optimizer
    return [(group["lr"], len(group["params"])) for group in optimizer.param_groups]


class Reached(Exception):
    """Ends a run where it has come far enough."""


def alone(case: Case) -> Config:
    """The config for one process without a group, on the CPU."""
    return dataclasses.replace(case.config, strategy=OPTIONS["strategy"]["single"]())


def run_of(config: Config) -> TrainingRun:
    """A run in this process, on the CPU, without a process group."""
    config = dataclasses.replace(config, strategy=OPTIONS["strategy"]["single"]())
    worker = WorkerProcess(Path(str(config.run_dir)), World())
    return TrainingRun(config, worker, "cpu", Display(active=True))


def evaluation_of(case: Case, train: BatchSource, test: BatchSource) -> Evaluation:
    config = alone(case)
    strategy = build_strategy(config, World(), "cpu")
    module = build_module(config, train, strategy, "cpu")
    builder = JobBuilder(config, World(), "cpu", module, strategy, RankStatus())
    return builder.build_evaluation(test)


def schedule(case: Case) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plan: Any = SimpleNamespace(steps=20, steps_per_epoch=10)
    made = schedule_of(case.config.schedule, plan, optimizer, {})
    return [made.values(step) for step in range(20)]


def falling(step: int, steps: int, **_: Any) -> float:
    """A schedule of the user's."""
    return 1 - step / steps


def followed_metric(case: Case) -> Any:
    return metric_of(case.config.schedule)


def first_rates(case: Case) -> Any:
    """Of the first steps, as the run will have them."""
    sources = open_datasets(case.config)
    job = job_of(alone(case), World(), sources)
    return learning_rates(job, 4)


def wrapped(case: Case) -> Any:
    """What torch's own DDP was given, and its hooks. It runs a step, alone in a process group."""
    real = nn.parallel.DistributedDataParallel.__init__
    given = {}

    @functools.wraps(real)
    def init(self: Any, module: nn.Module, **arguments: Any) -> None:
        given.update(arguments)
        real(self, module, **arguments)

    source = open_datasets(case.config)[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        several = mock.patch(
            "ddp_train.parallel.naming_ddp.ranks", lambda: 2
        )  # one sends its buffers to nobody
        with mock.patch.object(nn.parallel.DistributedDataParallel, "__init__", init), several:
            ddp: Any = build_strategy(case.config, World(size=2), "cpu").wrap(
                module_of(case.config, source)
            )
        if case.config.strategy.comm_hook != "bf16":  # gloo on CPU cannot average bfloat16
            ddp(source.get_batch(np.arange(4), 0))[0].backward()
        hooks = [
            (hook.__name__, getattr(state, "matrix_approximation_rank", None))
            for hook, state in ddp._comm_hooks
        ]
        return {name: str(value) for name, value in given.items()}, hooks
    finally:
        dist.destroy_process_group()


def buckets(case: Case) -> tuple[int, bool]:
    """Bytes of one, and whether torch's compiler would make a graph for each. Nothing is
    compiled."""
    several = mock.patch("ddp_train.parallel.compiler_graphs.ranks", lambda: 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch._dynamo.config.patch(optimize_ddp=True), several:
            module = module_of(case.config, open_datasets(case.config)[0])
            wrapped = build_strategy(case.config, World(size=2), "cpu").wrap(module)
            assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
            first = (getattr(wrapped, "bucket_bytes_cap_list", None) or [wrapped.bucket_bytes_cap])[
                0
            ]
            return first, bool(torch._dynamo.config.optimize_ddp)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "mib", "cut"),
    [
        ("tuning.buckets=default", 25, True),
        ("tuning.buckets=large", 125, False),
        ("tuning.buckets=large model=mlp model.hidden=6000", 125, True),
        ("tuning.buckets=one", 2**20, False),
        ("tuning.buckets=default strategy.bucket_cap_mb=3", 3, False),
        ("tuning.buckets=default strategy.bucket_cap_mb_list=[2,4]", 2, False),
    ],
)
def test_buckets_have_the_size_that_is_asked_for(words: str, mib: int, cut: bool) -> None:
    assert buckets(case_of(f"tuning.compile=true {words}", CPU)) == (mib * 2**20, cut)


@pytest.mark.parametrize(
    ("ranks", "flops", "buckets"),
    [
        *((2, flops, "one") for flops in (FLOPS_PER_BYTE_SENT * 10**6, 10**15)),
        *((2, flops, "large") for flops in (FLOPS_PER_BYTE_SENT * 10**6 - 1, 1, None)),
        (4, FLOPS_PER_BYTE_SENT * 10**6, "large"),  # each sends half as much again
        (4, FLOPS_PER_BYTE_SENT * 15 * 10**5, "one"),
        (1, None, "one"),
    ],
)
@mock.patch.dict(BUCKET_MB, large=0.9)
def test_model_is_cut_where_the_exchange_is_long(
    ranks: int, flops: int | None, buckets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_graphs, "ranks", lambda: ranks)
    monkeypatch.setattr(compiler_graphs, "from_leader", lambda value, device: value)
    module = nn.Sequential(
        nn.Linear(500, 500, bias=False), nn.Linear(500, 500).requires_grad_(False)
    )  # 1 MB to send
    assert buckets_by_flops(module, lambda: flops, "cpu") == buckets
    monkeypatch.setitem(BUCKET_MB, "large", 1)  # all fit: there is nothing to choose
    assert buckets_by_flops(module, lambda: pytest.fail("counted in vain"), "cpu") == "one"


@pytest.mark.parametrize(("ranks", "sent"), [(1, False), (2, True)])
def test_buffers_are_sent_only_where_somebody_receives_them(
    ranks: int, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_train.parallel.naming_ddp.ranks", lambda: ranks)
    arguments = ddp_arguments("cpu")
    assert [value for name, value in arguments.items() if "buffers" in name] == [sent]


@pytest.mark.parametrize(
    ("deterministic", "device", "ranks", "fixed"),
    [
        (True, "cpu", 2, False),
        (True, "cpu", 3, True),
        (True, "cuda:0", 2, True),
        (False, "cuda:0", 3, False),
    ],
)
def test_buckets_are_final_where_bits_depend_on_them(
    deterministic: bool, device: str, ranks: int, fixed: bool
) -> None:
    config = case_of(f"strategy=ddp deterministic={str(deterministic).lower()}", CPU).config
    strategy = build_strategy(config, World(size=ranks), device)
    assert isinstance(strategy, DistributedDataParallel) and strategy.fixed_buckets == fixed


def placed_modules(case: Case) -> Any:
    """The layers after `place` has converted them."""
    source = open_datasets(case.config)[0]
    return [type(layer).__name__ for layer in module_of(case.config, source).modules()]


def number_types(case: Case) -> Any:
    source = open_datasets(case.config)[0]
    module = module_of(case.config, source)
    micro_batches = build_plan(case.config, World(), 48).micro_batches()
    batch = next(iter(loader_of(source, micro_batches, case.config.tuning, "cpu")))
    outputs = module.model(batch.inputs)
    return module.autocast, outputs.dtype, batch.inputs.dtype


def memory_formats(case: Case) -> Any:
    loader = loader_of(
        ArraySource(torch.zeros(4, 1), torch.zeros(4)), [], case.config.tuning, "cpu"
    )
    weights = [weight for weight in model_in(case).parameters() if weight.ndim == 4]
    four = [*weights, loader.place(Batch(torch.zeros(2, 3, 4, 4), NO_SAMPLES)).data]
    return [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in four]


def data_loader(case: Case) -> Any:
    """Who reads the batches, and the settings of the DataLoader. On GPUs: nothing is loaded."""
    source = ArraySource(torch.zeros(4, 1), torch.zeros(4))
    device = World().device(case.config.device)
    stream: Any = loader_of(source, [], case.config.tuning, device).stream
    if isinstance(stream, InProcessStream):
        return "in this process", stream.pin_memory
    built = stream.data_loader
    return built.num_workers, built.prefetch_factor, built.persistent_workers, built.pin_memory


def where_data_are_held(case: Case) -> Any:
    """What batches come from, or why they cannot."""
    if case.problems:
        return case.problems
    train, test = open_datasets(case.config)[:2]
    evaluation: Any = evaluation_of(case, train, test)
    return type(evaluation.batches.loader.stream)


def copies_to_the_device(case: Case) -> Any:
    tensor = mock.Mock(spec=torch.Tensor)
    tensor.to.return_value = torch.zeros(2)
    tuning = dataclasses.replace(case.config.tuning, copy_stream=False)
    source = ArraySource(torch.zeros(4, 1), torch.zeros(4))
    loader_of(source, [], tuning, "cuda:0").place(Batch(tensor, NO_SAMPLES))
    return tensor.to.call_args.kwargs


def copies_beside_the_computation(case: Case) -> Any:
    source = ArraySource(torch.zeros(4, 1), torch.zeros(4))
    stream: Any = loader_of(source, [], case.config.tuning, "cuda:0").stream
    return type(stream.placement)


def process_flags(case: Case) -> Any:
    """The global flags of torch once a worker has set them."""
    with (
        mock.patch.object(TrainingRun, "open_data", side_effect=Reached),
        contextlib.suppress(Reached),
    ):
        run_of(case.config).execute()
    return flags()


def compiled(case: Case) -> Any:
    """How many graphs torch's compiler found in a training step and an evaluation; they are not
    turned into kernels."""
    from torch._dynamo import utils

    source = open_datasets(case.config)[0]
    torch._dynamo.reset()
    utils.counters.clear()
    with mock.patch("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward):
        module = module_of(case.config, source)
        batch = source.get_batch(np.arange(4), None)
        module(batch)[0].backward()
        module.score(batch)
    return utils.counters["stats"]["unique_graphs"]


def loss_of_tokens(case: Case) -> Any:
    """The function that computes it."""
    task: Any = module_of(case.config, open_datasets(case.config)[0]).task
    return getattr(task.cross_entropy_sum, "__name__", "torch's")


def asked_of_the_compiler(case: Case) -> Any:
    """The options with which a training step is turned into kernels; it is not."""
    source = open_datasets(case.config)[0]
    asked = []

    def compile_fx(graph: Any, *_: Any, config_patches: Any = None, **__: Any) -> Any:
        asked.append(config_patches)
        return graph.forward

    torch._dynamo.reset()
    with mock.patch("torch._inductor.compile_fx.compile_fx", compile_fx):
        module_of(case.config, source)(source.get_batch(np.arange(4), None))
    return asked


def tensors_kept(case: Case) -> Any:
    """The bytes of each for the backward pass."""
    source = open_datasets(case.config)[0]
    kept = []
    module = module_of(case.config, source)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.nbytes), lambda _: None
    ):
        module(source.get_batch(np.arange(4), None))
    return kept


def advised(case: Case) -> Any:
    source = open_datasets(case.config)[0]
    return advice(case.config, module_of(case.config, source), source)


class Counted(nn.Module):
    """A metric, as far as it is looked at: torchmetrics may be missing."""

    _defaults: dict[str, Any] = {}  # noqa: RUF012
    higher_is_better = True


def further_metrics(case: Case) -> Any:
    """Metrics beside those of the task, and their directions."""
    library = mock.Mock(Metric=Counted, MetricCollection=dict)
    with mock.patch.dict("sys.modules", torchmetrics=library):
        found = module_of(case.config, open_datasets(case.config)[0]).further_metrics
    return found and found.better


def steppers(case: Case) -> Any:
    """The one that a job has. On GPUs: no step is taken."""
    sources = open_datasets(case.config)
    module = module_of(case.config, sources[0])
    with (
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch("ddp_train.assembly.job.on_stream", contextlib.nullcontext),
    ):
        config = dataclasses.replace(case.config, strategy=OPTIONS["strategy"]["single"]())
        made: Any = job_of(config, World(), sources, device="cpu", module=module).stepper
        return type(made)


def spared_objects(case: Case) -> Any:
    switches.set_garbage_collection(case.config.tuning.gc_freeze)
    try:
        return gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


class OneTask:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) * self.factor).sum(), len(batch[1])


class OtherTask(OneTask):
    pass


def task_made(case: Case) -> Any:
    source = open_datasets(case.config)[0]
    task: Any = build_task(case.config.task, source, source.get_batch(np.array([0]), None))
    own = task.loss.__self__
    return type(own).__name__, own.factor


def loss(case: Case) -> Any:
    """The loss of four samples with three outputs each, by the task of the config."""
    draw = torch.Generator().manual_seed(0)
    batch = {
        "classification": (torch.randn(4, 3, generator=draw), torch.tensor([0, 1, 2, 1])),
        "multilabel": (
            torch.randn(4, 3, generator=draw),
            torch.randint(0, 2, (4, 3), generator=draw).float(),
        ),
        "regression": (torch.randn(4, generator=draw), torch.randn(4, generator=draw)),
        "segmentation": (
            torch.randn(4, 3, 2, 2, generator=draw),
            torch.randint(0, 3, (4, 2, 2), generator=draw),
        ),
    }[case.config.task.name]
    total, units = build_task(case.config.task, ArraySource(*batch), batch).loss(
        nn.Identity(), batch
    )
    return float(total), int(units)


def text_written(case: Case) -> Any:
    """By the untrained model; None if none is asked for."""
    source = open_datasets(case.config)[0]
    write = text_writer(case.config, source)
    if write:
        return write(module_of(case.config, source).model)
    return None


def bytes_per_token(case: Case) -> Any:
    """As the task of the data gets it."""
    source = open_datasets(case.config)[0]
    task = build_task(case.config.task, source, source.get_batch(np.array([0]), None))
    return task.derive({"loss": 1.0})


def plan(case: Case) -> Any:
    made = build_plan(case.config, World(), 240)
    return made, [
        (micro_batch.step, content(torch.from_numpy(micro_batch.indices)), micro_batch.is_last)
        for micro_batch in made.micro_batches()
    ]


def first_epoch(case: Case) -> Any:
    """The samples of its global batches."""
    splits = open_datasets(case.config)
    by_tokens = case.config.data.batch_by == "tokens"
    if by_tokens:
        lengths = lengths_of(splits.train, case.config.train.global_batch_size)
    else:
        lengths = None
    sampled = sampled_epochs(case.config, splits.train)
    made = build_plan(case.config, World(), len(splits.train), splits.weights, lengths, sampled)
    return [made.global_batch(step).tolist() for step in range(made.steps_per_epoch)]


def evaluation_batches(case: Case) -> Any:
    return [
        len(batch.targets) for batch in evaluation_of(case, *open_datasets(case.config)[:2]).batches
    ]


def weights_after_a_step(case: Case) -> Any:
    job = job_of(alone(case), World())
    batch = next(iter(job.batches))
    job.stepper.backward(*job.wrapped(batch.data), batch.micro_batch)
    job.stepper.step()
    return [content(parameter.detach()) for parameter in job.module.parameters()]


def steps_after_a_bad_loss(case: Case) -> Any:
    job = job_of(alone(case), World())
    batch = next(iter(job.batches))
    job.stepper.backward(*job.wrapped((batch.inputs * torch.nan, batch.targets)), batch.micro_batch)
    with contextlib.suppress(NonFiniteLossError):
        job.stepper.step()
    return job.stepper.steps_done


def run(case: Case) -> Any:
    """A whole run in this process: what stands in its files, but for the clock."""
    freeze(case.config)
    run_dir = Path(str(case.config.run_dir))
    run_of(case.config).execute()
    if (run_dir / "metrics.jsonl").exists():
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    else:
        lines = []
    summary = json.loads((run_dir / "summary.json").read_text())
    timeless = [
        {
            k: v
            for k, v in json.loads(line).items()
            if "second" not in k and k not in ("figures", "time")
        }
        for line in lines
    ]
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    best = (summary.get("best") or {}).get("metric")
    return timeless, summary["mode"], summary["steps"], summary["test"], best, checkpoints


def made_with_a_trained_model(case: Case) -> Any:
    """What is written, or why nothing is."""
    freeze(case.config)
    run_dir = Path(str(case.config.run_dir))
    try:
        run_of(case.config).execute()
    except DataError as error:
        return str(error).replace(str(run_dir), "")
    files = sorted(path.name for path in run_dir.glob("*.*"))
    predicted = None
    if "predictions.npz" in files:
        predicted = np.load(run_dir / "predictions.npz")["target"].tolist()
    summary = json.loads((run_dir / "summary.json").read_text())
    return files, predicted, sets_of(summary)


def formats_asked_for(case: Case) -> Any:
    """Of an export of a trained model. Nothing is exported: that both can be is shown in
    tests/inference/test_inference_of_runs.py."""
    freeze(case.config)
    with mock.patch("ddp_train.runs.inference_run.export_model", return_value=[]) as export:
        run_of(case.config).execute()
    return export.call_args.args[-1]


TENSORBOARD = "ddp_train.telemetry.trackers.tensorboard.TensorBoard"


def trackers(case: Case) -> Any:
    """Those of a run, and what they are told of it; none is opened."""
    told: list[Any] = []

    def thread(name: str, tracker: Any, run: Any, delivered: Any) -> mock.Mock:
        told.append((name, type(tracker), run.project))
        return mock.Mock()

    begun = run_of(case.config)
    metrics = mock.Mock(kept=[], listeners=[])
    with mock.patch.object(tracking, "TrackerThread", thread):
        start_trackers(begun, tracking.Tracking(begun.trackers(), 1.0, 1.0), metrics, 0)
    return told


def hooks_of_trackers(case: Case) -> Any:
    """The hooks that the details need."""
    case.config.tracker.classes = {"tensorboard": {"_target_": TENSORBOARD}}
    case.config.train.max_steps = 1
    freeze(case.config)
    hooks: list[Any] = []
    with mock.patch.object(Training, "announce", lambda training: hooks.extend(training.job.hooks)):
        run_of(case.config).execute()
    return [type(hook) for hook in hooks]


def frozen_to(case: Case) -> Any:
    freeze(case.config)
    return [
        path.as_posix().split("/")[:2] for path in Path().rglob(FILE) if "trained" not in path.parts
    ]


def resolved_device(case: Case) -> Any:
    return World().device(case.config.device)


def problems(case: Case) -> Any:
    return case.problems


def objective(case: Case) -> Any:
    numbers = {"test": {"loss": 1.0, "accuracy": 2.0}, "seconds": 3.0, "samples_per_second": 4.0}
    run_dir = Path(str(case.config.run_dir))
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text(json.dumps(numbers))
    return completed_outcome(case.config)["objective"]


def asked_checkpoint(case: Case) -> Any:
    """Which one of a run's checkpoints."""
    asked: list[Any] = []
    with mock.patch.object(reader, "find", lambda *arguments: asked.append(arguments)):
        find_checkpoint(case.config, World(), "cpu")
    return asked


def mirrored(case: Case) -> Any:
    run(case)
    return sorted(path.name for path in Path("mirror/checkpoints").glob("*"))


def steps_traced(case: Case) -> Any:
    run(case)
    return sorted(path.name for path in Path(str(case.config.run_dir), "profile").glob("*"))


def memory_history(case: Case) -> Any:
    """Whether a worker on a GPU asks torch for it."""
    memory = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "memory", memory),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch._C, "_cuda_attach_out_of_memory_observer", create=True),
    ):
        worker.prepare_gpu(case.config.train.memory_history, Path("here"), 0, "cuda:0")
    return memory._record_memory_history.called


def early_stopping(case: Case) -> Any:
    """What it compares, and how long it waits."""
    hook = build_selection(case.config, {}, open_datasets(case.config), mock.Mock())
    stopping = hook.early_stopping
    compared = stopping and (stopping.best.selection, stopping.best.min_delta, stopping.patience)
    return compared, hook.time_limit and hook.time_limit.seconds


def attempt_of(case: Case, stop: StopRequests, server: Any = None) -> Attempt:
    elastic = Elastic(case.config, None)
    return Attempt(Launch(ROOT, stop, server, elastic, Workload()), number=0)


def worker_environments(case: Case) -> Any:
    """What our own launcher gives to its workers."""
    started: list[Any] = []
    with (
        mock.patch.object(subprocess, "Popen", lambda command, env, **more: started.append(env)),
        contextlib.closing(attempt_of(case, StopRequests())) as attempt,
    ):
        attempt.start()
        attempt.workers.processes.clear()  # there are no processes to end
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return [{name: env[name] for name in names} for env in started]


def asked_to_fork(case: Case) -> Any:
    """How many workers the launcher has forked, where a server is at hand."""
    server = mock.Mock(**{"fork.side_effect": lambda specs, given_up: specs})
    with (
        mock.patch.object(subprocess, "Popen", lambda *words, **more: None),
        contextlib.closing(attempt_of(case, StopRequests(), server)) as attempt,
    ):
        attempt.start()
        workers = [worker is not None for worker in attempt.workers.processes]
        attempt.workers.processes.clear()  # there are no processes to end
    return workers


def page(case: Case) -> Any:
    """Which class writes the page of the run."""
    return type(workload_of(case.config).page).__name__


def proof(case: Case) -> Any:
    """What a proof makes of a job."""
    made = for_proof(case.config, Path("proof"))
    return made.train, made.data


def parts_of_a_proof(case: Case) -> Any:
    """Which real runs a proof makes, ten seconds after its begin."""
    progress = Progress(time.monotonic() - 10, case.config.prove.seconds)
    examined = Examined(precision="fp64")
    with contextlib.ExitStack() as stack:
        for name in ("gradients", "resume", "other_number", "evaluation"):
            stack.enter_context(mock.patch.object(RealRuns, name, lambda *_: ok("")))
        RealRuns(case.config, mock.Mock(), examined, progress).run()
    return [finding.status for finding in examined.findings]


def torchrun_command(case: Case) -> Any:
    return multihost.command(case.config, NetworkLocation("10.0.0.1", "eth0", True), PROGRAM, [])


def attempts(case: Case) -> Any:
    with mock.patch.object(local.Attempt, "run", return_value=AttemptEnd(70)) as tried:
        local.launch(case.config, ROOT)
    return tried.call_count


def patience_at_the_end(case: Case) -> Any:
    """How many seconds workers that do not listen are left alive once somebody asked them to
    stop."""
    stop = StopRequests()
    worker = mock.Mock(**{"poll.return_value": None})
    seconds = itertools.count()
    stop.received.append(signal.SIGTERM)
    attempt = attempt_of(case, stop)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(attempt, "start", lambda: attempt.workers.processes.append(worker))
        )
        stack.enter_context(mock.patch.object(time, "monotonic", lambda: next(seconds)))
        stack.enter_context(mock.patch.object(time, "sleep"))
        assert attempt.run() == AttemptEnd(UNSAVED)
    attempt.workers.board.close()
    worker.send_signal.assert_called_once_with(signal.SIGTERM)
    return next(seconds)


def process_group(case: Case) -> Any:
    """What init_process_group is given, on GPUs too; no group is opened."""
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(mock.patch.object(dist, "init_process_group"))
        unwanted = [
            (dist, "barrier"),
            (dist, "destroy_process_group"),
            (gc, "collect"),
            (worker, "prepare_gpu"),
        ]
        unwanted += [
            (worker.TrainingRun, "execute"),
            (worker, "start_logging"),
            (worker.stacks, "show_stacks"),
        ]
        for owner, name in unwanted:
            stack.enter_context(mock.patch.object(owner, name))
        assert worker.run(case.config, World(), lambda: mock.Mock()) == 0
    return opened.call_args.args, opened.call_args.kwargs["timeout"]


# --- the table ------------------------------------------------------------------------------------


def trials_at_once(case: Case) -> Any:
    """How many of eight trials run at a time on a host, and with how many GPUs each."""
    return dataclasses.astuple(pool_of(case.asked, [case.config], 8, case.machine))


def runs_of_a_sweep(case: Case) -> Any:
    """What runs after a trial that was completed beside others."""
    row = {
        "trial": 0,
        "status": "completed",
        "words": ["seed=1"],
        "at_once": 2,
        "samples_per_second": 9.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        return Baseline(case.asked.sweep.baseline).choose(
            [row], [row], TrialNumbers(Path(folder), 1, "now")
        )


@dataclasses.dataclass
class Row:
    """`base` and `changed` are words of a command line; `changed` is added to `base`."""

    changed: str
    observe: Callable[[Case], Any]
    base: str = ""
    machine: Hardware = CPU


TEXT = "data=text data.path=corpus data.length=8 model=gpt"
NO_WORKERS = "tuning.num_workers=0"
WORKERS = "tuning.num_workers=2"
TWO_HOSTS = "launch.nnodes=2 launch.rdzv_endpoint=a:1 run_dir=here"

ROWS: dict[str, Row] = {
    "mode": Row("mode=evaluate", run, f"{SMALL} checkpoint.resume=trained train.epochs=3"),
    "name": Row("name=mine", frozen_to),
    "run_dir": Row("run_dir=here", frozen_to),
    "seed": Row("seed=1", run, SMALL),
    "device": Row("device=cpu", resolved_device, machine=GPU),
    "deterministic": Row("deterministic=false", process_flags),
    "metrics": Row(f"metrics=[{{_target_:{__name__}.Counted,name:count}}]", further_metrics),
    "hooks": Row("hooks=[ddp_lab.study.step_times.StepTimes]", steppers, machine=GPU),
    "objective": Row("objective=test.accuracy", objective),
    "trusted_modules": Row("trusted_modules=[yaml]", problems, "model._target_=yaml.Loader"),
    "launch.nproc_per_node": Row("launch.nproc_per_node=3", worker_environments),
    "launch.nnodes": Row("launch.nnodes=3", torchrun_command, TWO_HOSTS),
    "launch.rdzv_endpoint": Row("launch.rdzv_endpoint=b:1", torchrun_command, TWO_HOSTS),
    "launch.max_restarts": Row("launch.max_restarts=2", attempts),
    "launch.backend": Row("launch.backend=gloo", process_group, machine=GPU),
    "launch.timeout_seconds": Row("launch.timeout_seconds=60", process_group),
    "launch.join_timeout_seconds": Row(
        "launch.join_timeout_seconds=9", torchrun_command, TWO_HOSTS
    ),
    "launch.grace_seconds": Row("launch.grace_seconds=1", patience_at_the_end),
    "launch.threads_per_process": Row("launch.threads_per_process=1", worker_environments),
    "launch.fork_server": Row("launch.fork_server=false", asked_to_fork),
    "launch.page": Row("launch.page=false", page),
    "strategy.sync_bn": Row("strategy.sync_bn=true", placed_modules, "model.norm=batch"),
    "strategy.bucket_cap_mb": Row("strategy.bucket_cap_mb=1", wrapped),
    "strategy.bucket_cap_mb_list": Row("strategy.bucket_cap_mb_list=[1,2]", wrapped),
    "strategy.gradient_as_bucket_view": Row("strategy.gradient_as_bucket_view=false", wrapped),
    "strategy.static_graph": Row("strategy.static_graph=true", wrapped),
    "strategy.broadcast_buffers": Row("strategy.broadcast_buffers=false", wrapped),
    "strategy.find_unused_parameters": Row("strategy.find_unused_parameters=true", wrapped),
    "strategy.skip_all_reduce_unused_params": Row(
        "strategy.skip_all_reduce_unused_params=true",
        wrapped,
        "strategy.find_unused_parameters=true",
    ),
    "strategy.init_sync": Row("strategy.init_sync=false", wrapped),
    "strategy.comm_hook": Row("strategy.comm_hook=fp16", wrapped),
    "strategy.virtual_shards": Row("strategy.virtual_shards=4", plan),
    "strategy.powersgd_rank": Row(
        "strategy.powersgd_rank=2", wrapped, "strategy.comm_hook=powersgd"
    ),
    "train.global_batch_size": Row("train.global_batch_size=48", plan),
    "train.accumulation_steps": Row("train.accumulation_steps=2", plan),
    "train.epochs": Row("train.epochs=3", run, SMALL),
    "train.max_steps": Row("train.max_steps=3", run, SMALL),
    "train.max_minutes": Row("train.max_minutes=3", early_stopping),
    "train.max_grad_norm": Row("train.max_grad_norm=1e-3", weights_after_a_step, SMALL),
    "train.on_non_finite": Row("train.on_non_finite=skip", steps_after_a_bad_loss, SMALL),
    "task.target": Row(f"task._target_={__name__}.OtherTask", task_made),
    "task.arguments": Row("task.factor=2", task_made),
    "task.loss": Row("task.loss=mae", loss, "task=regression data=linear_regression model=mlp"),
    "task.label_smoothing": Row("task.label_smoothing=0.1", loss, "task=classification"),
    "task.class_weights": Row("task.class_weights=[1,2,3]", loss, "task=classification"),
    "task.pos_weight": Row(
        "task.pos_weight=[2,1,1]", loss, f"task=multilabel {ALSO['data=custom']}"
    ),
    "task.ignore_index": Row(
        "task.ignore_index=1", loss, f"task=segmentation {ALSO['data=custom']}"
    ),
    "task.sample_tokens": Row("task.sample_tokens=9", text_written, TEXT),
    "task.sample_prompt": Row(
        "task.sample_prompt=ab", text_written, f"{TEXT} task.sample_tokens=9"
    ),
    "task.sample_temperature": Row(
        "task.sample_temperature=1e-6", text_written, f"{TEXT} task.sample_tokens=9"
    ),
    "train.log_every_steps": Row("train.log_every_steps=1", run, SMALL),
    "train.evaluate_every_epochs": Row("train.evaluate_every_epochs=2", run, SMALL),
    "train.evaluate_every_steps": Row("train.evaluate_every_steps=1", run, SMALL),
    "train.ema_decay": Row("train.ema_decay=0.9", run, SMALL),
    "train.ema_warmup": Row("train.ema_warmup=true", run, f"{SMALL} train.ema_decay=0.9"),
    "train.profile_steps": Row("train.profile_steps=2:3", steps_traced, SMALL),
    "train.memory_history": Row("train.memory_history=true", memory_history, machine=GPU),
    "train.early_stopping.patience": Row("train.early_stopping.patience=2", early_stopping),
    "train.early_stopping.metric": Row(
        "train.early_stopping.metric=test.accuracy",
        early_stopping,
        "train.early_stopping.patience=2",
    ),
    "train.early_stopping.min_delta": Row(
        "train.early_stopping.min_delta=0.1", early_stopping, "train.early_stopping.patience=2"
    ),
    "train.evaluate_batch_size": Row("train.evaluate_batch_size=7", evaluation_batches),
    "tuning.precision": Row("tuning.precision=fp64", number_types),
    "tuning.num_workers": Row("tuning.num_workers=2", data_loader),
    "tuning.prefetch_factor": Row("tuning.prefetch_factor=4", data_loader, WORKERS),
    "tuning.persistent_workers": Row("tuning.persistent_workers=false", data_loader, WORKERS),
    "tuning.pin_memory": Row("tuning.pin_memory=false", data_loader, machine=GPU),
    "tuning.non_blocking": Row("tuning.non_blocking=false", copies_to_the_device, machine=GPU),
    "tuning.copy_stream": Row(
        "tuning.copy_stream=false", copies_beside_the_computation, machine=GPU
    ),
    "tuning.channels_last": Row("tuning.channels_last=true", memory_formats),
    "tuning.cudnn_benchmark": Row("tuning.cudnn_benchmark=false", process_flags, machine=GPU),
    "tuning.tf32": Row("tuning.tf32=false", process_flags, machine=GPU),
    "tuning.triton_kernels": Row("tuning.triton_kernels=false", loss_of_tokens, TEXT, GPU),
    "tuning.buckets": Row("tuning.buckets=large", buckets),
    "tuning.conv_sums": Row("tuning.conv_sums=true", problems, machine=GPU),
    "tuning.compile": Row("tuning.compile=true", compiled),
    "tuning.compile_mode": Row(
        "tuning.compile_mode=max-autotune-no-cudagraphs",
        asked_of_the_compiler,
        "tuning.compile=true",
    ),
    "tuning.activation_checkpointing": Row(
        "tuning.activation_checkpointing=[Sequential]", tensors_kept
    ),
    "tuning.bias_lint": Row(
        "tuning.bias_lint=false",
        advised,
        f"model._target_={__name__}.Biased trusted_modules=[{__name__.partition('.')[0]}]",
    ),
    "tuning.cuda_graph": Row("tuning.cuda_graph=false", steppers, machine=GPU),
    "tuning.rehearse": Row("tuning.rehearse=true", problems, "tuning.cuda_graph=false", GPU),
    "tuning.gc_freeze": Row("tuning.gc_freeze=false", spared_objects),
    "tuning.optimizer": Row("tuning.optimizer=loop", optimizer),
    "checkpoint.every_steps": Row("checkpoint.every_steps=1", run, f"{SMALL} checkpoint.keep=9"),
    "checkpoint.every_minutes": Row(
        "checkpoint.every_minutes=0.00001",
        run,
        f"{SMALL} checkpoint.keep=9 train.log_every_steps=1",
    ),
    "checkpoint.best": Row(
        "checkpoint.best=true", run, f"{SMALL} checkpoint.keep=9 checkpoint.every_steps=3"
    ),
    "checkpoint.best_metric": Row("checkpoint.best_metric=test.loss", run, SMALL),
    "checkpoint.which": Row(
        "checkpoint.which=last", asked_checkpoint, "mode=evaluate checkpoint.resume=trained"
    ),
    "checkpoint.mirror": Row("checkpoint.mirror=file://mirror", mirrored, SMALL),
    "checkpoint.average": Row(
        "checkpoint.average=true",
        made_with_a_trained_model,
        f"{SMALL} mode=predict checkpoint.resume=trained",
    ),
    "evaluate.sets": Row(
        "evaluate.sets=[validation]",
        made_with_a_trained_model,
        f"{SMALL} mode=evaluate checkpoint.resume=trained data.validation=0.5",
    ),
    "predict.split": Row(
        "predict.split=train",
        made_with_a_trained_model,
        f"{SMALL} mode=predict checkpoint.resume=trained",
    ),
    "predict.format": Row(
        "predict.format=parquet",
        made_with_a_trained_model,
        f"{SMALL} mode=predict checkpoint.resume=trained",
    ),
    "sweep.gpus_per_trial": Row(
        "sweep.gpus_per_trial=2", trials_at_once, "launch.nproc_per_node=1", EIGHT_GPUS
    ),
    "sweep.processes_at_once": Row(
        "sweep.processes_at_once=auto", trials_at_once, "launch.nproc_per_node=1"
    ),
    "sweep.baseline": Row("sweep.baseline=true", runs_of_a_sweep, "launch.nproc_per_node=1"),
    "prove.samples": Row("prove.samples=16", proof),
    "prove.steps": Row("prove.steps=8", proof),
    "prove.seconds": Row("prove.seconds=9", parts_of_a_proof, "mode=train"),
    "prove.runs": Row("prove.runs=false", parts_of_a_proof, "mode=train"),
    "export.formats": Row(
        "export.formats=[onnx]",
        formats_asked_for,
        f"{SMALL} mode=export checkpoint.resume=trained",
    ),
    "checkpoint.keep": Row("checkpoint.keep=1", run, SMALL),
    "checkpoint.resume": Row("checkpoint.resume=trained", run, f"{SMALL} train.epochs=3"),
    "tracker.classes": Row(f"tracker.classes.b={{_target_:{TENSORBOARD}}}", trackers),
    "tracker.project": Row("tracker.project=mine", trackers, "tracker=mlflow"),
    "tracker.details": Row("tracker.details=true", hooks_of_trackers, "tracker=tensorboard"),
    "model.init_from": Row("model.init_from=nowhere.pt", problems),
    "model.init_ignore": Row("model.init_ignore=[head.*]", problems),
    "model.freeze": Row("model.freeze=[*bias]", trained_at_first_and_later),
    "model.freeze_epochs": Row(
        "model.freeze_epochs=1", trained_at_first_and_later, "model.freeze=[*bias]"
    ),
    "model.channels": Row("model.channels=4", model),
    "model.norm": Row("model.norm=none", model),
    "model.dropout": Row("model.dropout=0.1", model),
    "model.hidden": Row("model.hidden=16", model),
    "model.layers": Row("model.layers=1", model),
    "model.heads": Row("model.heads=2", model),
    "model.width": Row("model.width=64", model),
    "model.vocabulary_multiple": Row("model.vocabulary_multiple=100", model),
    "model.fused": Row("model.fused=true", gelu_is_compiled),
    "model.arch": Row("model.arch=resnet34", model),
    "model.weights": Row("model.weights=NONE", problems),
    "model.target": Row(
        "model._target_=torch.nn.modules.linear.NonDynamicallyQuantizableLinear", model
    ),
    "model.arguments": Row("model.out_features=4", model),
    "data.limit": Row("data.limit=5", samples),
    "data.validation": Row("data.validation=0.2", samples),
    "data.mixup": Row("data.mixup=0.5", batch_trained_on, f"model=mlp {NO_WORKERS}"),
    "data.cutmix": Row("data.cutmix=0.5", batch_trained_on, f"model=mlp {NO_WORKERS}"),
    "data.random_erasing": Row(
        "data.random_erasing=1", batch_trained_on, f"model=mlp {NO_WORKERS}"
    ),
    "data.weights": Row("data.weights=balanced", first_epoch),
    "data.sampler": Row("data.sampler={_target_:torch.utils.data.SequentialSampler}", first_epoch),
    "data.batch_sampler": Row(
        "data.batch_sampler={_target_:torch.utils.data.sampler.BatchSampler,sampler:[0,1,2],batch_size:2,"
        "drop_last:false}",
        first_epoch,
    ),
    "data.drop_last": Row(
        "data.drop_last=true",
        first_epoch,
        "data.limit=6 launch.nproc_per_node=1 train.global_batch_size=4",
    ),
    "data.batch_by": Row("data.batch_by=tokens", first_epoch),
    "data.placement": Row("data.placement=device", where_data_are_held, "data.placement=host"),
    "data.augment": Row("data.augment=FLIPPED", samples),
    "data.root": Row("data.root=other", asked_of_torchvision),
    "data.download": Row("data.download=true", asked_of_torchvision),
    "data.decode": Row("data.decode=pil", samples),
    "data.image_size": Row("data.image_size=16", samples),
    "data.samples": Row("data.samples=64", samples),
    "data.test_samples": Row("data.test_samples=64", samples),
    "data.channels": Row("data.channels=1", samples),
    "data.classes": Row("data.classes=3", samples),
    "data.features": Row("data.features=3", samples),
    "data.noise": Row("data.noise=0.5", samples),
    "data.path": Row("data.path=other", samples),
    "data.glob": Row("data.glob=*.log", samples),
    "data.length": Row("data.length=4", samples),
    "data.test_part": Row("data.test_part=0.4", samples, "data.path=corpus/long.log"),
    "data.tokenizer": Row("data.tokenizer=none.json", problems),
    "data.vocabulary": Row("data.vocabulary=300", samples),
    "data.dtype": Row("data.dtype=uint32", samples, "data.vocabulary=2000000000"),
    "data.bytes_per_token": Row("data.bytes_per_token=4.5", bytes_per_token),
    "data.splits": Row(
        "data.splits={train:{train:true,size:7},test:{train:false,size:6}}", samples
    ),
    "data.validation_sets": Row("data.validation_sets={odd:{train:false,size:5}}", scored_sets),
    "data.test_sets": Row("data.test_sets={odd:{train:false,size:5}}", scored_sets),
    "data.fields": Row("data.fields=[x]", what_opening_says),
    "data.transform": Row("data.transform=[torch.nn.Softplus]", samples),
    "data.test_transform": Row("data.test_transform=[torch.nn.Softplus]", scored_samples),
    "data.outputs": Row("data.outputs=5", samples),
    "data.collate_fn": Row(f"data.collate_fn={__name__}.reversed_batch", samples),
    "data.target": Row(f"data._target_={__name__}.OtherTable", samples),
    "data.arguments": Row("data.size=7", samples),
    "optimizer.lr": Row("optimizer.lr=0.3", optimizer),
    "optimizer.weight_decay": Row("optimizer.weight_decay=0.3", optimizer),
    "optimizer.decay_norm_and_bias": Row("optimizer.decay_norm_and_bias=FLIPPED", optimizer),
    "optimizer.lr_scaling": Row("optimizer.lr_scaling=linear", first_rates, SMALL),
    "optimizer.lr_base_batch": Row(
        "optimizer.lr_base_batch=48", first_rates, f"{SMALL} optimizer.lr_scaling=sqrt"
    ),
    "optimizer.groups": Row("optimizer.groups=[{match:*bias,lr:0.3}]", groups_of_a_job),
    "optimizer.layer_decay": Row("optimizer.layer_decay=0.5", groups_of_a_job, "model=mlp"),
    "optimizer.trust_coefficient": Row("optimizer.trust_coefficient=0.3", optimizer),
    "optimizer.max_trust_ratio": Row("optimizer.max_trust_ratio=0.3", optimizer),
    "optimizer.momentum": Row("optimizer.momentum=0.3", optimizer),
    "optimizer.nesterov": Row("optimizer.nesterov=FLIPPED", optimizer),
    "optimizer.beta1": Row("optimizer.beta1=0.3", optimizer),
    "optimizer.beta2": Row("optimizer.beta2=0.3", optimizer),
    "optimizer.eps": Row("optimizer.eps=0.3", optimizer),
    "optimizer.rho": Row("optimizer.rho=0.3", optimizer),
    "optimizer.alpha": Row("optimizer.alpha=0.3", optimizer),
    "optimizer.ns_steps": Row("optimizer.ns_steps=2", optimizer),
    "optimizer.adjust_lr": Row("optimizer.adjust_lr=match_rms_adamw", optimizer),
    "optimizer.matrices": Row("optimizer.matrices=[0.weight]", groups_of_a_job),
    "optimizer.adamw_lr": Row("optimizer.adamw_lr=0.3", optimizer),
    "optimizer.target": Row("optimizer._target_=torch.optim.Adam", optimizer),
    "optimizer.arguments": Row("optimizer.lr=0.2", optimizer),
    "schedule.warmup_steps": Row("schedule.warmup_steps=4", schedule),
    "schedule.warmup_epochs": Row("schedule.warmup_epochs=1", first_rates, SMALL),
    "schedule.warmup_at_most": Row(
        "schedule.warmup_at_most=0.3", first_rates, f"{SMALL} schedule.warmup_steps=2"
    ),
    "schedule.interval": Row("schedule.interval=epoch", schedule),
    "schedule.metric": Row("schedule.metric=test.accuracy", followed_metric),
    "schedule.target": Row(
        f"schedule._target_={__name__}.falling trusted_modules=[{__name__.partition('.')[0]}]",
        schedule,
    ),
    "schedule.arguments": Row("schedule.step_size=4", schedule),
    "schedule.decay_part": Row("schedule.decay_part=0.5", schedule),
    "schedule.decay": Row("schedule.decay=cosine", schedule),
    "schedule.step_size": Row("schedule.step_size=4", schedule),
    "schedule.gamma": Row("schedule.gamma=0.3", schedule, "schedule.step_size=4"),
    "schedule.final_factor": Row("schedule.final_factor=0.3", schedule),
    "schedule.power": Row("schedule.power=3", schedule),
    "schedule.pct_start": Row("schedule.pct_start=0.5", schedule),
    "schedule.div_factor": Row("schedule.div_factor=5", schedule),
    "schedule.final_div_factor": Row("schedule.final_div_factor=5", schedule),
}
"""For each key of the schema: the change, the observation, and what must be set beside it."""


def test_what_cannot_be_recorded_is_refused_or_left_out() -> None:
    against = (
        "launch.backend=gloo",
        "train.accumulation_steps=2",
        "optimizer=rmsprop",
        "strategy=dp",
        "train.on_non_finite=skip",
        "strategy.sync_bn=true",
        "strategy=ordered",
        "tuning.compile=true tuning.compile_mode=max-autotune",
        "tuning.activation_checkpointing=[Linear]",
        "tuning.precision=fp64",
    )
    assert case_of("model=mlp", GPU).config.tuning.cuda_graph is True
    for words in (
        "optimizer=lars",
        "optimizer=lamb tuning.optimizer=loop",
        "tuning.compile_mode=reduce-overhead",
    ):
        assert case_of(f"model=mlp {words}", GPU).config.tuning.cuda_graph is True, words
    for words in against:
        assert case_of(f"model=mlp {words}", GPU).config.tuning.cuda_graph is False, words
        problems = case_of(f"{words} tuning.cuda_graph=true", GPU).problems
        assert any(problem.startswith("tuning.cuda_graph=true: needs ") for problem in problems), (
            words
        )


def test_regressions_keep_fp32_on_gpus() -> None:
    own = "data._target_=mine.Data model=mlp"
    precisions = {
        f"{own} task=classification": "bf16",
        f"{own} task=regression": "fp32",
        f"{own} task=regression tuning.precision=bf16": "bf16",
        "data=linear_regression model=mlp": "fp32",
    }
    for line, precision in precisions.items():
        assert case_of(line, GPU).config.tuning.precision == precision, line


def test_the_plan_says_why() -> None:
    """For each switch that `auto` chose; nothing of those that are on for every GPU, or off for
    want of one."""

    def rows(line: str, machine: Hardware) -> dict[str, str]:
        config = case_of(line, machine).config
        return tuning_rows(config.tuning, config.reasons)

    assert rows("", CPU) == {
        "tuning": "recommended: precision fp32 (no GPU), gc_freeze, optimizer foreach (no GPU)"
    }
    assert rows("model=mlp tuning.tf32=false", GPU) == {
        "tuning": (
            "recommended: precision bf16 (compute capability 9.0), pin_memory, non_blocking,"
            " copy_stream, cudnn_benchmark, triton_kernels, cuda_graph (a small model), gc_freeze,"
            " optimizer fused"
        ),
        "left off": "channels_last (the model is not known to have convolutions), compile (the model is not known to be large)",
    }
    assert rows("model=resnet50 train.max_steps=100 optimizer=lars tuning.precision=fp32", GPU) == {
        "tuning": (
            "recommended: precision fp32, pin_memory, non_blocking, copy_stream, channels_last"
            " (convolutions), cudnn_benchmark, tf32, triton_kernels, gc_freeze, optimizer foreach"
            " (no fused lars)"
        ),
        "left off": (
            "compile (under 2000 steps), cuda_graph (neither a small built-in model nor a compiled one)"
        ),
    }
    small = (
        "model=gpt data=text model.layers=6 model.heads=6 model.width=384"
        " train.global_batch_size=16"
    )
    assert "cuda_graph (a small model)" in rows(small, GPU)["tuning"]
    many = f"{small} train.global_batch_size=256"
    assert "compile (long steps)" in rows(many, GPU)["tuning"], "a step of 65 ms"
    assert "cuda_graph (compiled; used if it makes a step faster)" in rows(many, GPU)["tuning"]
    largest = rows("tuning=max optimizer=rmsprop deterministic=true data=image_folder", GPU)
    assert "num_workers 4 (4 cores each)" in largest["tuning"]
    assert (
        largest["left off"]
        == "cudnn_benchmark (deterministic=true), compile (deterministic=true), cuda_graph (because"
        " of optimizer)"
    )
    assert rows("tuning=none", GPU) == {"tuning": "none: precision fp32, optimizer loop"}


@pytest.mark.parametrize(
    ("words", "nvlink", "on", "off"),
    [
        ("", True, "buckets by_flops (NVLink)", ""),
        ("", False, "", "buckets (no fast NVLink between all GPUs)"),
        ("strategy.bucket_cap_mb=100", True, "", "buckets (strategy.bucket_cap_mb)"),
        ("strategy.bucket_cap_mb_list=[9]", True, "", "buckets (strategy.bucket_cap_mb_list)"),
        (TWO_HOSTS, True, "", "buckets (several hosts)"),
        (
            "launch.nnodes=1:2 launch.rdzv_endpoint=a:1 run_dir=here",
            True,
            "",
            "buckets (several hosts)",
        ),
        ("launch.nproc_per_node=1:4", True, "buckets by_flops (NVLink)", ""),
        ("tuning.cuda_graph=false", True, "buckets one (NVLink)", ""),
        ("tuning.cuda_graph=false", False, "", "buckets (no fast NVLink between all GPUs)"),
        (f"tuning.cuda_graph=false {TWO_HOSTS}", True, "", "buckets (several hosts)"),
        (
            "tuning.cuda_graph=false strategy.bucket_cap_mb=100",
            True,
            "",
            "buckets (strategy.bucket_cap_mb)",
        ),
        ("train.accumulation_steps=2", True, "buckets one (NVLink)", ""),
        ("launch.nproc_per_node=1:1", True, "", ""),
        ("launch.nproc_per_node=1", True, "", ""),
        ("tuning.compile=false", True, "", ""),
        ("strategy=ordered", True, "", ""),
        ("strategy=single", True, "", ""),
        ("mode=evaluate checkpoint.resume=trained tuning.compile=true", True, "", ""),
        ("tuning.buckets=one", True, "buckets one", ""),
        ("tuning.buckets=large tuning.cuda_graph=false", False, "buckets large", ""),
        ("tuning.buckets=default", True, "", ""),
        ("tuning=none tuning.compile=true", True, "", ""),
        ("model=cnn data=digits tuning.compile=false", True, "", ""),
    ],
)
def test_model_is_seldom_cut_where_gradients_travel_fast(
    words: str, nvlink: bool, on: str, off: str
) -> None:
    machine = dataclasses.replace(GPU, gpus=4, nvlink=nvlink)
    config = case_of(words if "model=" in words else f"model=resnet50 {words}", machine).config
    rows = tuning_rows(config.tuning, config.reasons)
    chosen = [
        part
        for part in rows["tuning"].removeprefix("recommended: ").split(", ")
        if part.startswith("buckets")
    ]
    left_off = [part for part in rows.get("left off", "").split(", ") if part.startswith("buckets")]
    assert (chosen, left_off) == ([on] * bool(on), [off] * bool(off))


@pytest.mark.parametrize(
    ("asked", "answer", "what"),
    [
        ("importlib.util.find_spec", None, "no Triton"),
        ("c_compiler", None, "no C compiler"),
        ("sysconfig.get_path", "/nowhere", "no Python.h (python3-dev)"),
    ],
)
def test_triton_that_cannot_compile_is_left_out_or_refused(
    asked: str, answer: Any, what: str
) -> None:
    words = "model=resnet50 data=synthetic train.max_steps=9999"
    with mock.patch(f"ddp_train.hardware.{asked}", return_value=answer):
        config = case_of(words, GPU).config
        assert not config.tuning.compile and not config.tuning.triton_kernels
        assert config.reasons["compile"] == config.reasons["triton_kernels"] == what
        problems = case_of(f"{words} tuning.compile=true tuning.triton_kernels=true", GPU).problems
        assert [problem for problem in problems if what in problem] == [
            f"tuning.{name}=true: needs Triton, a C compiler and Python.h, and this host has {what}; install"
            f" what is missing, or use tuning.{name}=false"
            for name in ("compile", "triton_kernels")
        ]
        assert case_of("tuning.triton_kernels=true", CPU).problems == [], (
            "it has no effect there, which is told"
        )


# --- the tests ------------------------------------------------------------------------------------


def names_of(schema: type) -> Iterator[str]:
    """The keys of a section, and of a section within it."""
    for name, hint in field_types(schema).items():
        yield from (f"{name}.{inner}" for inner in names_of(hint)) if is_section(hint) else [name]


def all_switches() -> Iterator[tuple[str, str]]:
    """(option, key): each key of each option, `model=cnn` and `model.channels`; no option for what
    has none."""
    for field in dataclasses.fields(Config):
        if field.name in SCALARS:
            yield "", field.name
    for section, schema in SECTIONS.items():
        yield from (("", f"{section}.{name}") for name in names_of(schema) if name != "name")
    for section, options in OPTIONS.items():
        for name, schema in options.items():
            for f in dataclasses.fields(schema):
                if f.name != "name":
                    yield f"{section}={name}", f"{section}.{f.name}"


def flags() -> dict[str, Any]:
    """torch's settings for the whole process."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.deterministic,
        ),
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    }


@contextlib.contextmanager
def flags_restored() -> Iterator[None]:
    """A worker sets its flags in a fresh process and never takes them back; here they must not
    reach the next look."""
    before = flags()
    random_state = torch.get_rng_state()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with mock.patch.dict(os.environ):
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(before["threads"])
    torch.use_deterministic_algorithms(before["deterministic"][0])
    torch.backends.cudnn.deterministic = before["deterministic"][1]
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before["tf32"]
    torch.set_rng_state(random_state)


read_table = functools.cache(np.loadtxt)
"""Of the digits: reading them takes 0.1 s, each of a few hundred times."""


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "loadtxt", read_table)
    for name in ("MNIST", "FashionMNIST", "CIFAR10"):
        monkeypatch.setattr(
            f"torchvision.datasets.{name}", TorchvisionColour if name == "CIFAR10" else Torchvision
        )


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What some rows name: `files` (as torchvision has them), `images` (a folder per class),
    `other` (both, with other content) and `trained` (a finished run)."""
    folder = tmp_path_factory.mktemp("things")
    for place in ("files", "other"):
        for path in (path for schema in OPTIONS["data"].values() for path in schema.files):
            (folder / place / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / place / path).write_bytes(
                b"\0\0\x08\x01" + bytes(4)
            )  # an IDX file of no numbers
    for place, seed in (("images", 1), ("other", 2)):
        numbers = np.random.default_rng(seed)
        for number, name in enumerate(
            f"{split}/{label}/{i}" for split in ("train", "val") for label in "ab" for i in "123"
        ):
            path = folder / place / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.integers(0, 255, (40, 30 + number, 3), dtype=np.uint8)).save(
                path
            )
    (folder / "corpus").mkdir()
    (folder / "numbers").mkdir()
    for name, seed in (("corpus/a.txt", 1), ("corpus/long.log", 2), ("other/a.txt", 3)):
        (folder / name).write_bytes(
            np.random.default_rng(seed).integers(32, 127, 900 * seed, dtype=np.uint8).tobytes()
        )
    for name, seed in (("numbers/a.bin", 1), ("other/a.bin", 2)):
        np.random.default_rng(seed).integers(0, 200, 900).astype(np.uint16).tofile(folder / name)
    with contextlib.chdir(folder), flags_restored():
        run(case_of(f"{SMALL} run_dir=trained", CPU))
    return folder


def observed(row: Row, line: str, place: Path, things: Path) -> Any:
    """What a row's observation gives for a command line, in a folder of its own."""
    place.mkdir()
    for thing in things.iterdir():
        (place / thing.name).symlink_to(thing)
    with contextlib.chdir(place), flags_restored():
        case = case_of(line, row.machine)
        assert (
            row.observe in (problems, where_data_are_held, further_metrics) or case.problems == []
        )
        return row.observe(case)


OF_ONE_OPTION = {
    (option, "data.validation"): Row("data.validation=0.2", problems)
    for option in ("data=text", "data=tokens")
}
OF_ONE_OPTION |= {
    (option, f"data.{name}_sets"): Row(f"data.{name}_sets={{odd:{path}}}", scored_sets)
    for option, path in {
        "data=image_folder": "val",
        "data=text": "other",
        "data=tokens": "other/a.bin",
    }.items()
    for name in ("validation", "test")
}
OF_ONE_OPTION |= {
    (option, "data.weights"): Row("data.weights=balanced", problems)
    for option in ("data=text", "data=tokens", "data=linear_regression")
}
"""Rows of single options: keys that they refuse, with the reason, or that take other values there."""
BASELINES: dict[tuple[Callable[[Case], Any], str, Hardware], Any] = {}


def baseline(row: Row, line: str, place: Path, things: Path) -> Any:
    """What is observed without the change, looked at twice; rows that share it share the result."""
    key = (row.observe, line, row.machine)
    if key not in BASELINES:
        BASELINES[key] = observed(row, line, place / "base", things)
        assert BASELINES[key] == observed(row, line, place / "again", things), (
            "what is observed is not repeatable"
        )
    return BASELINES[key]


def test_every_key_has_a_row() -> None:
    keys = {key for key in all_keys() if not key.endswith(".name")}
    assert keys == set(ROWS)
    assert keys == {key for _, key in all_switches()}


IMPORTS_MUCH = {"tracker.details", "checkpoint.mirror", "train.profile_steps", "tuning.gc_freeze"}
"""Keys whose looks take a second or two: TensorBoard, fsspec, torch's profiler, all garbage."""


def takes_long(option: str, key: str) -> bool:
    """`make test` looks at the keys outside of options, without compiling, and without whole
    runs."""
    if option or key in IMPORTS_MUCH:
        return True
    return ROWS[key].observe in (
        run,
        compiled,
        asked_of_the_compiler,
        made_with_a_trained_model,
    )


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of DDP, about the model
@pytest.mark.parametrize(
    ("option", "key"),
    [
        pytest.param(
            *switch,
            id=" ".join(switch).strip(),
            marks=[pytest.mark.slow] if takes_long(*switch) else [],
        )
        for switch in all_switches()
    ],
)
def test_the_switch_is_alive(option: str, key: str, tmp_path: Path, things: Path) -> None:
    row = OF_ONE_OPTION.get((option, key), ROWS[key])
    section = option.partition("=")[0]
    if option:
        default = getattr(OPTIONS[section][option.partition("=")[2]](), key.partition(".")[2])
    else:
        default = None
    base = f"{option} {ALSO.get(option, '')} {row.base}"
    changed = f"{base} {row.changed.replace('FLIPPED', str(not default).lower())}"
    before = baseline(row, " ".join(base.split()), tmp_path, things)
    assert before != observed(row, changed, tmp_path / "changed", things), (
        f"{row.changed} changes nothing that {row.observe.__name__} can see"
    )
