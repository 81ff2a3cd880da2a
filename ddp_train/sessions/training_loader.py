"""The loaders that a session trains on: each step takes a batch of one, or of several."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

from ddp_train.data.batch import Batch
from ddp_train.data.global_batches import Pass
from ddp_train.resilience.heartbeat import EPOCH_END
from ddp_train.sessions.exchange_watch import PASS
from ddp_train.sessions.feed import Feed
from ddp_train.sessions.position import Place
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.wrapped import is_in_update_bn

log = logging.getLogger(__name__)
LENGTH_LEFT = (
    "len(loader) is %d in this epoch instead of %d, since the run was resumed inside of the"
    " epoch. For a schedule call len(loader) before run.epochs"
)


class TrainingLoader:
    """The batches of each pass, or what is left of them: `for inputs, targets in loader`.

    A batch that is asked for between two steps begins one; its loader ends the step, when it is
    asked for the next batch. What other loaders give meanwhile belongs to the same step.
    """

    def __init__(self, steps: Steps, feed: Feed, dataset: Any, repeat: bool = False) -> None:
        """dataset: what the user gave.
        repeat: after a pass the next one follows, without an end.
        """
        self.dataset = dataset
        self.steps = steps
        self.feed = feed
        self.repeat = repeat
        self.place = Place(epoch=-1, is_over=True)
        self.told_length = False
        """The length of a resumed epoch was asked for, and explained."""
        self.number = steps.loaders.add(self)
        self.iterators = 0
        """Iterators that were made inside of an epoch of a resumed run, until one of them began."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that identify the batches."""
        return self.feed.facts

    @property
    def parts(self) -> list[Any]:
        """Objects that give the batches: the data set, a sampler."""
        return [self.dataset, *vars(self.feed).values()]

    def __len__(self) -> int:
        """Batches of a pass over the data as they are now, as many on all processes; inside of a
        resumed epoch, those left."""
        batches = len(self.feed)
        epoch = self.steps.loop.open_epoch
        if epoch is None or not epoch.first_batch:
            return batches
        saved = self.steps.loaders.saved.get(self.number)
        place = Place(**saved["place"]) if saved else self.place
        if place.is_over:
            return batches
        left = batches - (place.batch if saved else place.first)
        self._tell_of_length(left, batches)
        return left

    def _tell_of_length(self, left: int, batches: int) -> None:
        if self.told_length or not self.steps.world.is_leader:
            return
        self.told_length = True
        log.warning(LENGTH_LEFT, left, batches)

    def __iter__(self) -> Iterator[Any]:
        if is_in_update_bn():
            raise UsageError(
                "update_bn got a run.loader, whose batches are steps of training",
                "use run.update_bn(loader, swa_model), which makes no steps",
            )
        goes_on = self.iterators == 0
        if self.steps.loop.open_epoch and self.number in self.steps.loaders.saved:
            self.iterators += 1
        return self._passes(goes_on)

    def _passes(self, goes_on: bool) -> Iterator[Any]:
        has_batches = yield from self._one_pass(goes_on)
        while self.repeat and has_batches:
            has_batches = yield from self._one_pass(goes_on)

    def _one_pass(self, goes_on: bool) -> Generator[Any, None, bool]:
        """The batches of a pass, or what is left of them. Returns whether it has some at all.

        goes_on: in a resumed run, the pass inside of which that was saved. Where an iterator has
        been made inside of an epoch, and has given nothing, that pass was left: `zip` makes an
        iterator of each loader, and ends before the second begins if the first has no more batches.
        """
        steps = self.steps
        steps.loop.check_in_epoch("the loader of run.loader")
        steps.begin_pass()
        place = self._begin(goes_on)
        if place is None:
            return self.place.batch > 0
        # A pass without batches is over at once, like one whose last batch began a step.
        leads = True
        for batch in self.feed:
            step = steps.hand_out(self, place, batch.micro_batch)
            leads = step is not None
            steps.watches.see_batch(batch.micro_batch, batch.data)
            try:
                yield batch.data
            except GeneratorExit:
                if step:
                    steps.leave_step(step)
                place.leave(steps.loop.position.step)
                raise
            if place is not self.place:
                raise UsageError(
                    "a loader of run.loader was iterated again while its earlier iterator is"
                    " still in use",
                    "end the first loop over the loader before the second begins, or make two"
                    " loaders",
                )
            if step:
                is_last = self.feed.is_last(batch.micro_batch.step) and not self.repeat
                steps.end_step(step, is_last)
        place.is_over = True
        if leads:
            steps.loop.see_batches_left(False)
            if not self.repeat:
                steps.end_loop()
        steps.status.phase = EPOCH_END
        return place.batch > 0 or not leads  # a step that goes on is not counted yet

    def further_pass(self) -> Iterator[Batch]:
        """The batches of a pass that is no training: those of the epoch that began last, with its
        draws. They are no steps.

        Raises UsageError inside of another pass, which could not go on.
        """
        steps = self.steps
        saved = steps.loaders.saved.get(self.number)
        place = Place(**saved["place"]) if saved else self.place
        if not place.is_over or (saved and place.was_done_before(steps.loop.position)):
            raise UsageError(
                "run.update_bn was called inside of the loop over its loader",
                "call it after that loop, or pass another loader: run.update_bn(run.loader(data,"
                " global_batch_size=64), swa_model)",
            )
        if saved:
            del steps.loaders.saved[self.number]
            self.place = place
            self.feed.restore(saved["feed"], False)
        epoch = steps.loop.begun_epoch
        self.feed.set_epoch(epoch)
        self.feed.begin(Pass(epoch), 0)
        yield from self.feed

    def _begin(self, goes_on: bool) -> Place | None:
        """Begin the next pass, or go on in that of the checkpoint.

        None if the loop over it was done when that was saved, and others of the epoch had begun.
        """
        steps = self.steps
        saved = steps.loaders.saved.pop(self.number, None)
        if saved is None:
            place = self.place.next(steps.loop.position.epoch)
            self._begin_feed(place)
            return place
        self.place = place = Place(**saved["place"])
        if not goes_on:
            place.leave(steps.loop.position.step)
        self.feed.restore(saved["feed"], not place.is_over)
        if goes_on and place.was_done_before(steps.loop.position):
            return None
        if place.is_over:
            place = place.next(steps.loop.position.epoch)
            self._begin_feed(place)
            return place
        place.first = place.batch
        self._begin_feed(place)
        steps.loaders.check_batches(saved["pass"], self.feed.pass_facts())
        return place

    def _begin_feed(self, place: Place) -> None:
        self.steps.exchange_watch.enter(PASS)
        self.feed.begin(Pass(place.epoch, place.repetition), place.batch)
        self.place = place

    def begin_epoch(self, epoch: int) -> None:
        """Called where an epoch begins, before the user's loop has it."""
        self.feed.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """The loader's part of a checkpoint, plain data."""
        saved = self.steps.loaders.saved.get(self.number)
        if saved:
            return saved  # nothing was taken since
        in_pass = not self.place.is_over
        return {
            "place": dict(vars(self.place)),
            "feed": self.feed.state(in_pass, self.place.batch),
            "pass": self.feed.pass_facts() if in_pass else {},
        }
