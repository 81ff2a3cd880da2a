"""How this program was started, how it starts itself again, and where its presets lie.
Torch-free."""

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
"""The likeness of two names from which one is a typo of the other: modle is, and traces is no
tracker."""
PACKAGE_LINE = "# @package _global_"
FOLDER = "conf"
"""Your own presets: in the working folder, or beside launch.py."""


@dataclass(frozen=True)
class Program:
    """`python launch.py`, `ddp-train` or `python -m ddp_train`."""

    typed: str = "ddp-train"
    """What a person types before the words."""
    script: Path = PACKAGE / "__main__.py"
    """What Python is given for the same: from any folder, by torchrun too."""
    import_path: Path | None = None
    """The folder of a checkout, from which workers import this package first; None: it is
    installed."""
    presets: Path = PACKAGE / FOLDER
    own: Path | None = None
    """Your own presets, in the same groups."""
    own_is_named: bool = False
    """Whether the command line names that folder."""
    notes: tuple[str, ...] = ()
    """What the user should know of it."""

    @property
    def words(self) -> list[str]:
        """The flag that names the folder of your own presets."""
        return [f"{CONFIG_DIR[1]}={self.own}"] if self.own_is_named else []

    def command(self, words: list[str]) -> str:
        """A command line for people, quoted for a shell."""
        return shlex.join([*self.typed.split(" "), *self.words, *words])

    def again(self, words: list[str]) -> list[str]:
        """The same as a command of its own."""
        return [sys.executable, str(self.script), *self.words, *words]

    def folders(self) -> list[Path]:
        return [self.presets, *([self.own] if self.own else [])]

    def groups(self) -> list[str]:
        """The groups of this program, those within hydra too. Your own folder can add options, but
        no group."""
        found = {path.parent for path in self.presets.rglob("*.yaml")} - {self.presets}
        return sorted(path.relative_to(self.presets).as_posix() for path in found)

    def is_group(self, name: str) -> bool:
        return os.path.isdir(self.presets / name)  # noqa: PTH112  Path.is_dir raises for a name that is too long

    def files(self, group: str) -> list[Path]:
        """The options of a group, by name."""
        return sorted(self._files(group), key=lambda path: path.stem)

    def _files(self, group: str) -> Iterator[Path]:
        for folder in self.folders():
            found = (folder / group).glob("[!.]*.yaml")
            yield from (
                path for path in found if folder == self.presets or not self._problem(group, path)
            )

    def options(self, group: str) -> list[str]:
        return [path.stem for path in self.files(group)]

    def file(self, group: str, option: str | None) -> Path | None:
        """The file of an option."""
        return next((path for path in self._files(group) if path.stem == option), None)

    def shown(self, path: Path) -> str:
        """A file of a preset, for messages: your own as it was named, ours from the package on."""
        return str(
            path
            if self.own and path.is_relative_to(self.own)
            else path.relative_to(self.presets.parent.parent)
        )

    def check(self) -> None:
        """Raises ConfigError for a folder of your own that there is not, or a file in it that would
        act on all commands and is ignored. A file that one chooses stops those commands alone that
        do: `unusable`."""
        if not self.own:
            return
        if not self.own.is_dir():
            raise ConfigError(
                [
                    f"{CONFIG_DIR[1]}={self.own}: no such folder; name one with"
                    " experiment/NAME.yaml in it"
                ]
            )
        if (self.own / "config.yaml").exists():
            remedy = (
                f"put what it sets into {self.own}/experiment/NAME.yaml, and choose that:"
                " experiment=NAME"
            )
            raise ConfigError(
                [f"{self.own}/config.yaml: ddp_train has a config.yaml of its own; {remedy}"]
            )

    def unusable(self) -> dict[tuple[str, str], str]:
        """Files of your own that would be ignored, or do less than they say: the group and option
        by which one would choose it, and why. They have the name of one of ours, no group reads
        them, or what they set would stand under the name of their group."""
        found: dict[tuple[str, str], str] = {}
        groups = self.groups() if self.own else []
        for path in sorted(self.own.rglob("*.y*ml")) if self.own else ():
            group = path.relative_to(self.own or "").parent.as_posix()
            meant = difflib.get_close_matches(group, groups, n=1, cutoff=CLOSE)
            if path.name.startswith(".") or (
                path.suffix == ".yml" and path.with_suffix(".yaml").exists()
            ):
                continue  # what an editor leaves, or another program's
            if group not in groups and meant:
                if path.stem in self.options(meant[0]):
                    continue  # that one is chosen
                found[meant[0], path.stem] = (
                    f"{path}: there is no group {group}; did you mean {meant[0]}?"
                )
            elif path.suffix == ".yml" and group in groups:
                found[group, path.stem] = (
                    f"{path}: only *.yaml is read; rename it to {path.stem}.yaml"
                )
            elif group in groups and (problem := self._problem(group, path)):
                found[group, path.stem] = problem
        return found

    def _problem(self, group: str, path: Path) -> str:
        """What is wrong with a file of your own in a group that there is; "" if nothing."""
        if group in PRESETS and not sets_a_run(path.read_text(errors="replace")):
            return f"{path}: its first line must be `{PACKAGE_LINE}`, to set keys of a run"
        is_ours = (self.presets / group / path.name).exists()
        if is_ours:
            return f"{path}: ddp_train has {group}={path.stem} of its own; rename it"
        return ""


