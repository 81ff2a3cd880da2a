"""Loops with copies of a model that move along: of a session, and of one process by torch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import ddp_train
from tests.sessions import loops
from tests.sessions.loops import BATCH, EPOCHS, Weights, rows, sgd, weights_of


class PlainRun(loops.PlainRun):
    def update_bn(self, loader: Any, model: nn.Module) -> None:
        step = self.step
        update_bn(loader, model)
        self.step = step


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, outputs)]
    return nn.Sequential(*layers).double()


def swa(run: Any, epochs: int = EPOCHS) -> Weights:
    """Averages of the wrapped model, and of the plain one, whose batch norm is its own."""
    plain = net()
    early = AveragedModel(plain).to(run.device)
    model = run.wrap(plain)
    optimizer = sgd(model)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    average = AveragedModel(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler, average=average, early=early)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.mean((model(inputs).squeeze(1) - labels).square()).backward()
            optimizer.step()
        average.update_parameters(model)
        early.update_parameters(model)
        scheduler.step()
        run.update_bn(loader, average)
        run.update_bn(loader, early)
    return weights_of(model=model, average=average, early=early)


class LikeTimm(nn.Module):
    """The interface of timm's ModelEmaV2 and V3."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        ours = self.module.state_dict().values()
        for average, value in zip(ours, model.state_dict().values(), strict=True):
            average.copy_(average * decay + value * (1 - decay))


def averaged(run: Any, epochs: int = EPOCHS, backend: str = "") -> Weights:
    """Averages that follow each step. backend: compiles the model, in place and around it."""
    model = run.wrap(net())
    around = model
    if backend:
        model.compile(backend=backend)
        around = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    timm = LikeTimm(around, 0.9)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer, ema=ema, timm=timm)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.mean((model(inputs).squeeze(1) - labels).square()).backward()
            optimizer.step()
            ema.update_parameters(model)
            timm.update(model, run.step)
    return weights_of(model=model, ema=ema, timm=timm.module)


def compiled(run: Any, epochs: int = EPOCHS) -> Weights:
    return averaged(run, epochs, backend="eager")


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module) -> None:
    """As in public scripts: by `.data`."""
    for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        ours.data.mul_(0.8).add_(theirs.data, alpha=0.2)


def mean_teacher(run: Any, epochs: int = EPOCHS) -> Weights:
    """A teacher in train mode, and one that is copied after the first step, for its epoch."""
    model = run.wrap(net())
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer, teacher=teacher)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            other = copy.deepcopy(model).requires_grad_(False)
            aims = teacher(inputs.flip(1)) + other(inputs)
            optimizer.zero_grad()
            outputs = model(inputs)
            losses = (outputs.squeeze(1) - labels).square() + (outputs - aims).square().squeeze(1)
            run.mean(losses).backward()
            optimizer.step()
            follow(teacher, model)
    return weights_of(model=model, teacher=teacher)


class Contrast(nn.Module):
    """MoCo: a momentum encoder, and a queue of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = net(3)
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        keys = torch.randn(3, 9, generator=torch.Generator().manual_seed(3)).double()
        self.register_buffer("queue", functional.normalize(keys, dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, views: Tensor, others: Tensor) -> Tensor:
        queries = functional.normalize(self.encoder(views), dim=1)
        follow(self.momentum_encoder, self.encoder)
        with torch.no_grad():
            keys = functional.normalize(self.momentum_encoder(others), dim=1)
        own = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([own, queries @ self.queue.clone()], 1) / 0.2
        all_keys, _ = ddp_train.all_gather(keys)
        places = (self.place + torch.arange(len(all_keys), device=keys.device)) % 9
        self.queue[:, places] = all_keys.T
        self.place += len(all_keys)
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return functional.cross_entropy(logits, labels, reduction="none")


def moco(run: Any, epochs: int = EPOCHS) -> Weights:
    model = run.wrap(Contrast())
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for inputs, _ in loader:
            optimizer.zero_grad()
            run.mean(model(inputs, inputs.flip(1))).backward()
            optimizer.step()
    return weights_of(model=model)


class Distillation(nn.Module):
    """DINO's loss, with the centre of the teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, 3).double())

    def forward(self, outputs: Tensor, aims: Tensor) -> Tensor:
        aims = ((aims - self.centre) / 0.5).softmax(1)
        return -(aims * outputs.log_softmax(1)).sum(1)

    @torch.no_grad()
    def move_centre(self, aims: Tensor) -> None:
        all_aims, _ = ddp_train.all_gather(aims)
        self.centre = self.centre * 0.9 + all_aims.mean(0) * 0.1


def dino(run: Any, epochs: int = EPOCHS) -> Weights:
    student = run.wrap(net(3))
    teacher = run.wrap(net(3)).requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    criterion = Distillation().to(run.device)
    optimizer = sgd(student)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(student=student, teacher=teacher, optimizer=optimizer, criterion=criterion)
    for _ in run.epochs(epochs):
        for inputs, _ in loader:
            aims = teacher(inputs)
            losses = criterion(student(inputs.flip(1)), aims) + criterion(student(inputs), aims)
            optimizer.zero_grad()
            run.mean(losses).backward()
            optimizer.step()
            criterion.move_centre(aims)
            follow(teacher, student)
    return weights_of(student=student, teacher=teacher, criterion=criterion)


LOOPS: dict[str, Callable[..., Weights]] = {
    loop.__name__: loop for loop in (swa, averaged, mean_teacher, moco, dino)
}
