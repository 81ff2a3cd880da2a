"""Every key that exists, with its type, its default, its rule and its meaning. The reference of the config.

A group with several options (`model=cnn|mlp|...`) has one dataclass per option; its `name` says which one it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union


def key(default: Any, meaning: str, **rules: Any) -> Any:
    """A field with its meaning and its rules.

    Rules: `at_least`, `above`, `at_most`, `below` (numbers), `choices` (all that is allowed), `words` (strings allowed
    beside numbers or booleans, "auto" for example), `may_be_empty` (strings).
    """
    metadata = {"meaning": meaning, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class LaunchConfig:
    nproc_per_node: Union[int, str] = key(
        "auto", "processes per host; auto: one per GPU, 2 without", at_least=1, words=("auto",)
    )
    nnodes: int = key(1, "hosts", at_least=1)
    rdzv_endpoint: str | None = key(None, "host:port where several hosts meet")
    max_restarts: int = key(0, "how often a failed run is started again before it gets to a new checkpoint", at_least=0)
    backend: str = key("auto", "auto: nccl on GPUs, gloo on CPU", choices=("auto", "nccl", "gloo"))
    timeout_seconds: float = key(
        600.0, "the longest a process may stay where it is, and a collective wait for others", above=0, at_most=1e6
    )
    join_timeout_seconds: int = key(
        600, "how long hosts and processes wait for each other before the first step", at_least=1, at_most=10**6
    )
    grace_seconds: float = key(
        30.0, "from a request to stop, or a failure while a checkpoint is written, to SIGKILL", at_least=0, at_most=1e6
    )
    threads_per_process: Union[int, str] = key(
        "auto", "CPU threads of torch; auto: cores / processes, at most 4 with GPUs", at_least=1, words=("auto",)
    )
    fork_server: bool = key(
        True, "fork the processes from one that imports torch meanwhile; false: each imports it by itself"
    )


@dataclass
class TrainConfig:
    global_batch_size: int = key(96, "samples per optimizer step, over all processes", at_least=1)
    accumulation_steps: int = key(1, "micro-batches per optimizer step on each process", at_least=1)
    reduction: str = key(
        "all_reduce",
        "of gradients: torch's own, or ordered, whose bits are the same on any number of processes (slower)",
        choices=("all_reduce", "ordered"),
    )
    virtual_shards: int = key(8, "parts of a global batch with reduction=ordered, a power of two", at_least=1)
    epochs: int = key(30, "passes over the training set", at_least=1)
    max_steps: int | None = key(None, "stop after so many optimizer steps", at_least=1)
    max_grad_norm: float | None = key(None, "clip the global gradient norm to this", above=0)
    on_non_finite: str = key("stop", "a loss that is NaN or infinite: stop, or skip the step", choices=("stop", "skip"))
    loss: str = key(
        "auto",
        "cross_entropy for class labels, mse for numbers; naming one makes sure of it",
        choices=("auto", "cross_entropy", "mse"),
    )
    label_smoothing: float = key(0.0, "of the cross entropy", at_least=0, below=1)
    log_every_steps: int = key(50, "optimizer steps between two lines of metrics.jsonl", at_least=1)
    evaluate_every_epochs: int = key(1, "epochs between two evaluations; the last is always evaluated", at_least=1)
    evaluate_batch_size: int = key(200, "samples per forward pass in evaluation, on one process", at_least=1)


@dataclass
class CheckpointConfig:
    every_steps: int | None = key(None, "optimizer steps between two checkpoints; null: one per epoch", at_least=1)
    every_minutes: float | None = key(None, "a checkpoint at the next logging interval after so long, too", above=0)
    keep: int = key(2, "how many of the newest checkpoints stay", at_least=1)
    best: bool = key(False, "save after every evaluation, and keep the best checkpoint beside the newest")
    resume: str = key("auto", "auto: the newest valid one in run_dir; never; or the path of a checkpoint or a run")


@dataclass
class TuningConfig:
    """Performance tips, each one switch. `auto` is resolved for the device, and printed."""

    name: str = "recommended"
    precision: str = key(
        "auto",
        "fp32, bf16 or fp16 (autocast), fp64; auto: bf16 on GPUs that have it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
    )
    num_workers: Union[int, str] = key(
        "auto",
        "loader processes, or decoding threads, per rank; auto: 0 for data held in memory",
        at_least=0,
        words=("auto",),
    )
    prefetch_factor: int = key(2, "batches each loader process prepares ahead, or all threads", at_least=1)
    persistent_workers: bool = key(True, "keep the loader processes of an evaluation for the next one")
    pin_memory: Union[bool, str] = key("auto", "page-locked batches; auto: on GPUs", words=("auto",))
    non_blocking: Union[bool, str] = key(
        "auto", "copy to the GPU while it computes; auto: with pin_memory", words=("auto",)
    )
    copy_stream: Union[bool, str] = key(
        "auto", "copy batches in a stream of their own, beside the computation; auto: on GPUs", words=("auto",)
    )
    channels_last: Union[bool, str] = key("auto", "NHWC memory format; auto: on GPUs", words=("auto",))
    cudnn_benchmark: Union[bool, str] = key(
        "auto", "let cuDNN time its algorithms; auto: on one GPU per process", words=("auto",)
    )
    tf32: Union[bool, str] = key("auto", "TensorFloat-32 for float32 matrix products; auto: on GPUs", words=("auto",))
    compile: Union[bool, str] = key(
        "auto", "torch.compile the model; auto: torchvision's on GPUs, if the run is long enough", words=("auto",)
    )
    compile_mode: str = key(
        "default",
        "of torch.compile: its own CUDA graphs (reduce-overhead), kernels chosen by timing (max-autotune...)",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    activation_checkpointing: list[str] = key(
        [], "classes of blocks that compute their activations again in the backward pass, to keep fewer: [Bottleneck]"
    )
    cuda_graph: Union[bool, str] = key(
        "auto", "replay whole training steps as one CUDA graph; auto: small models on GPUs", words=("auto",)
    )
    gc_freeze: bool = key(True, "spare the garbage collector what was there before the first step")
    bias_lint: bool = key(True, "name biases that the norm layer behind them subtracts again")
    optimizer: str = key(
        "auto",
        "torch's implementation: loop, foreach, fused; auto: fused where it exists on GPUs",
        choices=("auto", "loop", "foreach", "fused"),
    )


@dataclass
class TrackerConfig:
    """Trackers of experiments, fed by rank 0: `tracker=tensorboard`, `tracker=[wandb,mlflow]`. docs/tracking.md"""

    tensorboard: bool = key(False, "event files in run_dir/tensorboard")
    wandb: bool = key(False, "Weights & Biases, in run_dir/wandb; sent away only with WANDB_MODE=online")
    mlflow: bool = key(False, "MLflow, to MLFLOW_TRACKING_URI or its own default on this host")
    project: str = key("ddp-train", "the project of wandb, the experiment of mlflow; a run is called by its name")
    details: bool = key(False, "for TensorBoard: weights as histograms per epoch, a batch of images, the graph")


TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Keys of TrackerConfig, and names of Python packages and of this one's extras."""


