"""Everything before a process starts: compose, bind, resolve, check, freeze."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ddp_train.config.auto import at_another_number, resolve
from ddp_train.config.checkpoint_checks import changed_keys, stretched_schedule
from ddp_train.config.composition import read_config
from ddp_train.config.earlier_runs import EarlierRun, ground_in, run_to_resume
from ddp_train.config.folders import is_of_script, is_of_sweep
from ddp_train.config.freeze import COMMANDS, freeze, record_command, to_text, to_values
from ddp_train.config.notices import notices, of_other_modes
from ddp_train.config.overrides import Overrides, read_overrides
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.run_directory import unwritten
from ddp_train.config.validate import check, check_rules
from ddp_train.distributed.environment import visible_devices
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware, detect_hardware
from ddp_train.options.registry import OPTIONS, TRACKERS
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import EARLIER as EARLIER_FAILURES
from ddp_train.resilience.failure_report import set_aside
from ddp_train.resilience.lost_hosts import FILE as LOST_HOSTS
from ddp_train.text import dotted, shell_word

OF_TORCHRUN = {"launch.nproc_per_node": "auto", "launch.nnodes": 1, "launch.max_restarts": 0}
"""Keys that torchrun decides, whatever the config of an earlier run says."""
LEFT_BY_RUNS = (
    "checkpoints",
    "metrics.jsonl",
    EARLIER_FAILURES,
    COMMANDS,
    "trackers.json",
    "timeline.json",
    LOST_HOSTS,
)


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its config, the frozen text, and notices for the user."""

    config: Config
    text: str
    """Empty on one of several hosts: there, rank 0 freezes the config, under torchrun."""
    notices: list[str]
    lock: run_lock.Lock | None = None
    """Held for the life of the run, so that no second run uses its directory."""
    at_another_number: Callable[[int], Config] | None = None
    """The config for another number of processes on this host."""


def prepare(
    program: Program,
    overrides: list[str],
    world: World | None,
    run_dir: str | None = None,
    shared_by: int = 1,
) -> Prepared:
    """Compose, check and freeze the config. Raises ConfigError with every problem.

    run_dir: the directory of a sweep's trial, in place of the one among the overrides.
    shared_by: the number of trials that have the cores of this host among them.
    """
    command_line = read_overrides(program, overrides)
    command_line.is_of_trial = run_dir is not None
    if world:
        command_line.given = {**OF_TORCHRUN, **command_line.given}
    config, problems = read_run(program, command_line)
    if run_dir:
        config = replace(config, run_dir=run_dir)
    prepared = _lock_and_freeze(config, problems, world, program.command(overrides), shared_by)
    prepared.notices.extend(of_other_modes(command_line.given, config.mode))
    experiment = command_line.presets.get("experiment")
    if config.uses_trained and experiment:
        prepared.notices.append(
            f"experiment={experiment} with mode={config.mode}: model, task, data and metrics come"
            " from the checkpoint; give the keys to change as overrides"
        )
    return prepared


def read_run(program: Program, overrides: Overrides) -> tuple[Config, list[str]]:
    """The config, composed and bound, and all problems.

    What is done with a trained model gets model, task and data of its checkpoint; a command that
    names no job gets that of the run in its run_dir.
    """
    config, problems = read_config(program, overrides)
    if config.uses_trained:
        earlier = EarlierRun.of(Path(config.checkpoint.resume))
        if earlier is not None:
            # With the problems of the second reading only: a key may belong to the option that is
            # adopted.
            return read_config(program, overrides, earlier.adopted())
    if config.mode != "train" or not config.run_dir:
        return config, problems
    resume = config.checkpoint.resume
    # With an option of a group or a preset, the overrides say all of it, as at its start.
    says_all = overrides.config or overrides.choices.keys() & {*OPTIONS, *PRESETS}
    if not says_all and resume in ("auto", "never"):
        return _read_on_ground(program, overrides, config, problems)
    if resume == "never":
        return config, problems
    earlier = EarlierRun.of(Path(config.run_dir))
    if earlier is None:
        return config, problems
    before = earlier.values.get("data", {})
    if config.data.decode == "auto" and before.get("name") == config.data.name:
        # Other hardware may choose another decoder, with slightly different pixels: a run keeps its
        # own.
        config.data = replace(config.data, decode=before.get("decode", "auto"))
    return config, problems


def _read_on_ground(
    program: Program, overrides: Overrides, config: Config, problems: list[str]
) -> tuple[Config, list[str]]:
    """The config of the run in the run directory with the overrides on top, and all problems.

    config, problems: what the overrides say alone, which is returned for a new folder.
    """
    try:
        ground = ground_in(Path(str(config.run_dir)))
    except ConfigError as error:
        return config, [*problems, *error.problems]
    if not ground:
        return config, problems
    return read_config(program, overrides, ground)


def resolve_and_check(
    config: Config, world: World | None, hardware: Hardware | None = None
) -> tuple[Config, list[str]]:
    """The config without `auto`, as this hardware will run it, and everything that is wrong."""
    problems = check_rules(config)
    if problems:  # checks on values that break their rules would only repeat them
        return config, problems
    hardware = hardware or detect_hardware(visible_devices())
    resolved = resolve(config, hardware, world)
    return resolved, check(RequestedRun(config, resolved, hardware, world))


