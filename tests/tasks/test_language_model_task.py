"""The task of texts: the forms of its batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddp_train.tasks.language_model.task import LanguageModel
from tests.support.task_samples import IDS, LENGTH, WORDS


def test_batch_of_tokens_may_be_ids_a_pair_or_a_dict() -> None:
    task = LanguageModel()
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(WORDS, WORDS, generator=draw)

    def model(input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return table[input_ids]

    ids = IDS[:4]
    alone, units = task.loss(model, ids)
    assert units == 4 * (LENGTH - 1)
    for batch in ((ids[:, :-1], ids[:, 1:]), {"input_ids": ids}, {"input_ids": ids, "labels": ids}):
        loss, number = task.loss(model, batch)
        assert torch.equal(loss, alone) and number == units
    of_transformers = task.loss(
        lambda **given: SimpleNamespace(logits=model(**given)), {"input_ids": ids}
    )  # type: ignore[arg-type]
    assert torch.equal(of_transformers[0], alone), "its models return an object with logits"
    mask = (torch.arange(LENGTH) < 4).long().expand(4, LENGTH)
    padded = {"input_ids": ids, "attention_mask": mask}
    loss, number = task.loss(model, padded)
    assert torch.equal(loss, task.loss(model, ids[:, :4])[0]) and number == 4 * 3
