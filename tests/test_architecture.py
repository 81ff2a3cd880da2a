"""The house keeps its shape: imports go down, the loop is a page, modules are small, nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ddp_train"

LAYERS = """
    errors lock output processes heartbeat health distributed.world
    config.schema config.machine config.resolve config.compose config.outside config.tips config.check config.freeze
    config.prepare
    nested custom stopping distributed.preflight distributed.session distributed.roll_call distributed.sync_batch_norm
    data.copies data.keyed data.augment data.crop data.plan data.folder data.ahead data.sources data.loader
    models lint strategy ordered recompute tuning figures metrics guard large_batch fused optim cuda_graph
    checkpoint progress loop hooks trackers tracking build worker
    restarts watch fork_server launcher hosts sweep cli
""".split()  # noqa: SIM905  one word per module reads better
"""From the ground up: a module imports only what stands before it."""

WINGS = """
    study.facts study.plots study.report study.request study.trials study.results study.variants study.tables
    study.costs study.mlperf study.simulate study.dry_plan
    study.scaling study.gradients study.batch_size study.step_times study.gradient_probe study.worker
    study.sweep study.main
    doctor.aside doctor.findings doctor.host doctor.gpu doctor.stages doctor.probe doctor.probes doctor.peers
    doctor.examination
""".split()  # noqa: SIM905
"""Above all that: they may import the main path, which never imports them."""

WINGS_WITH_TORCH = (
    "doctor.probe",
    "doctor.peers",
    "study.dry_plan",
    "study.step_times",
    "study.gradient_probe",
    "study.worker",
)
"""Parts of workers, in processes of their own."""

ALL = LAYERS + WINGS

WHEN_THINGS_GO_WRONG = """
    lock output processes heartbeat health stopping distributed.preflight distributed.roll_call restarts watch hosts
    guard
""".split()  # noqa: SIM905
"""Modules that a run which goes well hardly enters."""

ON_REQUEST = """
    data.copies data.crop data.folder data.ahead lint ordered distributed.sync_batch_norm recompute large_batch fused
    cuda_graph sweep
""".split()  # noqa: SIM905
"""Modules that a run enters only if it asks for what they do: image folders, LARS, recorded steps ..."""

WHAT_IS_WATCHED = ["figures", "trackers", "tracking"]
"""Modules that measure and tell; what a run computes is the same without them."""

WITHOUT_TORCH = [
    "errors",
    "lock",
    "output",
    "processes",
    "health",
    "heartbeat",
    "restarts",
    "watch",
    "fork_server",
    "distributed.world",
    "stopping",
    "launcher",
    "hosts",
    "sweep",
    "cli",
    *[m for m in WINGS if m not in WINGS_WITH_TORCH],
    *[m for m in LAYERS if m.startswith("config.")],
]


def path_of(module: str) -> Path:
    return PACKAGE / (module.replace(".", "/") + ".py")


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ddp_train":
            base = (node.module or "").removeprefix("ddp_train").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if path_of(inner).exists() else base)
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


def test_every_module_has_its_layer() -> None:
    modules = {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
               for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}  # fmt: skip
    assert modules == set(ALL)


@pytest.mark.parametrize("module", ALL)
def test_imports_go_down(module: str) -> None:
    below = set(ALL[: ALL.index(module)])
    assert imports_of(path_of(module)) <= below


@pytest.mark.parametrize("module", ALL)
def test_no_module_is_too_long(module: str) -> None:
    assert code_lines(path_of(module)) <= (450 if module == "config.schema" else 300)  # a list of all keys


def test_the_main_path_can_be_read_in_an_hour() -> None:
    """What happens when things go wrong, and what few runs ask for, are rooms to read one after the other."""
    wrong = sum(code_lines(path_of(module)) for module in WHEN_THINGS_GO_WRONG)
    asked = sum(code_lines(path_of(module)) for module in ON_REQUEST)
    watched = sum(code_lines(path_of(module)) for module in WHAT_IS_WATCHED)
    all_of_it = sum(code_lines(path_of(module)) for module in LAYERS) + code_lines(ROOT / "launch.py")
    assert wrong <= 1250 and watched <= 490 and asked <= 1080
    assert all_of_it - wrong - watched - asked <= 4560


@pytest.mark.parametrize(("wing", "limit"), [("doctor", 1540), ("study", 2800)])
def test_a_wing_is_no_longer_than_it_must_be(wing: str, limit: int) -> None:
    assert sum(code_lines(path_of(module)) for module in WINGS if module.startswith(wing)) <= limit


def test_the_loop_is_a_page() -> None:
    path = path_of("loop")
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert {function.name for function in functions} == {"fit", "train", "evaluate"}
    assert sum((function.end_lineno or 0) - function.lineno + 1 for function in functions) <= 60
    text = path.read_text()
    for stranger in ("rank", "config", "device", "dist.", "autocast", "isinstance"):
        assert stranger not in text.split('"""', 2)[2].split("class Hook")[1].replace("collaborator", ""), stranger


def test_workers_start_without_hydra() -> None:
    code = "import sys, ddp_train.worker; sys.exit('hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_runs_before_the_config_is_valid_does_not_import_torch(module: str) -> None:
    code = f"import sys, ddp_train.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_nothing_happens_at_import() -> None:
    """No thread, no logging handler, no signal handler, no change of torch's global state."""
    code = (
        "import logging, signal, sys, threading, torch\n"
        "state = lambda: (threading.active_count(), len(logging.root.handlers), signal.getsignal(signal.SIGTERM),\n"
        "                 torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),\n"
        "                 torch.initial_seed(),\n"
        "                 torch.distributed.is_initialized())\n"
        "before = state()\n"
        "import ddp_train.worker, ddp_train.cli\n"
        "sys.exit(state() != before)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
