"""The option optimizer=muon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.optim.config import BuiltInOptimizerConfig
from ddp_train.options.key import key
from ddp_train.options.registry import implementation_of


@dataclass
class MuonConfig(BuiltInOptimizerConfig):
    """Momentum orthogonalised for matrices, AdamW for the rest. docs/guides/optimizers.md"""

    name: str = "muon"
    implementation: ClassVar[str] = "ddp_train.optim.muon.optimizer:Muon"
    beside_arguments: ClassVar[tuple[str, ...]] = (
        *BuiltInOptimizerConfig.beside_arguments,
        "matrices",
    )
    can_be_captured: ClassVar[bool] = True
    learning_rates: ClassVar[tuple[str, ...]] = ("lr", "adamw_lr")
    lr: float = key(0.02, "learning rate of matrices after warm-up", above=0)
    weight_decay: float = key(
        0.01, "weight decay, decoupled from the gradient, of both methods", at_least=0
    )
    momentum: float = key(0.95, "momentum of matrices", at_least=0, below=1)
    nesterov: bool = key(True, "Nesterov momentum")
    ns_steps: int = key(5, "iterations that orthogonalise", at_least=1, at_most=20)
    adjust_lr: str = key(
        "original",
        "factor of the learning rate by shape; original: sqrt(max(1, rows / columns));"
        " match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that a learning rate for AdamW fits",
        choices=("original", "match_rms_adamw"),
    )
    matrices: list[str] = key(
        [],
        "globs over names of parameters that Muon updates; default: those of two or more"
        " dimensions, except embeddings and the output layer",
        example="[blocks.*.weight]",
    )
    adamw_lr: float = key(
        3e-4, "learning rate of AdamW, for the other parameters, after warm-up", above=0
    )
    beta1: float = key(0.9, "AdamW's decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW's decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator of AdamW", above=0)

    def split_groups(self, groups: list[Any], model: Any, trained: dict[str, Any]) -> list[Any]:
        split = implementation_of("ddp_train.optim.muon.optimizer:split_groups")
        return split(groups, model, trained, self.matrices)

    def rates_in_words(self, built: Any) -> str:
        return (
            f" for {built.orthogonalised_parameters:,} parameters, AdamW's {self.adamw_lr:g} for"
            " the rest"
        )
