"""Passes of a loop over `range(run.step, ...)` that are no steps.

With loaders that take turns `run.step` counts the batches of one of them, and a loop that begins at
it does other passes when it is resumed.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import types

from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.watches.code_names import names_in
from ddp_train.sessions.watches.frame_names import code_of, run_names, variable_of

log = logging.getLogger(__name__)
OTHER_PASSES = (
    "%s: the loop counts it from run.step, but not every pass is a step: run.step counts the"
    " batches of the loader that begins each step. A resumed run repeats passes, may take another"
    " loader, and ends with other weights. Take a batch of every loader in each pass (for loaders"
    " that take turns, in an inner loop over them), or keep %s in an object with state_dict and"
    " load_state_dict, and pass that to run.resume"
)
MOST_LOOKS = 1000
"""Steps that are looked at."""

Place = tuple[types.CodeType, int]
"""Some code, and a line in it."""
Count = tuple[types.CodeType, str]
"""Some code, and a variable of it."""


class LoopPasses:
    """Compares what a loop counts from `run.step` with `run.step`, where steps begin."""

    def __init__(self) -> None:
        self.looks = 0
        self.names: dict[Place, set[str]] = {}
        """The counts of the loops around each line."""
        self.ahead: dict[Count, int] = {}
        """By how much each was above `run.step` where the last step began."""

    def begin_step(self, step: int) -> None:
        """Name once the counts that have risen by more than `run.step`. step: its value."""
        if self.looks == MOST_LOOKS:
            return
        self.looks += 1
        before = self.ahead
        self.ahead = {count: value - step for count, value in self._counts_now().items()}
        names = {
            name
            for (code, name), ahead in self.ahead.items()
            if ahead > before.get((code, name), ahead)
        }
        if names:
            self.looks = MOST_LOOKS
            listed = ", ".join(sorted(names))
            log.warning(OTHER_PASSES, listed, listed)

    def _counts_now(self) -> dict[Count, int]:
        counts: dict[Count, int] = {}
        for frame in user_frames():
            for name in self._names_at(frame):
                value = variable_of(name, frame)
                if isinstance(value, int):
                    counts[frame.f_code, name] = value
        return counts

    def _names_at(self, frame: types.FrameType) -> set[str]:
        place = (frame.f_code, frame.f_lineno)
        if place not in self.names:
            self.names[place] = counts_from_steps(code_of(frame), frame.f_lineno, run_names(frame))
        return self.names[place]


def counts_from_steps(code: str, line: int, run_names: set[str]) -> set[str]:
    """The variables of loops around a line that go over something made of `run.step`.

    Without loops that multiply it: by 2 for two passes in a step.

    code: of a file. Where it cannot be read there are none.
    line: its number, from 1. A loop at whose head it is does not count: its variables are not set.
    run_names: how the code calls the run of the session.
    """
    steps = {f"{run}.step" for run in run_names}
    names: set[str] = set()
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.For) or not _is_in_body(line, node):
                continue
            if names_in(node.iter) & steps and not _multiplies(node.iter):
                names |= names_in(node.target)
    return names


def _is_in_body(line: int, loop: ast.For) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)


def _multiplies(items: ast.expr) -> bool:
    return any(isinstance(node, ast.Mult) for node in ast.walk(items))
