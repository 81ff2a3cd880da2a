"""A regression: how far diabetes had gone a year later, from ten measurements of 442 people;
scikit-learn ships it."""

from __future__ import annotations

import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import TensorDataset


class Diabetes(TensorDataset):
    """Every fifth person tests. Inputs: standardised, float32 [10]. Target: the progression, from
    25 to 346."""

    def __init__(self, train: bool) -> None:
        table, progression = load_diabetes(return_X_y=True)
        mine = [number for number in range(len(table)) if (number % 5 > 0) == train]
        inputs = torch.from_numpy(
            table[mine] * len(table) ** 0.5
        ).float()  # its columns have length 1, not variance 1
        super().__init__(inputs, torch.from_numpy(progression[mine]).float())
