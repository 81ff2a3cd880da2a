"""Every key of the configuration: its type, default, rule and meaning, and what is known about each option.

A group with several options (`model=cnn|mlp|...`) has one dataclass per option, and `name` holds the option's name.
Facts that other modules ask about an option (does it have a fused implementation? how large is the data set?) are
attributes and methods of its class, never tables elsewhere. Attributes without annotation are no keys: they hold what
is true of options that have no such key.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Union

AUTO: dict[str, Any] = {"literals": ("auto",)}
"""The rule of keys whose value may also be auto."""


def key(default: Any, meaning: str, **rules: Any) -> Any:
    """A field with its meaning and its rules.

    Rules: `at_least`, `above`, `at_most`, `below` (numbers; of a list, each item), `choices` (all values allowed),
    `literals` (strings allowed beside numbers or booleans, "auto" for example), `may_be_empty` (strings).
    """
    metadata = {"meaning": meaning, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class LaunchConfig:
    nproc_per_node: Union[int, str] = key("auto", "processes per host; auto: one per GPU, else 2", at_least=1, **AUTO)
    nnodes: int = key(1, "number of hosts", at_least=1)
    rdzv_endpoint: str | None = key(None, "HOST:PORT of one of the hosts, where all hosts of a run meet")
    max_restarts: int = key(0, "restarts after a failure; the count begins anew with each checkpoint", at_least=0)
    backend: str = key("auto", "for collectives; auto: nccl on GPUs, gloo on CPU", choices=("auto", "nccl", "gloo"))
    timeout_seconds: float = key(
        600.0, "the run fails if a process, or a collective, makes no progress for so long", above=0, at_most=1e6
    )
    join_timeout_seconds: int = key(
        600, "longest wait for other hosts and processes before the first step", at_least=1, at_most=10**6
    )
    grace_seconds: float = key(
        30.0, "time to save a checkpoint between a stop request and SIGKILL", at_least=0, at_most=1e6
    )
    threads_per_process: Union[int, str] = key(
        "auto", "CPU threads of torch; auto: cores / processes, at most 4 with GPUs", at_least=1, **AUTO
    )
    fork_server: bool = key(True, "fork workers from a process that has imported torch: a faster start")


@dataclass
class EarlyStoppingConfig:
    patience: int | None = key(
        None, "stop after this many evaluations in a row without improvement; null: never", at_least=1
    )
    metric: str = key("auto", "validation.NAME or test.NAME; auto: the loss of the set that is scored")
    min_delta: float = key(0.0, "smallest change that is an improvement", at_least=0)


@dataclass
class TrainConfig:
    global_batch_size: int = key(96, "samples per optimizer step, over all processes", at_least=1)
    accumulation_steps: int = key(1, "micro-batches per optimizer step on each process", at_least=1)
    epochs: int = key(30, "passes over the training set", at_least=1)
    max_steps: int | None = key(None, "stop after this many optimizer steps", at_least=1)
    max_grad_norm: float | None = key(None, "clip the global gradient norm to this value", above=0)
    on_non_finite: str = key("stop", "at a NaN or infinite loss: stop, or skip that step", choices=("stop", "skip"))
    log_every_steps: int = key(50, "optimizer steps between two lines of metrics.jsonl", at_least=1)
    evaluate_every_epochs: int = key(1, "epochs between evaluations; the last epoch is always evaluated", at_least=1)
    evaluate_batch_size: int = key(200, "samples per forward pass of an evaluation, on each process", at_least=1)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)


@dataclass
class CheckpointConfig:
    every_steps: int | None = key(None, "optimizer steps between two checkpoints; null: one per epoch", at_least=1)
    every_minutes: float | None = key(None, "also save after so long, at the end of a logging interval", above=0)
    keep: int = key(2, "number of newest checkpoints to keep", at_least=1)
    best: bool = key(False, "save after every evaluation, keep the best checkpoint too, and link it as `best`")
    best_metric: str = key(
        "auto",
        "what the best is the best by, validation.NAME or test.NAME; auto: accuracy where there is one, else loss",
    )
    resume: str = key("auto", "auto: the newest valid checkpoint in run_dir; never; or the path of a checkpoint or run")
    which: str = key(
        "auto",
        "which checkpoint of the run that resume names; auto: for mode=evaluate the best if it has one, else the last",
        choices=("auto", "best", "last"),
    )


@dataclass
class TuningConfig:
    """Performance tips, each one switch. `auto` is resolved for the hardware, and printed."""

    name: str = "recommended"
    precision: str = key(
        "auto",
        "number format; bf16 and fp16 by autocast; auto: bf16 on GPUs that support it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
    )
    num_workers: Union[int, str] = key(
        "auto",
        "loader processes per rank, or threads that read files for data.decode=gpu; auto: 0 for data held in memory",
        at_least=0,
        **AUTO,
    )
    prefetch_factor: int = key(
        2, "batches prepared ahead by each loader process, or by all threads of data.decode=gpu", at_least=1
    )
    persistent_workers: bool = key(True, "keep the loader processes of an evaluation for the next one")
    pin_memory: Union[bool, str] = key("auto", "page-locked batches; auto: on GPUs", **AUTO)
    non_blocking: Union[bool, str] = key("auto", "asynchronous copies to the GPU; auto: on GPUs", **AUTO)
    copy_stream: Union[bool, str] = key("auto", "copy batches in a CUDA stream of their own; auto: on GPUs", **AUTO)
    channels_last: Union[bool, str] = key("auto", "NHWC memory format; auto: convolutions on GPUs", **AUTO)
    cudnn_benchmark: Union[bool, str] = key(
        "auto", "let cuDNN choose algorithms by timing; auto: with one GPU per process", **AUTO
    )
    tf32: Union[bool, str] = key("auto", "TensorFloat-32 matrix products; auto: on GPUs", **AUTO)
    compile: Union[bool, str] = key("auto", "torch.compile; auto: large models on GPUs, in long runs", **AUTO)
    compile_mode: str = key(
        "default",
        "mode of torch.compile; reduce-overhead and max-autotune capture CUDA graphs themselves",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    activation_checkpointing: list[str] = key(
        [], "classes of blocks that recompute their activations in the backward pass, for example [Bottleneck]"
    )
    cuda_graph: Union[bool, str] = key(
        "auto", "capture training steps as a CUDA graph; auto: small models on GPUs", **AUTO
    )
    gc_freeze: bool = key(True, "exclude what exists before the first step from garbage collection")
    bias_lint: bool = key(True, "report biases directly before a norm layer, which cancels them")
    optimizer: str = key(
        "auto",
        "implementation; auto: fused on GPUs where torch has it, else foreach; default: torch or your class decides",
        choices=("auto", "loop", "foreach", "fused", "default"),
    )


@dataclass
class TrackerConfig:
    """Experiment trackers, written by rank 0: `tracker=tensorboard`, `tracker=[wandb,mlflow]`. docs/tracking.md"""

    tensorboard: bool = key(False, "TensorBoard event files in run_dir/tensorboard")
    wandb: bool = key(False, "Weights & Biases, in run_dir/wandb; uploaded only with WANDB_MODE=online")
    mlflow: bool = key(False, "MLflow, to MLFLOW_TRACKING_URI or its own default on this host")
    project: str = key("ddp-train", "project in wandb, experiment in mlflow")
    details: bool = key(False, "for TensorBoard: histograms of weights, a batch of images, the graph")


TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Keys of TrackerConfig, and names of Python packages and of this one's extras."""