def _lock_and_freeze(
    config: Config, problems: list[str], world: World | None, command: str, shared_by: int
) -> Prepared:
    """The rest of `prepare`, for a config that has been composed and bound."""
    hardware = detect_hardware(visible_devices())
    hardware = replace(hardware, cpus=max(1, hardware.cpus // shared_by))
    resolved, further_problems = resolve_and_check(config, world, hardware)
    if problems or further_problems:
        raise ConfigError(list(dict.fromkeys(problems + further_problems)))
    notes = notices(RequestedRun(config, resolved, hardware, world))
    if world is None and int(resolved.launch.nnodes) > 1:
        return Prepared(resolved, "", notes)
    if resolved.mode == "doctor":
        # It may examine while a run is in that directory, and leaves that run's files alone.
        return Prepared(resolved, to_text(resolved), notes)
    lock = lock_run_dir(resolved, world)
    run_dir = Path(str(resolved.run_dir))
    try:
        set_aside(run_dir)
    except OSError as error:
        raise unwritten(resolved.run_dir, error) from None
    earlier = run_to_resume(resolved)
    if earlier:
        resolved.chosen_keys += _chosen_before(earlier, resolved)
        changes = ", ".join(changed_keys(earlier, resolved))
        if changes:
            notes.append(f"run_dir={resolved.run_dir} resumes with other values: {changes}")
        stretched = stretched_schedule(earlier, resolved)
        if stretched:
            notes.append(stretched)
    is_restart = world is not None and world.attempt > 0
    if resolved.mode == "train" and resolved.checkpoint.resume == "never" and not is_restart:
        notes += archive_previous_run(run_dir)
    text = freeze(resolved)
    try:
        record_command(run_dir, command, hardware)
    except OSError as error:
        raise unwritten(resolved.run_dir, error) from None
    at_number = partial(at_another_number, config, resolved, hardware)
    return Prepared(resolved, text, notes, lock, at_number)


def _chosen_before(earlier: Config, config: Config) -> list[str]:
    """The keys that `auto` chose at an earlier start of the run, and that a resumed run keeps."""
    before = dotted(to_values(earlier))
    now = dotted(to_values(config))
    return [
        key
        for key in earlier.chosen_keys
        if key not in config.chosen_keys and key in now and now[key] == before.get(key)
    ]


def check_owner(config: Config) -> None:
    """Raise ConfigError if the run directory is that of a sweep or a script."""
    run_dir = Path(str(config.run_dir))
    elsewhere = _new_folder(config)
    if is_of_sweep(run_dir):
        trial = shell_word("run_dir", f"{config.run_dir}/NUMBER")
        remedy = f"to resume a trial, use {trial}; for a new run use {elsewhere}"
        raise ConfigError(
            [
                f"run_dir={config.run_dir}: is the folder of a sweep, and a run would overwrite"
                f" its page; {remedy}"
            ]
        )
    if is_of_script(run_dir) and config.checkpoint.resume != "never":
        raise ConfigError(
            [
                f"run_dir={config.run_dir}: was written by ddp_train.session or save_checkpoint,"
                f" and only that script can resume it; use {elsewhere}"
            ]
        )


def lock_run_dir(config: Config, world: World | None) -> run_lock.Lock:
    """Lock the run directory for the life of the run.

    Raises ConfigError if it is a sweep's or a script's, or if another run works in it, which the
    error names.
    """
    check_owner(config)
    run_dir = Path(str(config.run_dir))
    try:
        return run_lock.acquire(run_dir / run_lock.FILE, _patience_seconds(config, world))
    except run_lock.LockHeldError as error:
        remedy = f"wait until that run ends, stop it, or use {_new_folder(config)}"
        raise ConfigError(
            [f"run_dir={config.run_dir}: another run is in it, {error}; {remedy}"]
        ) from None
    except OSError as error:
        raise unwritten(config.run_dir, error) from None


def _new_folder(config: Config) -> str:
    """An override for a run in another folder, to be pasted."""
    return shell_word("run_dir", f"{config.run_dir}_new")


def _patience_seconds(config: Config, world: World | None) -> float:
    """The longest time that an earlier holder of the run directory may take to end."""
    if world is None:
        return 0.0
    if config.host_range:
        # A file server frees the lock of a host that is gone when its lease ends (NFSv4: 90 s).
        return 120.0
    if world.attempt or world.hosts > 1:
        # A new rank 0 may start while torchrun still ends the old one, on another host: SIGKILL
        # comes 30 s after SIGTERM.
        return 35.0
    return 0.0


def archive_previous_run(run_dir: Path) -> list[str]:
    """Rename the files of a run that is not resumed, so that nothing is lost or mistaken for new.

    Returns a notice, if there are any.
    """
    of_trackers = [name for tracker in TRACKERS.values() for name in tracker.left_by_runs]
    places = [run_dir / name for name in (*LEFT_BY_RUNS, *of_trackers)]
    left = [path for path in places if path.exists()]
    if not left:
        return []
    number = next(n for n in itertools.count(1) if not any(run_dir.glob(f"*_before_{n}*")))
    archived = [path.rename(path.with_stem(f"{path.stem}_before_{number}")) for path in left]
    names = ", ".join(path.name for path in archived)
    return [
        f"checkpoint.resume=never: files of an earlier run in {run_dir} were renamed to {names}"
    ]
