"""Loops over several models: of a session, and of one process by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_train.data.batch_plan import epoch_order

EPOCHS = 2
SAMPLES = 20
BATCH = 6
"""The last batch of an epoch has 2 samples: of three processes one has none."""

Weights = dict[str, Tensor]


def rows() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(inputs, (inputs[:, 0] > 0).double())


def net(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def sgd(*models: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    weights = [weight for model in models for weight in model.parameters()]
    return torch.optim.SGD(weights, lr=0.2, momentum=momentum)


def weights_of(**models: nn.Module) -> Weights:
    return {
        f"{name}.{key}": value.detach().cpu().clone()
        for name, model in models.items()
        for key, value in model.state_dict().items()
    }


class PlainRun:
    """What these loops call of a session, without processes, checkpoints and this package."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.epoch = -1
        self.step = 0

    def wrap(self, model: nn.Module, **_: Any) -> nn.Module:
        return model

    def loader(self, data: TensorDataset, *, global_batch_size: int) -> PlainLoader:
        return PlainLoader(self, data, global_batch_size)

    def resume(self, **_: Any) -> int:
        return 0

    def epochs(self, count: int) -> Iterator[int]:
        for self.epoch in range(count):
            yield self.epoch

    def mean(self, losses: Tensor) -> Tensor:
        return losses.mean()


class PlainLoader:
    def __init__(self, run: PlainRun, data: TensorDataset, batch: int) -> None:
        self.run = run
        self.data = data
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.as_tensor(epoch_order(0, self.run.epoch, len(self.data)))
        for share in order.split(self.batch):
            yield tuple(tensor[share] for tensor in self.data.tensors)
            self.run.step += 1


def of_real(scores: Tensor) -> Tensor:
    return functional.softplus(-scores).squeeze(1)


def of_fake(scores: Tensor) -> Tensor:
    return functional.softplus(scores).squeeze(1)


def adversarial(run: Any, epochs: int = EPOCHS) -> Weights:
    """Two passes of the discriminator before one backward pass; a loss through both models."""
    generator = run.wrap(net(4))
    discriminator = run.wrap(net(1, seed=1))
    opt_g = sgd(generator)
    opt_d = sgd(discriminator)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(generator=generator, discriminator=discriminator, opt_g=opt_g, opt_d=opt_d)
    for _ in run.epochs(epochs):
        for real, _ in loader:
            fake = generator(real.flip(1))
            opt_d.zero_grad()
            losses = of_real(discriminator(real)) + of_fake(discriminator(fake.detach()))
            run.mean(losses).backward()
            opt_d.step()
            opt_g.zero_grad()
            run.mean(of_real(discriminator(fake))).backward()
            opt_g.step()
    return weights_of(generator=generator, discriminator=discriminator)


def penalised(run: Any, epochs: int = EPOCHS) -> Weights:
    """Three backward passes of the critic, one of them of a gradient penalty.

    The generator is updated in every second step, while the critic is frozen.
    """
    generator = run.wrap(net(4))
    critic = run.wrap(net(1, seed=1))
    opt_g = sgd(generator)
    opt_d = sgd(critic)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(generator=generator, critic=critic, opt_g=opt_g, opt_d=opt_d)
    for _ in run.epochs(epochs):
        for real, _ in loader:
            with torch.no_grad():
                fake = generator(real.flip(1))
            opt_d.zero_grad()
            of_real_scores = run.mean(critic(real).squeeze(1))
            of_fake_scores = run.mean(critic(fake).squeeze(1))
            between = (real + fake).div(2).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            of_real_scores.neg().backward()
            of_fake_scores.backward()
            run.mean((slope.norm(dim=1) - 1).square()).backward()
            opt_d.step()
            if run.step % 2:
                critic.requires_grad_(False)
                opt_g.zero_grad()
                run.mean(-critic(generator(real.flip(1))).squeeze(1)).backward()
                opt_g.step()
                critic.requires_grad_(True)
    return weights_of(generator=generator, critic=critic)