# --- strategy -------------------------------------------------------------------------------------------------------


@dataclass
class SingleConfig:
    """One process, one device."""

    name: str = "single"


@dataclass
class DpConfig:
    """torch.nn.DataParallel: one process, all visible GPUs."""

    name: str = "dp"


@dataclass
class DdpConfig:
    """DistributedDataParallel: one process per GPU. Options that bear torch's name mean what they mean in torch."""

    name: str = "ddp"
    sync_bn: bool = key(False, "batch norm over the samples of all processes")
    bucket_cap_mb: float | None = key(None, "size of a gradient bucket in MiB; null: torch's default", above=0)
    bucket_cap_mb_list: list[float] | None = key(None, "sizes of the gradient buckets in MiB, one by one", above=0)
    gradient_as_bucket_view: bool = key(False, "gradients are views into the buckets: one copy less")
    static_graph: bool = key(False, "the graph is the same in every iteration")
    broadcast_buffers: bool = key(True, "rank 0's buffers go to all ranks at every forward pass")
    find_unused_parameters: bool = key(False, "some parameters get no gradient in some iterations")
    skip_all_reduce_unused_params: bool = key(False, "do not reduce parameters that no rank used")
    init_sync: bool = key(True, "verify shapes and send rank 0's weights when DDP is built")
    comm_hook: str = key("none", "compress gradients on the wire", choices=("none", "fp16", "bf16", "powersgd"))
    powersgd_rank: int = key(1, "rank of the approximation of comm_hook=powersgd", at_least=1)


