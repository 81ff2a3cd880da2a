"""Checks that all processes read the same data, and a resumed run those of before."""

from __future__ import annotations

import hashlib
import logging

import torch

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.collate_trial import WARNING, dependence_of_collate
from ddp_train.data.datasets import BatchSource, digests, is_read_in_order
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.process_group import from_all_ranks, same_everywhere
from ddp_train.errors import PeerError
from ddp_train.models.put_back import reading_ahead

log = logging.getLogger(__name__)

SAME_FILES = (
    "give all hosts the same files. A data set of your own must be the same each time it is"
    " created: seed the random numbers that it draws, and loop over sorted(...) in place of a"
    " Python set. A stream must give all processes the same samples: leave rank and"
    " split_by_node out"
)
DRAWN_ANEW = (
    "data: some samples, read twice, are not the same: the data set, or its transform, draws from a"
    " generator of its own, or changes with each call. So the result depends on the number of"
    " processes, and a resumed run reads other samples. Draw random numbers by torch, numpy.random"
    " or random, which are seeded by seed, epoch and sample, and keep no state from sample to"
    " sample; mode=prove names the line or the attribute"
)


def common_digests(splits: Splits, read: BatchSource, device: str) -> dict[str, str]:
    """The digests of the split that is read, as `data.datasets.digests` gives them. One all-gather.

    Raises PeerError if not all processes read the same one, and splits of the same sizes: each
    would compute its part of another batch.
    """
    with reading_ahead(read):
        return _common_digests(splits, read, device)


def _common_digests(splits: Splits, read: BatchSource, device: str) -> dict[str, str]:
    found = digests(read)
    numbers = {
        "the size of the training set": len(splits.train),
        "the size of the validation set": len(splits.validation or ()),
        "the size of the test set": len(splits.test),
        **{f"the size of {name}": len(source) for name, source in splits.further.items()},
        "a digest of the samples": _number_of("".join(found.values())),
        "drawn anew": int(_is_drawn_anew(read, found)),
    }
    of_ranks = from_all_ranks(torch.tensor(list(numbers.values()), device=device)).T.tolist()
    *sizes, hashes, drawn = zip(numbers, of_ranks, strict=True)
    for what, theirs in sizes:
        if len(set(theirs)) > 1:
            raise _different(what, [f"{number:,}" for number in theirs])
    if any(drawn[1]):
        log.warning(DRAWN_ANEW)
        return {"count": found["count"]}  # samples of a later reading could not be compared
    what, theirs = hashes
    if len(set(theirs)) > 1:
        raise _different(what, [f"{number:x}"[:8] for number in theirs])
    return found


def _is_drawn_anew(read: BatchSource, found: dict[str, str]) -> bool:
    """Whether samples of a data set of the user's are others when they are read again.

    A stream is compared with itself where it is opened.

    found: the digests of the first reading.
    """
    is_users = isinstance(read, UserDataset) and not is_read_in_order(read)
    return is_users and digests(read) != found


def _number_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def _different(what: str, of_ranks: list[str]) -> PeerError:
    table = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(of_ranks))
    return PeerError(f"{what} is not the same for all processes ({table})", SAME_FILES)


def warn_of_collate(read: BatchSource) -> None:
    """Warn if a sample of a data set depends, by its collate_fn, on what else is in its batch."""
    if not isinstance(read, UserDataset) or is_read_in_order(read):
        return
    with reading_ahead(read):
        dependence = dependence_of_collate(read)
    if dependence:
        log.warning(WARNING, "data.collate_fn", dependence)


def scored_digests(splits: Splits, then: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The digests of the sets that are scored, by their names. Warns of one that has changed.

    then: those of a checkpoint; empty at the beginning.
    """
    found = {}
    for name, source in {**splits.validation_sets, **splits.test_sets}.items():
        try:
            with reading_ahead(source):
                now = digests(source)
                before = then.get(name, now)
                is_another = before != now and digests(source) == now  # else it draws each time
        except Exception as error:  # noqa: BLE001  its evaluation tells it, which may be far away, or never come
            log.info("the %s set was not compared with that of the checkpoint: %r", name, error)
            continue
        found[name] = now
        if is_another:
            what = "it has other samples"
            if now["count"] != before["count"]:
                what = f"it has {now['count']} samples, and had {before['count']}"
            log.warning(
                "the %s set has changed since the checkpoint: %s; scores before and after cannot be"
                " compared",
                name,
                what,
            )
    return found


def plan_digests(plan: BatchPlan, device: str) -> dict[str, str]:
    """The digests of the weights, or lengths, that decide which samples a batch has.

    Raises PeerError if the processes read different ones: each would compute its part of another
    batch.
    """
    found = plan.digests()
    for name, digest in found.items():
        number = int(digest[:15], 16)
        same_everywhere(number, device, f"a digest of the samples' {name}", SAME_FILES)
    return found
