"""Sequences of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ddp_train.data.corpus.windows import IGNORED
from ddp_train.errors import DataError


def padded(samples: Sequence[Any], padding_id: int = 0) -> dict[str, Tensor]:
    """A `collate_fn` for `task=language_model`: samples filled up to the longest at their ends.

    samples: the ids of each, whole numbers [t], as a tensor, an array or a list; or a dict of such
        rows of one length, with `input_ids` and perhaps others; `labels` stand beside their own
        token, as in transformers.

    Returns int64 [n, longest]: `input_ids`, filled with padding_id; `attention_mask`, 1 where there
    is a token; `labels`, filled with -100, which counts as no token; other rows, filled with 0.
    Raises DataError if rows of one sample differ in length.
    """
    rows_of_samples = [_rows_of(sample) for sample in samples]
    fillers = {"input_ids": padding_id, "labels": IGNORED}
    batch = {}
    for name in rows_of_samples[0]:
        rows = [rows_of_sample[name] for rows_of_sample in rows_of_samples]
        filler = fillers.get(name, 0)
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=filler)
    return batch


def _rows_of(sample: Any) -> dict[str, Tensor]:
    """The rows of one sample, with mask and labels. Raises DataError."""
    given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    rows = {name: torch.as_tensor(row, dtype=torch.int64) for name, row in given.items()}
    ids = rows["input_ids"]
    mask = rows.setdefault("attention_mask", torch.ones_like(ids))
    rows.setdefault("labels", ids.masked_fill(mask == 0, IGNORED))
    for name, row in rows.items():
        if row.ndim != 1:
            raise DataError(
                f"{name} of a sample has the shape {list(row.shape)}, but must have one dimension,"
                " [length]",
                "call the tokenizer without return_tensors, or take the first row: ids[0]",
            )
        if len(row) != len(ids):
            raise DataError(
                f"a sample has {len(ids)} input_ids, but {len(row)} {name}",
                f"make {name} as long as input_ids",
            )
    return rows