# --- model ----------------------------------------------------------------------------------------------------------


@dataclass
class CnnConfig:
    """Two convolutions per scale, then one linear layer."""

    name: str = "cnn"
    channels: int = key(32, "of the first scale; each further scale doubles them", at_least=1)
    norm: str = key("group", "after each convolution", choices=("none", "batch", "group"))
    dropout: float = key(0.0, "before the last layer", at_least=0, below=1)


@dataclass
class MlpConfig:
    """Linear layers with ReLU."""

    name: str = "mlp"
    hidden: int = key(128, "features of each hidden layer", at_least=1)
    layers: int = key(2, "hidden layers", at_least=1)
    dropout: float = key(0.0, "after each hidden layer", at_least=0, below=1)


@dataclass
class LinearRegressionConfig:
    """One linear layer."""

    name: str = "linear_regression"


@dataclass
class GeluMlpConfig:
    """Linear layers with the hand-written GELU of the PyTorch tuning guide, a chain of pointwise operations."""

    name: str = "gelu_mlp"
    hidden: int = key(1024, "features of each hidden layer", at_least=1)
    layers: int = key(2, "hidden layers", at_least=1)
    fused: bool = key(False, "fuse the pointwise operations with torch.compile")


@dataclass
class TorchvisionConfig:
    """Any classifier of torchvision, trained from scratch."""

    name: str = "torchvision"
    arch: str = key("resnet18", "its name in torchvision.models")


@dataclass
class CustomConfig:
    """Anyone's own class or function: `_target_=package.Name`, and its arguments beside it."""

    name: str = "custom"
    target: str = key(
        "", "dotted path; outside torch and torchvision its package must be in trusted_modules", may_be_empty=True
    )
    arguments: dict[str, Any] = key({}, "keyword arguments, plain values")


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass
class DataConfig:
    name: str = "digits"
    limit: int | None = key(None, "use only so many samples of each split", at_least=1)
    loader: str = key(
        "auto",
        "host, or device: held in its memory; auto: device for data held in memory that fit",
        choices=("auto", "host", "device"),
    )


@dataclass
class DigitsConfig(DataConfig):
    """1,797 handwritten digits, 8x8, that scikit-learn ships; 1,433 to train, 364 to test, no download."""

    name: str = "digits"
    augment: bool = key(True, "shift each image by up to one pixel")


@dataclass
class TorchvisionDataConfig(DataConfig):
    root: str = key("data", "the folder that holds it")
    download: bool = key(False, "fetch it if it is missing; one process per host fetches, the others wait")
    augment: bool = key(False, "random shift, and flip for photographs and clothes")


@dataclass
class MnistConfig(TorchvisionDataConfig):
    """60,000 + 10,000 handwritten digits, 28x28."""

    name: str = "mnist"


@dataclass
class FashionMnistConfig(TorchvisionDataConfig):
    """60,000 + 10,000 pieces of clothing, 28x28."""

    name: str = "fashion_mnist"


@dataclass
class Cifar10Config(TorchvisionDataConfig):
    """50,000 + 10,000 colour photographs, 32x32."""

    name: str = "cifar10"


@dataclass
class ImageFolderConfig(DataConfig):
    """A folder per class under ROOT/train and ROOT/val: the layout of ImageNet."""

    name: str = "image_folder"
    root: str = key("data/imagenet", "the folder that holds train/ and val/")
    image_size: int = key(224, "height and width after the crop, in pixels", at_least=1)
    augment: bool = key(True, "random resized crop and horizontal flip")
    decode: str = key(
        "auto",
        "by PIL or torchvision in loader processes, by torchvision in threads of each rank, or on the GPU",
        choices=("auto", "pil", "processes", "threads", "gpu"),
    )


