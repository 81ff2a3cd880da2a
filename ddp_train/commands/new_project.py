"""`ddp-train init my_project`: starts a project that runs, and whose tests pass. Torch-free."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

from ddp_train.config.program import PACKAGE, command_name
from ddp_train.errors import ConfigError

INIT = "init"
TEMPLATE = PACKAGE / "template"
NAME = "my_project"
"""Stands for the name of the project in the files of the template and in their paths."""


def create(arguments: list[str]) -> int:
    """Write the project into a folder. Returns the exit code. Raises ConfigError."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(
            [f"{INIT}: needs the name of a new folder; use {command_name()} {INIT} {NAME}"]
        )
    folder = Path(arguments[0])
    name = package_name(folder)
    try:
        is_in_use = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if is_in_use:
            raise ConfigError(
                [f"{INIT} {folder}: exists, and is not an empty folder; use a new folder"]
            )
        files = copy_template(folder, name)
    except OSError as error:
        raise ConfigError(
            [f"{INIT} {folder}: cannot be written ({error.strerror}); use another folder"]
        ) from None
    print_next_steps(folder, files)
    return 0


def package_name(folder: Path) -> str:
    """The name of the project's package. Raises ConfigError if no package can have it."""
    name = folder.resolve().name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        other = folder.parent / ("my_" + re.sub(r"\W", "_", name))
        raise ConfigError(
            [
                f"{INIT} {folder}: {name} cannot be the name of a package, which begins with a"
                " letter, contains only letters, digits and _, and is no Python keyword; use"
                f" {command_name()} {INIT} {shlex.quote(str(other))}"
            ]
        )
    if importlib.util.find_spec(name):
        raise ConfigError(
            [
                f"{INIT} {folder}: a package {name} is installed already, and Python might import"
                " that one instead of yours; use another name"
            ]
        )
    return name


def copy_template(folder: Path, name: str) -> list[Path]:
    """Write the files of the template under another name. Returns them. Raises OSError."""
    files = []
    sources = [path for path in TEMPLATE.rglob("*.*") if path.suffix in (".py", ".yaml")]
    for source in sorted(sources):
        place = str(source.relative_to(TEMPLATE)).replace(NAME, name)
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text().replace(NAME, name))
        files.append(path)
    return files


def print_next_steps(folder: Path, files: list[Path]) -> None:
    for path in files:
        print(path)
    command = command_name()
    script = Path(sys.argv[0])
    if script.name == "launch.py":
        command = f"python {script.resolve()}"
    print(f"\nIt runs as it is:\n  cd {folder}\n  {command} experiment=spots\n  python -m pytest")
