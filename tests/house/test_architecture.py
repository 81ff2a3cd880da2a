"""The house keeps its shape: imports go down, no circle, nothing happens at import."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_train import public

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ddp_train"
LABORATORY = ROOT / "ddp_lab"

OPTION_CLASSES = "the modules config.py of the rooms"
"""The classes of options, each beside its implementation: a layer of its own."""

ROOMS = [
    *("errors", "public", "text", "scored_sets", "linux", "plain_yaml"),
    *("plain_state", "tensor_tree"),
    *("distributed", "hardware", "options", OPTION_CLASSES),
    *("checkpoints.layout", "resilience", "telemetry", "config", "launcher"),
    "sweeps",
    "kernels",
    *("data", "models", "tasks", "optim", "parallel", "performance"),
    *("engine", "checkpoints", "recovery", "assembly", "inference", "runs"),
    "commands",
    *("sessions", "testing", "__main__"),
]
"""Whatever lies directly in ddp_train/, from the ground up: a room imports only rooms before it.

A module that is named with its room lies on a floor of its own: `checkpoints.layout` says without
torch where checkpoints are, to the config and the launcher too.
"""

WITH_TORCH = [
    "ddp_train.plain_state",
    "ddp_train.tensor_tree",
    *(
        f"ddp_train.distributed.{name}"
        for name in ("all_gather", "buffers_of_ranks", "connections", "exchange", "flight_record")
    ),
    *(
        f"ddp_train.distributed.{name}"
        for name in ("preflight", "process_group", "replicas", "torchrun_agent")
    ),
    *("ddp_train.distributed.empty_batch", "ddp_train.resilience.peer_check"),
    *(f"ddp_train.telemetry.{name}" for name in ("gpu_sampler", "hardware_monitor")),
    *(f"ddp_train.{room}." for room in ("data", "models", "tasks", "optim", "parallel")),
    *(f"ddp_train.{room}." for room in ("performance", "engine", "recovery", "assembly")),
    *("ddp_train.kernels.", "ddp_train.inference.", "ddp_train.runs."),
    *(f"ddp_train.checkpoints.{name}" for name in ("checkpoint_hook", "scored_checkpoint")),
    *(f"ddp_train.checkpoints.{name}" for name in ("mirror", "reader", "training_state", "writer")),
    *(
        f"ddp_train.sessions.{name}"
        for name in (
            "batch_norm",
            "foreign_optimizers",
            "gradient",
            "loader",
            "models",
            "numbers",
            "loop_state",
            "mean_losses",
            "open_step",
            "model_parts",
            "parameter_groups",
            "process",
            "run",
            "saving",
            "session_",
            "steps",
        )
    ),
    *("ddp_train.sessions.values", "ddp_train.sessions.wrapped", "ddp_train.sessions.feed"),
    "ddp_train.sessions.stream_feed",
    *("ddp_train.sessions.data_arguments", "ddp_train.sessions.training_loader"),
    "ddp_train.sessions.learning_rates",
    *("ddp_train.sessions.update", "ddp_train.sessions.watches."),
    "ddp_train.sessions.windows",
    *(
        "ddp_lab.doctor.collective_test",
        "ddp_lab.doctor.all_hosts",
        "ddp_lab.doctor.peers",
        "ddp_lab.doctor.multihost_checks",
    ),
    *(f"ddp_lab.study.{name}" for name in ("dry_plan", "step_times", "gradient_probe")),
    *(
        f"ddp_lab.prove.{name}"
        for name in ("bench", "causes", "data_checks", "division", "layer_trace")
    ),
    *(f"ddp_lab.prove.{name}" for name in ("examine", "gradient_checks", "score_checks")),
    *(f"ddp_lab.prove.{name}" for name in ("fixed_draws", "hooks", "unseeded")),
]
"""How the names of modules begin that import torch, which only workers may do. All others run
before a config is valid, and must answer a typo within half a second."""


def is_option_class(module: str) -> bool:
    """Tell whether a module is the config.py of a room or of a package in it."""
    return module.endswith(".config")


def room_of(module: str) -> str:
    inside = module.removeprefix("ddp_train.")
    if inside in ROOMS:
        return inside
    return OPTION_CLASSES if is_option_class(module) else module.split(".")[1]


@functools.cache
def modules_of(package: Path) -> dict[str, Path]:
    """Files by the names of their modules. The template's files are imported in projects alone."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py" and "template" not in path.parts
    }


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_by(path: Path) -> set[str]:
    """The modules of core and laboratory that a file imports, wherever in the file."""
    modules = modules_of(CORE) | modules_of(LABORATORY)
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & modules.keys()) or {node.module}
    return {name for name in found if name.split(".")[0] in ("ddp_train", "ddp_lab")}


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module of core and laboratory imports of them."""
    modules = modules_of(CORE) | modules_of(LABORATORY)
    return {name: imported_by(path) for name, path in modules.items()}


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of the core of which the first imports the second."""
    pairs = {
        (room_of(name), room_of(other))
        for name in modules_of(CORE)
        for other in imports()[name]
        if "." in other
    }
    return {(room, other) for room, other in pairs if room != other}


