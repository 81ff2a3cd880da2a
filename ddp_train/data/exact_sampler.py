"""The samples of one process in a loop of your own: each of a data set once, on one process."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.process_group import place_among_ranks


class ExactSampler(Sampler[int]):
    """A sampler in place of torch's DistributedSampler, with its arguments.

    It neither repeats samples to fill up nor, unless `drop_last`, leaves any out. Process r of p
    has every p-th sample of the order, beginning with number r.

    So the processes' numbers of samples differ by one at most, and an evaluation that adds up sums
    and counts is exact. To train under DDP, which waits for all processes in every step, give all
    as many batches: with `drop_last=True`, or inside of `torch.distributed.algorithms.Join`.

    The order of an epoch depends on `seed` and epoch alone; it is that of a run of the launcher
    with this seed.
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
        """Keeps the data set.

        num_replicas, rank: None for those of the process group, or 1 and 0 without one.
        drop_last: leaves out what is left of the samples when all processes have as many.

        Raises ValueError for a rank that there is not.
        """
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
        """Set the epoch. Call it before each epoch, which has an order of its own."""
        self.epoch = epoch

    def _samples_used(self) -> int:
        count = len(self.dataset)
        if self.drop_last:
            return count - count % self.num_replicas
        return count
