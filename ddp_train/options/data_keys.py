"""Keys that several data sets have."""

from __future__ import annotations

from typing import Any

from ddp_train.options.key import key


def validation_part() -> Any:
    meaning = (
        "fraction of the training set that is held out for validation; 0: none; null: the data"
        " set's own validation split, if it has one"
    )
    return key(None, meaning, at_least=0, below=1)


def named_validation_sets(what: str) -> Any:
    meaning = (
        f"further validation sets by name, each {what}; scored beside the validation set, as"
        " validation/NAME"
    )
    return key({}, meaning)


def named_test_sets(what: str) -> Any:
    return key({}, f"further test sets by name, each {what}; scored as test/NAME")


def mixing_alpha(what: str) -> Any:
    return key(0.0, f"alpha of {what} two samples of the global batch; 0: off", at_least=0)


def sampler() -> Any:
    meaning = (
        "class of a sampler that gives the indices of an epoch's samples, {_target_: my.Sampler,"
        " num_samples: 500}; {}: each sample once, shuffled in each epoch"
    )
    return key({}, meaning)


def batch_sampler() -> Any:
    meaning = (
        "class of a batch sampler that gives an epoch's global batches as lists of indices, at"
        " most train.global_batch_size each: {_target_: my.BatchSampler}; {}: none"
    )
    return key({}, meaning)


def drop_last() -> Any:
    return key(False, "leave out the last global batch of an epoch if it is not full")


def sample_weights() -> Any:
    meaning = (
        "draw the samples of an epoch with replacement; balanced: all classes equally often;"
        " FILE (.npy or text): by a weight for each sample; null: each sample once"
    )
    return key(None, meaning)
