"""The option model=torchvision. torchvision is not imported, which would take over a second."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import ModelConfig, RequestedRun
from ddp_train.text import did_you_mean


@dataclass
class TorchvisionConfig(ModelConfig):
    """Any classifier of torchvision, from scratch or with its weights."""

    name: str = "torchvision"
    implementation: ClassVar[str] = "ddp_train.models.torchvision_networks:build_torchvision"
    takes_tokens: ClassVar[bool | None] = False
    takes_images: ClassVar[bool | None] = True
    channels_taken: ClassVar[tuple[int, ...]] = (1, 3)
    arch: str = key("resnet18", "name of the classifier in torchvision.models")
    weights: str | None = key(
        None,
        "begin with torchvision's weights for it, DEFAULT or a name like IMAGENET1K_V1; downloaded"
        " once per host",
    )

    def worth_compiling(self) -> bool:
        return True

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from super().problems(run)
        names = classifiers()
        if self.arch not in names:
            yield Problem(
                f"model.arch={self.arch}",
                f"torchvision has no classifier of that name{did_you_mean(self.arch, names)}",
            )
        if self.weights is not None:
            yield from self._weights_problems(self.weights)

    def _weights_problems(self, weights: str) -> Iterator[Problem]:
        if self.init_from is not None:
            yield Problem(
                f"model.weights={weights}",
                f"contradicts model.init_from={self.init_from}",
                "give one of them",
            )
            return
        known = names_of_weights(self.arch)
        if weights not in known:
            guess = did_you_mean(weights, known)
            listed = ", ".join(known) or "none"
            yield Problem(f"model.weights={weights}", f"{self.arch} has {listed}{guess}")


def sources() -> list[str]:
    """The source files of the installed torchvision's models."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    files = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    return [file.read_text() for file in files]


def classifiers() -> list[str]:
    """The names of the classifiers of the installed torchvision."""
    pattern = re.compile(r"^@register_model\(.*?\)\n(?:@.*\n)*def (\w+)\(", re.M)
    return sorted(name for source in sources() for name in pattern.findall(source))


def names_of_weights(arch: str) -> list[str]:
    """The names of the weights that the installed torchvision has for a classifier."""
    builder = re.compile(rf"^def {re.escape(arch)}\([^)]*?weights: Optional\[(\w+)\]", re.M)
    for source in sources():
        parameter = builder.search(source)
        if parameter is None:
            continue
        of_class = rf"^class {parameter[1]}\(.*?\n(.*?)(?=^\S|\Z)"
        members = re.search(of_class, source, re.M | re.S)
        return re.findall(r"^    (\w+) = ", members[1], re.M) if members else []
    return []