def test_imports_go_down() -> None:
    assert {room_of(name) for name in modules_of(CORE)} == set(ROOMS)
    upward = [(one, other) for one, other in arrows() if ROOMS.index(other) > ROOMS.index(one)]
    assert not upward, f"imports that go up: {upward}"


def test_classes_of_options_import_only_the_ground() -> None:
    allowed = {"errors", "text", "options", OPTION_CLASSES}
    upward = {other for room, other in arrows() if room == OPTION_CLASSES} - allowed
    assert not upward


def test_the_core_never_imports_the_laboratory() -> None:
    upward = [
        (name, other)
        for name in modules_of(CORE)
        for other in imports()[name]
        if other.startswith("ddp_lab")
    ]
    assert not upward


def test_the_laboratory_imports_declared_modules_alone() -> None:
    used = {
        other
        for name in modules_of(LABORATORY)
        for other in imports()[name]
        if other.startswith("ddp_train")
    }
    assert used == set(public.MODULES), "change the laboratory, or what ddp_train/public.py says"


def test_the_laboratory_uses_no_private_name() -> None:
    private = [
        f"{name}: {node.module}.{alias.name}"
        for name, path in modules_of(LABORATORY).items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_train")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private


def test_the_plugin_imports_nothing_of_ours() -> None:
    for path in (ROOT / "hydra_plugins").rglob("*.py"):
        assert not imported_by(path), path


def test_config_objects_stop_where_a_run_is_set_up() -> None:
    """Constructors take plain values: no collaborator of the loop imports the config."""
    collaborators = ["distributed", "resilience", "telemetry", "data", "models", "tasks", "optim"]
    collaborators += ["kernels", "parallel", "performance", "engine"]
    of_a_config = {"options", OPTION_CLASSES, "config"}
    assert not {pair for pair in arrows() if pair[0] in collaborators and pair[1] in of_a_config}


def test_kernels_are_reached_by_their_interface_alone() -> None:
    for name in modules_of(CORE):
        if name.split(".")[1] != "kernels":
            kernels = {other for other in imports()[name] if other.startswith("ddp_train.kernels.")}
            assert kernels <= {"ddp_train.kernels.interface"}, name


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Inside a room too."""
    left = imports().copy()
    while left:
        free = [module for module, needs in left.items() if not needs & left.keys() - {module}]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_the_loop_knows_only_collaborators() -> None:
    text = (CORE / "engine" / "loop.py").read_text()
    code = text.split('"""', 2)[2].split("class Hook")[1]
    for stranger in ("rank", "config", "device", "dist.", "autocast", "isinstance"):
        assert stranger not in code, stranger


def printed_by(code: str) -> str:
    """What a new interpreter prints for some code."""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def worker_imports() -> dict[str, Any]:
    """What an interpreter holds that imported the worker: "modules"; "before" and "after": state.

    The state is looked at once torch is imported, and again with the worker and the command too.
    """
    printed = printed_by("""
import json, logging, signal, sys, threading, torch

def state():
    return (
        threading.active_count(),
        len(logging.root.handlers),
        str(signal.getsignal(signal.SIGTERM)),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(),
        torch.distributed.is_initialized(),
    )

before = state()
import ddp_train.runs.worker
modules = list(sys.modules)
import ddp_train.commands.flags
print(json.dumps({"modules": modules, "before": before, "after": state()}))
""")
    return json.loads(printed)


@pytest.mark.slow
def test_workers_start_without_hydra(worker_imports: dict[str, Any]) -> None:
    assert "hydra" not in worker_imports["modules"]


@pytest.mark.slow
def test_no_kernel_is_imported_by_a_worker_that_uses_none(worker_imports: dict[str, Any]) -> None:
    modules = worker_imports["modules"]
    kernels = {name for name in modules if name.startswith("ddp_train.kernels.")}
    assert kernels == {"ddp_train.kernels.interface"}


@pytest.mark.slow
def test_nothing_happens_at_import(worker_imports: dict[str, Any]) -> None:
    """No thread, no logging handler, no signal handler, no change of torch's global state."""
    assert worker_imports["after"] == worker_imports["before"]


@pytest.mark.slow
def test_torch_is_not_imported_before_the_config_is_valid() -> None:
    """One process imports all modules; the first one behind which torch is there is named."""
    modules = [
        name
        for name in imports()
        if is_option_class(name) or not name.startswith(tuple(WITH_TORCH))
    ]
    first_with_torch = printed_by(f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
""")
    assert not first_with_torch
