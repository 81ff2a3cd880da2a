"""The house keeps its shape: imports go down, no circle, nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ddp_train"

ROOMS = """
    errors text linux tensor_tree
    distributed resilience telemetry config launcher data models tasks optim parallel performance training own_loop
    study doctor testing prove
    __main__
""".split()  # noqa: SIM905  one word per room reads better
"""Whatever lies directly in ddp_train/, from the ground up: a room imports only rooms before it."""


WITH_TORCH = """
    tensor_tree distributed/preflight distributed/process_group distributed/all_gather distributed/exchange
    distributed/connections distributed/flight_record distributed/replicas
    resilience/peer_check data/ models/ tasks/ telemetry/console telemetry/hardware_monitor telemetry/tracker
    optim/ parallel/ performance/ training/ own_loop/loader own_loop/process own_loop/run own_loop/state own_loop/steps
    own_loop/wrapped doctor/collective_test doctor/multihost_checks study/dry_plan
    study/step_times study/gradient_probe
    prove/examine prove/causes prove/division prove/data_checks prove/fixed_draws prove/hooks prove/unseeded
""".split()  # noqa: SIM905
"""What workers import. All else runs before a config is valid, and must answer a typo within half a
second."""


def files() -> list[Path]:
    """Without the template, whose files are copied into projects, and imported there."""
    ours = {*PACKAGE.rglob("*.py")} - {*(PACKAGE / "template").rglob("*.py")}
    return sorted(path for path in ours if path.name != "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules_imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in the file: `config.schema`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ddp_train":
            base = (node.module or "").removeprefix("ddp_train").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if (PACKAGE / (inner.replace(".", "/") + ".py")).exists() else base)
    return found


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    found = {
        (room_of(path), module.split(".")[0])
        for path in files()
        for module in modules_imported(path)
    }
    return {(room, other) for room, other in found if other not in (room, "")}


def test_imports_go_down() -> None:
    assert {room_of(path) for path in files()} == set(ROOMS)
    upward = [(one, other) for one, other in arrows() if ROOMS.index(other) > ROOMS.index(one)]
    assert not upward, f"imports that go up: {upward}"


def test_config_objects_stop_where_a_run_is_set_up() -> None:
    """Constructors take plain values: no collaborator of the loop imports the config."""
    plain = {
        "distributed",
        "resilience",
        "data",
        "models",
        "telemetry",
        "tasks",
        "optim",
        "parallel",
        "performance",
    }
    assert not {pair for pair in arrows() if pair[0] in plain and pair[1] == "config"}
    users = {
        path.stem
        for path in (PACKAGE / "training").glob("*.py")
        if any(
            module.startswith(("config.schema", "config.options"))
            for module in modules_imported(path)
        )
    }
    assert users == {
        *(
            "worker",
            "context",
            "run",
            "setup",
            "shown",
            "open_data",
            "metrics",
            "plan_report",
            "summary",
        ),
        *("inference", "trained", "load", "from_python", "fine_tuning", "mirrored"),
    }


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Inside a room too."""
    graph = {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): modules_imported(path)
        for path in files()
    }
    left = dict(graph)
    while left:
        free = [module for module, needs in left.items() if not needs & left.keys() - {module}]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_the_loop_knows_only_collaborators() -> None:
    text = (PACKAGE / "training" / "loop.py").read_text()
    code = text.split('"""', 2)[2].split("class Hook")[1]
    for stranger in ("rank", "config", "device", "dist.", "autocast", "isinstance"):
        assert stranger not in code, stranger


@pytest.mark.slow
def test_workers_start_without_hydra() -> None:
    code = "import sys, ddp_train.training.worker; sys.exit('hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.slow
def test_what_runs_before_the_config_is_valid_does_not_import_torch() -> None:
    """One process imports all of it; the first module behind which torch is there is named."""
    modules = [
        "ddp_train." + str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".")
        for path in files()
        if not str(path.relative_to(PACKAGE).with_suffix("")).startswith(
            tuple(name.rstrip(".") for name in WITH_TORCH)
        )
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_nothing_happens_at_import() -> None:
    """No thread, no logging handler, no signal handler, no change of torch's global state."""
    code = (
        "import logging, signal, sys, threading, torch\nstate = lambda: (threading.active_count(),"
        " len(logging.root.handlers), signal.getsignal(signal.SIGTERM),\n                "
        " torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),\n                "
        " torch.initial_seed(),\n                 torch.distributed.is_initialized())\nbefore ="
        " state()\nimport ddp_train.training.worker, ddp_train.launcher.cli\nsys.exit(state() !="
        " before)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