# --- strategy -------------------------------------------------------------------------------------------------------


@dataclass
class StrategyConfig:
    """What every strategy answers."""

    name: str = "single"
    has_process_group: ClassVar[bool] = False
    """Whether several processes may run, connected by torch.distributed."""
    spreads_over_gpus: ClassVar[bool] = False
    """Whether one process uses all visible GPUs."""
    capture_blocker: ClassVar[str] = ""
    """Why its step cannot be captured as a CUDA graph."""
    sync_bn = find_unused_parameters = False
    comm_hook = "none"


@dataclass
class SingleConfig(StrategyConfig):
    """One process, one device."""

    name: str = "single"


@dataclass
class DpConfig(StrategyConfig):
    """torch.nn.DataParallel: one process, all visible GPUs."""

    name: str = "dp"
    spreads_over_gpus: ClassVar[bool] = True
    capture_blocker: ClassVar[str] = "DataParallel runs in several threads"


@dataclass
class DdpConfig(StrategyConfig):
    """DistributedDataParallel: one process per GPU. Keys named as in torch mean what they mean in torch."""

    name: str = "ddp"
    has_process_group: ClassVar[bool] = True
    sync_bn: bool = key(False, "batch norm statistics over the samples of all processes")
    bucket_cap_mb: float | None = key(None, "size of a gradient bucket in MiB; null: torch's default", above=0)
    bucket_cap_mb_list: list[float] | None = key(None, "size of each gradient bucket in MiB", above=0)
    gradient_as_bucket_view: bool = key(False, "gradients are views into the buckets, which saves a copy")
    static_graph: bool = key(False, "promise that the graph is the same in every iteration")
    broadcast_buffers: bool = key(True, "send rank 0's buffers to all ranks before every forward pass")
    find_unused_parameters: bool = key(False, "allow parameters that get no gradient in some iterations")
    skip_all_reduce_unused_params: bool = key(False, "do not reduce parameters that no rank used")
    init_sync: bool = key(True, "verify shapes and send rank 0's weights when DDP is built")
    comm_hook: str = key("none", "compress gradients before the exchange", choices=("none", "fp16", "bf16", "powersgd"))
    powersgd_rank: int = key(1, "rank of the approximation of comm_hook=powersgd", at_least=1)


