"""The directory of a run: can it be written, and may this run have it? Nothing is written here."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ddp_train.errors import ConfigError, DiskFullError
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config
from ddp_train.resilience.whole_files import RAISE_LIMIT, is_over_limit, shown_limit
from ddp_train.text import shell_word


def problems(config: Config) -> Iterator[Problem]:
    """Checks without writing; `freeze` tries, and fails with the same message."""
    if not re.fullmatch(r"[\w][\w .+=-]*", config.name):
        yield Problem(
            f"name={config.name}",
            "must be usable as the name of a folder: letters, digits, spaces and . _ + = -, and"
            " the first a letter, a digit or _",
        )
        return
    if config.mode == "doctor":  # it tries to write, on every host
        return
    if str(config.run_dir).startswith("~"):
        yield _unexpanded(str(config.run_dir))
        return
    run_dir = Path(str(config.run_dir)).absolute()
    shared = _shared_folder(run_dir.resolve())
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if shared:
        yield Problem(
            f"run_dir={config.run_dir}",
            f"a run would put its files into the {shared}",
            f"use a folder for this run alone, {shell_word('run_dir', run_dir / 'runs/NAME')}",
        )
    elif not existing.is_dir():
        yield unwritable(config.run_dir, f"{existing} is not a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield unwritable(config.run_dir, f"no permission to write in {existing}")


def _unexpanded(run_dir: str) -> Problem:
    """The problem of a path that begins with ~, alone or before the name of a user."""
    user, _, inside = run_dir.removeprefix("~").partition("/")
    if user:
        remedy = f"write the full path of the home folder of {user}"
    else:
        inside = inside or "runs/NAME"
        remedy = f"use run_dir=$HOME/{inside}, or in a preset ${{oc.env:HOME}}/{inside}"
    return Problem(f"run_dir={run_dir}", "~ is not expanded here", remedy)


def _shared_folder(run_dir: Path) -> str:
    """The kind of folder with other files that a run directory is; "" for any other.

    Other folders may hold some: lost+found of a mount, logs of a batch system.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  Path's raises where there is none
    folders = {Path("/"): "root folder", home: "home folder", Path.cwd(): "working folder"}
    if run_dir not in folders or not run_dir.is_dir() or not any(run_dir.iterdir()):
        return ""
    if any((run_dir / name).exists() for name in ("config.yaml", "checkpoints")):
        return ""
    return folders[run_dir]


def unwritable(run_dir: str | None, reason: str) -> Problem:
    return Problem(f"run_dir={run_dir}", f"cannot be written ({reason})", "use another folder")


def unwritten(run_dir: str | Path | None, error: OSError) -> ConfigError:
    """The error to be raised where a run directory could not be written."""
    reason = error.strerror or str(error)
    if is_over_limit(error):
        problem = Problem(f"run_dir={run_dir}", shown_limit(), RAISE_LIMIT)
        return ConfigError([str(problem)])
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space, and start the same command again"
        return DiskFullError([f"run_dir={run_dir}: cannot be written ({reason}); {remedy}"])
    return ConfigError([str(unwritable(str(run_dir), reason))])
