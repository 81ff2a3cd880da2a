"""The house keeps its shape: imports go down, rooms stay few, the loop is a page, nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections import Counter
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

LINES = {
    "errors": 75, "text": 40, "linux": 105, "tensor_tree": 25,
    "distributed": 810, "resilience": 1200, "config": 3855, "launcher": 2685, "data": 2240, "models": 525,
    "telemetry": 2230, "tasks": 1115, "optim": 985, "parallel": 432, "performance": 1028, "training": 4030,
    "own_loop": 1005, "study": 2125, "doctor": 1600, "prove": 1470, "testing": 25, "__main__": 155,
}  # fmt: skip
"""The most lines of code that each room may hold: not blank, no comment, no docstring. No file is left out."""

FIRST_SITTING = """
    __main__ config/prepare launcher/local training/worker training/run training/setup training/loop training/hooks
    parallel/strategy optim/optimizers optim/schedules optim/stepper data/batch_plan data/rng data/loader data/datasets
    tasks/task distributed/world distributed/process_group
""".split()  # noqa: SIM905
"""What docs/architecture.md asks a reader to read first."""

WITH_TORCH = """
    tensor_tree distributed/preflight distributed/process_group distributed/all_gather distributed/exchange
    distributed/connections distributed/flight_record distributed/replicas
    resilience/peer_check data/ models/ tasks/ telemetry/console telemetry/hardware_monitor telemetry/tracker
    optim/ parallel/ performance/ training/ own_loop/loader own_loop/process own_loop/run own_loop/state own_loop/steps
    own_loop/wrapped doctor/collective_test doctor/multihost_checks study/dry_plan
    study/step_times study/gradient_probe
    prove/examine prove/causes prove/division prove/data_checks prove/fixed_draws prove/hooks prove/unseeded
""".split()  # noqa: SIM905
"""What workers import. All else runs before a config is valid, and must answer a typo within half a second."""


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


def code_lines(path: Path) -> int:
    """Lines that hold code: not blank, no comment, no docstring."""
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER) or token.type == tokenize.STRING:
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    found = {
        (room_of(path), module.split(".")[0]) for path in files()
        for module in modules_imported(path)
    }  # fmt: skip
    return {(room, other) for room, other in found if other not in (room, "")}


def test_rooms_are_few_and_imports_go_down() -> None:
    assert {room_of(path) for path in files()} == set(ROOMS)
    pairs = arrows()
    print(f"{len(ROOMS)} rooms, {len(pairs)} arrows:")
    for room in ROOMS:
        print(f"  {room:<12} imports {', '.join(sorted(other for one, other in pairs if one == room)) or 'nothing'}")
    upward = [(one, other) for one, other in pairs if ROOMS.index(other) > ROOMS.index(one)]
    assert not upward, f"imports that go up: {upward}"
    later = ("own_loop", "prove", "testing")  # wings that came after the rooms were drawn, when there were 90
    print(f"without the wings {', '.join(later)}: {sum(one not in later for one, _ in pairs)}")
    assert sum(one not in later for one, _ in pairs) < 100 and len(ROOMS) <= 22 and len(pairs) <= 130


def test_config_objects_stop_where_a_run_is_set_up() -> None:
    """Constructors take plain values: no collaborator of the loop imports the config."""
    plain = {"distributed", "resilience", "data", "models", "telemetry", "tasks", "optim", "parallel", "performance"}
    assert not {pair for pair in arrows() if pair[0] in plain and pair[1] == "config"}
    users = {
        path.stem
        for path in (PACKAGE / "training").glob("*.py")
        if any(module.startswith(("config.schema", "config.options")) for module in modules_imported(path))
    }
    assert users == {
        *("worker", "context", "run", "setup", "shown", "open_data", "metrics", "plan_report", "summary"),
        *("inference", "trained", "load", "from_python", "fine_tuning", "mirrored"),
    }


def places_of_the_config() -> list[str]:
    """Where all of the config arrives behind the worker's entry: parameters of functions, fields of classes."""
    found = []
    for path in files():
        if room_of(path) in ("config", "launcher", "own_loop", "study", "doctor", "testing", "prove", "__main__"):
            continue  # what made it, and wings
        for node in ast.walk(ast.parse(path.read_text())):
            arguments = [*node.args.args, *node.args.kwonlyargs] if isinstance(node, ast.FunctionDef) else []
            fields = (
                [one for one in node.body if isinstance(one, ast.AnnAssign)] if isinstance(node, ast.ClassDef) else []
            )
            if any(one.annotation and ast.unparse(one.annotation) == "Config" for one in [*arguments, *fields]):
                found.append(f"{path.stem}.{node.name}")
    return found


def test_the_config_is_known_in_few_places() -> None:
    places = places_of_the_config()
    print(f"the config in {len(places)} places:", " ".join(places))
    assert 20 < len(places) < 40


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Inside a room too."""
    graph = {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): modules_imported(path) for path in files()
    }
    left = dict(graph)
    while left:
        free = [module for module, needs in left.items() if not needs & left.keys() - {module}]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_each_room_keeps_within_its_size() -> None:
    sizes: Counter[str] = Counter()
    for path in files():
        sizes[room_of(path)] += code_lines(path)
    for room in ROOMS:
        print(f"  {room:<12} {sizes[room]:>5} of {LINES[room]}")
    print(f"  {'all':<12} {sizes.total():>5}")
    assert not {room: size for room, size in sizes.items() if size > LINES[room]}


def test_a_first_sitting_is_short() -> None:
    read = [PACKAGE / f"{name}.py" for name in FIRST_SITTING]
    lines = {path.stem: code_lines(path) for path in read}
    print(lines, sum(lines.values()))
    assert len(read) <= 21 and sum(lines.values()) <= 2600


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_is_too_long(path: Path) -> None:
    assert code_lines(path) <= 300


def test_the_loop_is_a_page() -> None:
    path = PACKAGE / "training" / "loop.py"
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert {function.name for function in functions} == {"fit", "train", "evaluate"}
    assert sum((function.end_lineno or 0) - function.lineno + 1 for function in functions) <= 60
    text = path.read_text()
    for stranger in ("rank", "config", "device", "dist.", "autocast", "isinstance"):
        assert stranger not in text.split('"""', 2)[2].split("class Hook")[1].replace("collaborator", ""), stranger


@pytest.mark.slow
def test_workers_start_without_hydra() -> None:
    code = "import sys, ddp_train.training.worker; sys.exit('hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.slow
def test_what_runs_before_the_config_is_valid_does_not_import_torch() -> None:
    """One process imports all of it; the first module behind which torch is there is named."""
    modules = [
        "ddp_train." + str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for path in files()
        if not str(path.relative_to(PACKAGE).with_suffix("")).startswith(tuple(name.rstrip(".") for name in WITH_TORCH))
    ]  # fmt: skip
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_nothing_happens_at_import() -> None:
    """No thread, no logging handler, no signal handler, no change of torch's global state."""
    code = (
        "import logging, signal, sys, threading, torch\n"
        "state = lambda: (threading.active_count(), len(logging.root.handlers), signal.getsignal(signal.SIGTERM),\n"
        "                 torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),\n"
        "                 torch.initial_seed(),\n"
        "                 torch.distributed.is_initialized())\n"
        "before = state()\n"
        "import ddp_train.training.worker, ddp_train.launcher.cli\n"
        "sys.exit(state() != before)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
