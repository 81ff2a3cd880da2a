"""Images that a model of torchvision pads to the largest of its batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from tests.sessions.loops import sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import told_by

pytestmark = pytest.mark.slow
detection = pytest.importorskip("torchvision.models.detection")
LARGEST = 40


class Boxes(Dataset[Any]):
    """Images, each with a box; every second one is higher."""

    def __init__(self, sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(number)
        height = 32 + 8 * (number % self.sizes)
        image = torch.rand(3, height, 32, generator=generator, dtype=torch.float64)
        corner = torch.randint(0, 16, (1, 2), generator=generator).double()
        return image, {"boxes": torch.cat([corner, corner + 12], 1), "labels": torch.tensor([1])}


def detector() -> nn.Module:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.ReLU())
    backbone.out_channels = 4  # type: ignore[assignment]
    anchors = detection.anchor_utils.AnchorGenerator(((8,),), ((1.0,),))
    head = detection.retinanet.RetinaNetHead(4, 1, 2, norm_layer=None)
    return detection.RetinaNet(
        backbone, 2, anchor_generator=anchors, head=head, min_size=32, max_size=LARGEST
    ).double()


def trained(world: World, sizes: int, multiple: int) -> tuple[list[str], Tensor]:
    """The warnings of a loop over images of some sizes, and the weights."""

    def loop(run: Run) -> Tensor:
        net = detector()
        net.transform.size_divisible = multiple  # type: ignore[union-attr]
        model = run.wrap(net)
        optimizer = sgd(model)
        loader = run.loader(
            Boxes(sizes),
            global_batch_size=4,
            collate_fn=lambda samples: tuple(zip(*samples, strict=True)),
        )
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for images, targets in loader:
                losses = model(list(images), list(targets))
                optimizer.zero_grad()
                run.mean(sum(losses.values()).expand(len(images))).backward()
                optimizer.step()
        return weights_of(model=model)

    return told_by(world, loop)


@pytest.mark.parametrize(
    ("sizes", "multiple", "is_told"), [(2, 4, True), (2, 64, False), (1, 4, False)]
)
def test_padding_to_the_largest_of_a_part_is_told(sizes: int, multiple: int, is_told: bool) -> None:
    """And the remedy is exact."""
    ((messages, expected),) = on_ranks(1, trained, sizes, multiple)
    assert messages == []
    for rank, (messages, weights) in enumerate(on_ranks(3, trained, sizes, multiple)):
        if is_told and rank == 0:
            (message,) = messages
            assert "model.transform.size_divisible = 64" in message
        else:
            assert messages == []
        if not is_told:
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
