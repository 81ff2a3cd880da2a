"""Batches by a sampler of the user's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from ddp_train.data import sampled_batches
from ddp_train.data.global_batches import Pass
from ddp_train.data.sampled_batches import SampledBatches, digest_of


def test_loader_processes_that_start_again_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(
        sampled_batches, "same_everywhere", lambda digest, *_: compared.append(digest)
    )
    samples = range(600)
    sampler = RandomSampler(samples, generator=torch.Generator().manual_seed(1))
    batches = SampledBatches(BatchSampler(sampler, 2, False), samples, key=0, device="cpu")
    batches.begin(Pass(0))
    given_ahead = [batch.tolist() for batch in itertools.islice(batches.batches(0), 280)]
    again = [batch.tolist() for batch in batches.batches(0)]
    assert again[:280] == given_ahead and len(again) == 300
    rest = [batch for portion in batches.kept[1:] for batch in portion]
    assert compared == [digest_of(batches.kept[0]), digest_of(rest)]