@dataclass
class OrderedConfig(StrategyConfig):
    """Gradients summed in a fixed order: the same bits on any number of processes, slower than ddp."""

    name: str = "ordered"
    has_process_group: ClassVar[bool] = True
    capture_blocker: ClassVar[str] = "a captured step runs no Python"
    virtual_shards: int = key(8, "parts of a global batch; a power of two, and a multiple of the processes", at_least=1)


# --- model ----------------------------------------------------------------------------------------------------------


class ModelFacts:
    """What every model answers; the defaults are those of a model that nothing is known about."""

    takes_images: ClassVar[bool | None] = None
    """Whether it has convolutions over images; None: unknown."""
    takes_tokens: ClassVar[bool | None] = None
    """Whether its inputs are numbers of tokens; None: unknown."""
    smallest_side: ClassVar[int] = 1
    """Of its images, in pixels."""
    channels_taken: ClassVar[tuple[int, ...]] = ()
    """Numbers of channels of its images; (): any."""
    fused = False

    def is_launch_bound(self) -> bool:
        """Whether a GPU runs its kernels faster than a host launches them."""
        return False

    def worth_compiling(self) -> bool:
        """Whether torch.compile saves more in a long run than it costs at the start."""
        return False

    def has_batch_norm(self) -> bool | None:
        """None: unknown."""
        return None


@dataclass
class ModelConfig(ModelFacts):
    name: str = "cnn"
    takes_tokens: ClassVar[bool | None] = False


@dataclass
class CnnConfig(ModelConfig):
    """Two convolutions per scale, then one linear layer."""

    name: str = "cnn"
    takes_images: ClassVar[bool | None] = True
    smallest_side: ClassVar[int] = 2
    channels: int = key(32, "channels of the first scale; each further scale doubles them", at_least=1)
    norm: str = key("group", "norm layer after each convolution", choices=("none", "batch", "group"))
    dropout: float = key(0.0, "dropout before the last layer", at_least=0, below=1)

    def is_launch_bound(self) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return self.norm == "batch"


@dataclass
class _DenseConfig(ModelConfig):
    """Linear layers only."""

    takes_images: ClassVar[bool | None] = False

    def is_launch_bound(self) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return False


@dataclass
class MlpConfig(_DenseConfig):
    """Linear layers with ReLU."""

    name: str = "mlp"
    hidden: int = key(128, "features of each hidden layer", at_least=1)
    layers: int = key(2, "number of hidden layers", at_least=1)
    dropout: float = key(0.0, "dropout after each hidden layer", at_least=0, below=1)


@dataclass
class LinearRegressionConfig(_DenseConfig):
    """One linear layer."""

    name: str = "linear_regression"


@dataclass
class GeluMlpConfig(_DenseConfig):
    """Linear layers with the hand-written GELU of the PyTorch tuning guide, a chain of pointwise operations."""

    name: str = "gelu_mlp"
    hidden: int = key(1024, "features of each hidden layer", at_least=1)
    layers: int = key(2, "number of hidden layers", at_least=1)
    fused: bool = key(False, "fuse the pointwise operations with torch.compile")


@dataclass
class TorchvisionConfig(ModelConfig):
    """Any classifier of torchvision, trained from scratch."""

    name: str = "torchvision"
    takes_images: ClassVar[bool | None] = True
    channels_taken: ClassVar[tuple[int, ...]] = (1, 3)
    arch: str = key("resnet18", "name of the classifier in torchvision.models")

    def worth_compiling(self) -> bool:
        return True


