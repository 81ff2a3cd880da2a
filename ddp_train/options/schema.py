"""The whole configuration: sections with one schema, and groups with several options.

An option of a group (`model=cnn`) is a dataclass in a module `config` beside its implementation,
found through `options.registry`. Its keys, what is true of it (does it have a fused implementation?
how large is the data set?) and its checks are fields, attributes and methods of its class, never
tables elsewhere. The base class of each group has what every option answers. Attributes without
annotation are not keys: they hold what is true of options that have no such key.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Union, cast

from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.options.key import AUTO, broken_rule, key, range_of
from ddp_train.options.problem import Problem
from ddp_train.options.registry import OPTIONS, default_of
from ddp_train.options.sections import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    LaunchConfig,
    PredictConfig,
    ProveConfig,
    SweepConfig,
    TrackerConfig,
    TrainConfig,
    TuningConfig,
)
from ddp_train.scored_sets import TEST, VALIDATION, full_name, in_order, is_name, key_of_set
from ddp_train.text import did_you_mean, shown, words_to_resume

LR_POWERS = {"linear": 1.0, "sqrt": 0.5}
"""Exponent of global_batch_size / lr_base_batch. linear: arXiv:1706.02677, for SGD; sqrt:
arXiv:1404.5997, also for LAMB."""


@dataclass
class StrategyConfig:
    """The way in which replicas are wrapped, and gradients exchanged."""

    name: str = "single"
    implementation: ClassVar[str] = ""
    """The class of the device and the keys of this option, `module:Class`."""
    has_process_group: ClassVar[bool] = False
    """Whether several processes may run, connected by torch.distributed."""
    spreads_over_gpus: ClassVar[bool] = False
    """Whether one process uses all visible GPUs."""
    has_buckets: ClassVar[bool] = False
    """Whether gradients are exchanged in buckets."""
    fixes_bits: ClassVar[bool] = False
    """Whether a run has the same bits on any number of processes."""
    capture_blocker: ClassVar[str] = ""
    """The reason why its step cannot be captured as a CUDA graph; "": it can."""
    sync_bn = find_unused_parameters = False
    comm_hook = "none"
    virtual_shards = cast("int | None", None)
    is_plain = False

    def can_run_on(self, processes: int) -> bool:
        """Tell whether the work of a step can be divided among so many processes."""
        return True

    def sizes_of_buckets(self, asked: str = "default") -> dict[str, Any]:
        """The sizes of buckets that are given, by their keys.

        asked: tuning.buckets.
        """
        return {}

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        count = run.config.process_count
        if not self.has_process_group and count > 1 and not run.may_change_size:
            yield Problem(
                f"strategy={self.name}",
                f"runs in one process, not in {count}",
                "use strategy=ddp, or launch.nproc_per_node=1 launch.nnodes=1",
            )

    def notices(self, run: RequestedRun) -> Iterator[str]:
        """Keys that have no effect here."""
        backend = run.asked.launch.backend
        if not self.has_process_group and backend != "auto":
            yield (
                f"launch.backend={backend} has no effect: strategy={self.name} runs in one process"
                " and opens no process group"
            )


@dataclass
class ModelConfig:
    """The network, its initial weights, and its parts that train. docs/guides/finetuning.md"""

    init_from: str | None = key(
        None,
        "start with the weights of a file (.safetensors, .pt), a run or a checkpoint; all names"
        " and shapes must fit the model",
        is_path=True,
    )
    init_ignore: list[str] = key(
        [],
        "globs over names of tensors that model.init_from skips, in the model and in the"
        " file: [head.*]",
    )
    freeze: list[str] = key(
        [],
        "globs over names of parameters that do not train, [layer1.*]; batch norms there stay in"
        " eval mode",
    )
    freeze_epochs: int | None = key(
        None,
        "epochs for which `freeze` holds; then these parameters train too; null: to the end",
        at_least=1,
    )
    name: str = "cnn"
    implementation: ClassVar[str] = ""
    """The function of the shape of a sample, the outputs and its keys that builds it,
    `module:function`."""
    is_custom: ClassVar[bool] = False
    """Whether it is a class of your own."""
    takes_images: ClassVar[bool | None] = None
    """Whether it has convolutions over images; None: unknown."""
    takes_tokens: ClassVar[bool | None] = None
    """Whether its inputs are numbers of tokens; None: unknown."""
    smallest_side: ClassVar[int] = 1
    """The smallest side of its images, in pixels."""
    channels_taken: ClassVar[tuple[int, ...]] = ()
    """The numbers of channels that its images may have; (): any."""
    fused = False
    weights = cast("str | None", None)

    def is_launch_bound(self, units: float) -> bool:
        """Tell whether a GPU runs its kernels faster than a host launches them.

        units: samples, or tokens, of a process in a step.
        """
        return False

    def worth_compiling(self) -> bool:
        """Tell whether torch.compile saves more in a long run than it costs at the start."""
        return False

    def has_batch_norm(self) -> bool | None:
        """Tell whether it has batch norms; None: unknown."""
        return None

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from self._misfits(run.config.data)
        if self.init_ignore and self.init_from is None and self.weights is None:
            yield Problem(
                f"model.init_ignore={shown(self.init_ignore)}",
                "has an effect only with model.init_from",
                "add model.init_from=PATH, or leave model.init_ignore out",
            )
        if self.freeze_epochs is not None and not self.freeze:
            yield Problem(
                f"model.freeze_epochs={self.freeze_epochs}",
                "has an effect only with model.freeze",
                "add 'model.freeze=[GLOB]', or leave model.freeze_epochs out",
            )

    def _misfits(self, data: DataConfig) -> Iterator[Problem]:
        """The first reason why the model cannot take the samples of a data set."""
        shape = data.image_shape()
        has_tokens = data.task == "language_model"
        if self.takes_images and data.is_regression:
            yield Problem(
                f"model={self.name}",
                f"needs images, and data={data.name} is a table",
                "use model=linear_regression or mlp",
            )
        elif has_tokens and self.takes_tokens is False:
            yield Problem(
                f"model={self.name}",
                f"does not take token ids, and data={data.name} gives nothing else",
                "use model=gpt",
            )
        elif self.takes_tokens and not has_tokens and not data.is_custom:
            yield Problem(
                f"model={self.name}",
                f"needs tokens, and data={data.name} has none",
                "use data=text",
            )
        elif shape and shape[1] < self.smallest_side:
            yield Problem(
                f"data.image_size={shape[1]}",
                f"model={self.name} needs {self.smallest_side} pixels a side",
                f"use data.image_size={self.smallest_side} or more",
            )
        elif shape and self.channels_taken and shape[0] not in self.channels_taken:
            allowed = " or ".join(map(str, self.channels_taken))
            yield Problem(
                f"data.channels={shape[0]}",
                f"model={self.name} takes images of {allowed} channels",
                "use data.channels=3",
            )

    def notices(self, run: RequestedRun) -> Iterator[str]:
        """Keys that have no effect here."""
        config = run.config
        resume = config.checkpoint.resume
        names_a_checkpoint = resume not in ("auto", "never")
        if self.init_from is not None and config.mode == "train" and names_a_checkpoint:
            yield (
                f"model.init_from={self.init_from} has no effect:"
                f" the weights are those of checkpoint.resume={resume}"
            )
        epochs = config.train.most_epochs
        if self.freeze_epochs is not None and epochs and self.freeze_epochs >= epochs:
            yield (
                f"model.freeze_epochs={self.freeze_epochs} has no effect: the run ends after"
                f" train.epochs={epochs}"
            )
        if config.strategy.sync_bn and self.has_batch_norm() is False:
            yield f"strategy.sync_bn=true has no effect: model={self.name} has no batch norm here"
        if run.asked.tuning.channels_last is True and self.takes_images is False:
            yield f"tuning.channels_last=true has no effect: model={self.name} has no convolution"


@dataclass
class TaskConfig:
    """The task of a model, with its loss and its metrics."""

    name: str = "auto"
    implementation: ClassVar[str] = ""
    """The place of its class, `module:Class`; "": no task of ours has the name."""
    is_custom: ClassVar[bool] = False
    """Whether it is a class of your own."""
    metrics: ClassVar[dict[str, str]] = {}
    """The metrics of an evaluation, each with its better direction, `max` or `min`; {}: unknown
    before the task is loaded."""
    sample_tokens = 0
    sample_prompt = ""
    sample_temperature = 1.0

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        data = run.config.data
        fitting = data.fitting_task
        if fitting is not None and self.name not in ("auto", "custom", fitting):
            targets = {
                "regression": "numbers",
                "classification": "class labels",
                "language_model": "tokens",
            }
            yield Problem(
                f"task={self.name}",
                f"data={data.name} has {targets[fitting]} as targets",
                f"use task={fitting}",
            )


@dataclass
class DataConfig:
    """The samples that train and score, and how they are drawn."""

    name: str = "digits"
    implementation: ClassVar[str] = ""
    """The function of its keys and the seed that opens the training and the test split,
    `module:function`."""
    set_implementation: ClassVar[str] = ""
    """The function that opens a further set, `module:function`: of key and value that name it, for
    messages, the value, the training set and its keys."""
    is_custom: ClassVar[bool] = False
    """Whether it is a class of your own."""
    is_regression: ClassVar[bool | None] = None
    """Whether its targets are numbers, not class labels; None: unknown."""
    task: ClassVar[str | None] = None
    """The task that task=auto means with it; None: the targets of a batch tell."""
    class_folders: ClassVar[tuple[str, ...]] = ()
    """Folders with one sub-folder per class that must exist, below `root`."""
    files: ClassVar[tuple[str, ...]] = ()
    """Files that must exist, below `root`."""
    images: ClassVar[tuple[int, int, int] | None] = None
    """Number, channels and side of a fixed set of images that is held in memory."""
    placement = "host"
    root = decode = ""
    path = cast("str | None", None)
    tokenizer = cast("str | None", None)
    download = False
    validation = cast("float | None", None)
    validation_sets = cast("dict[str, Any]", {})
    test_sets = cast("dict[str, Any]", {})
    weights = cast("str | None", None)
    sampler = cast("dict[str, Any]", {})
    batch_sampler = cast("dict[str, Any]", {})
    drop_last = False
    limit = cast("int | None", None)
    batch_by = "samples"
    mixup = cutmix = random_erasing = 0.0
    length = 1

    @property
    def fitting_task(self) -> str | None:
        """The built-in task that fits its targets, as far as is known before they are read."""
        by_targets = {True: "regression", False: "classification", None: None}
        return self.task or by_targets[self.is_regression]

    def samplers(self) -> dict[str, dict[str, Any]]:
        """Samplers of the user's by their keys, {} where there is none."""
        return {"data.sampler": self.sampler, "data.batch_sampler": self.batch_sampler}

    def has_validation(self) -> bool | None:
        """Tell whether there will be a validation set; None: only the data know."""
        return bool(self.validation or self.validation_sets)

    def named_sets(self) -> dict[str, Any]:
        """The value of each further set in the config, by its full name: validation/noisy."""
        named = {}
        for kind, sets in {VALIDATION: self.validation_sets, TEST: self.test_sets}.items():
            for name, value in sets.items():
                named[full_name(kind, name)] = value
        return named

    def sets_by_key(self) -> dict[str, Any]:
        """The same by their keys: data.validation_sets.noisy."""
        return {key_of_set(name): given for name, given in self.named_sets().items()}

    def sets(self) -> list[str] | None:
        """The names of the sets that are scored; None: only the data know.

        While a run trains those of validation are, without them those of test; the first selects.
        """
        validation = [VALIDATION] if self.validation else []
        return in_order([*validation, TEST, *self.named_sets()])

    def writes_files(self) -> bool:
        """Tell whether opening it writes files, a download for example.

        One process of each host does that first.
        """
        return bool(self.download)

    def in_memory_bytes(self) -> int | None:
        """The size of a data set that is held in memory; None: it is not.

        A batch is one indexing operation then, which loader processes do not make faster.
        """
        if self.images:
            return self.images[0] * self.images[1] * self.images[2] ** 2
        return None

    def image_shape(self) -> tuple[int, int] | None:
        """Channels and side of its images; None: no images, or unknown."""
        return self.images[1:] if self.images else None

    def sample_bytes(self) -> int:
        """Bytes of the inputs of a sample, as loader processes hand them over; 0: unknown."""
        shape = self.image_shape()
        return 4 * shape[0] * shape[1] ** 2 if shape else 0

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from self._placement_problems(run.config.tuning.num_workers)
        yield from self._mixing_problems(run.config.task)
        yield from self._name_problems()
        if self.validation and self.task == "language_model":
            yield Problem(
                f"data.validation={self.validation:g}",
                f"windows of data={self.name} overlap, so none can be held out for validation",
                "leave data.validation out. A test set is held out already (data.test_part); to"
                " validate with another text, use data.validation_sets.other=FILE",
            )
        if self.weights and self.batch_by == "tokens":
            yield Problem(
                f"data.weights={self.weights}",
                "contradicts data.batch_by=tokens: the number of steps would depend on the draws",
                "give one of them",
            )
        yield from self._sampler_problems()
        has_labels = not self.is_regression and self.task != "language_model"
        if self.weights == "balanced" and not has_labels:
            yield Problem(
                f"data.weights={self.weights}",
                f"data={self.name} has no class labels",
                "use data.weights=FILE with a weight for each sample, or leave data.weights out",
            )

    def _sampler_problems(self) -> Iterator[Problem]:
        if self.drop_last and self.batch_by == "tokens":
            yield Problem(
                "data.drop_last=true",
                "contradicts data.batch_by=tokens, whose batches differ in size",
                "leave it out",
            )
        for option, given in self.samplers().items():
            if given:
                yield from self._problems_of_sampler(option, given)
        if self.batch_sampler and self.drop_last:
            yield Problem(
                "data.drop_last=true",
                "contradicts data.batch_sampler, which decides on the batches",
                "leave it out",
            )

    def _problems_of_sampler(self, option: str, given: dict[str, Any]) -> Iterator[Problem]:
        target = given.get("_target_")
        if not isinstance(target, str):
            rule = "must be a class with its arguments"
            yield Problem(f"{option}={shown(given)}", rule, f"use {option}._target_=package.Name")
            return
        found = f"{option}._target_={target}"
        if target.rpartition(".")[2] == "DistributedSampler":
            yield Problem(
                found,
                "would divide the samples among the processes, which the launcher does already",
                "leave it out",
            )
        for name, value in given.items():
            if isinstance(value, dict) and "_target_" in value:
                typed = shlex.quote(f"data.sampler={shown(value)}")
                yield Problem(
                    f"{option}.{name}={shown(value)}",
                    f"would be passed to {option}._target_ as a dict",
                    f"use {typed}, from which the run makes the batches (with"
                    " data.drop_last=true only full ones), or a batch sampler of your own that"
                    " creates this object itself",
                )
        others = {
            f"data.weights={self.weights}": self.weights is not None,
            "data.batch_by=tokens": self.batch_by == "tokens",
            "data.batch_sampler": option == "data.sampler" and self.batch_sampler,
        }
        for other, is_given in others.items():
            if is_given:
                yield Problem(
                    found,
                    f"contradicts {other}, which also decides on the samples of a batch",
                    "give one of them",
                )

    def _name_problems(self) -> Iterator[Problem]:
        """Further sets whose names would not stand in a metric, validation/noisy.accuracy."""
        for key_name, sets in {
            "validation_sets": self.validation_sets,
            "test_sets": self.test_sets,
        }.items():
            for name in sets:
                if not is_name(name):
                    yield Problem(
                        f"data.{key_name}={shown(dict(sets))}",
                        f"{shown(name)} must be a name of letters, digits, _ and -",
                    )

    def _placement_problems(self, workers: int | str) -> Iterator[Problem]:
        if self.placement != "device":
            return
        if self.in_memory_bytes() is None:
            yield Problem(
                "data.placement=device",
                f"data={self.name} is not held in memory",
                "use data.placement=host",
            )
        elif workers:
            yield Problem(
                f"tuning.num_workers={workers}",
                "data.placement=device does not use loader processes",
                "use tuning.num_workers=0, or data.placement=host",
            )

    def _mixing_problems(self, task: TaskConfig) -> Iterator[Problem]:
        for name, alpha in {"mixup": self.mixup, "cutmix": self.cutmix}.items():
            if alpha and task.name not in ("auto", "classification"):
                yield Problem(
                    f"data.{name}={alpha:g}",
                    f"mixes the labels of two classes, which task={task.name} may not accept",
                    f"use task=classification, or data.{name}=0",
                )
        if (self.mixup or self.cutmix) and self.batch_by == "tokens":
            yield Problem(
                "data.batch_by=tokens",
                "samples of different lengths cannot be mixed",
                "use data.mixup=0 data.cutmix=0",
            )

    def missing(self, config: Config) -> Iterator[Problem]:
        """Problems of what this host lacks of the data set. Nothing is written."""
        weights = None if config.uses_trained else self.weights  # nothing trains
        if weights not in (None, "balanced") and not Path(weights).is_file():
            yield Problem(
                f"data.weights={weights}",
                "no such file",
                "use data.weights=balanced, or the path of a .npy or text file",
            )


