"""Command lines with flags: help, version, and what Hydra handles (-m, --cfg, --info, shell
completion)."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import shutil
import signal
import sys
import textwrap
from pathlib import Path

import hydra
from hydra.errors import HydraException

import ddp_train
from ddp_train.config.bind import is_section, key_named_like, own_keys
from ddp_train.config.overrides import register_schema
from ddp_train.config.program import CONFIG_DIR, PRESETS, Program
from ddp_train.config.reuse import KEY, OF_A_RUN
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.options.custom import CustomConfig
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS, Config
from ddp_train.resilience.preemption import stop_signals
from ddp_train.sweeps.trials import Trials
from ddp_train.text import did_you_mean, shown

SWEEP = ("-m", "--multirun")
FLAGS = (
    *("-h", "--help", "--version", *SWEEP, "-c", "--cfg", "--resolve", "-p", "--package"),
    *("-i", "--info", "-sc", "--shell-completion", "--hydra-help", *CONFIG_DIR),
)


USES = {
    "{} [key=value ...]": "train",
    "torchrun --nproc_per_node=N {torchrun} [key=value ...]": "the same run under torchrun",
    "{} mode=evaluate checkpoint.resume=PATH": "score the test set with a checkpoint",
    "{} mode=predict checkpoint.resume=PATH": "write the predictions of a trained model",
    "{} mode=export checkpoint.resume=PATH": "write a trained model as .pt2 or ONNX",
    "{} mode=doctor [key=value ...]": "is this host fit to train? or these hosts?",
    "{} mode=prove [key=value ...]": "the same result however it is divided?",
    "{} -m optimizer.lr=0.1,0.2 [...]": "a sweep: one table of all trials",
    "{} mode=study study=NAME [...]": "compare several variants in one report",
    "{} --cfg job [key=value ...]": "show the config, run nothing",
    "{} check [key=value ...]": "check a command, start nothing",
    "{} watch RUNS": "all runs of a folder, as they go",
    "{} compare RUN RUN [...]": "what differs; is it more than noise?",
    "{} resize RUN N": "change the number of processes",
    "{} init FOLDER": "start a project of your own",
}


def usage(typed: str) -> str:
    """The first lines of --help. typed: how the program was started."""
    by_torchrun = typed.removeprefix("python ") if typed.startswith("python ") else "-m ddp_train"
    lines = [line.format(typed, torchrun=by_torchrun) for line in USES]
    width = max(map(len, lines)) + 4
    about = "Trains a model on every GPU of this host, one process each; without GPUs, in two."
    return "\n".join(
        [
            about,
            "",
            *(f"{line:<{width}}{use}" for line, use in zip(lines, USES.values(), strict=True)),
        ]
    )


def through_hydra(trials: Trials, argv: list[str], world: World | None) -> int:
    """Prints what the flags ask for, or runs a sweep. Returns the exit code.

    Raises ConfigError before any trial starts.
    """
    flags = [word.partition("=")[0] for word in argv if word.startswith("-")]
    unknown = [flag for flag in flags if flag not in FLAGS]
    if unknown:
        raise ConfigError([f"{flag}: no such flag{_meant(flag)}" for flag in unknown])
    sweep = not set(SWEEP).isdisjoint(flags)
    if {"-h", "--help"} & set(flags):
        text = help_text(trials.program)
        print(wrapped(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)
        return 0
    if "--version" in flags:
        print(f"ddp_train {ddp_train.__version__}")
        return 0
    if world and sweep:
        remedy = trials.program.command([*argv, f"launch.nproc_per_node={world.local_size}"])
        raise ConfigError([f"-m: torchrun would start one sweep per rank; use: {remedy}"])
    if not sweep and set(flags) <= {"--resolve", "-p", "--package"}:
        raise ConfigError([f"{flags[0]}: needs --cfg job; add that, or leave it out"])
    if not sweep and (words := [word for word in argv if word.startswith(f"{KEY}=")]):
        raise ConfigError(
            [
                f"{words[0]}: flags show what the presets compose; for what that run had, read the"
                " file"
            ]
        )
    if {"-sc", "--shell-completion", "--hydra-help"}.isdisjoint(flags):
        argv = trials.check(argv, sweep)
    register_schema(trials.program)
    own = trials.program.own
    sys.argv = [sys.argv[0], *([f"{CONFIG_DIR[1]}={own}"] if own else []), *argv]
    if trials.pool:
        for number in stop_signals():
            signal.signal(number, trials.end_by_signal)
    only_shows = not {"-c", "--cfg", "-i", "--info"}.isdisjoint(flags)
    with trials.alone() if sweep and not only_shows else contextlib.nullcontext():
        try:
            hydra.main(
                config_path=str(trials.program.presets), config_name="config", version_base="1.3"
            )(trials.run)()
        except BaseException as error:
            if trials.sweep_dir != Path():  # show the results of the trials so far
                trials.finish()
            if isinstance(
                error.__context__, HydraException
            ):  # Hydra has printed it, and exits with 1
                raise SystemExit(ConfigError.exit_code) from None
            raise
        return trials.finish()


def _meant(flag: str) -> str:
    """What was probably meant by an unknown flag: another flag, or a key typed like one (`--lr
    0.1`)."""
    if len(flag) <= len("-x"):
        return ""
    name = flag.lstrip("-").replace("-", "_")
    key = name if name in PRESETS else key_named_like(name)
    alike = difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.75)
    if key and not alike:
        return f"; did you mean {key}=VALUE?"
    return did_you_mean(flag, list(FLAGS))


def help_text(program: Program) -> str:
    """Usage, the config groups with their options, and each key with its default, choices and
    meaning."""
    lines = [
        usage(program.typed),
        "",
        f"Groups (group=option; the files are in {' and '.join(map(str, program.folders()))}):",
    ]
    for name in program.groups():
        files = program.files(name)
        default = f" (default: {getattr(Config(), name).name})" if name in OPTIONS else ""
        lines.append(f"  {name:<15} {', '.join(path.stem for path in files)}{default}")
        if (
            "# @package" in files[0].read_text()
        ):  # a whole experiment: its first comment describes it
            lines += [
                f"    {path.stem:<19}"
                f" {[*path.read_text(errors='replace').splitlines(), '', ''][1].lstrip('# ')}"
                for path in files
            ]
    lines += ["", "Keys (key=value):", f"  {KEY + '=RUN':<44} {OF_A_RUN}", *_keys("", Config)]
    for section, schema in SECTIONS.items():
        lines += ["", f"{section}:", *_keys(section + ".", schema)]
    for section, options in OPTIONS.items():
        common = next(iter(options.values())).__bases__[0]
        keys = _keys(section + ".", common) if is_section(common) else []
        if keys:
            lines += [
                "",
                (
                    f"{section}=... (keys of every"
                    f" option{' but custom' if 'custom' in options else ''}):"
                ),
                *keys,
            ]
        for name, schema in options.items():
            if (schema.__doc__ or "").startswith(schema.__name__ + "("):
                about = ""
            else:
                about = schema.__doc__ or ""
            heading = f"{section}={name}: {about.splitlines()[0] if about else ''}".rstrip(": ")
            known = [] if issubclass(schema, CustomConfig) else keys
            lines += [
                "",
                heading,
                *(line for line in _keys(section + ".", schema) if line not in known),
            ]
    return "\n".join(lines).replace("python launch.py", program.typed)  # in the comments of presets


def wrapped(text: str, width: int) -> str:
    """Wraps long lines. Continuation lines are indented to the last column of the line (after two
    spaces or more), with at least 22 columns of text."""
    lines = []
    for line in text.splitlines():
        parts = re.match(r".*  (?=\S)", line.rstrip())
        margin = " " * min(len(parts[0]) if parts else 0, width - 22)
        wrapper = textwrap.TextWrapper(width, subsequent_indent=margin, break_long_words=False)
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def _keys(prefix: str, schema: type) -> list[str]:
    lines = []
    fields = list(dataclasses.fields(schema))
    if issubclass(schema, CustomConfig):
        named = {"_target_=package.Name": "target", "ANY=value": "arguments"}
        meanings = {f.name: f.metadata.get("meaning") for f in fields}
        lines = [f"  {prefix + override:<44} {meanings[name]}" for override, name in named.items()]
        fields = [f for f in fields if f.name in own_keys(schema)]
    for f in fields:
        if dataclasses.is_dataclass(inner := getattr(schema(), f.name, None)) and "." in prefix:
            lines += _keys(f"{prefix}{f.name}.", type(inner))
        if "meaning" in f.metadata:
            default = getattr(schema(), f.name)
            choices = f" ({', '.join(f.metadata['choices'])})" if "choices" in f.metadata else ""
            lines.append(
                f"  {prefix + f.name + '=' + shown(default):<44} {f.metadata['meaning']}{choices}"
            )
    return lines