_LAUNCH_BOUND_BLOCKS = 10**6
"""Layers times width squared: a block has twelve times its width squared parameters. GPT-2's smallest has 7 million."""


@dataclass
class GptConfig(ModelConfig):
    """GPT-2: a decoder-only transformer. Its context is data.length, its vocabulary that of the data."""

    name: str = "gpt"
    takes_images: ClassVar[bool | None] = False
    takes_tokens: ClassVar[bool | None] = True
    layers: int = key(4, "number of blocks", at_least=1)
    heads: int = key(4, "attention heads of a block; they divide the width", at_least=1)
    width: int = key(128, "features of a token", at_least=1)
    dropout: float = key(0.0, "dropout of embeddings, attention and residuals", at_least=0, below=1)
    vocabulary_multiple: int = key(
        64, "round the vocabulary up to a multiple, for faster matrix products: 50,257 to 50,304", at_least=1
    )

    def is_launch_bound(self) -> bool:
        return self.layers * self.width**2 < _LAUNCH_BOUND_BLOCKS

    def worth_compiling(self) -> bool:
        return not self.is_launch_bound()

    def has_batch_norm(self) -> bool:
        return False


# --- task -----------------------------------------------------------------------------------------------------------


_CLASS_WEIGHTS = "factor on the loss of each class; the mean stays one over {unit}s"


@dataclass
class TaskConfig:
    name: str = "auto"


@dataclass
class AutoTaskConfig(TaskConfig):
    """Classification for class labels, regression for numbers; other targets are refused with the candidates."""

    metrics: ClassVar[dict[str, str]] = {}
    """Of an evaluation, with the better direction, `max` or `min`; {}: unknown before the task is loaded."""
    name: str = "auto"


@dataclass
class ClassificationConfig(TaskConfig):
    """Class labels, or a part of each class (soft labels)."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "accuracy": "max", "top5": "max"}
    name: str = "classification"
    loss: str = key("cross_entropy", "loss of a sample", choices=("cross_entropy",))
    label_smoothing: float = key(0.0, "label smoothing of the cross entropy", at_least=0, below=1)
    class_weights: list[float] | None = key(None, _CLASS_WEIGHTS.format(unit="sample"), at_least=0)


@dataclass
class MultilabelConfig(TaskConfig):
    """Any number of labels per sample, each 0 or 1."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "f1_macro": "max", "exact_match": "max"}
    name: str = "multilabel"
    loss: str = key("bce", "loss of a sample, the mean over its labels", choices=("bce",))
    pos_weight: list[float] | None = key(None, "factor on the loss of a label that applies, for each label", at_least=0)


@dataclass
class RegressionConfig(TaskConfig):
    """One number per sample, or several."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "mae": "min", "mse": "min", "rmse": "min"}
    name: str = "regression"
    loss: str = key("mse", "loss of a sample, the mean over its numbers", choices=("mse", "mae", "huber", "smooth_l1"))


@dataclass
class SegmentationConfig(TaskConfig):
    """A class for each pixel."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "pixel_accuracy": "max", "mean_iou": "max"}
    name: str = "segmentation"
    loss: str = key("cross_entropy", "loss of a pixel", choices=("cross_entropy",))
    ignore_index: int = key(-100, "pixels of this class are left out")
    class_weights: list[float] | None = key(None, _CLASS_WEIGHTS.format(unit="valid pixel"), at_least=0)


