"""tuning.conv_sums on the CPU, where its operator computes the sums by torch. By cuDNN:
tests/end_to_end/test_gpu.py."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import subprocess
import sys
import uuid
import weakref
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor import config

from ddp_train.config.packages import SOURCE
from ddp_train.kernels.conv_sums import ConvSums
from ddp_train.kernels.conv_sums_operators import conv_sums, normalised
from ddp_train.kernels.genstats import Case, fastest_kernel, milliseconds_saved
from ddp_train.kernels.interface import conv_sums_options
from ddp_train.performance.switches import tune_model
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.task import ModelWithTask
from tests.config.test_switches import GPU, case_of
from tests.support.commands import ROOT, run

FP32 = (torch.float32,)


class Counted(ConvSums):
    """How many convolutions it summed up, in all graphs."""

    found = 0

    def uuid(self) -> Any:
        return (
            uuid.uuid4().hex
        )  # the graphs of another run of the test are not taken from the compiler's cache

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        self.found += sum("conv_sums" in str(node.target) for node in graph.nodes)


class Net(nn.Module):
    """Two that fit, one of them strided, dilated and also used by another layer; and one each of
    those that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, 2, 2, 2, bias=False)
        self.first_norm = nn.BatchNorm2d(16, momentum=0.3)
        self.second = nn.Conv2d(16, 16, (1, 3), padding=(0, 1), bias=False)
        self.second_norm = nn.BatchNorm2d(16)
        self.biased = nn.Conv2d(16, 16, 1)
        self.biased_norm = nn.BatchNorm2d(16)
        self.odd = nn.Conv2d(16, 12, 1, bias=False)
        self.odd_norm = nn.BatchNorm2d(12)
        self.grouped = nn.Conv2d(12, 12, 1, groups=2, bias=False)
        self.grouped_norm = nn.BatchNorm2d(12)
        self.plain = nn.Conv2d(12, 16, 1, bias=False)
        self.cumulative = nn.BatchNorm2d(16, momentum=None)
        self.resting = nn.Conv2d(16, 16, 1, bias=False)
        self.resting_norm = nn.BatchNorm2d(16)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.resting_norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.first_norm(x).relu() + x.tanh()
        x = self.second_norm(self.second(x)).relu()
        x = self.biased_norm(self.biased(x))
        x = self.grouped_norm(self.grouped(self.odd_norm(self.odd(x)).relu()))
        return self.resting_norm(self.resting(self.cumulative(self.plain(x))))


class Changed(nn.Module):
    """A batch norm for two convolutions, the later one first; one whose scale is computed; an
    output that is changed in place before; a convolution of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(6)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))
        self.scale = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        a = self.convolutions[0](x)
        b = self.convolutions[1](x)
        b = self.norms[0](b)
        a = self.norms[0](a)
        c = self.convolutions[2](a + b)
        c.relu_()
        c = self.norms[1](c)
        d = self.convolutions[3](c)
        norm: Any = self.norms[2]
        e = nn.functional.batch_norm(
            d, norm.running_mean, norm.running_var, self.scale.exp(), norm.bias, True
        )
        e = e + d * 0.5
        f = self.convolutions[4](e)
        return self.norms[3](self.convolutions[5](f)) + self.norms[4](f)


def changed_through_a_view(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    y = conv(x)
    y.detach().clamp_(min=0)
    return norm(y * 1) + norm(y)


def conv_without_gradients(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = conv(x)
    return norm(y)


def used_twice(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    y = conv(x)
    y.mul_(3)
    return norm(y) + norm(conv(y))


def norm_without_gradients(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    y = conv(x)
    with torch.no_grad():
        z = norm(y)
    return y + z


def average_read_before(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    y = conv(x)
    before = norm.running_mean.clone()
    return norm(y) + before.view(1, -1, 1, 1)


def average_with_a_gradient(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    return norm(conv(x * norm.running_var.view(1, -1, 1, 1)))


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None


def without_a_gradient(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    return cast(Tensor, Stop.apply(norm(conv(x)))) + x


def average_reset(conv: nn.Module, norm: Any, x: Tensor) -> Tensor:
    y = conv(x)
    norm.running_mean.zero_()
    return norm(y)


def by_functions(conv: Any, norm: Any, x: Tensor) -> Tensor:
    """Arguments that a layer always gives, left out; windows of one number for two."""
    y = nn.functional.conv2d(x, conv.weight, None, (2,), (1,))
    return nn.functional.batch_norm(
        y, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.2
    )


def with_a_frozen_scale(conv: Any, norm: Any, x: Tensor) -> Tensor:
    scale = norm.weight.detach() * 2
    return nn.functional.batch_norm(
        conv(x), norm.running_mean, norm.running_var, scale, norm.bias, True
    )


class Between(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.between = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.conv, self.norm, x)


class Pair(nn.Module):
    """No nn.Sequential, which torch 2.11 compiles not in place, without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, bias=False)
        self.first_norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, bias=False)
        self.second_norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second_norm(self.second(self.first_norm(self.first(x)).relu()))


