"""The task of the network: the loss of a batch, and its score."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class FindSpots:
    """The network says where the spot is. A hit is an answer less than `radius` pixels away."""

    unit = "picture"  # what the mean of the loss is taken over ...
    units_are_samples = True  # ... which is one sample
    better = {"hits": "max"}  # of the metrics, those that are better the higher they are

    def __init__(self, radius: float = 1.0) -> None:
        self.radius = radius

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(sum of the losses, number of pictures), never their mean: a batch may be split over
        processes."""
        pictures, places = batch
        return functional.mse_loss(model(pictures), places, reduction="sum"), len(places)

    def score(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """name -> (sum, number): what is reported is sum / number over the whole test set."""
        pictures, places = batch
        squares = (model(pictures) - places).square().sum(1)
        hits = squares.sqrt() < self.radius
        return {
            "loss": (squares.sum(), len(places)),
            "distance": (squares.sqrt().sum(), len(places)),
            "hits": (hits.sum(), len(places)),
        }

    def predictions(self, model: nn.Module, batch: Batch | Tensor) -> dict[str, Tensor]:
        """The columns of mode=predict, a row per picture. Pictures to be predicted need no
        places."""
        pictures = batch if isinstance(batch, Tensor) else batch[0]
        return {"place": model(pictures)}
