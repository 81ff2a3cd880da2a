"""CIFAR-10 to 94 % in eight epochs: pictures that stay on the device, a small network, Muon for its
filters.

First: python examples/get_cifar10.py

After Keller Jordan's airbench (arXiv:2404.00498, and github.com/KellerJordan/cifar10-airbench,
airbench94_muon.py), whose figures the defaults are; docs/guides/examples.md says what is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.sgd import sgd

SIDE = 32
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Of the pixels of the training pictures, from 0 to 1."""


def opened(path: str, name: str) -> np.ndarray:
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} is missing: run python examples/get_cifar10.py")
    with np.load(path) as held:
        return held[name]


class Pictures:
    """(uint8 [3, 32, 32], class), all in memory; with data.placement=device in the GPU's, where
    batches are then made.

    Training pictures are mirrored in turns: each by a coin of its own in the first epoch, and then
    in every second one (section 3.6 of arXiv:2404.00498), so that two epochs after another always
    show both sides. They are moved by up to `shift` pixels, what comes into view being reflected.
    All of it depends on seed, epoch and number of a picture.
    """

    classes = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )

    def __init__(self, train: bool, path: str = "data/cifar10.npz", shift: int = 2) -> None:
        split = "train" if train else "test"
        self.images = torch.from_numpy(opened(path, f"{split}_images"))
        self.labels = torch.from_numpy(opened(path, f"{split}_labels")).long()
        self.shift = shift
        self.key = int(torch.randint(2**62, ()))  # the launcher has seeded it
        self.targets = self.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        images, labels = self.get_batch(torch.tensor([number]), None)
        return images[0], labels[0]

    def to(self, device: torch.device) -> Pictures:
        other = copy.copy(self)
        other.images = self.images.to(device)
        other.labels = self.labels.to(device)
        return other

    def get_batch(self, numbers: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]:
        """numbers: int64 [n]. Returns pictures, [n, 3, 32, 32] in the memory format channels_last,
        and classes."""
        along = torch.arange(SIDE, device=numbers.device)
        rows = along[None]
        columns = along[None]
        if epoch is not None:
            own = bits(numbers, self.key)
            now = bits(numbers + (epoch + 1 << 32), self.key)
            span = 2 * self.shift + 1
            rows = reflected(along + (now % span - self.shift)[:, None])
            columns = reflected(along + (now // span % span - self.shift)[:, None])
            mirrored = ((own + epoch) & 1).bool()
            columns = torch.where(mirrored[:, None], SIDE - 1 - columns, columns)
        pixels = (numbers[:, None] * SIDE + rows)[:, :, None] * SIDE + columns[:, None]
        return self.images.view(-1, 3)[pixels].permute(0, 3, 1, 2), self.labels[numbers]


def bits(numbers: Tensor, key: int) -> Tensor:
    """Random int64 numbers of at least 0, each a hash of its number and the key: SplitMix64 (Steele
    et al., OOPSLA 2014)."""
    state = (
        numbers + key
    ) * -0x61C8864680B583EB  # 0x9E37... of the paper as a signed number, and so below
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        state = (state ^ (state >> shift & (1 << 64 - shift) - 1)) * factor
    return state & (1 << 63) - 1


def reflected(places: Tensor) -> Tensor:
    """Places on a line of pixels, where those beside it are mirrored at its first and last
    pixel."""
    return (SIDE - 1) - ((SIDE - 1) - places.abs()).abs()


class Group(nn.Sequential):
    """Two convolutions, the first one with a maximum over 2 x 2 pixels behind it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        first = convolution(inputs, outputs)
        second = convolution(outputs, outputs)
        super().__init__(
            *(first, nn.MaxPool2d(2), norm(outputs), nn.GELU()), *(second, norm(outputs), nn.GELU())
        )


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Its first channels begin as a copy of the input."""
    made = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight.data[:inputs])
    return made


def norm(channels: int) -> nn.BatchNorm2d:
    """It has no scale that trains, and its running statistics are those of few steps."""
    made = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    made.weight.requires_grad = False
    return made


class Net(nn.Module):
    """uint8 [n, 3, 32, 32] -> logits [n, 10].

    A convolution that whitens patches of 2 x 2 pixels, three groups, a maximum over what is left, a
    linear head. In evaluation the logits are a mean over six views: the picture, and it moved by
    one pixel up and left, and down and right, these two with half the weight; each of them as it is
    and mirrored.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        path: str = "data/cifar10.npz",
        widths: Sequence[int] = (64, 256, 256),
        classes: int = 10,
        views: bool = True,
    ) -> None:
        """path: file of the pictures, of which the first 5,000 to train with say what is white.

        views: whether several views of a picture are averaged in evaluation.
        """
        super().__init__()
        for name, of_channels in (("mean", MEAN), ("std", STD)):
            self.register_buffer(
                name, 255 * torch.tensor(of_channels).view(3, 1, 1), persistent=False
            )
        filters = whitening(
            self.scaled(torch.from_numpy(opened(path, "train_images")[:5000]).permute(0, 3, 1, 2))
        )
        self.whiten = nn.Conv2d(3, len(filters), 2)
        self.whiten.weight = nn.Parameter(filters, requires_grad=False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        channels = (len(filters), *widths)
        self.groups = nn.Sequential(*map(Group, channels[:-1], channels[1:]))
        self.head = nn.Linear(channels[-1], classes, bias=False)
        self.head.weight.data /= self.head.weight.data.std()
        self.views = views

    def scaled(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def forward(self, images: Tensor) -> Tensor:
        x = self.scaled(images)
        if self.training or not self.views:
            return self.logits(x)
        wide = functional.pad(x, (1, 1, 1, 1), "reflect")
        moved = self.both_sides(wide[..., :SIDE, :SIDE]) + self.both_sides(wide[..., 2:, 2:])
        return self.both_sides(x) / 2 + moved / 4

    def both_sides(self, x: Tensor) -> Tensor:
        return (self.logits(x) + self.logits(x.flip(-1))) / 2

    def logits(self, x: Tensor) -> Tensor:
        x = self.groups(functional.gelu(self.whiten(x)))
        return self.head(functional.max_pool2d(x, 3).flatten(1)) / self.head.in_features


def whitening(images: Tensor, eps: float = 5e-4) -> Tensor:
    """[24, 3, 2, 2]: filters whose outputs are uncorrelated and of mean square 1 over all patches,
    and their negatives.

    images: [n, 3, h, w]. eps: added to the mean squares, so that directions in which patches hardly
    differ stay small.
    """
    patches = functional.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)
    squares, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (directions / (squares + eps).sqrt()).T.reshape(-1, 3, 2, 2)
    return torch.cat([filters, -filters]).to(images.dtype)


class FilterMuon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) for filters, which have four dimensions;
    SGD for all else.

    m = b m + g, with momentum b, and u = g + b m, as Nesterov's. A filter w of n rows is first
    brought to the length sqrt(n), which a batch norm behind it does not see; then w -= rate O(u),
    where O has the singular vectors of u, as a matrix of n rows, and singular values of about 1.
    All else: w -= rate u, where g has weight_decay w in it.
    """

    found_inf: Tensor | None = None
    """A float32 scalar on the device: 1 leaves weights and momenta as they are."""
    _step_supports_amp_scaling = True  # says that a GradScaler, or the launcher, may set it

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.24,
        momentum: float = 0.6,
        weight_decay: float = 0.0,
        until: float = 1.0,
        ns_steps: int = 3,
        compiled: bool = False,
    ) -> None:
        """until: part of the run after which a group's rate is 0, if a schedule takes `lr` to 0 in
        a straight line.

        ns_steps: iterations of Newton and Schulz.
        compiled: whether torch.compile compiles the update of filters.
        """
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "until": until}
        )
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.ns_steps = ns_steps
        self.update: Callable[..., Any] = (
            torch.compile(updated, dynamic=False) if compiled else updated
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            for of_filters in (True, False):
                if together := [one for one in trained if (one.ndim == 4) == of_filters]:
                    (self._filters if of_filters else self._others)(group, together)

    def _filters(self, group: dict[str, Any], filters: list[Tensor]) -> None:
        momenta = self._momenta(filters)
        gradients = [one.grad for one in filters]
        new = self.update(
            filters, gradients, momenta, rate_of(group), group["momentum"], self.ns_steps
        )
        for old, changed in zip([*filters, *momenta], [*new[0], *new[1]], strict=True):
            old.copy_(
                changed if self.found_inf is None else torch.where(self.found_inf > 0, old, changed)
            )

    def _others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        sgd(
            parameters,
            [one.grad for one in parameters if one.grad is not None],
            list(self._momenta(parameters)),
            fused=True,  # one kernel, which looks at found_inf
            found_inf=self.found_inf,
            lr=rate_of(group),  # type: ignore[arg-type]
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            nesterov=True,
            dampening=0.0,
            maximize=False,
        )

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        for one in parameters:
            if "momentum_buffer" not in self.state[one]:
                self.state[one]["momentum_buffer"] = torch.zeros_like(one)
        return [self.state[one]["momentum_buffer"] for one in parameters]


def rate_of(group: dict[str, Any]) -> float | Tensor:
    """What a schedule has made of the rate, 1 - part of the run, as 1 - part / until. A tensor
    stays on its device."""
    left = 1 - (1 - group["lr"] / group["initial_lr"]) / group["until"]
    return group["initial_lr"] * (left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0.0))


