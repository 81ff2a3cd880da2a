"""Samples are copied out of what is held, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_train.data.datasets import ArraySource


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 5, 7), (1, 28, 28), (16,), (5,)], ids=str)
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_samples_are_copied_in_words_bit_for_bit(
    shape: tuple[int, ...], kind: torch.dtype, channels_last: bool
) -> None:
    held = torch.randint(256, (40, *shape), generator=torch.Generator().manual_seed(0)).to(kind)
    if kind == torch.uint8 and len(shape) == 3:
        means = ((0.4,) * shape[0], (0.3,) * shape[0])
    else:
        means = ((), ())
    source = (
        ArraySource(held, torch.arange(40), *means)
        .select(np.arange(39))
        .to(torch.device("cpu"), channels_last)
    )
    indices = np.array([38, 0, 7, 7, 21])
    inputs, targets = source.get_batch(indices, None)
    expected = held[indices]
    if means[0]:
        expected = expected.float() * (1 / (255 * torch.tensor(0.3))) - torch.tensor(
            0.4
        ) / torch.tensor(0.3)
    assert torch.equal(inputs, expected) and inputs.dtype == expected.dtype
    assert targets.tolist() == indices.tolist()
    if len(shape) == 3:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert inputs.is_contiguous(memory_format=layout)
