"""A step without samples: what torch refuses there works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_train.distributed.empty_batch import reshaped_size, step_without_samples


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((0, 3, 4), (0, -1), (0, 12)),
        ((0, 3, 4), (0, 2, -1), (0, 2, 6)),
        ((0, 3, 4), (-1, 12), (-1, 12)),
        ((2, 3, 4), (2, -1), (2, -1)),
    ],
)
def test_the_size_that_one_row_would_have(
    shape: tuple[int, ...], size: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert reshaped_size(shape, size) == expected


def test_networks_take_no_rows_and_give_zero_gradients() -> None:
    norm = nn.BatchNorm2d(4)
    instance_norm = nn.InstanceNorm2d(4, affine=True)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), norm, instance_norm, nn.PixelShuffle(2))
    head = nn.Linear(64, 3)
    with step_without_samples():
        features = network(torch.empty(0, 2, 6, 6))
        head(features.view(features.size(0), -1)).sum().backward()
        assert features.reshape((len(features), -1)).shape == (0, 64)
        assert torch.empty(0, 2).view(torch.int32).dtype == torch.int32
    with pytest.raises(RuntimeError, match="cannot reshape"):
        torch.empty(0, 2).view(0, -1)
    for parameter in (*network.parameters(), *head.parameters()):
        assert parameter.grad is not None and not parameter.grad.any()
    assert not torch.as_tensor(norm.running_mean).any()


@pytest.mark.parametrize("masks", ["none", "padding", "shared", "both", "each"])
def test_attention_with_masks_takes_no_rows(masks: str) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    arguments = {}
    if masks in ("padding", "both"):
        arguments["src_key_padding_mask"] = torch.zeros(0, 5, dtype=torch.bool)
    if masks in ("shared", "both"):
        arguments["src_mask"] = torch.zeros(5, 5, dtype=torch.bool)
    if masks == "each":
        arguments["src_mask"] = torch.zeros(0, 5, 5)
    with step_without_samples():
        outputs = layer(torch.zeros(0, 5, 4), **arguments)
        outputs.sum().backward()
    assert outputs.shape == (0, 5, 4)
    for parameter in layer.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_ctc_loss_of_no_sample_is_nothing(reduction: str) -> None:
    log_probs = torch.zeros(7, 0, 3, requires_grad=True)
    lengths = torch.zeros(0, dtype=torch.long)
    targets = torch.zeros(0, 2, dtype=torch.long)
    with step_without_samples():
        losses = nn.CTCLoss(reduction=reduction)(log_probs, targets, lengths, lengths)
        losses.sum().backward()
    assert losses.shape == ((0,) if reduction == "none" else ())
    assert log_probs.grad is not None and log_probs.grad.shape == (7, 0, 3)
