"""This program: how it was started, how it starts itself again, and where its presets lie.

Torch-free.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
CONFIG_DIR = ("-cd", "--config-dir")
PRESETS = ("experiment", "debug")
"""Groups of whole runs, of which none need be chosen: their files set keys of all sections."""
CLOSE = 0.8
"""Likeness from which one name is a typo of another: modle is, and traces is not a tracker."""
PACKAGE_LINE = "# @package _global_"
FOLDER = "conf"
"""Your own presets: in the working folder, or beside launch.py."""


@dataclass(frozen=True)
class Program:
    """`python launch.py`, `ddp-train` or `python -m ddp_train`."""

    typed: str = "ddp-train"
    """The words that a person types before the overrides."""
    script: Path = PACKAGE / "__main__.py"
    """The file that Python is given for the same: from any folder, by torchrun too."""
    import_path: Path | None = None
    """The folder of a checkout, from which workers import this package first.

    None: it is installed.
    """
    presets: Path = PACKAGE / FOLDER
    own: Path | None = None
    """The folder of the user's presets, in the same groups."""
    own_is_named: bool = False
    """Whether the command line names that folder."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def flags(self) -> list[str]:
        """The flag that names the folder of the user's presets, if it was given."""
        if self.own_is_named:
            return [f"{CONFIG_DIR[1]}={self.own}"]
        return []

    def command(self, overrides: list[str]) -> str:
        """A command line for people, quoted for a shell."""
        return shlex.join([*self.typed.split(" "), *self.flags, *overrides])

    def again(self, overrides: list[str]) -> list[str]:
        """The arguments of a process that runs this program with other overrides."""
        return [sys.executable, str(self.script), *self.flags, *overrides]

    def folders(self) -> list[Path]:
        """The folders of presets; what stands in the first hides the same in the second."""
        return [folder for folder in (self.presets, self.own) if folder]

    def groups(self) -> list[str]:
        """The groups, those within hydra too. Your own folder adds options, but no group."""
        parents = {path.parent for path in self.presets.rglob("*.yaml")} - {self.presets}
        return sorted(path.relative_to(self.presets).as_posix() for path in parents)

    def is_group(self, name: str) -> bool:
        return os.path.isdir(self.presets / name)  # noqa: PTH112  Path.is_dir raises for a name that is too long

    def files(self, group: str) -> list[Path]:
        """The options of a group, by name."""
        by_name: dict[str, Path] = {}
        for folder in self.folders():
            for path in (folder / group).glob("[!.]*.yaml"):
                by_name.setdefault(path.stem, path)
        return [path for _, path in sorted(by_name.items())]

    def options(self, group: str) -> list[str]:
        return [path.stem for path in self.files(group)]

    def file(self, group: str, option: str | None) -> Path | None:
        """The file of an option."""
        return next((path for path in self.files(group) if path.stem == option), None)

    def shown(self, path: Path) -> str:
        """A file of a preset, for messages: your own as it was named, ours from the package on."""
        if self.own and path.absolute().is_relative_to(self.own.absolute()):
            inside = path.absolute().relative_to(self.own.absolute())
            return str(self.own / inside)
        return str(path.relative_to(self.presets.parent.parent))

    def problem_of(self, group: str, option: str) -> str:
        """The reason why a file of the user's does not act as meant; "" if it does."""
        if not self.own:
            return ""
        path = self.own / group / f"{option}.yaml"
        if not path.is_file():
            return ""
        if (self.presets / group / path.name).exists():
            return f"{path}: ddp_train already has {group}={option}; rename the file"
        if group in PRESETS and not sets_a_run(path.read_text(errors="replace")):
            return f"{path}: a preset of a run must begin with the line `{PACKAGE_LINE}`"
        return ""

    def unused(self) -> dict[tuple[str, str], str]:
        """Files of the user's without effect: the group and the option meant, and the reason.

        Such a file stops only a command that chooses it: it may be another program's.
        """
        problems: dict[tuple[str, str], str] = {}
        if not self.own:
            return problems
        for path in sorted(self.own.rglob("[!.]*.y*ml")):
            folder = path.parent.relative_to(self.own)
            group, problem = self._reason_unused(path, folder.as_posix())
            if problem:
                problems[group, path.stem] = problem
        return problems

    def _reason_unused(self, path: Path, group: str) -> tuple[str, str]:
        """The group that a file was meant for, and why it has no effect, "" if it has one."""
        groups = self.groups()
        if path.suffix == ".yml" and path.with_suffix(".yaml").exists():
            return group, ""
        if group in groups and path.suffix == ".yml":
            return group, f"{path}: only *.yaml is read; rename it to {path.stem}.yaml"
        if group in groups:
            return group, self.problem_of(group, path.stem)
        for meant in difflib.get_close_matches(group, groups, n=1, cutoff=CLOSE):
            if path.stem not in self.options(meant):
                return meant, f"{path}: there is no group {group}; did you mean {meant}?"
        return group, ""

    def check(self) -> None:
        """Raise ConfigError for a folder of your own that is missing, or would be ignored."""
        if not self.own:
            return
        if not self.own.is_dir():
            problem = "no such folder; use a folder with experiment/NAME.yaml in it"
            raise ConfigError([f"{CONFIG_DIR[1]}={self.own}: {problem}"])
        if (self.own / "config.yaml").exists():
            rule = "ddp_train already has a config.yaml"
            remedy = f"move the keys to {self.own}/experiment/NAME.yaml, and use"
            message = f"{self.own}/config.yaml: {rule}; {remedy} experiment=NAME"
            raise ConfigError([message])


