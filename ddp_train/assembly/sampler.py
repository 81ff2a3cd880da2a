"""The sampler that a config names."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from ddp_train.config.user_code import instantiate, parameters_of
from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.sample_facts import told_labels
from ddp_train.data.sampled_epochs import SampledEpochs
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError
from ddp_train.options.custom import code_of
from ddp_train.options.schema import Config

SECTION = "data.sampler"
DATA = ("data_source", "dataset")
LABELS = ("labels", "targets")
"""Parameters that are the training set, and the labels that it tells, unless they are given."""


def sampled_epochs(config: Config, source: BatchSource) -> SampledEpochs | None:
    """The epochs of `data.sampler`; None where the config names none.

    source: the training set.

    Raises ConfigError if the sampler cannot be made.
    """
    if not config.data.sampler:
        return None
    code = code_of(config.data.sampler)
    more = _offered(source, parameters_of(SECTION, code), code.arguments)
    key = hash_key(config.seed, "sampler")

    def make() -> Any:
        with keyed_generators() as seed_generators:
            seed_generators(key)
            return instantiate(SECTION, code, **more)

    try:
        return SampledEpochs(make, source, key)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{SECTION}._target_={code.target}: {error}"]) from error


def _offered(source: BatchSource, parameters: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments that no config can give: the training set, and its labels."""
    offered: dict[str, Any] = {}
    for name in parameters:
        if name in given:
            continue
        if name in DATA:
            offered[name] = _samples_of(source)
        elif name in LABELS:
            labels = told_labels(source)
            if labels is not None:
                offered[name] = labels.tolist()
    return offered


def _samples_of(source: BatchSource) -> Any:
    """The training set as the user's class, of the samples that train."""
    if not isinstance(source, UserDataset):
        return source
    if source.numbers is None:
        return source.dataset
    return Subset(source.dataset, source.numbers.tolist())
