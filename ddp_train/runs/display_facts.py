"""Speeds, advice and a text that the model writes: shown beside the losses of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ddp_train.config.switches import is_launch_bound
from ddp_train.data.corpus.windows import TokenSource
from ddp_train.data.datasets import BatchSource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from ddp_train.performance.bias_lint import biases_before_norm
from ddp_train.performance.flops import flops_of_samples, one_sample, peak_flops
from ddp_train.tasks.sampling import write_tokens
from ddp_train.tasks.task import ModelWithTask
from ddp_train.telemetry.rates import Rates


def build_rates(config: Config, world: World, device: str, job: Job, source: BatchSource) -> Rates:
    """Constants of a run from which its speeds are derived.

    All processes must call it: all count operations, since a model's forward pass may wait for all.
    """
    task = job.module.task
    unit = None if task.units_are_samples else task.unit
    # Counting calls the model and delays the first step. It is of no use where utilisation says
    # nothing, or where samples differ in cost.
    if config.device != "cuda" or is_launch_bound(config) or config.data.batch_by == "tokens":
        return Rates(unit)
    tuning = config.tuning
    gpu_name = torch.cuda.get_device_name(device)
    peak = peak_flops(gpu_name, tuning.precision, bool(tuning.tf32))
    if peak:
        spreads = config.strategy.spreads_over_gpus
        peak *= torch.cuda.device_count() if spreads else world.size
    return Rates(unit, flops_of_samples(job.module, source), peak)


def text_writer(config: Config, source: BatchSource) -> Callable[[nn.Module], str] | None:
    """A function that has a model write a text of `task.sample_tokens` tokens; None if no text is
    wanted."""
    count = config.task.sample_tokens
    if not count:
        return None
    if not isinstance(source, TokenSource):
        problem = (
            f"task.sample_tokens={count}: a model can write text only with data=text or"
            " data=tokens; use task.sample_tokens=0"
        )
        raise ConfigError([problem])
    prompt = config.task.sample_prompt
    key = f"task.sample_prompt={prompt}"
    codec = source.codec
    if prompt and not codec:
        raise ConfigError(
            [f"{key}: data=tokens needs a tokenizer to read this text; add data.tokenizer=PATH"]
        )
    first = [source.last_token]
    if codec:
        first += codec.encode(prompt)
    if max(first) >= source.vocabulary:
        last = source.vocabulary - 1
        mismatch = (
            f"has the token id {max(first):,}, but the largest id of the vocabulary is {last:,}"
        )
        remedy = "use the tokenizer that the data were made with"
        raise ConfigError([f"{key}: {mismatch}; {remedy}"])

    def write(model: nn.Module) -> str:
        temperature = config.task.sample_temperature
        ids = write_tokens(
            model, first, count, source.length, source.vocabulary, temperature, config.seed
        )
        if codec:
            return prompt + codec.decode(ids)
        return " ".join(map(str, ids))

    return write


def advice(config: Config, module: ModelWithTask, source: BatchSource) -> list[str]:
    """Changes of the model that the user may want, a line each."""
    sample = one_sample(source, module.model)
    if not config.tuning.bias_lint or not isinstance(sample, tuple | list):
        return []
    names = biases_before_norm(module.model, sample[0]) or []
    if not names:
        return []
    listed = ", ".join(names[:3])
    if len(names) > 3:
        listed += f" and {len(names) - 3} more"
    return [
        f"note: these biases have no effect, since a norm layer follows and cancels them: {listed}."
        " Build such layers with bias=False"
    ]
