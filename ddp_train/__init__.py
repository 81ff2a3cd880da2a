"""Data-parallel PyTorch training, one process per GPU. Start reading at `__main__.py`, then
docs/inside/architecture.md.

`run` starts a run with the overrides of the command line, and `load` returns its trained model. For
code of your own: `Task` documents the methods that a task may have; `all_gather` collects the rows
of all processes, for losses that compare samples; `noise_like`, `rand_like`, `randint_like` and
`dropout` give the same random numbers on any number of processes; `log` takes numbers of your own,
for files, pages and trackers. `session` runs a training loop of your own on any number of processes
(docs/guides/own_loop.md). Its parts are also usable one by one (docs/guides/own_loop_more.md):
`ExactSampler`, `synchronised` batch norm, `Lars`, `Lamb`, `Muon`, `save_checkpoint` and
`load_checkpoint`. Each name is imported when it is first used: `import ddp_train` does not import
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_train.checkpoints.reader import load_checkpoint
    from ddp_train.checkpoints.writer import save_checkpoint
    from ddp_train.data.exact_sampler import ExactSampler
    from ddp_train.data.keyed_noise import dropout, noise_like, rand_like, randint_like
    from ddp_train.distributed.all_gather import all_gather
    from ddp_train.inference.trained_model import load
    from ddp_train.optim.lars_lamb.optimizers import Lamb, Lars
    from ddp_train.optim.muon.optimizer import Muon
    from ddp_train.parallel.sync_batch_norm import synchronised
    from ddp_train.runs.from_python import Result, RunFailedError, run
    from ddp_train.sessions.start import session
    from ddp_train.tasks.logged_numbers import log
    from ddp_train.tasks.task import Task
    from ddp_train.telemetry.trackers.tracker import Tracker

__version__ = "0.1.0"
__all__ = [
    "ExactSampler",
    "Lamb",
    "Lars",
    "Muon",
    "Result",
    "RunFailedError",
    "Task",
    "Tracker",
    "all_gather",
    "dropout",
    "load",
    "load_checkpoint",
    "log",
    "noise_like",
    "rand_like",
    "randint_like",
    "run",
    "save_checkpoint",
    "session",
    "synchronised",
]

_PLACES = {
    "Task": "ddp_train.tasks.task",
    "Tracker": "ddp_train.telemetry.trackers.tracker",
    "all_gather": "ddp_train.distributed.all_gather",
    **dict.fromkeys(
        ("noise_like", "rand_like", "randint_like", "dropout"), "ddp_train.data.keyed_noise"
    ),
    "load": "ddp_train.inference.trained_model",
    "log": "ddp_train.tasks.logged_numbers",
    "session": "ddp_train.sessions.start",
    "ExactSampler": "ddp_train.data.exact_sampler",
    "synchronised": "ddp_train.parallel.sync_batch_norm",
    **dict.fromkeys(("Lars", "Lamb"), "ddp_train.optim.lars_lamb.optimizers"),
    "Muon": "ddp_train.optim.muon.optimizer",
    "save_checkpoint": "ddp_train.checkpoints.writer",
    "load_checkpoint": "ddp_train.checkpoints.reader",
    **dict.fromkeys(("run", "Result", "RunFailedError"), "ddp_train.runs.from_python"),
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
