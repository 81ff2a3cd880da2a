"""The samples of one process in a loop of your own: each of a data set once, on one process."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.process_group import place_among_ranks


class ExactSampler(Sampler[int]):
    """A sampler that divides a data set among processes, in place of torch's DistributedSampler.

    No sample is repeated to make the shares equal, and none is left out unless `drop_last` is set.
    Rank r of p processes gets the samples r, r + p, r + 2 p ... of the epoch's order. The shares
    differ by one sample at most, so an evaluation that adds up sums and counts is exact.

    Training under DDP needs the same number of batches on every process: use `drop_last=True`, or
    `torch.distributed.algorithms.Join`.

    The order depends only on `seed` and the epoch, not on the number of processes. A run by config
    with the same seed has the same order.

    dataset: a map-style data set, of which only the length is used.
    num_replicas: number of processes; None for the size of the process group, or 1 without one.
    rank: number of this process, from 0; None for torch.distributed.get_rank(), or 0 without a
            process group.
    shuffle: False keeps the order of the data set in every epoch.
    seed: int, the same on every process.
    drop_last: leave out the last samples if they cannot be divided evenly.

    Raises ValueError if `rank` is not at least 0 and below `num_replicas`.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        rank_in_group, ranks = place_among_ranks()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.num_replicas = ranks if num_replicas is None else num_replicas
        self.rank = rank_in_group if rank is None else rank
        self.epoch = 0
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank={self.rank}: must be at least 0 and below num_replicas={self.num_replicas}"
            )

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        if self.shuffle:
            order = epoch_order(self.seed, self.epoch, count).tolist()
        else:
            order = list(range(count))
        used = order[: self._samples_used()]
        return iter(used[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return len(range(self.rank, self._samples_used(), self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration has.

        Call it on every process before each epoch; otherwise all epochs have the same order.

        epoch: number of the epoch, from 0.
        """
        self.epoch = epoch

    def _samples_used(self) -> int:
        count = len(self.dataset)
        if self.drop_last:
            return count - count % self.num_replicas
        return count
