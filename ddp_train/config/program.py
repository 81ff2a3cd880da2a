"""How this program was started, how it starts itself again, and where its presets lie.

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
    """What a person types before the overrides."""
    script: Path = PACKAGE / "__main__.py"
    """What Python is given for the same: from any folder, by torchrun too."""
    import_path: Path | None = None
    """The folder of a checkout, from which workers import this package first.

    None: it is installed.
    """
    presets: Path = PACKAGE / FOLDER
    own: Path | None = None
    """Your own presets, in the same groups."""
    own_is_named: bool = False
    """Whether the command line names that folder."""
    notes: tuple[str, ...] = ()
    """What the user should know of it."""

    @property
    def flags(self) -> list[str]:
        """The flag that names the folder of your own presets."""
        return [f"{CONFIG_DIR[1]}={self.own}"] if self.own_is_named else []

    def command(self, overrides: list[str]) -> str:
        """A command line for people, quoted for a shell."""
        return shlex.join([*self.typed.split(" "), *self.flags, *overrides])

    def again(self, overrides: list[str]) -> list[str]:
        """The arguments of a process that runs this program with other overrides."""
        return [sys.executable, str(self.script), *self.flags, *overrides]

    def folders(self) -> list[Path]:
        """The folders of presets; what stands in the first hides the same in the second."""
        return [self.presets, self.own] if self.own else [self.presets]

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
        own = self.own.absolute() if self.own else None
        if self.own and own and path.absolute().is_relative_to(own):
            return str(self.own / path.absolute().relative_to(own))
        return str(path.relative_to(self.presets.parent.parent))

    def problem_of(self, group: str, option: str) -> str:
        """Why a file of your own acts not at all, or on other keys than it names; "" if it does."""
        path = self.own / group / f"{option}.yaml" if self.own else None
        if path is None or not path.is_file():
            return ""
        if (self.presets / group / path.name).exists():
            return f"{path}: ddp_train has {group}={option} of its own; rename it"
        if group in PRESETS and not sets_a_run(path.read_text(errors="replace")):
            return f"{path}: its first line must be `{PACKAGE_LINE}`, to set keys of a run"
        return ""

    def unused(self) -> dict[tuple[str, str], str]:
        """Why files of your own do not act, by the group and the option that were meant.

        Such a file stops only a command that chooses it: it may be another program's.
        """
        problems = {}
        for path in sorted(self.own.rglob("[!.]*.y*ml")) if self.own else ():
            group, problem = self._why_unused(path)
            if problem:
                problems[group, path.stem] = problem
        return problems

    def _why_unused(self, path: Path) -> tuple[str, str]:
        """The group that a file was meant for, and why it does not act, "" if it does."""
        group = path.parent.relative_to(self.own or "").as_posix()
        groups = self.groups()
        is_replaced = path.suffix == ".yml" and path.with_suffix(".yaml").exists()
        if is_replaced:
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
            problem = "no such folder; name one with experiment/NAME.yaml in it"
            raise ConfigError([f"{CONFIG_DIR[1]}={self.own}: {problem}"])
        if (self.own / "config.yaml").exists():
            remedy = (
                f"put what it sets into {self.own}/experiment/NAME.yaml, and choose that:"
                " experiment=NAME"
            )
            raise ConfigError(
                [f"{self.own}/config.yaml: ddp_train has a config.yaml of its own; {remedy}"]
            )


def sets_a_run(text: str) -> bool:
    """Tell whether a preset says so where Hydra looks for it: in its first line."""
    first = text.lstrip().partition("\n")[0]
    return first.startswith("#") and first.lstrip("#").split() == PACKAGE_LINE.split()[1:]


def find_program(script: Path | None, argv: list[str]) -> tuple[Program, list[str]]:
    """This program, and the arguments without the flag that names a folder of presets.

    script: launch.py; None: started as a module, or by its command. Raises ConfigError.
    """
    arguments, named = _without_config_dir(argv)
    own = Path(named) if named is not None else None
    notes = []
    if own is None:
        for folder in _unnamed_presets(script):
            if not (folder / "config.yaml").exists():
                own = folder
                break
            notes.append(
                f"{folder} is another program's, for it has a config.yaml: not used; name presets"
                f" of yours with {CONFIG_DIR[1]}=FOLDER"
            )
    checkout = script.parent if script else PACKAGE.parent
    is_installed = checkout.name in ("site-packages", "dist-packages")
    program = Program(
        typed=command_name(),
        script=script or PACKAGE / "__main__.py",
        import_path=None if is_installed else checkout,
        own=own,
        own_is_named=named is not None,
        notes=tuple(notes),
    )
    program.check()
    import_from_working_folder()
    return replace(program, notes=(*program.notes, *_note_of_unused(program))), arguments


def _note_of_unused(program: Program) -> Iterator[str]:
    """What a user should know of files that do not act: the first, and how many there are."""
    problems = list(program.unused().values())
    if problems:
        others = f", nor are {len(problems) - 1} others" if len(problems) > 1 else ""
        yield (
            f"{problems[0]}; not used until then{others}; if {program.own} belongs to another"
            f" program, name presets of yours with {CONFIG_DIR[1]}=FOLDER"
        )


def _unnamed_presets(script: Path | None) -> list[Path]:
    """Folders of presets that are used without being named."""
    folders = [Path(FOLDER)]
    if script:
        folders.append(Path(os.path.relpath(script.parent / FOLDER)))
    return [path for path in folders if path.is_dir() and path.resolve() != PACKAGE / FOLDER]


def command_name() -> str:
    """How this program was started, as one types it."""
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
        named = folder if equals else next(rest, "")
        is_folder = equals or not ("=" in named or named.startswith("-"))
        if not named or not is_folder:
            raise ConfigError([f"{flag}: needs a folder; use {flag} FOLDER"])
    return arguments, named


def import_from_working_folder() -> None:
    """Import your own packages from the working folder too, after all that is installed.

    A file yaml.py there hides nothing.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
