"""The options of each group: their names, and where the class of each is.

A class is imported when it is asked for. To add an option, write its class into a module `config`
beside its implementation, and its line here. A tracker is its own class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


class OptionGroup(Mapping[str, type[Any]]):
    """The options of a group by name: `OPTIONS["optimizer"]["sgd"]`."""

    def __init__(self, places: dict[str, str]) -> None:
        """places: `module:Class` of each option, by its name."""
        self._places = places

    def __getitem__(self, name: str) -> type[Any]:
        module, _, class_name = self._places[name].partition(":")
        return getattr(import_module(module), class_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places


OPTIONS: dict[str, OptionGroup] = {
    "strategy": OptionGroup(
        {
            "single": "ddp_train.parallel.config:SingleConfig",
            "dp": "ddp_train.parallel.config:DpConfig",
            "ddp": "ddp_train.parallel.ddp.config:DdpConfig",
            "ordered": "ddp_train.parallel.ordered.config:OrderedConfig",
        }
    ),
    "model": OptionGroup(
        {
            "cnn": "ddp_train.models.config:CnnConfig",
            "mlp": "ddp_train.models.config:MlpConfig",
            "linear_regression": "ddp_train.models.config:LinearRegressionConfig",
            "gelu_mlp": "ddp_train.models.config:GeluMlpConfig",
            "gpt": "ddp_train.models.gpt.config:GptConfig",
            "torchvision": "ddp_train.models.torchvision.config:TorchvisionConfig",
            "custom": "ddp_train.options.custom:CustomModelConfig",
        }
    ),
    "task": OptionGroup(
        {
            "auto": "ddp_train.tasks.config:AutoTaskConfig",
            "classification": "ddp_train.tasks.config:ClassificationConfig",
            "regression": "ddp_train.tasks.config:RegressionConfig",
            "multilabel": "ddp_train.tasks.config:MultilabelConfig",
            "segmentation": "ddp_train.tasks.config:SegmentationConfig",
            "language_model": "ddp_train.tasks.language_model.config:LanguageModelConfig",
            "custom": "ddp_train.options.custom:CustomTaskConfig",
        }
    ),
    "data": OptionGroup(
        {
            "digits": "ddp_train.data.config:DigitsConfig",
            "mnist": "ddp_train.data.config:MnistConfig",
            "fashion_mnist": "ddp_train.data.config:FashionMnistConfig",
            "cifar10": "ddp_train.data.config:Cifar10Config",
            "image_folder": "ddp_train.data.image_folder.config:ImageFolderConfig",
            "synthetic": "ddp_train.data.config:SyntheticConfig",
            "linear_regression": "ddp_train.data.config:LinearRegressionDataConfig",
            "text": "ddp_train.data.corpus.config:TextConfig",
            "tokens": "ddp_train.data.corpus.config:TokensConfig",
            "custom": "ddp_train.options.custom:CustomDataConfig",
        }
    ),
    "optimizer": OptionGroup(
        {
            "sgd": "ddp_train.optim.config:SgdConfig",
            "adam": "ddp_train.optim.config:AdamConfig",
            "adamw": "ddp_train.optim.config:AdamWConfig",
            "adadelta": "ddp_train.optim.config:AdadeltaConfig",
            "rmsprop": "ddp_train.optim.config:RmspropConfig",
            "lars": "ddp_train.optim.lars_lamb.config:LarsConfig",
            "lamb": "ddp_train.optim.lars_lamb.config:LambConfig",
            "muon": "ddp_train.optim.muon.config:MuonConfig",
            "custom": "ddp_train.options.custom:CustomOptimizerConfig",
        }
    ),
    "schedule": OptionGroup(
        {
            "constant": "ddp_train.optim.schedules.config:ConstantConfig",
            "step": "ddp_train.optim.schedules.config:StepConfig",
            "cosine": "ddp_train.optim.schedules.config:CosineConfig",
            "polynomial": "ddp_train.optim.schedules.config:PolynomialConfig",
            "one_cycle": "ddp_train.optim.schedules.config:OneCycleConfig",
            "wsd": "ddp_train.optim.schedules.config:WsdConfig",
            "custom": "ddp_train.options.custom:CustomScheduleConfig",
        }
    ),
}
"""The groups of which a run has one option each."""

TRACKERS = OptionGroup(
    {
        "tensorboard": "ddp_train.telemetry.trackers.tensorboard:TensorBoard",
        "wandb": "ddp_train.telemetry.trackers.wandb:Wandb",
        "mlflow": "ddp_train.telemetry.trackers.mlflow:Mlflow",
    }
)
"""The trackers of ours, of which a run may have several. Their keys are the arguments of the
class."""


def default_of(group: str, name: str) -> Any:
    """An option with the defaults of all its keys."""
    return OPTIONS[group][name]()


def implementation_of(place: str) -> Any:
    """The object at `module:name`, imported now. Options name their implementations so."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
