"""The sampler that a config names."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from ddp_train.config.user_code import instantiate, parameters_of
from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.sample_facts import told_labels, told_lengths
from ddp_train.data.sampled_epochs import EpochsInBatches, SampledEpochs
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError
from ddp_train.options.custom import code_of
from ddp_train.options.schema import Config

DATA = ("data_source", "dataset")
LABELS = ("labels", "targets")
"""Parameters that are the training set, and the labels that it tells."""


def sampled_epochs(config: Config, source: BatchSource) -> SampledEpochs | None:
    """The epochs of `data.sampler` or `data.batch_sampler`; None where the config names neither.

    source: the training set.

    Raises ConfigError if the sampler cannot be made.
    """
    data = config.data
    batch_size = config.train.global_batch_size
    section = SampledEpochs.option
    if data.batch_sampler:
        section = EpochsInBatches.option
    given = data.batch_sampler or data.sampler
    if not given:
        return None
    code = code_of(given)
    offered = _offered(source, batch_size, parameters_of(section, code))
    more = {name: value for name, value in offered.items() if name not in code.arguments}
    key = hash_key(config.seed, "sampler")

    def make() -> Any:
        with keyed_generators() as seed_generators:
            seed_generators(key)
            return instantiate(section, code, **more)

    try:
        if data.batch_sampler:
            return EpochsInBatches(make, source, key, batch_size)
        return SampledEpochs(make, source, key)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{section}._target_={code.target}: {error}"]) from error


def _offered(source: BatchSource, batch_size: int, parameters: list[str]) -> dict[str, Any]:
    """Arguments that the run knows: the training set, what it tells of its samples, the size of a
    global batch."""
    offered: dict[str, Any] = {}
    for name in parameters:
        told = None
        if name in DATA:
            offered[name] = _samples_of(source)
        elif name in LABELS:
            told = told_labels(source)
        elif name == "lengths":
            told = told_lengths(source)
        elif name == "batch_size":
            offered[name] = batch_size
        if told is not None:
            offered[name] = told.tolist()
    return offered


def _samples_of(source: BatchSource) -> Any:
    """The training set as the user's class, of the samples that train."""
    if not isinstance(source, UserDataset):
        return source
    if source.numbers is None:
        return source.dataset
    return Subset(source.dataset, source.numbers.tolist())