@dataclass
class SyntheticConfig(DataConfig):
    """Random images with a class-dependent pattern, made on the fly: for benchmarks."""

    name: str = "synthetic"
    samples: int = key(4096, "in the training set", at_least=1)
    test_samples: int = key(1024, "in the test set", at_least=1)
    channels: int = key(3, "of an image", at_least=1)
    image_size: int = key(32, "height and width in pixels", at_least=1)
    classes: int = key(10, "number of classes", at_least=2)


@dataclass
class LinearRegressionDataConfig(DataConfig):
    """A generated table: y = w x + b + noise."""

    name: str = "linear_regression"
    samples: int = key(2048, "in the training set", at_least=1)
    test_samples: int = key(512, "in the test set", at_least=1)
    features: int = key(20, "columns of the table", at_least=1)
    noise: float = key(0.1, "standard deviation of the noise", at_least=0)


# --- optimizer and schedule -----------------------------------------------------------------------------------------


@dataclass
class OptimizerConfig:
    name: str = "sgd"
    lr: float = key(0.05, "learning rate after warm-up", above=0)
    weight_decay: float = key(0.0, "as torch's optimizer defines it", at_least=0)
    decay_norm_and_bias: bool = key(True, "weight decay for parameters of at most one dimension too: norms and biases")
    lr_scaling: str = key("none", "lr times batch / lr_base_batch, or its root", choices=("none", "linear", "sqrt"))
    lr_base_batch: int = key(256, "global batch that lr is meant for, with lr_scaling", at_least=1)


@dataclass
class SgdConfig(OptimizerConfig):
    name: str = "sgd"
    momentum: float = key(0.9, "of the gradient", at_least=0, below=1)
    nesterov: bool = key(False, "Nesterov momentum")