def updated(
    filters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    rate: float | Tensor,
    momentum: float,
    steps: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """New filters and momenta; see FilterMuon."""
    momenta = list(torch._foreach_add(gradients, momenta, alpha=momentum))
    ahead = torch._foreach_add(gradients, momenta, alpha=momentum)
    lengths = torch._foreach_norm(filters)
    brought = [
        one * (len(one) ** 0.5 / length) for one, length in zip(filters, lengths, strict=True)
    ]
    steps_taken = torch._foreach_mul(orthogonalised(ahead, steps), rate)
    return list(torch._foreach_sub(brought, steps_taken)), momenta


def orthogonalised(filters: Sequence[Tensor], steps: int) -> list[Tensor]:
    """Each as a matrix U S V^T, [rows, all else], made U S' V^T with S' of about 1, by the quintic
    of Muon's author.

    One batch of matrices that are padded with zeros: rows and columns of zeros stay what they are,
    and change no other.
    """
    matrices = [
        one.flatten(1) if len(one) <= one[0].numel() else one.flatten(1).T for one in filters
    ]
    rows, columns = (max(one.shape[side] for one in matrices) for side in (0, 1))
    dtype = torch.bfloat16 if filters[0].is_cuda else filters[0].dtype
    x = torch.zeros(len(matrices), rows, columns, dtype=dtype, device=filters[0].device)
    for place, one in zip(x, matrices, strict=True):
        place[: one.shape[0], : one.shape[1]] = one
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445
        )
    parts = [whole[: one.shape[0], : one.shape[1]] for whole, one in zip(x, matrices, strict=True)]
    turned = [
        part if len(one) <= one[0].numel() else part.T
        for part, one in zip(parts, filters, strict=True)
    ]
    return [
        part.to(one.dtype).reshape(one.shape) for part, one in zip(turned, filters, strict=True)
    ]
