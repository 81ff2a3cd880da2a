"""Sequences of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_train.data.corpus.windows import IGNORED
from ddp_train.errors import DataError


def padded(samples: Sequence[Any], padding_id: int = 0) -> dict[str, Tensor]:
    """A `collate_fn` for `task=language_model`: samples as one batch, each filled up to the longest
    at its end.

    samples: of each its ids, whole numbers [t], as a tensor, an array or a list; or a dict of such
    rows of one length,
    with `input_ids` and perhaps others; `labels` stand beside their own token, as in transformers.
    Returns int64
    [n, longest]: `input_ids`, filled with padding_id; `attention_mask`, 1 where there is a token;
    `labels`, filled with
    -100, which counts as no token; other rows, filled with 0. Raises DataError if rows of one
    sample differ in length.
    """
    dicts = [sample if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    rows = [
        {name: torch.as_tensor(row, dtype=torch.int64) for name, row in one.items()}
        for one in dicts
    ]
    for row in rows:
        ids = row["input_ids"]
        row.setdefault("attention_mask", torch.ones_like(ids))
        row.setdefault("labels", ids.masked_fill(row["attention_mask"] == 0, IGNORED))
        odd = {
            name: list(other.shape)
            for name, other in row.items()
            if other.ndim != 1 or len(other) != len(ids)
        }
        if odd:
            name, shape = next(iter(odd.items()))
            has = (
                f"a sample has input_ids of the shape {list(ids.shape)}, and {name} of the shape"
                f" {shape}"
            )
            raise DataError(has, "give each sample rows of whole numbers, all of one length")
    fillers = {"input_ids": padding_id, "labels": IGNORED}
    return {name: _filled([row[name] for row in rows], fillers.get(name, 0)) for name in rows[0]}


def _filled(rows: list[Tensor], filler: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