def sets_a_run(text: str) -> bool:
    """Tell whether a preset is for a whole run: `# @package _global_` is its first line."""
    first = text.lstrip().partition("\n")[0]
    return first.startswith("#") and first.lstrip("#").split() == PACKAGE_LINE.split()[1:]


def find_program(script: Path | None, argv: list[str]) -> tuple[Program, list[str]]:
    """This program, and the arguments without the flag that names a folder of presets.

    script: launch.py; None: started as a module, or by its command. Raises ConfigError.
    """
    arguments, named = _without_config_dir(argv)
    if named is None:
        own, notes = _unnamed_presets(script)
    else:
        own = Path(named)
        notes = []
    program = Program(
        typed=command_name(),
        script=script or PACKAGE / "__main__.py",
        import_path=_checkout(script),
        own=own,
        own_is_named=named is not None,
    )
    program.check()
    import_from_working_folder()
    return replace(program, notes=(*notes, *_note_of_unused(program))), arguments


def _checkout(script: Path | None) -> Path | None:
    """The folder of a checkout from which this package is imported; None: it is installed."""
    checkout = PACKAGE.parent
    if script:
        checkout = script.parent
    if checkout.name in ("site-packages", "dist-packages"):
        return None
    return checkout


def _note_of_unused(program: Program) -> Iterator[str]:
    """The first file of the user's without effect, and the number of the others."""
    problems = list(program.unused().values())
    if not problems:
        return
    others = ""
    if len(problems) > 1:
        others = f", nor are {len(problems) - 1} other files"
    yield (
        f"{problems[0]}; until then the file is not used{others}. If {program.own} belongs to"
        f" another program, give the folder of your presets by {CONFIG_DIR[1]}=FOLDER"
    )


def _unnamed_presets(script: Path | None) -> tuple[Path | None, list[str]]:
    """The folder of presets that is used without being named, and notes about others."""
    folders = [Path(FOLDER)]
    if script:
        folders.append(Path(os.path.relpath(script.parent / FOLDER)))
    notes = []
    for folder in folders:
        if not folder.is_dir() or folder.resolve() == PACKAGE / FOLDER:
            continue
        if not (folder / "config.yaml").exists():
            return folder, notes
        notes.append(
            f"{folder} is not used: its config.yaml shows that it belongs to another program; give"
            f" the folder of your presets by {CONFIG_DIR[1]}=FOLDER"
        )
    return None, notes


def command_name() -> str:
    """The command that started this program, as one types it."""
    argv0 = Path(sys.argv[0])
    if argv0.name == "__main__.py":
        return "python -m ddp_train"
    if argv0.suffix != ".py":
        return argv0.name
    here = Path.cwd()
    if argv0.is_relative_to(here):
        argv0 = argv0.relative_to(here)
    return f"python {argv0}"


def _without_config_dir(argv: list[str]) -> tuple[list[str], str | None]:
    """The arguments without `--config-dir DIR` and the like, and the folder named last."""
    arguments = []
    named = None
    rest = iter(argv)
    for argument in rest:
        flag, equals, folder = argument.partition("=")
        if flag not in CONFIG_DIR:
            arguments.append(argument)
            continue
        if not equals:
            folder = next(rest, "")
            if "=" in folder or folder.startswith("-"):
                folder = ""
        named = folder
        if not named:
            raise ConfigError([f"{flag}: needs a folder; use {flag} FOLDER"])
    return arguments, named


def import_from_working_folder() -> None:
    """Import your own packages from the working folder too, after all that is installed.

    A file yaml.py there hides nothing.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