def with_heads(run: Any, epochs: int = EPOCHS) -> Weights:
    """An encoder in both optimizers, and heads that take turns."""
    encoder = run.wrap(net(3))
    heads = [run.wrap(nn.Linear(3, 1).double()) for _ in range(2)]
    optimizers = [sgd(encoder, head, momentum=0) for head in heads]
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(encoder=encoder, a=heads[0], b=heads[1], opt_a=optimizers[0], opt_b=optimizers[1])
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            turn = run.step % 2
            optimizers[turn].zero_grad()
            scores = heads[turn](encoder(inputs)).squeeze(1)
            run.mean((scores - labels).square()).backward()
            optimizers[turn].step()
    return weights_of(encoder=encoder, a=heads[0], b=heads[1])


def in_parts(run: Any, epochs: int = EPOCHS) -> Weights:
    """The parts of a model are called past its wrapper, in each step in another way."""
    model = run.wrap(net())
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)
    plain = getattr(model, "module", model)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            match run.step % 3:
                case 0:
                    scores = plain(inputs)
                case 1:
                    scores = functional_call(plain, dict(plain.named_parameters()), (inputs,))
                case _:
                    scores = plain[2](plain[:2](inputs))
            run.mean((scores.squeeze(1) - labels).square()).backward()
            optimizer.step()
    return weights_of(model=model)


def unfrozen(run: Any, epochs: int = EPOCHS) -> Weights:
    """The body trains from the second epoch on, and a layer is put in place of another."""
    model = run.wrap(net())
    first, _, last = getattr(model, "module", model)
    first.requires_grad_(False)
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(epochs):
        first.requires_grad_(epoch > 0)
        for inputs, labels in loader:
            last.bias.requires_grad_(run.step % 2 > 0)
            optimizer.zero_grad()
            run.mean((model(inputs).squeeze(1) - labels).square()).backward()
            optimizer.step()
    return weights_of(model=model)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net(3)
        self.actor = nn.Linear(3, 1).double()
        self.critic = nn.Linear(3, 1).double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(inputs)
        return self.actor(hidden).squeeze(1), self.critic(hidden).squeeze(1)


def of_one_pass(run: Any, epochs: int = EPOCHS) -> Weights:
    """Two losses of one forward pass go backward by themselves, each through a part."""
    model = run.wrap(TwoHeads(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            action, value = model(inputs)
            of_value = run.mean((value - labels).square())
            of_action = run.mean(functional.softplus(action * labels))
            of_value.backward(retain_graph=True)
            of_action.backward()
            optimizer.step()
    return weights_of(model=model)


def by_task(run: Any, epochs: int = EPOCHS) -> Weights:
    """Each sample adapts the weights by steps of its own (MAML), in a loop over the samples, so
    that without one nothing reaches the model; a second model is reached in some steps alone."""
    model = run.wrap(net())
    scale = run.wrap(net(1, seed=1))
    optimizer = sgd(model, scale, momentum=0)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, scale=scale, optimizer=optimizer)
    for epoch in run.epochs(epochs):
        for inputs, labels in loader:
            losses = torch.zeros(len(inputs), device=inputs.device).double()
            for place, (row, label) in enumerate(zip(inputs, labels, strict=True)):
                weights = dict(model.named_parameters())
                for _ in range(2):
                    loss = (functional_call(model, weights, (row[None],)) - label).square().sum()
                    slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=epoch > 0)
                    moved = zip(weights.items(), slopes, strict=True)
                    weights = {name: weight - 0.1 * slope for (name, weight), slope in moved}
                outputs = functional_call(model, weights, (row.flip(0)[None],))
                if run.step % 4 > 1:
                    outputs = outputs * scale(row[None])
                losses[place] = (outputs - label).square().sum()
            optimizer.zero_grad()
            run.mean(losses).backward()
            optimizer.step()
    return weights_of(model=model, scale=scale)


class Tables(nn.Module):
    """Two that are added: torch gives both the same tensor as their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(3, 2, sparse=True).double()
        self.other = nn.Embedding(3, 2, sparse=True).double()

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.one(places) + self.other(places)


def looked_up(run: Any, epochs: int = EPOCHS) -> Weights:
    """Sparse gradients."""
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(Tables(), nn.Linear(2, 1).double()))
    optimizer = sgd(model, momentum=0)
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.mean((model(labels.long()).squeeze(1) - inputs[:, 1]).square()).backward()
            optimizer.step()
    return weights_of(model=model)


LOOPS: dict[str, Callable[..., Weights]] = {
    loop.__name__: loop
    for loop in (
        adversarial,
        penalised,
        with_heads,
        in_parts,
        unfrozen,
        of_one_pass,
        by_task,
        looked_up,
    )
}