@dataclass
class OptimizerConfig:
    """The optimizer step, and the groups of its parameters. docs/guides/finetuning.md"""

    groups: list[dict[str, Any]] = key(
        [],
        "other arguments for some parameters, [{match: head.*, lr: 1e-2, weight_decay: 0}];"
        " match is a glob over their names, and the first match wins",
        example="[{match: head.*, lr: 0.01}]",
    )
    layer_decay: float | None = key(
        None,
        "each layer has the learning rate of the layer after it, times this factor. The layers"
        " are the members of the outermost nn.Sequential, ModuleList or ModuleDict that has two"
        " or more of one class; modules before these are the first layer, modules after these"
        " the last. In a model without one, its children are the layers",
        above=0,
        at_most=1,
    )
    name: str = "sgd"
    implementation: ClassVar[str] = ""
    """The place of its class, `module:Class`."""
    is_custom: ClassVar[bool] = False
    """Whether it is a class of your own."""
    has_fused: ClassVar[bool] = False
    """Whether torch 2.11 to 2.15 have a fused implementation."""
    can_be_captured: ClassVar[bool] = False
    """Whether its step runs without waiting for the host: a flag on the device skips it, its rate
    may lie there."""
    adapts_per_layer: ClassVar[bool] = False
    """Whether the learning rate is adapted to each layer."""
    learning_rates: ClassVar[tuple[str, ...]] = ("lr",)
    """Keys that `lr_scaling` multiplies."""
    beside_arguments: ClassVar[tuple[str, ...]] = (
        "name",
        "lr_scaling",
        "lr_base_batch",
        "groups",
        "layer_decay",
    )
    """Keys that are not arguments of its class."""
    lr_scaling = "none"
    lr_base_batch = 256

    def split_groups(self, groups: list[Any], model: Any, trained: dict[str, Any]) -> list[Any]:
        """Groups of parameters as the optimizer wants them.

        model: the module. trained: its parameters that train at any time, by name.
        """
        return groups

    def at_batch(self, global_batch_size: int) -> Any:
        """The same with its learning rates for a global batch, as `lr_scaling` says.

        The frozen config keeps what was asked.
        """
        if self.lr_scaling == "none":
            return self
        ratio = global_batch_size / self.lr_base_batch
        factor = ratio ** LR_POWERS[self.lr_scaling]
        changes = self._scaled(vars(self), factor)
        groups = [group | self._scaled(group, factor) for group in self.groups]
        return replace(self, **changes, groups=groups, lr_scaling="none")

    def _scaled(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        return {name: values[name] * factor for name in self.learning_rates if name in values}

    def rates_in_words(self, built: Any) -> str:
        """The words of the plan after the learning rate. built: the optimizer."""
        return ""

    def group_rules(self) -> dict[str, Mapping[str, Any]] | None:
        """The arguments that a group may have, each with the rules of its key; None: unknown."""
        numbers = [f for f in fields(self) if f.type in ("float", "float | None")]
        return {f.name: f.metadata for f in numbers if f.name != "layer_decay"}

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        for number, group in enumerate(self.groups):
            yield from self._group_problems(f"optimizer.groups[{number}]", group)

    def _group_problems(self, place: str, group: dict[str, Any]) -> Iterator[Problem]:
        match = group.get("match")
        found = f"{place}={shown(group)}"
        if not isinstance(match, str) or not match:
            yield Problem(
                found, "needs match, a glob over names of parameters", "add match: head.*"
            )
            return
        arguments = {name: value for name, value in group.items() if name != "match"}
        if not arguments:
            yield Problem(found, "changes nothing", "give it lr: 0.01, or another argument")
        rules = self.group_rules()
        for name, value in arguments.items():
            if rules is not None and name not in rules:
                known = f"optimizer={self.name} takes {', '.join(rules)} for a group"
                guess = did_you_mean(name, list(rules))
                yield Problem(found, f"no argument {name}", f"{known}{guess}")
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield Problem(f"{place}.{name}={shown(value)}", "must be a number")
                continue
            broken = broken_rule(value, rules[name] if rules else {})
            if broken:
                yield Problem(f"{place}.{name}={shown(value)}", broken)

    def notices(self, run: RequestedRun) -> Iterator[str]:
        """Keys that have no effect here."""
        return iter(())


@dataclass
class ScheduleConfig:
    """Learning rates as functions of the optimizer step, which is the same on all ranks."""

    name: str = "constant"
    is_custom: ClassVar[bool] = False
    """Whether it is a class or function of your own, or one of torch's schedulers."""
    spans_the_run: ClassVar[bool] = False
    """Whether the learning rate of a step depends on the number of steps of the run."""
    cycles_momentum = False
    metric = "auto"
    warmup_steps: int = key(0, "optimizer steps of linear warm-up from 0", at_least=0)
    warmup_epochs: float | None = key(
        None, "length of the warm-up in epochs, in place of warmup_steps", above=0
    )
    warmup_at_most: float | None = key(
        None,
        "the warm-up is cut to this fraction of the run; null: a warm-up as long as the run is"
        " an error",
        above=0,
        below=1,
    )

    def warmup_asked(self, steps_per_epoch: int) -> int:
        """The optimizer steps of the warm-up, before `warmup_at_most` cuts it."""
        if self.warmup_epochs is None:
            return self.warmup_steps
        return round(self.warmup_epochs * steps_per_epoch)

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        train = run.config.train
        if self.warmup_epochs is not None and self.warmup_steps:
            yield Problem(
                f"schedule.warmup_epochs={self.warmup_epochs:g}",
                f"contradicts schedule.warmup_steps={self.warmup_steps}",
                "give one of them",
            )
        if self.warmup_at_most is not None:
            return  # a warm-up that is too long is cut
        by_epochs = None if self.warmup_steps else self.warmup_epochs
        epochs = train.most_epochs
        if by_epochs is not None and epochs and by_epochs >= epochs:
            yield Problem(
                f"schedule.warmup_epochs={by_epochs:g}",
                f"must end before the run, which has train.epochs={epochs}",
                f"use schedule.warmup_epochs below {epochs}",
            )
        if train.max_steps is not None and self.warmup_steps >= train.max_steps:
            yield Problem(
                f"schedule.warmup_steps={self.warmup_steps}",
                f"must end before the run, which has train.max_steps={train.max_steps}",
                f"use schedule.warmup_steps below {train.max_steps}",
            )

    def notices(self, run: RequestedRun) -> Iterator[str]:
        """Keys that have no effect here."""
        return iter(())


@dataclass
class Config:
    """One whole run."""

    mode: str = key(
        "train",
        "evaluate, predict and export use a checkpoint; study compares runs; doctor examines"
        " this host; prove tests whether the result depends on the number of processes",
        choices=("train", "evaluate", "predict", "export", "study", "doctor", "prove"),
    )
    name: str = key(
        "default",
        "name of the run, whose folder is runs/NAME/... unless run_dir is given",
        is_path=True,
    )
    run_dir: str | None = key(
        None,
        "directory of the run; a run that is already there resumes, and for that run_dir=PATH"
        " alone is enough",
        is_path=True,
    )
    seed: int = key(0, "seed of all random numbers", at_least=0, below=2**63)
    device: str = key(
        "auto", "where to compute; auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu")
    )
    deterministic: Union[bool, str] = key(
        "auto",
        "the same bits in each repetition of a run; auto: on CPU and with strategy=ordered",
        **AUTO,
    )
    objective: str = key(
        "auto",
        "what a sweep optimizes: validation.NAME or test.NAME of any metric, samples_per_second or"
        " seconds; auto: the loss of the validation set, or of the test set if there is none",
    )
    metrics: list[dict[str, Any]] = key(
        [],
        "further metrics of evaluations, classes of torchmetrics: [{_target_: torchmetrics.NAME,"
        " ARGUMENT: ...}]; an item may also have name: NAME and better: max or min",
    )
    hooks: list[Any] = key(
        [],
        "your classes, called with (job, run_dir, world): package.Name, or {_target_: package.Name,"
        " ARGUMENT: ...}; called between steps, or entered as context managers around training",
        example="[package.Name] or [{_target_: package.Name, argument: 1}]",
    )
    trusted_modules: list[str] = key(
        [], "packages of your own that `_target_` in a checkpoint's config may load code from"
    )
    reasons: dict[str, str] = field(default_factory=dict)
    """The reason for the value that `auto` chose, by the name of the switch. Not a key: filled in
    when `auto` is resolved."""
    chosen_keys: list[str] = field(default_factory=list)
    """The keys, dotted, that were `auto`. Likewise."""
    process_range: str | None = None
    """The value of launch.nproc_per_node if that was a range. Not a key: filled in when `auto` is
    resolved."""
    process_counts: list[int] = field(default_factory=list)
    """The numbers in that range with which the run may continue. Likewise."""
    host_range: str | None = None
    """The value of launch.nnodes, or torchrun's --nnodes, if that was a range. Likewise."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    strategy: StrategyConfig = field(default_factory=partial(default_of, "strategy", "ddp"))
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=partial(default_of, "model", "cnn"))
    task: TaskConfig = field(default_factory=partial(default_of, "task", "auto"))
    data: DataConfig = field(default_factory=partial(default_of, "data", "digits"))
    optimizer: OptimizerConfig = field(default_factory=partial(default_of, "optimizer", "sgd"))
    schedule: ScheduleConfig = field(default_factory=partial(default_of, "schedule", "cosine"))
    tuning: TuningConfig = field(default_factory=TuningConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    prove: ProveConfig = field(default_factory=ProveConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def uses_trained(self) -> bool:
        """Whether model, task and data are those of a checkpoint, and nothing trains."""
        return self.mode in ("evaluate", "predict", "export")

    @property
    def process_count(self) -> int:
        """Processes over all hosts, once `auto` is resolved."""
        return int(self.launch.nproc_per_node) * int(self.launch.nnodes)

    @property
    def words_to_resume(self) -> str:
        """The overrides that resume the run."""
        return words_to_resume(self.run_dir, self.trusted_modules)


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
    "evaluate": EvaluateConfig,
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


@dataclass(frozen=True)
class RequestedRun:
    """A run before it starts, for the checks of its sections and options."""

    asked: Config
    """The config as the user wrote it."""
    config: Config
    """The same, with a value in place of each `auto`."""
    hardware: Hardware
    world: World | None = None
    """Under torchrun: this process among all."""

    @property
    def may_change_size(self) -> bool:
        """Whether a range of processes or hosts was asked for: `config.processes` checks it."""
        launch = self.asked.launch
        return bool(range_of(launch.nproc_per_node) or range_of(launch.nnodes))