@dataclass
class LanguageModelConfig(TaskConfig):
    """The next token."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "perplexity": "min", "bits_per_byte": "min"}
    name: str = "language_model"
    loss: str = key("cross_entropy", "loss of a token; targets of -100 are left out", choices=("cross_entropy",))
    sample_tokens: int = key(0, "tokens of a text that the model writes at the end, to run_dir/sample.txt", at_least=0)
    sample_prompt: str = key("", "beginning of that text", may_be_empty=True)
    sample_temperature: float = key(0.8, "of that text; towards 0, ever more the likeliest token", above=0)


# --- data -----------------------------------------------------------------------------------------------------------


def _validation_part() -> Any:
    meaning = "part of the training set that validates; 0: none; null: the data set's own validation split, if any"
    return key(None, meaning, at_least=0, below=1)


class DataFacts:
    """What every data set answers; the defaults are those of a data set that nothing is known about."""

    is_regression: ClassVar[bool | None] = None
    """Whether its targets are numbers, not class labels; None: unknown."""
    task: ClassVar[str | None] = None
    """What task=auto means with it; None: the targets of a batch tell."""
    files: ClassVar[tuple[str, ...]] = ()
    """Files that must exist, below `root`."""
    class_folders: ClassVar[tuple[str, ...]] = ()
    """Folders with one sub-folder per class that must exist, below `root`."""
    images: ClassVar[tuple[int, int, int] | None] = None
    """Number, channels and side of a fixed set of images that is held in memory."""
    placement = "host"
    root = decode = ""
    path = tokenizer = None
    download = False
    validation = None

    def in_memory_bytes(self) -> int | None:
        """Size of a data set that is held in memory: a batch is one indexing operation, which loader processes do not
        make faster. None: it is not held in memory."""
        return self.images[0] * self.images[1] * self.images[2] ** 2 if self.images else None

    def image_shape(self) -> tuple[int, int] | None:
        """Channels and side of its images; None: no images, or unknown."""
        return self.images[1:] if self.images else None

    def sample_bytes(self) -> int:
        """Of the inputs of one sample, as loader processes hand them over; 0: unknown."""
        shape = self.image_shape()
        return 4 * shape[0] * shape[1] ** 2 if shape else 0


@dataclass
class DataConfig(DataFacts):
    name: str = "digits"
    is_regression: ClassVar[bool | None] = False
    limit: int | None = key(None, "use only this many samples of each split", at_least=1)
    validation: float | None = _validation_part()
    placement: str = key(
        "auto", "where the data are held; auto: device if they fit", choices=("auto", "host", "device")
    )


@dataclass
class DigitsConfig(DataConfig):
    """1,797 handwritten digits, 8x8, that scikit-learn ships; 1,433 to train, 364 to test, no download."""

    name: str = "digits"
    augment: bool = key(True, "shift each image by up to one pixel")

    images: ClassVar[tuple[int, int, int] | None] = (1797, 1, 8)


@dataclass
class TorchvisionDataConfig(DataConfig):
    root: str = key("data", "folder that holds the data set")
    download: bool = key(False, "download it if it is missing")
    augment: bool = key(False, "random shifts; flips too for cifar10 and fashion_mnist")


_IDX_FILES = tuple(
    f"raw/{name}-ubyte" for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)


@dataclass
class MnistConfig(TorchvisionDataConfig):
    """60,000 + 10,000 handwritten digits, 28x28."""

    name: str = "mnist"
    files: ClassVar[tuple[str, ...]] = tuple(f"MNIST/{name}" for name in _IDX_FILES)
    images: ClassVar[tuple[int, int, int] | None] = (70_000, 1, 28)


@dataclass
class FashionMnistConfig(MnistConfig):
    """60,000 + 10,000 pieces of clothing, 28x28."""

    name: str = "fashion_mnist"
    files: ClassVar[tuple[str, ...]] = tuple(f"FashionMNIST/{name}" for name in _IDX_FILES)


@dataclass
class Cifar10Config(TorchvisionDataConfig):
    """50,000 + 10,000 colour photographs, 32x32."""

    name: str = "cifar10"
    files: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    )
    images: ClassVar[tuple[int, int, int] | None] = (60_000, 3, 32)


@dataclass
class ImageFolderConfig(DataConfig):
    """One folder per class under ROOT/train and ROOT/val: the layout of ImageNet."""

    name: str = "image_folder"
    class_folders: ClassVar[tuple[str, ...]] = ("train", "val")
    root: str = key("data/imagenet", "folder that holds train/ and val/")
    image_size: int = key(224, "height and width after the crop, in pixels", at_least=1)
    augment: bool = key(True, "random resized crop and horizontal flip")
    decode: str = key(
        "auto",
        "JPEG decoder: PIL, torchvision in processes, or the GPU; auto: gpu with under 8 cores per GPU, else processes",
        choices=("auto", "pil", "processes", "gpu"),
    )

    def image_shape(self) -> tuple[int, int]:
        return 3, self.image_size

    def sample_bytes(self) -> int:
        return 3 * self.image_size**2  # uint8 until it is on the device


@dataclass
class SyntheticConfig(DataConfig):
    """Random images with a class-dependent pattern, made on the fly: for benchmarks."""

    name: str = "synthetic"
    samples: int = key(4096, "samples in the training set", at_least=1)
    test_samples: int = key(1024, "samples in the test set", at_least=1)
    channels: int = key(3, "channels of an image", at_least=1)
    image_size: int = key(32, "height and width in pixels", at_least=1)
    classes: int = key(10, "number of classes", at_least=2)

    def in_memory_bytes(self) -> int:
        return (self.samples + self.test_samples) * self.channels * self.image_size**2

    def image_shape(self) -> tuple[int, int]:
        return self.channels, self.image_size


@dataclass
class LinearRegressionDataConfig(DataConfig):
    """A generated table: y = w x + b + noise."""

    name: str = "linear_regression"
    is_regression: ClassVar[bool | None] = True
    samples: int = key(2048, "samples in the training set", at_least=1)
    test_samples: int = key(512, "samples in the test set", at_least=1)
    features: int = key(20, "columns of the table", at_least=1)
    noise: float = key(0.1, "standard deviation of the noise", at_least=0)

    def in_memory_bytes(self) -> int:
        return (self.samples + self.test_samples) * self.sample_bytes()

    def sample_bytes(self) -> int:
        return 4 * self.features


_LIBRARY_BYTES = 12 * 2**20
"""Of Python's standard library without its tests, about; only whether it fits into a GPU's memory hangs on it."""
_TOKENIZER = "tokenizer.json of Hugging Face's tokenizers"


@dataclass
class TextConfig(DataConfig):
    """Text files as bytes, or through a tokenizer; by default Python's own standard library, without a download."""

    name: str = "text"
    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = "*.txt"
    path: str | None = key(None, "file or folder; null: the .py files of Python's standard library")
    glob: str | None = key(None, "files of the folder, below it too; null: *.txt")
    length: int = key(256, "tokens of a window, which is a sample", at_least=2)
    test_part: float = key(0.05, "part of the text that is held out, whole files where they fit", above=0, below=1)
    tokenizer: str | None = key(None, f"{_TOKENIZER}; null: each byte is a token")

    def in_memory_bytes(self) -> int:
        width = 4 if self.tokenizer else 1  # of four bytes at most; there are fewer tokens than bytes
        return width * _bytes_of(self.path, self.glob or self.pattern) if self.path else width * _LIBRARY_BYTES

    def sample_bytes(self) -> int:
        return 16 * self.length


