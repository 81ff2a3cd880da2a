"""The option task=language_model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import RequestedRun, TaskConfig
from ddp_train.text import shown


@dataclass
class LanguageModelConfig(TaskConfig):
    """The next token."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "perplexity": "min", "bits_per_byte": "min"}
    name: str = "language_model"
    implementation: ClassVar[str] = "ddp_train.tasks.language_model.task:LanguageModel"
    loss: str = key(
        "cross_entropy", "loss of a token; targets of -100 are left out", choices=("cross_entropy",)
    )
    sample_tokens: int = key(
        0,
        "length in tokens of a text that the model writes at the end, to"
        " run_dir/sample.txt; 0: none",
        at_least=0,
    )
    sample_prompt: str = key("", "beginning of that text", may_be_empty=True)
    sample_temperature: float = key(
        0.8, "temperature of that text; the lower, the more often the likeliest token", above=0
    )

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from super().problems(run)
        if self.sample_tokens:
            return
        default = LanguageModelConfig()
        for name in ("sample_prompt", "sample_temperature"):
            value = getattr(self, name)
            if value != getattr(default, name):
                yield Problem(
                    f"task.{name}={shown(value)}",
                    "has an effect only with task.sample_tokens",
                    f"add task.sample_tokens=200, or leave task.{name} out",
                )
