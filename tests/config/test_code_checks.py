"""Code that cannot be loaded is refused before it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.config.prepare import prepare
from tests.support.commands import PROGRAM
from tests.support.configs import (
    problems_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
HOOKS = """
import contextlib
from elsewhere import Other
raise AssertionError("imported")

def watch(job, run_dir, world): pass

@contextlib.contextmanager
def managed(*_): yield

short = lambda *_: None
SIZE = 3

class Closed:
    def close(self): pass

class Acts:
    def act(self, job): pass

class Whole:
    def __enter__(self): pass
    def __exit__(self, *_): pass

class Derived(Other): pass

def Assigned(): pass
Assigned = Other
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("watch", "a function, no class"),
        ("managed", "a function, no class"),
        ("short", "a function, no class"),
        ("SIZE", "a value, no class"),
        ("Closed", "a class that lacks methods"),
        ("Whole", ""),
        ("Acts", ""),
        ("Derived", ""),  # what the source alone does not show is left to the workers
        ("Assigned", ""),
        ("Other", ""),
    ],
)
@pytest.mark.parametrize("module", ["my_hooks", "my_tools.parts.hooks"])
def test_what_is_no_hook_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, found: str
) -> None:
    write_source(tmp_path, module, HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [f"hooks=[{module}.{name}]", "run_dir=run"]
    if not found:
        assert prepare(PROGRAM, words, None).config.hooks == [f"{module}.{name}"]
        return
    rule = (
        "it must be a class with a method act, or with __enter__ and __exit__; Class(job, run_dir,"
        " world) creates the hook"
    )
    assert problems_of(*words) == [f"hooks=[{module}.{name}]: {module}.{name} is {found}; {rule}"]


def write_source(folder: Path, module: str, source: str) -> None:
    """Writes a module, in a package that cannot be imported if it is in one."""
    path = folder / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent != folder:
        package = folder / module.partition(".")[0]
        (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    path.write_text(source)


OWN_TRACKERS = """
from ddp_train import Tracker
raise AssertionError("imported")

class Mine(Tracker):
    pass

class Closed:
    def close(self): pass
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Mien", "{module} has no Mien; did you mean Mine?"),
        (
            "Closed",
            "{module}.Closed is a class that lacks methods; it must be a class derived from"
            " ddp_train.Tracker, with the methods open, write and close",
        ),
    ],
)
@pytest.mark.parametrize("module", ["my_trackers", "my_tools.parts.trackers"])
def test_wrong_tracker_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, problem: str
) -> None:
    write_source(tmp_path, module, OWN_TRACKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    trusted = f"trusted_modules=[{module.partition('.')[0]}]"
    target = f"tracker.classes.mine._target_={module}.{name}"
    problems = problems_of(f"+{target}", trusted, "run_dir=run")
    assert problems == [f"{target}: {problem.format(module=module)}"]


def test_mistyped_hook_is_answered_with_a_likely_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(tmp_path, "my_hooks", HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "hooks=[my_hooks.Actts]"
    assert problems_of(target) == [f"{target}: my_hooks has no Actts; did you mean Acts?"]


def test_hidden_module_of_the_folder_is_named(tmp_path: Path) -> None:
    Path("yaml.py").touch()
    (problem,) = problems_of("model._target_=yaml.Net")
    assert problem.startswith("model._target_=yaml.Net: Python would import /")
    assert problem.endswith(
        "/yaml/__init__.py in place of yaml.py in this folder; rename yaml.py, or set PYTHONPATH=."
    )