@dataclass
class TokensConfig(DataConfig):
    """Files of tokens, mapped into memory: .bin as nanoGPT (no header) and llm.c (with one) write them."""

    name: str = "tokens"
    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = "*.bin"
    path: str | None = key(
        None, "a .bin file, or a folder with some; those with val or test in their names are held out"
    )
    length: int = key(1024, "tokens of a window, which is a sample", at_least=2)
    vocabulary: int = key(50_257, "number of tokens; those of the files are below it", at_least=1)
    dtype: str = key("uint16", "type of the tokens in files without a header", choices=("uint16", "uint32"))
    test_part: float = key(0.05, "part that is held out where no file is: the end of the last one", above=0, below=1)
    tokenizer: str | None = key(None, f"{_TOKENIZER}, to show text that the model writes")
    bytes_per_token: float | None = key(None, "bytes of text that a token stands for, for bits_per_byte", above=0)

    def in_memory_bytes(self) -> int:
        return _bytes_of(self.path, self.pattern) if self.path else 0

    def sample_bytes(self) -> int:
        return 16 * self.length


@functools.lru_cache(maxsize=1)  # asked several times, and a folder may hold many files
def _bytes_of(path: str, glob: str) -> int:
    """Of a file, or of the files in a folder that match; 0 if there is none."""
    files = [Path(path)] if Path(path).is_file() else Path(path).rglob(glob)
    return sum(file.stat().st_size for file in files if file.is_file())


# --- optimizer and schedule -----------------------------------------------------------------------------------------


class OptimizerFacts:
    """What every optimizer answers; the defaults are those of an optimizer that nothing is known about."""

    has_fused: ClassVar[bool] = False
    """Whether torch 2.11 to 2.15 have a fused implementation (adadelta, rmsprop, lars and lamb have none)."""
    can_be_captured: ClassVar[bool] = False
    """Whether its step runs without waiting for the host: a flag on the device skips it, its rate may lie there."""
    adapts_per_layer: ClassVar[bool] = False
    """Whether the learning rate is adapted to each layer."""
    lr_scaling = "none"
    nesterov = False


