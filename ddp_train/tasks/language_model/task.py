"""The built-in task of texts: which token comes next."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ddp_train.data.corpus.windows import IGNORED
from ddp_train.errors import ConfigError
from ddp_train.tasks.supervised import (
    BuiltIn,
    at_least_float32,
    one_tensor,
    refuse,
)
from ddp_train.tasks.task import ScoreSums


class LanguageModel(BuiltIn):
    """Predicts the next token of sequences of ids, int64 [n, t]. A unit is a token.

    A batch is one of these:

    - a tensor of ids: the model gets all but the last, [n, t - 1]; targets are all but the first;
    - (ids, targets), both [n, t]: each target stands beside the position that predicts it;
    - a dict with `input_ids` and perhaps `labels`, whose other entries are passed to the model by
      name: each label, or else id, stands beside its own token, as in transformers.

    The model returns logits over v tokens, [n, t, v] ([n, t - 1, v] for a tensor of ids). A target
    of -100 is not a unit.
    """

    unit = "token"

    def __init__(self, loss: str = "cross_entropy", bytes_per_token: float | None = None) -> None:
        """Set up the loss. bytes_per_token: average over the data, for `bits_per_byte`."""
        self.loss_name = loss
        self.bytes_per_token = bytes_per_token
        self.cross_entropy_sum: Callable[[Tensor, Tensor], Tensor] = functools.partial(
            functional.cross_entropy, reduction="sum"
        )
        """A function of logits [n, v] and targets [n]; tuning.triton_kernels puts a faster one
        here."""

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits [tokens, v] and targets [tokens] of all sequences of a batch, concatenated."""
        logits, targets = self.by_sequence(model, batch)
        return logits.flatten(0, 1), targets.flatten()

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The mean loss of the tokens of each sequence, in nats, and their number."""
        logits, targets = self.by_sequence(model, batch)
        losses = functional.cross_entropy(
            at_least_float32(logits).transpose(1, 2), targets, reduction="none"
        )
        tokens = (targets != IGNORED).sum(1)
        return {"loss": losses.sum(1) / tokens, "tokens": tokens}

    def by_sequence(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits [n, t, v] and targets [n, t] of a batch; with t - 1 for a tensor of ids [n, t].

        Raises DataError if the model returns another shape.
        """
        try:
            if isinstance(batch, Mapping):
                given = {name: value for name, value in batch.items() if name != "labels"}
                labels = batch.get("labels", _padding_ignored(batch))
                # The last position has no target, and is ignored: without it, flattening would copy
                # all logits.
                logits = one_tensor(model(**given))
                targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            elif isinstance(batch, Tensor):
                logits = one_tensor(model(batch[:, :-1]))
                targets = batch[:, 1:]
            else:
                ids, targets = batch
                logits = one_tensor(model(ids))
        except IndexError as error:
            ids = ids_of(batch)
            error.add_note(
                f"(the token numbers of this batch go from {int(ids.min())} to {int(ids.max())})"
            )
            raise
        if logits.ndim != 3 or logits.shape[:2] != targets.shape:
            refuse(
                logits,
                f"the targets are of shape {list(targets.shape)}; [n, tokens, vocabulary] is"
                " needed",
            )
        return logits, targets

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        return self.sum_of_losses(*self.outputs_and_targets(model, batch))

    def sum_of_losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses of valid tokens, and their number."""
        try:
            return self.cross_entropy_sum(logits, targets), (targets != IGNORED).sum()
        except IndexError:
            valid = targets[targets != IGNORED]
            refuse(logits, f"the targets go from {int(valid.min())} to {int(valid.max())}")

    def check(self, batch: Any) -> None:
        if isinstance(batch, Mapping):
            targets = batch.get("labels")
        else:
            targets = batch[1] if isinstance(batch, tuple | list) else None
        if targets is None:
            return
        negative = set(targets[targets < 0].tolist()) - {IGNORED}
        if negative:
            raise ConfigError(
                [
                    f"task=language_model: a target of the first sample is {max(negative)};"
                    f" targets to leave out must be {IGNORED}"
                ]
            )

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        return {"loss": self.sum_of_losses(outputs, targets)}

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        valid = targets != IGNORED
        return at_least_float32(outputs[valid]).log_softmax(-1), targets[valid]

    def derive(self, scores: dict[str, float]) -> dict[str, float]:
        loss = scores["loss"]
        metrics = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
        if self.bytes_per_token:
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def units_per_sample(self, batch: Any) -> float:
        return ids_of(batch).shape[-1]


def ids_of(batch: Any) -> Tensor:
    """The ids of a batch, [n, t]."""
    if isinstance(batch, Mapping):
        return batch["input_ids"]
    if isinstance(batch, Tensor):
        return batch
    return batch[0]


def _padding_ignored(batch: Mapping[str, Tensor]) -> Tensor:
    """The ids as labels; those that the attention mask leaves out are not units."""
    ids = batch["input_ids"]
    if "attention_mask" not in batch:
        return ids
    return ids.masked_fill(batch["attention_mask"] == 0, IGNORED)
