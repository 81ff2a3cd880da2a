"""Statistics of batch norm that are taken anew: of an average of weights, which has seen no batch.

Torch's `update_bn` takes those of the batches that one process is given. Here they are those that
it has in one process of the global batches, on any number of processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.distributed.training_step import TrainingStep, beside
from ddp_train.parallel.sync_batch_norm import synchronised_on
from ddp_train.sessions.open_step import StepRows
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.training_loader import TrainingLoader
from ddp_train.sessions.wrapped import WAY_OF_UPDATE_BN, Wrapped


def update_statistics(steps: Steps, loader: Any, model: nn.Module) -> None:
    """See Run.update_bn. A collective: every process must call it."""
    if not isinstance(loader, TrainingLoader):
        raise UsageError(
            "run.update_bn needs a run.loader, which divides each batch among the processes; a"
            f" {type(loader).__name__} does not",
            WAY_OF_UPDATE_BN,
        )
    if isinstance(model, Wrapped):
        model = model.module
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if not layers:
        return
    phase = steps.status.phase
    with (
        torch.no_grad(),
        _begun_anew(model, layers),
        _over_all_processes(model, steps),
        keyed_generators() as seed_generators,
    ):
        seed_generators(_key_of_draws(steps))
        for batch in loader.further_pass():
            with beside(_step_of(batch.micro_batch, steps)):
                model(_inputs_of(batch.data))
    steps.status.phase = phase


def _key_of_draws(steps: Steps) -> int:
    """The key of the model's draws, dropout for one: each process has its own."""
    return hash_key(steps.settings.seed, "update_bn", steps.world.rank, steps.loop.position.step)


def _step_of(share: MicroBatch, steps: Steps) -> TrainingStep:
    seed = steps.settings.seed
    rows = StepRows(seed, steps.loop.begun_epoch, share.step, share.indices, share.num_real)
    return TrainingStep(share.num_real > 0, share=rows)


def _inputs_of(batch: Any) -> Any:
    """The part of a batch that torch's `update_bn` gives the model."""
    if isinstance(batch, list | tuple):
        return batch[0]
    return batch


@contextlib.contextmanager
def _begun_anew(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Inside, the layers train, and their statistics are the plain mean over the batches since
    here."""
    modes = {module: module.training for module in model.modules()}
    momenta = {layer: layer.momentum for layer in layers}
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    model.train()
    try:
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _over_all_processes(model: nn.Module, steps: Steps) -> Iterator[None]:
    """Inside, batch norm of the model is over the samples of all processes."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    classes = {layer: type(layer) for layer in layers}
    if steps.world.size > 1:
        synchronised_on(steps.device, model)
    try:
        yield
    finally:
        for layer, own in classes.items():
            layer.__class__ = own