@dataclass
class AdamConfig(OptimizerConfig):
    name: str = "adam"
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    beta1: float = key(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.999, "decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)


@dataclass
class AdamWConfig(AdamConfig):
    name: str = "adamw"
    weight_decay: float = key(0.01, "decoupled from the gradient", at_least=0)


@dataclass
class AdadeltaConfig(OptimizerConfig):
    name: str = "adadelta"
    lr: float = key(1.0, "learning rate after warm-up", above=0)
    rho: float = key(0.9, "decay of the averages", at_least=0, below=1)
    eps: float = key(1e-6, "added to the denominator", above=0)


@dataclass
class RmspropConfig(OptimizerConfig):
    name: str = "rmsprop"
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    alpha: float = key(0.99, "decay of the average", at_least=0, below=1)
    momentum: float = key(0.0, "of the update", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)


@dataclass
class LarsConfig(OptimizerConfig):
    """SGD whose rate is adapted to each layer (arXiv:1708.03888), for batches of thousands."""

    name: str = "lars"
    lr: float = key(1.0, "learning rate after warm-up, before each layer's ratio", above=0)
    weight_decay: float = key(5e-5, "part of the gradient that is adapted", at_least=0)
    decay_norm_and_bias: bool = key(False, "decay and adapt parameters of at most one dimension too: norms and biases")
    momentum: float = key(0.9, "of the update, learning rate included", at_least=0, below=1)
    trust_coefficient: float = key(1e-3, "length of an update over that of the layer's weights, at lr=1", above=0)
    eps: float = key(0.0, "added to the denominator of the trust ratio", at_least=0)


@dataclass
class LambConfig(AdamConfig):
    """Adam whose rate is adapted to each layer (arXiv:1904.00962), for batches of thousands."""

    name: str = "lamb"
    lr: float = key(5e-3, "length of an update over that of the layer's weights, after warm-up", above=0)
    weight_decay: float = key(0.01, "part of the update that is adapted", at_least=0)
    decay_norm_and_bias: bool = key(False, "decay and adapt parameters of at most one dimension too: norms and biases")
    eps: float = key(1e-6, "added to the denominator", above=0)
    max_trust_ratio: float | None = key(None, "larger trust ratios are cut to this; null: none is", above=0)


@dataclass
class ScheduleConfig:
    """Learning rates are functions of the optimizer step, never of a rank's own count."""

    name: str = "constant"
    warmup_steps: int = key(0, "optimizer steps of linear warm-up from 0", at_least=0)
    warmup_epochs: float | None = key(None, "in place of warmup_steps: its length in epochs", above=0)


@dataclass
class ConstantConfig(ScheduleConfig):
    name: str = "constant"


@dataclass
class StepConfig(ScheduleConfig):
    name: str = "step"
    step_size: int = key(1000, "optimizer steps between two decays", at_least=1)
    gamma: float = key(0.1, "factor of each decay", above=0, at_most=1)


@dataclass
class CosineConfig(ScheduleConfig):
    name: str = "cosine"
    final_factor: float = key(0.0, "of the learning rate, at the last step", at_least=0, at_most=1)


@dataclass
class PolynomialConfig(ScheduleConfig):
    name: str = "polynomial"
    power: float = key(2.0, "exponent of the decay", above=0)
    final_factor: float = key(0.0, "of the learning rate, at the last step", at_least=0, at_most=1)


@dataclass
class OneCycleConfig(ScheduleConfig):
    """Leslie Smith's 1cycle (arXiv:1708.07120): up to lr, then down to almost nothing."""

    name: str = "one_cycle"
    pct_start: float = key(0.3, "share of the steps spent going up", above=0, below=1)
    div_factor: float = key(25.0, "lr over the first learning rate", at_least=1)
    final_div_factor: float = key(1e4, "first over last learning rate", at_least=1)


@dataclass
class Config:
    """One whole run."""

    mode: str = key("train", "what to do", choices=("train", "evaluate", "study", "doctor"))
    name: str = key("default", "a name; the run lives in runs/NAME/... unless run_dir is given")
    run_dir: str | None = key(None, "where this run lives; given again it is the same run, and goes on")
    seed: int = key(0, "the one seed", at_least=0, below=2**63)
    device: str = key("auto", "auto: cuda where there is a GPU", choices=("auto", "cuda", "cpu"))
    deterministic: Union[bool, str] = key("auto", "bit for bit repeatable; auto: on CPU, not on GPUs", words=("auto",))
    objective: str = key(
        "test.loss",
        "the number of summary.json that a sweep optimizes",
        choices=("test.loss", "test.accuracy", "samples_per_second", "seconds"),
    )
    probe: str = key(
        "none",
        "what a study measures inside the run: where the time of each step goes, or the gradients of the first one",
        choices=("none", "step_times", "gradients"),
    )
    trusted_modules: list[str] = key([], "packages that _target_ may load code from")
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    strategy: Any = field(default_factory=DdpConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: Any = field(default_factory=CnnConfig)
    data: Any = field(default_factory=DigitsConfig)
    optimizer: Any = field(default_factory=SgdConfig)
    schedule: Any = field(default_factory=CosineConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def _by_name(*schemas: type) -> dict[str, type]:
    return {schema().name: schema for schema in schemas}


OPTIONS: dict[str, dict[str, type]] = {
    "strategy": _by_name(SingleConfig, DpConfig, DdpConfig),
    "model": _by_name(CnnConfig, MlpConfig, LinearRegressionConfig, GeluMlpConfig, TorchvisionConfig, CustomConfig),
    "data": _by_name(
        DigitsConfig,
        MnistConfig,
        FashionMnistConfig,
        Cifar10Config,
        ImageFolderConfig,
        SyntheticConfig,
        LinearRegressionDataConfig,
        CustomConfig,
    ),
    "optimizer": _by_name(
        SgdConfig, AdamConfig, AdamWConfig, AdadeltaConfig, RmspropConfig, LarsConfig, LambConfig, CustomConfig
    ),
    "schedule": _by_name(ConstantConfig, StepConfig, CosineConfig, PolynomialConfig, OneCycleConfig),
}
"""For each group with several options: the schema of each option, by its `name`."""

SECTIONS: dict[str, type] = {
    "launch": LaunchConfig,
    "train": TrainConfig,
    "tuning": TuningConfig,
    "checkpoint": CheckpointConfig,
    "tracker": TrackerConfig,
}
"""The sections that have one schema."""


def schema_of(section: str, name: str) -> type | None:
    """The dataclass of a section, or None if `name` is not an option of it."""
    return SECTIONS.get(section) or OPTIONS[section].get(name)
