"""The whole configuration: sections with one schema, and groups with several options.

An option of a group (`model=cnn`) is a dataclass in a module `config` beside its implementation,
found through `options.registry`. Facts that others ask about an option (does it have a fused
implementation? how large is the data set?) are attributes and methods of its class, never tables
elsewhere. Attributes without annotation are not keys: they hold what is true of options that have
no such key.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Union

from ddp_train.options.key import AUTO, key
from ddp_train.options.registry import OPTIONS, default_of
from ddp_train.options.sections import (
    CheckpointConfig,
    ExportConfig,
    LaunchConfig,
    PredictConfig,
    ProveConfig,
    SweepConfig,
    TrackerConfig,
    TrainConfig,
    TuningConfig,
)
from ddp_train.text import word


@dataclass
class Config:
    """One whole run."""

    mode: str = key(
        "train",
        "train; score a checkpoint, predict with it, or export its model; compare runs; examine"
        " this host; prove a job",
        choices=("train", "evaluate", "predict", "export", "study", "doctor", "prove"),
    )
    name: str = key(
        "default",
        "name of the run; it is kept in runs/NAME/... unless run_dir is given",
        is_path=True,
    )
    run_dir: str | None = key(
        None,
        "directory of the run; given again, the run resumes, and given alone, as it was",
        is_path=True,
    )
    seed: int = key(0, "seed of all random numbers", at_least=0, below=2**63)
    device: str = key(
        "auto", "where to compute; auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu")
    )
    deterministic: Union[bool, str] = key(
        "auto", "repeatable bits; auto: on CPU and with strategy=ordered", **AUTO
    )
    objective: str = key(
        "auto",
        "what a sweep optimizes: validation.NAME or test.NAME of any metric, samples_per_second or"
        " seconds; auto: the loss of the validation set, or of the test set if there is none",
    )
    metrics: list[dict[str, Any]] = key(
        [],
        "further metrics of evaluations, classes of torchmetrics: [{_target_: torchmetrics.NAME,"
        " ARGUMENT: ...}]; each takes name: NAME and better: max or min, too",
    )
    hooks: list[Any] = key(
        [],
        "your classes, called with (job, run_dir, world): package.Name, or {_target_: package.Name,"
        " ARGUMENT: ...}; they act between steps, or are entered around training",
        example="[package.Name] or [{_target_: package.Name, argument: 1}]",
    )
    trusted_modules: list[str] = key([], "packages whose code a checkpoint's _target_ may name")
    reasons: dict[str, str] = field(default_factory=dict)
    """Why `auto` chose its value, by the name of the switch. Not a key: filled in when `auto` is
    resolved."""
    process_range: str | None = None
    """What launch.nproc_per_node was if that was a range. Not a key: filled in when `auto` is
    resolved."""
    process_counts: list[int] = field(default_factory=list)
    """The numbers in that range with which the run may continue. Likewise."""
    host_range: str | None = None
    """What launch.nnodes was, or torchrun's --nnodes, if that was a range. Likewise."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    strategy: Any = field(default_factory=partial(default_of, "strategy", "ddp"))
    train: TrainConfig = field(default_factory=TrainConfig)
    model: Any = field(default_factory=partial(default_of, "model", "cnn"))
    task: Any = field(default_factory=partial(default_of, "task", "auto"))
    data: Any = field(default_factory=partial(default_of, "data", "digits"))
    optimizer: Any = field(default_factory=partial(default_of, "optimizer", "sgd"))
    schedule: Any = field(default_factory=partial(default_of, "schedule", "cosine"))
    tuning: TuningConfig = field(default_factory=TuningConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    prove: ProveConfig = field(default_factory=ProveConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def uses_trained(self) -> bool:
        """Whether the model comes from a checkpoint, with task and data as they were, and nothing
        trains."""
        return self.mode in ("evaluate", "predict", "export")

    @property
    def words_to_resume(self) -> str:
        """What to type to resume the run. Code of your own has to be trusted again: SECURITY.md."""
        packages = ",".join(self.trusted_modules)
        return shlex.quote(word("run_dir", self.run_dir)) + (
            f" trusted_modules=[{packages}]" if packages else ""
        )


def built_in_directions() -> dict[str, str]:
    """The better direction, `max` or `min`, of each metric of the built-in tasks.

    A task of your own may say otherwise.
    """
    found = {}
    for option in OPTIONS["task"].values():
        found |= option.metrics
    return found


SECTIONS: dict[str, type] = {
    "launch": LaunchConfig,
    "train": TrainConfig,
    "tuning": TuningConfig,
    "checkpoint": CheckpointConfig,
    "predict": PredictConfig,
    "export": ExportConfig,
    "tracker": TrackerConfig,
    "prove": ProveConfig,
    "sweep": SweepConfig,
}
"""The sections that have one schema."""

SCALARS = tuple(name for name, f in Config.__dataclass_fields__.items() if "meaning" in f.metadata)
"""The keys of Config itself."""


def schema_of(section: str, name: str) -> type | None:
    """The dataclass of a section, or None if `name` is not an option of it."""
    return SECTIONS.get(section) or OPTIONS[section].get(name)
