"""The command that needs no name: a run, or what its `mode` asks for. Torch-free in the parent."""

from __future__ import annotations

import sys
from typing import NoReturn

from ddp_train.commands.table import load
from ddp_train.config.program import Program
from ddp_train.distributed.agent import is_of_launcher
from ddp_train.distributed.world import World
from ddp_train.launcher.fork_server import ForkServer

WITHOUT_WORKERS_HERE = ("launch.nnodes=", "mode=doctor", "launch.fork_server=false")
"""Beginnings of overrides with which no fork server is used."""


def run(program: Program, overrides: list[str], world: World | None) -> int:
    """Compose and check the config, then do what its mode asks for. Returns the exit code.

    Raises ConfigError before anything starts.
    """
    # before the config is read, so that the server imports torch meanwhile
    uses_server = not any(text.startswith(WITHOUT_WORKERS_HERE) for text in overrides)
    if world or not uses_server:
        return _run_prepared(program, overrides, world, None)
    server = ForkServer(program.import_path)
    try:
        return _run_prepared(program, overrides, world, server)
    finally:
        server.close()


def _run_prepared(
    program: Program, overrides: list[str], world: World | None, server: ForkServer | None
) -> int:
    # Hydra, while the server imports torch
    from ddp_train.config.prepare import prepare
    from ddp_train.launcher import local, multihost
    from ddp_train.launcher.stop_requests import StopRequests
    from ddp_train.launcher.workload import workload_of

    prepared = prepare(program, overrides, world)
    if not (world and is_of_launcher()):  # which has printed them
        for notice in (*program.notes, *prepared.notices):
            print(f"note: {notice}", file=sys.stderr)
    config = prepared.config
    if world:
        run_rank(program, world, overrides, prepared.text)
    if int(config.launch.nnodes) > 1:
        if server:
            server.close()  # torchrun starts the workers
        return multihost.join_hosts(config, program, overrides)
    if config.mode == "doctor":
        check_this_host = load("doctor of this host")
        return check_this_host(config, program.import_path)
    return local.launch(
        config,
        program.import_path,
        StopRequests(program_ends=True),
        server,
        prepared.at_another_number,
        workload_of(config),
    )


def _seconds_asked(argv: list[str]) -> float:
    """launch.join_timeout_seconds on a command line, for a rank that has no config yet."""
    from ddp_train.runs.worker_process import JOIN_SECONDS

    seconds = JOIN_SECONDS
    for word in argv:
        key, _, value = word.partition("=")
        if key == "launch.join_timeout_seconds" and value.isdigit():
            seconds = float(value)
    return seconds


def run_rank(program: Program, world: World, argv: list[str], text: str | None) -> NoReturn:
    """Do the part of one rank of torchrun.

    text: the frozen config, on rank 0, which composed it; None: it is received.
    """
    from ddp_train.config.freeze import load_frozen
    from ddp_train.runs import worker
    from ddp_train.runs.worker_process import leave

    seconds = _seconds_asked(argv)
    if text:
        seconds = load_frozen(text).launch.join_timeout_seconds
    store, text = worker.receive_config(world, text, seconds)
    config = load_frozen(text)
    if config.mode == "doctor":
        check_all_hosts = load("doctor of all hosts")
        leave(check_all_hosts(store, world, argv, config, program.import_path))
    worker.run_under_torchrun(store, world, argv, config, text)
