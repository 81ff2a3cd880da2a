"""`ddp-train init my_project`: a project of one's own that runs, and whose tests pass, to begin
with."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from ddp_train.config.program import PACKAGE, typed
from ddp_train.errors import ConfigError

INIT = "init"
TEMPLATE = PACKAGE / "template"
NAME = "my_project"
"""The files, and what stands in them, and in their paths, for the name of the project."""


def create(words: list[str]) -> int:
    """Writes the project into the folder that the words name. Returns the exit code. Raises
    ConfigError."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError([f"{INIT}: needs one folder; use {typed()} {INIT} {NAME}"])
    folder = Path(words[0])
    name = folder.resolve().name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            [f"{INIT} {folder}: {name} cannot be the name of a package; use letters, digits and _"]
        )
    if importlib.util.find_spec(name):
        raise ConfigError(
            [
                f"{INIT} {folder}: a package {name} is installed, which would hide yours; use"
                " another name"
            ]
        )
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                [f"{INIT} {folder}: exists and is not an empty folder; use a new one"]
            )
        written = []
        for source in sorted(
            path for path in TEMPLATE.rglob("*.*") if path.suffix in (".py", ".yaml")
        ):
            path = folder / str(source.relative_to(TEMPLATE)).replace(NAME, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source.read_text().replace(NAME, name))
            written.append(path)
    except OSError as error:
        raise ConfigError(
            [f"{INIT} {folder}: cannot be written ({error.strerror}); use another folder"]
        ) from None
    script = Path(sys.argv[0])
    again = f"python {script.resolve()}" if script.name == "launch.py" else typed()
    steps = [f"cd {folder}", f"{again} experiment=spots", "python -m pytest"]
    print(
        "\n".join([*map(str, written), "", "It runs as it is:", *(f"  {step}" for step in steps)])
    )
    return 0
