"""Command lines with flags: help, version, sweeps, and what Hydra shows. Torch-free."""

from __future__ import annotations

import difflib
import shutil
import sys

import ddp_train
from ddp_train.commands.table import CHECK, HELP
from ddp_train.config.program import CONFIG_DIR, PRESETS, Program
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.launcher.fork_server import ForkServer

VERSION = "--version"
SWEEP = ("-m", "--multirun")
CONFIG = ("-c", "--cfg")
INFO = ("-i", "--info")
SHOW = (*CONFIG, *INFO)
HOW_TO_SHOW = ("--resolve", "-p", "--package")
COMPLETION = ("-sc", "--shell-completion")
HYDRA_HELP = ("--hydra-help",)
OF_HYDRA = (*COMPLETION, *HYDRA_HELP)
PURPOSES = (SWEEP, CONFIG, INFO, COMPLETION, HYDRA_HELP)
"""Flags of which a command has those of one tuple at most."""
COMPLETIONS = ("install=", "uninstall=", "query=")
"""Beginnings of the words after a flag of COMPLETION; the last one is the shell's own."""
FLAGS = (*HELP, VERSION, *SWEEP, *SHOW, *HOW_TO_SHOW, *OF_HYDRA, *CONFIG_DIR)
CHECKS = ("--check", "--dry-run", "--dryrun", "--validate")
"""Flags of other programs for what our command `check` does."""
WITHOUT_SHARED_SERVER = ("launch.nnodes=", "hydra/launcher=", "sweep.", "launch.fork_server=false")
"""Beginnings of overrides with which the trials of a sweep use no common fork server."""


def run_with_flags(program: Program, argv: list[str], world: World | None) -> int:
    """Show what the flags ask for, or run a sweep. Returns the exit code.

    Raises ConfigError before any trial starts.
    """
    flags = [word.partition("=")[0] for word in argv if word.startswith("-")]
    unknown = [flag for flag in flags if flag not in FLAGS]
    if unknown:
        raise ConfigError([_no_such_flag(program, argv, flag) for flag in unknown])
    is_sweep = not set(SWEEP).isdisjoint(flags)
    if not set(HELP).isdisjoint(flags):
        return print_help(program)
    if VERSION in flags:
        print(f"ddp_train {ddp_train.__version__}")
        return 0
    require_one_purpose(flags)
    if is_sweep and world:
        remedy = program.command([*argv, f"launch.nproc_per_node={world.local_size}"])
        raise ConfigError([f"-m: torchrun would start one sweep per rank; use: {remedy}"])
    if is_sweep:
        return sweep(program, argv)
    return show(program, argv, flags)


def require_one_purpose(flags: list[str]) -> None:
    """Raise ConfigError if flags ask for a sweep and a listing, or for two listings."""
    given = [next((flag for flag in flags if flag in purpose), None) for purpose in PURPOSES]
    purposes = [flag for flag in given if flag]
    if len(purposes) > 1:
        raise ConfigError([f"{purposes[0]}: contradicts {purposes[1]}; give one of them"])


def print_help(program: Program) -> int:
    from ddp_train.commands.help import help_text, wrapped

    text = help_text(program)
    if sys.stdout.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    print(text)
    return 0


def sweep(program: Program, argv: list[str]) -> int:
    """Run a sweep. Returns the exit code. Raises ConfigError before any trial starts."""
    # before the values are checked, so that the server imports torch meanwhile
    server = ForkServer(program.import_path) if _shares_server(argv) else None
    try:
        from ddp_train.sweeps.plan import plan_sweep
        from ddp_train.sweeps.sweep import run_sweep

        plan = plan_sweep(program, argv)
        plan.print_notes()
        return run_sweep(program, plan, server)
    finally:
        if server:
            server.close()


def _shares_server(argv: list[str]) -> bool:
    """Whether the trials of a sweep probably run one after the other on this host."""
    if any(word.startswith("-") and word not in SWEEP for word in argv):
        return False
    if "launch.fork_server=false" in argv or "mode=doctor" in argv:
        return False
    return "hydra/launcher=basic" in argv or not any(
        word.startswith(WITHOUT_SHARED_SERVER) for word in argv
    )


def show(program: Program, argv: list[str], flags: list[str]) -> int:
    """Has Hydra show the config, or complete a command line. Returns the exit code."""
    from ddp_train.config.earlier_runs import CONFIG_KEY
    from ddp_train.sweeps.plan import checked_arguments
    from ddp_train.sweeps.sweep import call_hydra

    if set(flags) <= set(HOW_TO_SHOW):
        raise ConfigError([f"{flags[0]}: has an effect only with --cfg job; add --cfg job"])
    completes = not set(COMPLETION).isdisjoint(flags)
    if completes and not any(word.startswith(COMPLETIONS) for word in argv):
        raise ConfigError([f"{COMPLETION[0]}: needs a shell; add install=bash (or zsh, fish)"])
    reused = [word for word in argv if word.startswith(f"{CONFIG_KEY}=")]
    if reused:
        raise ConfigError(
            [
                f"{reused[0]}: {flags[0]} cannot show the config of an earlier run; read the"
                " config.yaml of that run"
            ]
        )
    arguments = argv
    if set(OF_HYDRA).isdisjoint(flags):
        arguments = checked_arguments(program, argv)
    call_hydra(program, arguments, _no_run)
    return 0


def _no_run(_: object) -> None:
    """The task function where Hydra runs nothing."""


def _no_such_flag(program: Program, argv: list[str], flag: str) -> str:
    if flag in CHECKS:
        words = [word for word in argv if word not in CHECKS]
        typed = program.command([CHECK, *words])
        return f"{flag}: no such flag; to check this command and run nothing, use: {typed}"
    return f"{flag}: no such flag{suggestion_for(flag)}"


def suggestion_for(flag: str) -> str:
    """Suggest what an unknown flag was to be; "" if nothing is like it.

    It may be another flag, or a key that was typed like one (`--lr 0.1`).
    """
    from ddp_train.config.keys import key_named_like

    if len(flag) <= len("-x"):
        return ""
    name = flag.lstrip("-").replace("-", "_")
    key = name if name in PRESETS else key_named_like(name)
    similar = difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.75)
    if similar:
        return f"; did you mean {similar[0]}?"
    return f"; did you mean {key}=VALUE?" if key else ""
