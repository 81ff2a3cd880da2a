"""All commands by name, with the function that does each. Torch-free.

The laboratory is known to the core by these names alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

COMMANDS = {
    # about folders: function(arguments)
    "init": "ddp_train.commands.new_project:create",
    "resize": "ddp_train.commands.resize:resize",
    "compare": "ddp_train.commands.compare:compare",
    "watch": "ddp_train.commands.watch:watch",
    # about scripts: function(arguments)
    "prove script": "ddp_lab.prove.script:prove_script",
    # about other commands: function(program, arguments)
    "check": "ddp_train.commands.check:check",
    # about a command that is a word of its own: function(command)
    "help of": "ddp_train.commands.help:print_help_of",
    # about runs: function(program, arguments, world)
    "run": "ddp_train.commands.run:run",
    "flags": "ddp_train.commands.flags:run_with_flags",
    "study": "ddp_lab.study.main:study",
    "prove": "ddp_lab.prove.main:prove",
    "rank": "ddp_train.commands.run:run_rank",
    # examinations that a config asks for
    "doctor of this host": "ddp_lab.doctor.main:check_this_host",
    "doctor of all hosts": "ddp_lab.doctor.all_hosts:check_all_hosts",
}
"""Module and name of the function of each command."""
OF_FOLDERS = ("init", "resize", "compare", "watch")
PROVE_SCRIPT = "prove"
"""The first word of `prove script`. The command `prove` is a mode of runs by config."""
CHECK = "check"
HELP = ("-h", "--help")
MODES = ("study", "prove")
"""Modes that are commands: their functions read the overrides of many runs."""


def command_of_run(arguments: list[str]) -> str:
    """The name of a command about runs: `flags`, `run`, or that of a mode."""
    for mode in MODES:
        if f"mode={mode}" in arguments:
            return mode
    return "flags" if has_flags(arguments) else "run"


def asks_for_help(arguments: list[str]) -> bool:
    """Whether a command that is a word of its own is asked how it is used."""
    if not arguments or arguments[0] not in (*OF_FOLDERS, PROVE_SCRIPT, CHECK):
        return False
    words = arguments[1:]
    if arguments[0] == PROVE_SCRIPT:
        words = words[:1]  # the others are those of the script
    return not set(HELP).isdisjoint(words)


def has_flags(arguments: list[str]) -> bool:
    return any(argument.startswith("-") for argument in arguments)


def load(name: str) -> Callable[..., int]:
    """The function of a command, imported when it is asked for."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function)
