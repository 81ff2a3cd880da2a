"""The check of scores: the same on any number of processes, and with batches of any size."""

from __future__ import annotations

from ddp_lab.doctor.findings import Finding, ok
from ddp_lab.prove import causes
from ddp_lab.prove.bench import Bench
from ddp_lab.prove.tolerances import BY_SIZE_ALLOWED, SCORES_ALLOWED, relative_difference
from ddp_lab.prove.unseeded import unseeded
from ddp_train.data.rng import global_states
from ddp_train.data.user_dataset import parts_of
from ddp_train.models.python_state import changed, state_of

CHECK = "evaluation"
EVALUATION_BATCHES = 5
"""Batches of the set, so that three processes have unequally many."""
PROCESSES = (1, 2, 3)

Scores = dict[str, float]


class ScoreCheck:
    """Scores the set that selects checkpoints."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.set_name, self.source = bench.splits.scored
        batch_of_fifth = max(1, -(-len(self.source) // EVALUATION_BATCHES))
        self.batch_size = min(bench.config.train.evaluate_batch_size, batch_of_fifth)

    def finding(self, by_size: bool) -> Finding:
        """by_size: whether to score batches of another size too."""
        before = state_of(self._parts())
        scores: list[Scores] = []
        generator = ""
        for processes in PROCESSES:
            states = global_states()
            scores.append(self._scores(processes))
            generator = generator or causes.moved_generator(states)
        worst, metric = _largest_difference(scores[0], scores[1:])
        allowed = SCORES_ALLOWED[self.bench.precision]
        if worst > allowed:
            changed_state = changed(before, state_of(self._parts()))
            asked = unseeded(lambda: self._scores(1))
            cause = causes.of_evaluation(metric, generator, asked, changed_state)
            return causes.finding(cause, worst, allowed)
        batches = f"batches of {self.batch_size}"
        if by_size:
            broken = self._broken_by_size(scores[0])
            if broken:
                return broken
            batches += " and of other sizes"
        names = ", ".join(scores[0])
        detail = f"{names} of {len(self.source)} samples of the {self.set_name} set in {batches}"
        return ok(detail, found=worst, allowed=allowed)

    def _broken_by_size(self, scores: Scores) -> Finding | None:
        """The finding if batches of another size give another score; None if they do not.

        It is averaged by batch, or a sample's depends on the others in its batch.

        scores: with batches of the usual size.
        """
        size = 2 * self.batch_size // 3
        if not size:
            return None
        others = self.bench.scores(self.source, size, processes=1)
        differences = {
            name: relative_difference(others[name], score) for name, score in scores.items()
        }
        metric = max(differences, key=lambda name: differences[name])
        allowed = BY_SIZE_ALLOWED[self.bench.precision]
        if not differences[metric] > allowed:
            return None
        text = (
            f"{metric} is {scores[metric]:.6g} with batches of {self.batch_size} samples, and"
            f" {others[metric]:.6g} with {size}"
        )
        return causes.finding(causes.of_batch_size(text), differences[metric], allowed)

    def _scores(self, processes: int) -> Scores:
        return self.bench.scores(self.source, self.batch_size, processes)

    def _parts(self) -> dict[str, object]:
        return {**self.bench.parts, **parts_of(self.source)}


def _largest_difference(scores: Scores, others: list[Scores]) -> tuple[float, str]:
    """The largest relative difference, and its metric; nan does not count."""
    worst = 0.0
    metric = ""
    for other in others:
        for name, score in scores.items():
            difference = relative_difference(other[name], score)
            if difference > worst:
                worst = difference
                metric = name
    return worst, metric
