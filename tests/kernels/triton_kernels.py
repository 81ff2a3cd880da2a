"""Our Triton kernels against torch. On a GPU: tests/end_to_end/test_gpu.py. Without one, by
Triton's interpreter in numpy:

TRITON_INTERPRET=1 python -m tests.kernels.triton_kernels
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from ddp_train.data.rows import normalised_rows, normalised_rows_by
from ddp_train.kernels.cross_entropy import IGNORED, cross_entropy
from ddp_train.kernels.custom_ops import only_backward
from ddp_train.kernels.fetch import fetch
from ddp_train.kernels.max_pool import MaxPool2d, max_pool, replace_max_pools

WINDOWS = [
    # n, c, height, width, kernel, stride, padding
    (2, 8, 9, 11, 3, 2, 1),
    (2, 3, 8, 8, 2, 2, 0),
    (1, 4, 7, 7, 3, 1, 1),
    (1, 2, 8, 8, 2, 3, 1),
    (1, 2, 13, 13, 5, 2, 2),
    (2, 64, 9, 9, 3, 2, 1),
    (1, 2, 16, 17, 7, 3, 3),
    (1, 2, 24, 23, 11, 5, 5),
]


def check_max_pool(device: str, dtype: torch.dtype = torch.float32) -> None:
    """Equal pixels, NaN and an infinity among them: the same maxima, and the same pixel of each
    window that has won."""
    draw = torch.Generator().manual_seed(0)
    for n, c, h, w, kernel, stride, padding in WINDOWS:
        pixels = torch.randint(0, 4, (n, c, h, w), generator=draw).float()
        pixels[0, 0, 0, 0], pixels[0, 0, 5, 5], pixels[0, 1] = torch.inf, torch.nan, -torch.inf
        ours = (
            pixels.to(device, dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        )
        theirs = (
            pixels.clone().requires_grad_()
        )  # on the CPU: torch's CUDA kernel gives the gradient of windows of
        found = max_pool(ours, kernel, stride, padding)[
            0
        ]  # -inf alone to the first pixel of the image
        expected = functional.max_pool2d(theirs, kernel, stride, padding)
        torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert found.is_contiguous(memory_format=torch.channels_last)
        gradient = torch.randn(found.shape, generator=draw).to(dtype)  # not channels_last
        found.backward(gradient.to(device))
        expected.backward(gradient.float())
        assert ours.grad is not None and theirs.grad is not None
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            ours.grad.float().cpu(), theirs.grad, rtol=tolerance, atol=tolerance
        )


def check_cross_entropy(device: str, dtype: torch.dtype = torch.float32) -> None:
    """Against float64: a row without a target, rows of which some classes, or the first 4,096, are
    ruled out."""
    draw = torch.Generator().manual_seed(0)
    for classes, size in ((4096, 3), (5000, 30), (9001, 300)):
        values = torch.randn(9, classes, generator=draw) * size
        values[2, 4000] = 100 + values[2].max()  # nearly certain: its loss is 0, and not below
        values[0, :100] = -torch.inf
        values[1, : classes - 1] = -torch.inf
        targets = torch.randint(200, classes, (9,), generator=draw)
        targets[1], targets[2], targets[3] = classes - 1, 4000, IGNORED
        logits = values.to(device, dtype).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        losses = cross_entropy(logits, targets.to(device))[0]
        expected = functional.cross_entropy(exact, targets.to(device), reduction="none")
        torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
        assert losses.min() >= 0
        weights = torch.rand(9, generator=draw).to(device)
        losses.backward(weights)
        expected.backward(weights.double())
        assert logits.grad is not None and exact.grad is not None
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
        assert logits.grad[3].abs().max() == 0


def check_fetch(device: str) -> None:
    """The same bits and strides: pictures of several sizes and numbers of channels, in both memory
    formats."""
    draw = torch.Generator().manual_seed(0)
    fetched = normalised_rows_by(fetch)
    for shape in (
        (9, 3, 20, 19),
        (5, 1, 28, 28),
        (5, 1, 27, 27),
        (5, 3, 1, 1),
        (4, 4, 3, 3),
        (3, 3, 2, 700),
    ):
        pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).to(device)
        mean = (0.485, 0.456, 0.406, 0.5)[: shape[1]]
        std = (0.229, 0.224, 0.225, 0.3)[: shape[1]]
        last = torch.empty_like(pictures, memory_format=torch.channels_last).copy_(
            pictures
        )  # its strides in any case
        for held in (pictures, last):
            for index in (torch.tensor([2, 0, 2, 1]), torch.empty(0, dtype=torch.int64)):
                found = fetched(held, index.to(device), mean, std)
                expected = normalised_rows(held, index.to(device), mean, std)
                assert torch.equal(found, expected)
                assert found.stride() == expected.stride() and found.dtype == expected.dtype
    index = torch.tensor([-1, 0, 1, 2], device=device)
    for given in (
        (pictures[..., ::2], index[1:], mean, std),
        (pictures, index[1::2], mean, std),
        (pictures, index[1:].int(), mean, std),
        (pictures, index[1:], mean[:1], std[:1]),
    ):
        assert torch.equal(fetched(*given), normalised_rows(*given)), (
            "by torch: the kernel is not made for this"
        )


def check_which_layers_are_replaced() -> None:
    layers = nn.Sequential(
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool2d(3, 2, dilation=2),
        nn.MaxPool2d((3, 3), 2),
        nn.MaxPool2d(3, 2, return_indices=True),
        nn.MaxPool2d(13, 2),
        nn.MaxPool2d(3, 2, padding=2),
    )
    replace_max_pools(layers)
    assert [type(layer) is MaxPool2d for layer in layers] == [True, *[False] * 7]


def check_compiled() -> None:
    """The gradients by torch's compiler, as far as it works without a GPU: by what it knows of our
    operators."""
    images = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    targets = torch.tensor([3, 7])

    def loss(images: torch.Tensor) -> torch.Tensor:
        rows = max_pool(images.relu(), 3, 2, 1)[0].flatten(1).repeat(1, 50)
        return cross_entropy(rows, targets)[0].sum()

    gradients = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaf = images.detach().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def check_what_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a target is neither in 0 to 4999 nor -100"):
        cross_entropy(torch.zeros(1, 5000), torch.tensor([5000]))
    with pytest.raises(ValueError, match="one target a row is needed"):
        cross_entropy(torch.zeros(4, 5000), torch.tensor([1, 2]))
    image = torch.randn(1, 2, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        (max_pool(image, 3, 2, 1)[0] ** 2).sum(), image, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
    assert only_backward()
    assert torch.func.grad(lambda x: x * float(not only_backward()))(torch.ones(())) == 1, (
        "torch's own are taken"
    )
    with forward_ad.dual_level():
        assert not only_backward()


if __name__ == "__main__":
    check_which_layers_are_replaced()
    check_max_pool("cpu")
    check_fetch("cpu")
    check_cross_entropy("cpu")
    check_cross_entropy("cpu", torch.bfloat16)
    check_compiled()
    check_what_is_refused()
