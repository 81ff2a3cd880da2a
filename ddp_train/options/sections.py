"""The sections of a run that have one schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from ddp_train.options.key import AUTO, key

DEFAULT_EPOCHS = 30


@dataclass
class LaunchConfig:
    nproc_per_node: Union[int, str] = key(
        "auto",
        "processes per host; auto: one per GPU, or 2 on CPU; LOW:HIGH, as 2:8 or 2:auto: the"
        " number may change during the run",
        at_least=1,
        may_be_range=True,
        **AUTO,
    )
    nnodes: Union[int, str] = key(
        1,
        "number of hosts; LOW:HIGH, as 2:3: hosts may leave and join during the run",
        at_least=1,
        may_be_range=True,
    )
    rdzv_endpoint: str | None = key(
        None, "HOST:PORT of one of the hosts, where all hosts of a run meet"
    )
    max_restarts: int = key(
        0,
        "most restarts after failures; the count starts again after each new step that is kept"
        " or saved",
        at_least=0,
    )
    backend: str = key(
        "auto",
        "library of the collectives; auto: nccl on GPUs, gloo on CPU",
        choices=("auto", "nccl", "gloo"),
    )
    timeout_seconds: float = key(
        600.0,
        "the run fails if a process, or a collective, makes no progress for this many seconds",
        above=0,
        at_most=1e6,
    )
    join_timeout_seconds: int = key(
        600,
        "longest wait for other hosts and processes before the first step",
        at_least=1,
        at_most=10**6,
    )
    grace_seconds: float = key(
        30.0,
        "time to save a checkpoint between a stop request and SIGKILL",
        at_least=0,
        at_most=1e6,
    )
    threads_per_process: Union[int, str] = key(
        "auto",
        "CPU threads of torch; auto: cores / processes, at most 4 with GPUs",
        at_least=1,
        **AUTO,
    )
    fork_server: bool = key(
        True, "fork workers from a process that has imported torch: a faster start"
    )
    page: bool = key(
        True, "write report.html into the run directory, while the run lives and at its end"
    )


@dataclass
class EarlyStoppingConfig:
    patience: int | None = key(
        None,
        "stop after this many evaluations in a row without improvement; null: never",
        at_least=1,
    )
    metric: str = key(
        "auto",
        "the metric that must improve, validation.NAME or test.NAME; auto: the loss of"
        " the validation set, or of the test set if there is none",
    )
    min_delta: float = key(
        0.0, "smallest change of the metric that counts as an improvement", at_least=0
    )


@dataclass
class TrainConfig:
    global_batch_size: int = key(
        96,
        "samples per optimizer step, over all processes; tokens with data.batch_by=tokens",
        at_least=1,
    )
    accumulation_steps: int = key(1, "micro-batches per optimizer step on each process", at_least=1)
    epochs: int | None = key(
        None,
        "passes over the training set; null: 30, or as many as train.max_steps takes",
        at_least=1,
    )
    max_steps: int | None = key(
        None,
        "stop after this many optimizer steps; if train.epochs is given too, what comes first"
        " ends the run",
        at_least=1,
    )
    max_minutes: float | None = key(
        None,
        "finish normally after this many minutes of training; such a run is not reproducible",
        above=0,
    )
    max_grad_norm: float | None = key(None, "clip the global gradient norm to this value", above=0)
    on_non_finite: str = key(
        "stop",
        "at a NaN or infinite loss: stop the run, or skip that step",
        choices=("stop", "skip"),
    )
    log_every_steps: int = key(50, "optimizer steps between two lines of metrics.jsonl", at_least=1)
    evaluate_every_epochs: int | None = key(
        None,
        "epochs between evaluations; null: 1, or none with evaluate_every_steps; the last"
        " step is always evaluated",
        at_least=1,
    )
    evaluate_every_steps: int | None = key(
        None, "optimizer steps between evaluations, in place of evaluate_every_epochs", at_least=1
    )
    evaluate_batch_size: int = key(
        200, "samples per forward pass of an evaluation, on each process", at_least=1
    )
    ema_decay: float | None = key(
        None,
        "decay of an exponential moving average of the weights, which is scored too; null: none",
        above=0,
        below=1,
    )
    ema_warmup: bool = key(
        False,
        "begin with a smaller decay: at most (1 + n) / (10 + n) after n updates of the average",
    )
    profile_steps: str | None = key(
        None, "FIRST:LAST, the steps that torch's profiler traces; null: none", is_span=True
    )
    memory_history: bool = key(
        False,
        "record which code allocates GPU memory, for the snapshot that is written at an"
        " out-of-memory error",
    )
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)

    @property
    def most_epochs(self) -> int | None:
        """The passes over the training set after which the run ends; None: its steps end it."""
        if self.epochs is None and self.max_steps is None:
            return DEFAULT_EPOCHS
        return self.epochs


@dataclass
class CheckpointConfig:
    every_steps: int | None = key(
        None,
        "optimizer steps between two checkpoints; null: a checkpoint after each epoch, or in a"
        " run without epochs after each evaluation",
        at_least=1,
    )
    every_minutes: float | None = key(
        None,
        "also save whenever this many minutes have passed, after the next line of metrics.jsonl",
        above=0,
    )
    keep: int = key(2, "number of newest checkpoints to keep", at_least=1)
    best: bool = key(
        False, "save after every evaluation, keep the best checkpoint too, and link it as `best`"
    )
    best_metric: str = key(
        "auto",
        "metric that the best checkpoint is chosen by, validation.NAME or test.NAME; auto: accuracy"
        " where there is one, else loss",
    )
    resume: str = key(
        "auto",
        "auto: the newest valid checkpoint in run_dir; never; or the path of a checkpoint or run",
        is_path=True,
    )
    which: str = key(
        "auto",
        "which checkpoint of checkpoint.resume=RUN; auto: the last when training, else the best if"
        " there is one",
        choices=("auto", "best", "last"),
    )
    mirror: str | None = key(
        None,
        "URL of a folder to which checkpoints are copied; a run that has no checkpoint"
        " of its own resumes from there",
    )
    average: bool = key(
        False, "for mode=predict and export: the average of the weights (train.ema_decay)"
    )


@dataclass
class EvaluateConfig:
    sets: list[str] = key(
        [], "the sets that mode=evaluate scores: [validation, test/NAME]; []: all test sets"
    )


@dataclass
class PredictConfig:
    split: str = key(
        "test",
        "the set whose samples mode=predict predicts: train, validation, test, validation/NAME"
        " or test/NAME",
    )
    format: str = key(
        "npz",
        "format of the file of predictions; parquet needs pyarrow",
        choices=("npz", "parquet"),
    )


@dataclass
class ExportConfig:
    formats: list[str] = key(
        ["torch"],
        "what mode=export writes; torch: a .pt2 of torch.export; onnx needs the packages onnx,"
        " onnxscript and onnxruntime",
        choices=("torch", "onnx"),
    )


@dataclass
class ProveConfig:
    """The runs and checks that mode=prove makes of a job. docs/operate/prove.md"""

    samples: int = key(
        64,
        "samples of the largest global batch that is tried; an epoch has 2.5 times as many",
        at_least=4,
    )
    steps: int = key(6, "optimizer steps of each real run; it is killed half-way", at_least=4)
    seconds: float = key(
        600.0, "after this time no further check is started, and the proof is incomplete", above=0
    )
    runs: bool = key(
        True, "also start several processes; false: only the checks that one process can make"
    )


@dataclass
class SweepConfig:
    """Trials of a sweep (-m) at the same time. docs/guides/sweeps.md"""

    gpus_per_trial: int | None = key(
        None, "GPUs of each trial of a sweep; null: as many as launch.nproc_per_node", at_least=1
    )
    processes_at_once: Union[int, str] = key(
        1,
        "trials of a sweep at a time on CPU; auto: cores / (processes x threads of a trial)",
        at_least=1,
        **AUTO,
    )
    baseline: bool = key(
        False, "run one trial again after the others, alone, to measure what sharing the host costs"
    )


@dataclass
class TuningConfig:
    """Performance tips, each one switch. `auto` is resolved for the hardware, and printed."""

    name: str = "recommended"
    precision: str = key(
        "auto",
        "number format; bf16 and fp16 by autocast; auto: bf16 on GPUs that support it, but fp32 for"
        " task=regression",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
    )
    num_workers: Union[int, str] = key(
        "auto",
        "loader processes per rank, or threads that read files for data.decode=gpu; auto: 0 for"
        " data held in memory",
        at_least=0,
        **AUTO,
    )
    prefetch_factor: int = key(
        2,
        "batches prepared ahead by each loader process, or by all threads of data.decode=gpu",
        at_least=1,
        at_most=10_000,
    )
    persistent_workers: bool = key(
        True, "keep the loader processes of an evaluation for the next one"
    )
    pin_memory: Union[bool, str] = key("auto", "page-locked batches; auto: on GPUs", **AUTO)
    non_blocking: Union[bool, str] = key(
        "auto", "asynchronous copies to the GPU; auto: on GPUs", **AUTO
    )
    copy_stream: Union[bool, str] = key(
        "auto", "copy batches to the GPU in a separate CUDA stream; auto: on GPUs", **AUTO
    )
    channels_last: Union[bool, str] = key(
        "auto", "NHWC memory format; auto: convolutions on GPUs", **AUTO
    )
    cudnn_benchmark: Union[bool, str] = key(
        "auto", "let cuDNN choose algorithms by timing; auto: with one GPU per process", **AUTO
    )
    tf32: Union[bool, str] = key("auto", "TensorFloat-32 matrix products; auto: on GPUs", **AUTO)
    compile: Union[bool, str] = key(
        "auto", "torch.compile; auto: large models on GPUs, in long runs", **AUTO
    )
    compile_mode: str = key(
        "default",
        "mode of torch.compile; reduce-overhead and max-autotune capture CUDA graphs themselves",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    buckets: str = key(
        "auto",
        "gradient buckets of DDP: default (25 MiB, or the size that `strategy` sets), large (125"
        " MiB), one, or by_flops (large if a step has few FLOPs for each byte of gradients, else"
        " one). torch.compile makes a graph for each bucket. auto over NVLink: by_flops if the"
        " step is captured, else one",
        choices=("auto", "default", "large", "one", "by_flops"),
    )
    triton_kernels: Union[bool, str] = key(
        "auto",
        "our own kernels: max pooling, the loss of large vocabularies, images held on the GPU;"
        " auto: on GPUs",
        **AUTO,
    )
    conv_sums: bool = key(
        False,
        "let each convolution compute the sums of the batch norm after it (cuDNN, package"
        " nvidia-cudnn-frontend); only for compiled models in fp16 or bf16",
    )
    activation_checkpointing: list[str] = key(
        [],
        "classes of blocks that recompute their activations in the backward pass, for example"
        " [Bottleneck]",
    )
    cuda_graph: Union[bool, str] = key(
        "auto",
        "capture training steps as a CUDA graph; auto: small and compiled models on GPUs",
        **AUTO,
    )
    rehearse: bool = key(
        False,
        "compile and capture before the first step, in steps that are undone, so that the first"
        " epoch is as fast as the others",
    )
    gc_freeze: bool = key(
        True, "exclude the objects that exist before the model is built from garbage collection"
    )
    bias_lint: bool = key(
        True, "report each bias directly before a norm layer, which subtracts it again"
    )
    optimizer: str = key(
        "auto",
        "implementation of the optimizer; auto: fused on GPUs if torch has it, else foreach;"
        " default: torch or your class decides",
        choices=("auto", "loop", "foreach", "fused", "default"),
    )


@dataclass
class TrackerConfig:
    """Experiment trackers, written by rank 0. docs/operate/tracking.md

    `tracker=tensorboard`, `tracker=[wandb,mlflow]`, or yours,
    `tracker=[{_target_: my_package.MyTracker}]`.
    """

    classes: dict[str, Any] = key(
        {}, "the class of each tracker by its name, {wandb: {_target_: package.Class, argument: 1}}"
    )
    project: str = key("ddp-train", "project in wandb, experiment in mlflow")
    details: bool = key(
        False, "for TensorBoard: histograms of weights, a batch of images, the graph"
    )
