"""LARS and LAMB on a GPU: no step waits for it, a CUDA graph replays steps with new rates, and what
a step costs.

    python benchmarks/large_batch_gpu.py [--steps 50] [--output FILE]

The parameters are those of ResNet-50, the gradients are random. First, with torch set to fail on
anything that waits for the GPU, three plain steps; then a step is captured and replayed with a rate
that changes in place, and compared with the same steps on the CPU in float64. Then milliseconds per
step, the kinds in turn in each of five rounds, the median shown, against torch's fused SGD and
AdamW. Without a GPU: the comparison and the times of plain steps.

Exit code 1 if weights are further from float64 than LIMIT, relative to the largest number of their
layer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from page import conditions, load_average, publish
from torch import Tensor, nn
from torch.optim import Optimizer
from torchvision.models import resnet50

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.assembly.arguments import arguments_of
from ddp_train.optim.config import AdamWConfig, SgdConfig
from ddp_train.optim.lars_lamb.config import LambConfig, LarsConfig
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import OptimizerConfig

LIMIT = 1e-4
RATES = [0.1, 0.3, 0.2, 0.4, 0.05, 0.01]
"""Three plain steps, and three replays. Those of LARS are meant for ratios of a thousandth: times
20."""
OURS = {"lars": LarsConfig(weight_decay=5e-5), "lamb": LambConfig()}
THEIRS = {"sgd": SgdConfig(weight_decay=5e-5), "adamw": AdamWConfig()}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Its parameters, each with a random gradient, the same in every call and on every device."""
    generator = torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = (1e-3 * torch.randn(parameter.shape, generator=generator)).to(parameter)
    return parameters


def optimizer_of(
    parameters: list[nn.Parameter], config: OptimizerConfig, implementation: str
) -> Optimizer:
    """The optimizer that a config names."""
    return build_optimizer(
        parameters,
        implementation_of(config.implementation),
        implementation=implementation,
        **arguments_of(config, *config.beside_arguments),
    )


def with_rate(optimizer: Optimizer, rate: float | Tensor) -> Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


def with_flag(optimizer: Optimizer) -> Optimizer:
    """Set the flag that could stop the optimizer step, as in training on a GPU, to a value that
    does not."""
    optimizer.found_inf = torch.zeros((), device=DEVICE)  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def captured(optimizer: Optimizer) -> Callable[[], None]:
    """A step of an optimizer that has made some already, as a graph. Its rate must be a tensor."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def difference_from_float64(name: str, model: nn.Module) -> float:
    """The largest difference after all RATES: on the GPU half of them in plain steps, half in
    replays of a graph."""
    scale = 20 if name == "lars" else 0.1
    here = copy.deepcopy(model).to(DEVICE)
    exact = copy.deepcopy(model).double()
    ours = parameters_of(here)
    rate = torch.zeros((), device=DEVICE)
    optimizer = with_flag(with_rate(optimizer_of(ours, OURS[name], "foreach"), rate))
    half = len(RATES) // 2
    rates = [torch.tensor(scale * value, device=DEVICE) for value in RATES]
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    for value in rates[:half]:
        rate.copy_(value)
        optimizer.step()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
    step = captured(optimizer) if ON_GPU else optimizer.step
    for value in rates[half:]:
        rate.copy_(value)
        step()
    theirs = parameters_of(exact)
    reference = optimizer_of(theirs, OURS[name], "loop")
    for value in RATES:
        with_rate(reference, scale * value).step()
    pairs = zip(ours, theirs, strict=True)
    return max(
        ((o.detach().cpu() - t).abs().max() / t.abs().max().clamp(min=1e-6)).item()
        for o, t in pairs
    )


def timed(step: Callable[[], object], steps: int) -> float:
    """Milliseconds per step."""
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def steps_to_time(model: nn.Module) -> dict[str, Callable[[], object]]:
    """The steps to time, each kind with weights of its own, warm."""
    found: dict[str, Callable[[], object]] = {}
    for name, config in {**OURS, **THEIRS}.items():
        kinds = ["foreach", "loop"] if name in OURS else ["fused"]
        for kind in [*kinds, *(["graph"] if ON_GPU and name in OURS else [])]:
            implementation = "foreach" if kind == "graph" else kind
            parameters = parameters_of(copy.deepcopy(model).to(DEVICE))
            optimizer = with_rate(
                optimizer_of(parameters, config, implementation),
                torch.tensor(1e-4, device=DEVICE),
            )
            with_flag(optimizer)
            for _ in range(3):
                optimizer.step()
            found[f"{name}, {kind}"] = captured(optimizer) if kind == "graph" else optimizer.step
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="LARS and LAMB: waits, graphs, milliseconds.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    before = load_average()
    torch.manual_seed(0)
    model = resnet50()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # no layer of zeros, whose relative difference would mean nothing
    worst = {name: difference_from_float64(name, model) for name in OURS}
    steps = steps_to_time(model)
    rounds = [
        {name: timed(step, arguments.steps) for name, step in steps.items()} for _ in range(5)
    ]
    if ON_GPU:
        how = "three plain steps, none of which waited, and three replays"
    else:
        how = f"{len(RATES)} plain steps"
    lines = [
        f"# Steps of LARS and LAMB on {torch.cuda.get_device_name(0) if ON_GPU else 'the CPU'}",
        "",
    ]
    lines += [
        "Parameters of ResNet-50 in float32, random gradients.",
        "",
        "| step | ms | all rounds |",
        "|---|---|---|",
    ]
    for name in steps:
        times = sorted(found[name] for found in rounds)
        lines.append(
            f"| {name} | {statistics.median(times):.3f} | {times[0]:.3f} - {times[-1]:.3f} |"
        )
    lines += [
        "",
        f"Largest relative difference from float64 on the CPU after {how}; {LIMIT:g} is allowed:",
        "",
    ]
    lines += [f"- {name}: {value:.2g}" for name, value in worst.items()]
    lines += [
        "",
        *conditions("large_batch_gpu.py " + " ".join(sys.argv[1:]), f"{before}, {load_average()}"),
    ]
    publish(lines, arguments.output)
    return int(not all(value <= LIMIT for value in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
