"""The option strategy=ordered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun, StrategyConfig
from ddp_train.text import counted, shown


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above a number of at least 1."""
    return 1 << (number.bit_length() - 1)


@dataclass
class OrderedConfig(StrategyConfig):
    """Gradients summed in a fixed order: the same bits on any number of processes, slower than
    ddp."""

    name: str = "ordered"
    implementation: ClassVar[str] = "ddp_train.parallel.ordered.reduction:OrderedReduction"
    has_process_group: ClassVar[bool] = True
    fixes_bits: ClassVar[bool] = True
    capture_blocker: ClassVar[str] = "a captured step runs no Python"
    virtual_shards: int = key(
        8,
        "number of equal parts of a global batch; a power of two, and a multiple of the"
        " number of processes",
        at_least=1,
    )

    def can_run_on(self, processes: int) -> bool:
        return self.virtual_shards % processes == 0

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        shards = self.virtual_shards
        lower = 1 << shards.bit_length() - 1
        if shards != lower:
            yield Problem(
                f"strategy.virtual_shards={shards}",
                "must be a power of two",
                f"use strategy.virtual_shards={lower} or {2 * lower}",
            )
        elif not run.may_change_size and not self.can_run_on(run.config.process_count):
            yield self._undivided(run.config)
        yield from self._changes_of_bits(run.config)

    def _undivided(self, config: Config) -> Problem:
        """The virtual shards cannot be divided among the processes."""
        shards = self.virtual_shards
        hosts = int(config.launch.nnodes)
        processes = config.process_count
        found = f"launch.nproc_per_node={config.launch.nproc_per_node}"
        fewer_hosts = _power_of_two(min(hosts, shards))
        fewer = _power_of_two(min(processes // hosts, shards // fewer_hosts))
        use = f"launch.nproc_per_node={fewer}, a power of two up to {shards}"
        if hosts > 1:
            found = f"launch.nnodes={hosts} {found}"
            use = (
                f"launch.nnodes={fewer_hosts} launch.nproc_per_node={fewer}, powers of two with at"
                f" most {shards} processes in all"
            )
        if processes > shards and processes == _power_of_two(processes):
            use = f"strategy.virtual_shards={processes}"
        return Problem(
            found,
            f"strategy=ordered cannot divide {counted(shards, 'virtual shard')} evenly among"
            f" {counted(processes, 'process')}",
            f"use {use}",
        )

    def _changes_of_bits(self, config: Config) -> Iterator[Problem]:
        """The keys whose values let bits depend on more than the job."""
        shapes = "the code of torch.compile depends on the shapes that a process meets first"
        needed: dict[str, tuple[Any, Any, str]] = {  # key: its value, the required value, why
            "train.accumulation_steps": (
                config.train.accumulation_steps,
                1,
                "raise strategy.virtual_shards instead",
            ),
            "deterministic": (config.deterministic, True, "otherwise bits vary between runs"),
            "launch.threads_per_process": (
                config.launch.threads_per_process,
                1,
                "the number of threads changes the bits",
            ),
            "tuning.compile": (config.tuning.compile, False, shapes),
            "model.fused": (config.model.fused, False, shapes),
        }
        for name, (value, required, why) in needed.items():
            if value != required:
                yield Problem(
                    f"{name}={shown(value)}",
                    f"strategy=ordered needs {name}={shown(required)}",
                    why,
                )
