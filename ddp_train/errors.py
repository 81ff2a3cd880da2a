"""The few errors a user sees. Each knows its exit code, its kind (the word in failure.json) and may carry a remedy."""

from __future__ import annotations

from collections.abc import Sequence

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cuda error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "'out of memory'",
)
"""What torch says on the CPU; the CUDA runtime, cuBLAS and cuDNN; NCCL, which quotes the runtime."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was wanting: torch's allocator says so on GPUs by a class of its own, all others in words."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(text in str(error).lower() for text in _OUT_OF_MEMORY)


class LaunchError(Exception):
    """A failure that we can explain. `str(error)` says what happened, `remedy` what to do about it."""

    exit_code = 70
    kind = "error"

    def __init__(self, detail: str, remedy: str = "") -> None:
        super().__init__(detail)
        self.remedy = remedy


class ConfigError(LaunchError):
    """The configuration cannot be run. Carries every problem that was found, one message each."""

    exit_code = 2
    kind = "config"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems), "correct the keys named above")

    def __str__(self) -> str:
        count = len(self.problems)
        heading = "1 problem" if count == 1 else f"{count} problems"
        return f"{heading} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in self.problems)


class DataError(LaunchError):
    """The data, or a checkpoint, cannot be used."""

    exit_code = 65
    kind = "data"


class PeerError(LaunchError):
    """Another process, host or port cannot be reached."""

    exit_code = 69
    kind = "peer"


class HangError(LaunchError):
    """No progress: some rank stays where it is, and the others wait for it."""

    exit_code = 71
    kind = "hang"


class NonFiniteLossError(LaunchError):
    """The loss of a step is NaN or infinite on some rank; raised on all ranks before the optimizer step."""

    kind = "non_finite_loss"

    def __init__(self, detail: str, remedy: str, rank: int | None, step: int) -> None:
        """rank: the first culprit, None if it is no single rank's fault. step: with that loss."""
        super().__init__(detail, remedy)
        self.rank = rank
        self.step = step


class WriteError(LaunchError):
    """The run directory cannot be written."""

    exit_code = 73
    kind = "write"


class OwnershipLostError(LaunchError):
    """The run directory belongs to another run now. Nobody may try to write there again."""

    exit_code = 73
    kind = "write"