@dataclass
class OptimizerConfig(OptimizerFacts):
    name: str = "sgd"
    lr: float = key(0.05, "learning rate after warm-up", above=0)
    weight_decay: float = key(0.0, "weight decay, as torch's optimizer defines it", at_least=0)
    decay_norm_and_bias: bool = key(True, "weight decay for norms and biases (parameters of at most one dimension) too")
    lr_scaling: str = key(
        "none", "multiply lr by global_batch_size / lr_base_batch, or its root", choices=("none", "linear", "sqrt")
    )
    lr_base_batch: int = key(256, "global batch size that lr is meant for, with lr_scaling", at_least=1)


@dataclass
class SgdConfig(OptimizerConfig):
    name: str = "sgd"
    has_fused: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True
    momentum: float = key(0.9, "momentum", at_least=0, below=1)
    nesterov: bool = key(False, "Nesterov momentum")


@dataclass
class AdamConfig(OptimizerConfig):
    name: str = "adam"
    has_fused: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    beta1: float = key(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.999, "decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)


@dataclass
class AdamWConfig(AdamConfig):
    name: str = "adamw"
    weight_decay: float = key(0.01, "weight decay, decoupled from the gradient", at_least=0)


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
    alpha: float = key(0.99, "decay of the average of squared gradients", at_least=0, below=1)
    momentum: float = key(0.0, "momentum", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)


_ADAPT_NORM_AND_BIAS = "decay and adapt norms and biases (parameters of at most one dimension) too"


@dataclass
class LarsConfig(OptimizerConfig):
    """SGD with a learning rate adapted to each layer (arXiv:1708.03888), for batches of thousands."""

    name: str = "lars"
    can_be_captured: ClassVar[bool] = True
    adapts_per_layer: ClassVar[bool] = True
    lr: float = key(1.0, "learning rate after warm-up, before each layer's ratio", above=0)
    weight_decay: float = key(5e-5, "weight decay, part of the gradient that is adapted", at_least=0)
    decay_norm_and_bias: bool = key(False, _ADAPT_NORM_AND_BIAS)
    momentum: float = key(0.9, "momentum of the update, learning rate included", at_least=0, below=1)
    trust_coefficient: float = key(1e-3, "norm of an update over that of the layer's weights, at lr=1", above=0)
    eps: float = key(0.0, "added to the denominator of the trust ratio", at_least=0)


@dataclass
class LambConfig(AdamConfig):
    """Adam with a learning rate adapted to each layer (arXiv:1904.00962), for batches of thousands."""

    name: str = "lamb"
    has_fused: ClassVar[bool] = False
    adapts_per_layer: ClassVar[bool] = True
    lr: float = key(5e-3, "norm of an update over that of the layer's weights, after warm-up", above=0)
    weight_decay: float = key(0.01, "weight decay, part of the update that is adapted", at_least=0)
    decay_norm_and_bias: bool = key(False, _ADAPT_NORM_AND_BIAS)
    eps: float = key(1e-6, "added to the denominator", above=0)
    max_trust_ratio: float | None = key(None, "upper bound of the trust ratio; null: none", above=0)


@dataclass
class ScheduleConfig:
    """Learning rates as functions of the optimizer step, which is the same on all ranks."""

    name: str = "constant"
    warmup_steps: int = key(0, "optimizer steps of linear warm-up from 0", at_least=0)
    warmup_epochs: float | None = key(None, "length of the warm-up in epochs, in place of warmup_steps", above=0)


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
    final_factor: float = key(0.0, "learning rate of the last step, as a fraction of lr", at_least=0, at_most=1)


@dataclass
class PolynomialConfig(ScheduleConfig):
    name: str = "polynomial"
    power: float = key(2.0, "exponent of the decay", above=0)
    final_factor: float = key(0.0, "learning rate of the last step, as a fraction of lr", at_least=0, at_most=1)


@dataclass
class OneCycleConfig(ScheduleConfig):
    """Leslie Smith's 1cycle (arXiv:1708.07120): up from lr / div_factor to lr, then down to almost nothing."""

    name: str = "one_cycle"
    pct_start: float = key(0.3, "fraction of the steps in which the learning rate goes up", above=0, below=1)
    div_factor: float = key(25.0, "lr divided by the first learning rate", at_least=1)
    final_div_factor: float = key(1e4, "first learning rate divided by the last", at_least=1)


# --- your own, and the whole ----------------------------------------------------------------------------------------


@dataclass
class CustomConfig(ModelFacts, DataFacts, OptimizerFacts):
    """Your own class or function: `_target_=package.Name`, and its arguments beside it."""

    name: str = "custom"
    target: str = key("", "dotted path of your own class or function (see SECURITY.md)", may_be_empty=True)
    arguments: dict[str, Any] = key({}, "its keyword arguments, plain values")
    metrics: ClassVar[dict[str, str]] = {}


@dataclass
class CustomDataConfig(CustomConfig):
    """Your own data set: `_target_=package.Name`, and its arguments beside it."""

    validation: float | None = _validation_part()


@dataclass
class Config:
    """One whole run."""

    mode: str = key(
        "train",
        "train, score a checkpoint, compare runs, or examine this host",
        choices=("train", "evaluate", "study", "doctor"),
    )
    name: str = key("default", "name of the run; it is kept in runs/NAME/... unless run_dir is given")
    run_dir: str | None = key(None, "directory of the run; given again, the run resumes")
    seed: int = key(0, "seed of all random numbers", at_least=0, below=2**63)
    device: str = key("auto", "where to compute; auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu"))
    deterministic: Union[bool, str] = key("auto", "repeatable bits; auto: on CPU and with strategy=ordered", **AUTO)
    objective: str = key(
        "auto",
        "what a sweep optimizes: validation.NAME or test.NAME of any metric, samples_per_second or seconds; auto: the "
        "loss of the validation set, or of the test set if there is none",
    )
    hooks: list[str] = key([], "your classes, package.Name: called with (job, run_dir, world), entered around training")
    trusted_modules: list[str] = key([], "packages whose code a checkpoint's _target_ may name")
    reasons: dict[str, str] = field(default_factory=dict)
    """Why `auto` chose its value, by the name of the switch. Not a key: filled in when `auto` is resolved."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    strategy: Any = field(default_factory=DdpConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: Any = field(default_factory=CnnConfig)
    task: Any = field(default_factory=AutoTaskConfig)
    data: Any = field(default_factory=DigitsConfig)
    optimizer: Any = field(default_factory=SgdConfig)
    schedule: Any = field(default_factory=CosineConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def _by_name(*schemas: type) -> dict[str, Any]:
    return {schema().name: schema for schema in schemas}


OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": _by_name(SingleConfig, DpConfig, DdpConfig, OrderedConfig),
    "model": _by_name(
        CnnConfig, MlpConfig, LinearRegressionConfig, GeluMlpConfig, GptConfig, TorchvisionConfig, CustomConfig
    ),
    "task": _by_name(
        AutoTaskConfig,
        ClassificationConfig,
        MultilabelConfig,
        RegressionConfig,
        SegmentationConfig,
        LanguageModelConfig,
        CustomConfig,
    ),
    "data": _by_name(
        DigitsConfig,
        MnistConfig,
        FashionMnistConfig,
        Cifar10Config,
        ImageFolderConfig,
        SyntheticConfig,
        LinearRegressionDataConfig,
        TextConfig,
        TokensConfig,
        CustomDataConfig,
    ),
    "optimizer": _by_name(
        SgdConfig, AdamConfig, AdamWConfig, AdadeltaConfig, RmspropConfig, LarsConfig, LambConfig, CustomConfig
    ),
    "schedule": _by_name(ConstantConfig, StepConfig, CosineConfig, PolynomialConfig, OneCycleConfig),
}
"""For each group with several options: the schema of each option, by its `name`."""

DIRECTIONS: dict[str, str] = {
    name: better for option in OPTIONS["task"].values() for name, better in option.metrics.items()
}
"""The better direction, `max` or `min`, of the built-in tasks' metrics. A task of your own may say otherwise."""

SECTIONS: dict[str, type] = {
    "launch": LaunchConfig,
    "train": TrainConfig,
    "tuning": TuningConfig,
    "checkpoint": CheckpointConfig,
    "tracker": TrackerConfig,
}
"""The sections that have one schema."""

SCALARS = tuple(name for name, f in Config.__dataclass_fields__.items() if "meaning" in f.metadata)
"""The keys of Config itself."""


def schema_of(section: str, name: str) -> type | None:
    """The dataclass of a section, or None if `name` is not an option of it."""
    return SECTIONS.get(section) or OPTIONS[section].get(name)