def passed_on(graph_pass: ConvSums, name: str) -> Any:
    """One of torch's backends, behind the pass."""

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graph_pass(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return lookup_backend(name)(graph, inputs)  # pyright: ignore[reportArgumentType]

    return backend


def summed_up(net: nn.Module, x: Tensor, graph_pass: ConvSums) -> None:
    """A forward pass; the graph is not differentiated."""
    torch._dynamo.reset()
    net.compile(dynamic=False, backend=passed_on(graph_pass, "eager"))
    net.train()(x)


@functools.cache
def graphs_of_net() -> list[fx.GraphModule]:
    """What a pass is given of `Net`: to be copied, for tracing takes a second."""
    kept: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: list[Tensor]) -> Any:
        kept.append(copy.deepcopy(graph))
        return graph

    torch._dynamo.reset()
    net = Net()
    net.compile(dynamic=False, backend=backend)
    net.train()(torch.randn(6, 8, 17, 19))
    return kept


def learned(
    net: nn.Module, x: Tensor, graph_pass: ConvSums | None, autocast: bool = False
) -> dict[str, Tensor]:
    """Output, gradients and buffers after two steps of a copy, which is compiled for the pass."""
    net = copy.deepcopy(net).train()
    if graph_pass:
        torch._dynamo.reset()
        net.compile(dynamic=False, backend=passed_on(graph_pass, "aot_eager"))
    x = x.clone().requires_grad_()
    y = torch.empty(0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net(x)
        (y.float() * torch.linspace(-1, 1, y.shape[1]).view(1, -1, 1, 1)).square().mean().backward()
    gradients = {} if x.grad is None else {"x": x.grad}
    gradients |= {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
    return {
        "y": y.detach(),
        **gradients,
        **{f"{name} kept": one for name, one in net.named_buffers()},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fit"), [(Net, 2), (Changed, 2)])
def test_batch_norm_learns_the_same_from_sums(kind: type[nn.Module], fit: int) -> None:
    """Output, gradients, running averages. What the kernels of cuDNN cannot do is left as it is."""
    torch.manual_seed(0)
    net = kind()
    x = (torch.randn(6, 8, 17, 19) + 2).contiguous(memory_format=torch.channels_last)
    counted = Counted("cpu", FP32, always=True)
    plain = learned(net, x, None)
    summed = learned(net, x, counted)
    assert counted.found == fit
    assert set(plain) == set(summed) and len(plain) > 20
    for name, expected in plain.items():
        torch.testing.assert_close(
            summed[name], expected, rtol=1e-4, atol=1e-5, msg=lambda said, n=name: f"{n}: {said}"
        )
    assert max(plain[name].abs().max() for name in plain if "running_mean" in name) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "fit"),
    [
        (changed_through_a_view, 0),
        (conv_without_gradients, 1),
        (used_twice, 0),
        (norm_without_gradients, 1),
        (average_read_before, 0),
        (average_reset, 0),
        (average_with_a_gradient, 0),
        (without_a_gradient, 1),
        (by_functions, 1),
        (with_a_frozen_scale, 1),
    ],
)
def test_what_lies_between_convolution_and_norm_keeps_its_place(between: Any, fit: int) -> None:
    torch.manual_seed(0)
    net = Between(between)
    x = torch.randn(4, 8, 9, 9) + 1
    counted = Counted("cpu", FP32, always=True)
    plain = learned(net, x, None)
    summed = learned(net, x, counted)
    assert counted.found == fit and set(plain) == set(summed)
    for name, expected in plain.items():
        torch.testing.assert_close(summed[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sums", "saved"), [((3.0, 3.0), 2), ((3.0, 3.9), 1), ((None, 3.0), 1), ((9.0, 9.0), 0)]
)
def test_convolutions_that_save_no_time_are_left_as_they_are(
    sums: tuple[float | None, float],
    saved: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """cuDNN's kernel, if it has one, beside torch's convolution and the reading half of a copy.
    Those of one shape are timed once. sums: milliseconds of each shape."""
    cases: list[Case] = []

    def kernel(case: Case) -> Any:
        cases.append(case)
        milliseconds = sums[len(cases) - 1]

        def run(x: Tensor, weight: Tensor, y: Tensor, _: Tensor) -> float | None:
            assert (x.shape, weight.shape) == (case.x_shape, case.weight_shape) and len(y) == 6
            return milliseconds

        return run if milliseconds else None

    def timed(work: Any) -> float:
        """3 by torch, a copy 2, cuDNN as it says."""
        made = work()
        if isinstance(made, float):
            return made
        return 3.0 if getattr(work, "func", None) else 2.0

    monkeypatch.setattr("ddp_train.kernels.genstats.fastest_kernel", kernel)
    monkeypatch.setattr("ddp_train.kernels.genstats.median_milliseconds", timed)
    caplog.set_level(logging.INFO, "ddp_train.kernels.conv_sums")
    milliseconds_saved.cache_clear()
    counted = Counted("cpu", FP32)
    for _ in range(2):
        for traced in copy.deepcopy(graphs_of_net()):
            counted(traced.graph)
    assert counted.found == 2 * saved
    assert [(case.x_shape, case.weight_shape, *case.window) for case in cases] == [
        ((6, 8, 17, 19), (16, 8, 3, 3), [2, 2], [2, 2], [2, 2]),
        ((6, 16, 9, 10), (16, 16, 1, 3), [1, 1], [0, 1], [1, 1]),
    ]
    less = sum(max(0.0, 0.97 * 4.0 - one) for one in sums if one)
    assert (
        caplog.text.count(f"cuDNN sums up {saved} of 2 convolutions, which saves {less:.2f} ms")
        == 2
    )
    milliseconds_saved.cache_clear()


def test_convolution_right_behind_a_batch_norm_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input is new in the graph, and the pass asks for its shape."""

    class Linear(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.second_norm(self.second(self.first_norm(self.first(x))))

    cases: list[Case] = []

    def saved(case: Case) -> float:
        cases.append(case)
        return 1.0

    monkeypatch.setattr("ddp_train.kernels.conv_sums.milliseconds_saved", saved)
    counted = Counted("cpu", FP32)
    summed_up(Linear(), torch.randn(4, 8, 9, 9), counted)
    assert counted.found == 2
    assert [case.x_shape for case in cases] == [(4, 8, 9, 9), (4, 16, 7, 7)]


def test_the_choice_comes_before_the_compilers_cache() -> None:
    """Where torch asks that first otherwise. What comes of it: the test below."""
    given = conv_sums_options("default")
    assert {"pre_grad_custom_pass"} == set(given) - {"pre_grad_pass_timing"}
    assert given.get("pre_grad_pass_timing") == (
        "early" if hasattr(config, "pre_grad_pass_timing") else None
    )


@pytest.mark.nightly
def test_a_choice_is_not_taken_from_the_compilers_cache(tmp_path: Path) -> None:
    """Two processes with one cache, in the second of which the kernel does not pay."""
    code = """
import sys, torch
from torch import nn
from ddp_train.kernels import conv_sums
from ddp_train.performance import switches
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.task import ModelWithTask
conv_sums.milliseconds_saved = lambda case: float(sys.argv[1])
conv_sums.ConvSums.__init__.__defaults__ = ("cpu", (torch.float32,), False)
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 49, 3))
module = ModelWithTask(net, Classification(classes=3), "cpu", None)
switches.tune_model(module, compile_mode="default", conv_sums=True)
batch = torch.randn(4, 8, 9, 9), torch.tensor([0, 1, 2, 0])
module(batch)[0].backward()
with torch.profiler.profile() as profile:
    module(batch)
print(any("conv_sums" in event.key for event in profile.key_averages()))
"""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for saved, summed in (("1", "True"), ("-1", "False")):
        command = [sys.executable, "-W", "ignore", "-c", code, saved]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.split()[-1:] == [summed], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("milliseconds", "refused", "chosen"),
    [([3.0, 1.0, 2.0], (), 1), ([3.0, 2.0], (1,), 2), ([], (0, 1, 2), None)],
)
def test_the_fastest_kernel_is_taken(
    milliseconds: list[float],
    refused: tuple[int, ...],
    chosen: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of cuDNN's, which are played here, those that can be built. No tensor of the trial stays."""
    used: list[int] = []

    class Tensors:
        def __getattr__(self, _: str) -> Any:
            return lambda *_, **__: self

    class Graph(Tensors):
        def get_execution_plan_count(self) -> int:
            return 3

        def get_workspace_size_plan_at_index(self, _: int) -> int:
            return 7

        def build_plan_at_index(self, index: int) -> None:
            if index in refused:
                raise RuntimeError(f"plan {index} is not supported")

        def genstats(self, **_: Any) -> Any:
            return Tensors(), Tensors()

        def execute_plan_at_index(
            self, tensors: Any, workspace: Tensor, index: int, handle: Any
        ) -> None:
            used.append(index)

    types = SimpleNamespace(HALF=1, BFLOAT16=2, FLOAT=3)
    modes = SimpleNamespace(A=1, B=2, FALLBACK=3)
    played = {
        "create_handle": lambda: 0,
        "set_stream": lambda **_: None,
        "pygraph": lambda **_: Graph(),
    }
    monkeypatch.setitem(
        sys.modules, "cudnn", SimpleNamespace(**played, data_type=types, heur_mode=modes)
    )
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    tensors: list[weakref.ref[Tensor]] = []

    def timed(work: Any) -> float:
        tensors.extend(
            weakref.ref(one)
            for one in (*work.args, *work.keywords.values())
            if isinstance(one, Tensor)
        )
        return milliseconds.pop(0)

    monkeypatch.setattr("ddp_train.kernels.genstats.median_milliseconds", timed)
    half = torch.float16
    shapes = (torch.Size((2, 8, 4, 4)), torch.Size((16, 8, 1, 1)))
    gc.disable()
    try:
        found = fastest_kernel.__wrapped__(
            Case(torch.device("cpu"), half, *shapes, (1, 1), (0, 0), (1, 1))
        )
        assert not any(one() is not None for one in tensors)
    finally:
        gc.enable()
    assert len(tensors) == 4 * (3 - len(refused))
    if chosen is None:
        assert found is None
    else:
        assert found
        found(
            torch.empty(2, 8, 4, 4),
            torch.empty(16, 8, 1, 1),
            torch.empty(2, 16, 4, 4),
            torch.empty(2, 16),
        )
        assert used == [chosen]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8 * 32 * 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = (norm(conv(x)) + x).relu()
        return self.head(x.flatten(1))


@pytest.mark.nightly
def test_the_compiler_moves_fewer_bytes() -> None:
    """Each output is read once less forward, and backward as often as before: where the compiler
    differentiated sums itself, residual blocks took two passes more."""
    from benchmarks.compiler_bytes import counted  # all of inductor, 2 s

    images = torch.randn(4, 8, 32, 32)
    (forward, backward), by_sums = (
        [part / (images.nbytes / 2) for part in counted(Residual(), images, sums)]
        for sums in (False, True)
    )
    assert forward > 20 and by_sums[0] == pytest.approx(forward - 2, abs=0.1)
    assert backward > 15 and by_sums[1] == pytest.approx(backward, abs=0.1)


LATE = """
from torch._inductor import decomposition
before = decomposition.select_decomp_table()
from ddp_train.kernels import conv_sums_operators
import torch
after = decomposition.select_decomp_table()
print(*(torch.ops.ddp_train.normalised.default in table for table in (before, after)))
# The zygote forks scripts that have this word: ddp_train.session()
"""


@pytest.mark.slow
def test_batch_norm_is_fused_after_another_compilation(tmp_path: Path) -> None:
    """In a process that has not imported it."""
    script = tmp_path / "fused.py"
    script.write_text(LATE)
    done = run(command=[sys.executable, str(script)])
    assert done.returncode == 0 and done.stdout == "False True\n", done.stderr


@pytest.mark.nightly
def test_what_the_compiler_makes_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With C++ where a GPU has Triton."""
    counted = Counted("cpu", (torch.bfloat16,), always=True)
    monkeypatch.setattr("ddp_train.kernels.conv_sums.ConvSums", lambda: counted)
    batch = (
        torch.randn(4, 8, 32, 32).contiguous(memory_format=torch.channels_last),
        torch.tensor([0, 1, 2, 0]),
    )
    net = Residual()
    gradients = []
    for sums in (False, True):
        torch._dynamo.reset()
        module = ModelWithTask(copy.deepcopy(net), Classification(classes=3), "cpu", torch.bfloat16)
        tune_model(module, channels_last=True, compile_mode="default", conv_sums=sums)
        with config.patch(compile_threads=1, force_disable_caches=True):  # no pool of threads stays
            module(batch)[0].backward()
        gradients.append(
            torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None])
        )
    assert counted.found == 2
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


@pytest.mark.slow
def test_in_16_bits_it_is_as_near_to_32_as_torch_is() -> None:
    torch.manual_seed(0)
    net = Pair()
    x = torch.randn(16, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    exact = learned(net, x, None)
    counted = Counted("cpu", (torch.bfloat16,), always=True)
    errors = []
    for graph_pass in (None, counted):
        found = learned(net, x, graph_pass, autocast=True)
        shares = [
            (found[name].float() - one).norm() / one.norm()
            for name, one in exact.items()
            if one.is_floating_point()
        ]
        errors.append(torch.stack(shares).square().mean().sqrt())
    assert counted.found == 2
    assert errors[0] > 1e-3 and errors[1] < 1.3 * errors[0], errors


@pytest.mark.parametrize("words", [([1, 1], [0, 0], [1, 1]), ([2, 1], [1, 2], [1, 2])])
@pytest.mark.slow
def test_the_operators_keep_torchs_rules(words: Any) -> None:
    """Their shapes without data, their gradients, their place in a compiled graph."""
    x = torch.randn(2, 8, 9, 10, requires_grad=True)
    weight = torch.randn(16, 8, 3, 2, requires_grad=True)
    torch.library.opcheck(conv_sums, (x, weight, *words))
    y, sums = conv_sums(x, weight, *words)
    torch.testing.assert_close(sums, torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))]))
    scale = torch.linspace(-1, 1, 16, requires_grad=True)
    shift = torch.zeros(16, requires_grad=True)
    y = y.detach().requires_grad_()
    torch.library.opcheck(normalised, (y, sums, scale, shift, y.numel() // 16, 1e-5))


RESNET = "model=resnet50 data=synthetic train.max_steps=9999 tuning.conv_sums=true"


def test_what_it_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, ModuleSpec | None] = {"cudnn": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name, find_spec(name)))
    assert case_of(RESNET, GPU).problems == [
        "tuning.conv_sums=true: needs the package nvidia-cudnn-frontend (run"
        f" {sys.executable} -m pip install '{SOURCE}[cudnn]'); otherwise use tuning.conv_sums=false"
    ]
    found["cudnn"] = find_spec("torch")
    assert case_of(RESNET, GPU).problems == []
    for words, needed in {
        "tuning.compile=false": "tuning.compile=true",
        "tuning.precision=fp32": "tuning.precision=fp16 or bf16",
        "tuning.channels_last=false": "tuning.channels_last=true",
        "deterministic=true tuning.compile=true": (
            "deterministic=false, since cuDNN chooses these kernels by their speed"
        ),
    }.items():
        assert case_of(f"{RESNET} {words}", GPU).problems == [
            f"tuning.conv_sums=true: needs {needed}; otherwise use tuning.conv_sums=false"
        ], words