def sets_a_run(text: str) -> bool:
    """Whether the file of a preset says so where Hydra looks for it: in its first line."""
    first = text.lstrip().partition("\n")[0]
    return first.startswith("#") and first.lstrip("#").split() == PACKAGE_LINE.split()[1:]


def started(script: Path | None, argv: list[str]) -> tuple[Program, list[str]]:
    """This program, by how it was started, and the words without those that name a folder of
    presets.

    script: launch.py; None: as a module, or by its command. Raises ConfigError.
    """
    words, named = _without_config_dir(argv)
    checkout = script.parent if script else PACKAGE.parent
    beside = [Path(FOLDER), *([Path(os.path.relpath(script.parent / FOLDER))] if script else [])]
    unnamed = [path for path in beside if path.is_dir() and path.resolve() != PACKAGE / FOLDER]
    if named is None:
        others = [path for path in unnamed if (path / "config.yaml").exists()]
    else:
        others = []
    if named is not None:
        own = Path(named)
    else:
        own = next((path for path in unnamed if path not in others), None)
    remedy = f"name presets of yours with {CONFIG_DIR[1]}=FOLDER"
    program = Program(
        typed=typed(),
        script=script or PACKAGE / "__main__.py",
        import_path=None if checkout.name in ("site-packages", "dist-packages") else checkout,
        own=own,
        own_is_named=named is not None,
        notes=tuple(
            f"{other} is another program's, for it has a config.yaml: not used; {remedy}"
            for other in others
        ),
    )
    program.check()
    if unusable := [*program.unusable().values()]:
        others = f", nor are {len(unusable) - 1} others" if len(unusable) > 1 else ""
        whose = f"if {own} belongs to another program, {remedy}"
        program = replace(
            program, notes=(*program.notes, f"{unusable[0]}; not used until then{others}; {whose}")
        )
    import_from_working_folder()
    return program, words


def typed() -> str:
    """How this program was started, as one types it."""
    argv0 = Path(sys.argv[0])
    if argv0.name == "__main__.py":
        return "python -m ddp_train"
    if argv0.suffix != ".py":
        return argv0.name
    here = Path.cwd()
    near = argv0.is_relative_to(here)
    return f"python {argv0.relative_to(here) if near else argv0}"


def _without_config_dir(argv: list[str]) -> tuple[list[str], str | None]:
    """The words without `--config-dir DIR` and the like, and the folder that they name last."""
    words = []
    named = None
    rest = iter(argv)
    for word in rest:
        flag, equals, folder = word.partition("=")
        if flag not in CONFIG_DIR:
            words.append(word)
            continue
        named = folder if equals else next(rest, "")
        if not named or (not equals and ("=" in named or named.startswith("-"))):
            raise ConfigError([f"{flag}: needs a folder; use {flag} FOLDER"])
    return words, named


def import_from_working_folder() -> None:
    """Your own packages are imported from the folder that you stand in, after all that is
    installed: a file yaml.py there hides nothing."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
