"""The errors that a user sees. Each class has an exit code and a kind (the word in
failure.json)."""

from __future__ import annotations

from collections.abc import Sequence

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cuda error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "'out of memory'",
)
"""Parts of the messages of: torch's CPU allocator; the CUDA runtime, cuBLAS, cuDNN; NCCL, which
quotes the runtime."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for out-of-memory errors: MemoryError, torch.OutOfMemoryError, or a known message
    (`_OUT_OF_MEMORY`)."""
    by_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_class or any(text in str(error).lower() for text in _OUT_OF_MEMORY)


class LaunchError(Exception):
    """A failure with a known cause. `str(error)` is what happened, `remedy` what to do about it."""

    exit_code = 70
    kind = "error"

    def __init__(self, detail: str, remedy: str = "") -> None:
        super().__init__(detail)
        self.remedy = remedy


MOST_SHOWN = 50
"""The most problems of a configuration that are printed."""


class ConfigError(LaunchError):
    """The configuration is invalid. `problems` has one message for each problem found."""

    exit_code = 2
    kind = "config"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems), "correct the keys named above")

    def __str__(self) -> str:
        count = len(self.problems)
        heading = "1 problem" if count == 1 else f"{count:,} problems"
        lines = [f"  - {problem}" for problem in self.problems[:MOST_SHOWN]]
        if count > MOST_SHOWN:
            lines.append(f"  - and {count - MOST_SHOWN:,} more")
        return f"{heading} in the configuration:\n" + "\n".join(lines)


class DiskFullError(ConfigError):
    """The run directory cannot be written before anything has begun: the disk is full."""

    exit_code = 73
    kind = "write"


class DataError(LaunchError):
    """The data or a checkpoint is missing, corrupt, or does not fit."""

    exit_code = 65
    kind = "data"


class TaskError(DataError):
    """A method of a task of the user's own returned what it must not."""

    kind = "task"


class LogError(DataError):
    """A call of `log` with a name or a number that is not allowed."""

    kind = "log"


class ModelError(DataError):
    """A model does not do what DDP needs."""

    kind = "model"


class StateError(DataError):
    """A state that training is to resume from is no plain data: no checkpoint could be read."""

    kind = "state"


class PeerError(LaunchError):
    """Another process, host or port cannot be reached."""

    exit_code = 69
    kind = "peer"


class HangError(LaunchError):
    """A rank makes no progress, and the others wait for it."""

    exit_code = 71
    kind = "hang"


class NonFiniteLossError(LaunchError):
    """The loss of a step is NaN or infinite on some rank; raised on all ranks before the optimizer
    step."""

    kind = "non_finite_loss"

    def __init__(self, detail: str, remedy: str, rank: int | None, step: int) -> None:
        """rank: the first rank with a non-finite loss; None if no single rank caused it. step: of
        that loss."""
        super().__init__(detail, remedy)
        self.rank = rank
        self.step = step


class WriteError(LaunchError):
    """The run directory cannot be written."""

    exit_code = 73
    kind = "write"


class OwnershipLostError(LaunchError):
    """Another run owns the run directory now. This process must not write there again."""

    exit_code = 73
    kind = "write"
