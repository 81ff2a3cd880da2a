"""The text of --help: the commands, the groups with their options, and all keys. Torch-free."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddp_train.config.earlier_runs import CONFIG_KEY, OF_A_RUN
from ddp_train.config.keys import is_section, own_keys
from ddp_train.config.program import Program, command_name
from ddp_train.options.custom import CustomOption
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS, Config
from ddp_train.text import shown

ABOUT = "Trains a model on every GPU of this host, one process each; without GPUs, in two."
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
    "{} prove train.py [...]": "the same for a script with a session?",
    "{} compare RUN RUN [...]": "what differs; is it more than noise?",
    "{} resize RUN N": "change the number of processes",
    "{} init FOLDER": "start a project of your own",
}
OF_COMMANDS = {
    "init": ("FOLDER", "Starts a project of your own, a package of the folder's name."),
    "resize": (
        "RUN N",
        "Changes the number of processes of a run that trains, to one of the range that it was"
        " started with\n(launch.nproc_per_node=1:4).",
    ),
    "compare": (
        "RUN RUN ... [--metric SET.NAME] [--output PAGE.html]",
        "Says what differs between runs, and whether it is more than noise.\n"
        "A folder stands for all runs in it.\n\n"
        "--metric SET.NAME    the number to judge by, as test.accuracy\n"
        "--output PAGE.html   write a page with the curves",
    ),
    "watch": ("FOLDER", "Shows all runs of a folder, or one run, as they go; Ctrl-C ends it."),
    "check": (
        "[-m] [key=value ...]",
        "Checks the command of a run, or of a sweep (-m). It starts and writes nothing.",
    ),
    "prove": (
        "train.py [ARGUMENT ...]",
        "Compares the first updates of a script with a ddp_train.session on 1 and 3 processes."
        "\nIn place of train.py, -m MODULE names a module.",
    ),
}
"""Arguments and meaning of each command that is a word of its own."""
KEY_WIDTH = 44
LEAST_TEXT_WIDTH = 23


def usage(typed: str) -> str:
    """The first lines of --help. typed: how the program was started."""
    by_torchrun = typed.removeprefix("python ") if typed.startswith("python ") else "-m ddp_train"
    commands = [command.format(typed, torchrun=by_torchrun) for command in USES]
    width = max(len(command) for command in commands) + 4
    lines = [ABOUT, ""]
    for command, meaning in zip(commands, USES.values(), strict=True):
        lines.append(f"{command:<{width}}{meaning}")
    return "\n".join(lines)


def print_help_of(command: str) -> int:
    """Print how a command of OF_COMMANDS is used. Returns the exit code."""
    arguments, meaning = OF_COMMANDS[command]
    print(f"{command_name()} {command} {arguments}\n\n{meaning}")
    return 0


def help_text(program: Program) -> str:
    """The usage, the config groups with their options, and all keys."""
    folders = " and ".join(str(folder) for folder in program.folders())
    lines = [
        usage(program.typed),
        "",
        f"Groups (group=option; the files are in {folders}):",
        *_group_lines(program),
        "",
        "Keys (key=value):",
        _line(f"{CONFIG_KEY}=RUN", OF_A_RUN),
        *_key_lines("", Config),
    ]
    for section, schema in SECTIONS.items():
        lines += ["", f"{section}:", *_key_lines(f"{section}.", schema)]
    for section, options in OPTIONS.items():
        lines += _option_lines(section, options)
    text = "\n".join(lines)
    return text.replace("python launch.py", program.typed)  # in the comments of presets


def _group_lines(program: Program) -> Iterator[str]:
    for name in program.groups():
        files = program.files(name)
        default = ""
        if name in OPTIONS:
            default = f" (default: {getattr(Config(), name).name})"
        yield f"  {name:<15} {', '.join(path.stem for path in files)}{default}"
        is_of_whole_runs = "# @package" in files[0].read_text()
        if is_of_whole_runs:
            for path in files:
                yield f"    {path.stem:<19} {_first_comment(path)}"


def _first_comment(path: Path) -> str:
    """The second line of a preset, which describes it."""
    lines = path.read_text(errors="replace").splitlines()
    return lines[1].lstrip("# ") if len(lines) > 1 else ""


def _option_lines(section: str, options: Mapping[str, type]) -> Iterator[str]:
    common = next(iter(options.values())).__bases__[0]
    common_lines = _key_lines(f"{section}.", common) if is_section(common) else []
    if common_lines:
        exception = " but custom" if "custom" in options else ""
        yield from ("", f"{section}=... (keys of every option{exception}):", *common_lines)
    for name, schema in options.items():
        yield ""
        yield f"{section}={name}: {_summary_of(schema)}".rstrip(": ")
        for line in _key_lines(f"{section}.", schema):
            if line not in common_lines or issubclass(schema, CustomOption):
                yield line


def _summary_of(schema: type) -> str:
    """The first line of a docstring; empty if the dataclass has only that of Python."""
    text = schema.__doc__ or ""
    if not text or text.startswith(f"{schema.__name__}("):
        return ""
    return text.splitlines()[0]


def _key_lines(prefix: str, schema: type) -> list[str]:
    """A line for each key of a section."""
    lines = []
    fields = list(dataclasses.fields(schema))
    if issubclass(schema, CustomOption):
        meanings = {field.name: field.metadata.get("meaning") for field in fields}
        lines.append(_line(f"{prefix}_target_=package.Name", meanings["target"]))
        lines.append(_line(f"{prefix}ANY=value", meanings["arguments"]))
        fields = [field for field in fields if field.name in own_keys(schema)]
    defaults = schema()
    for field in fields:
        default = getattr(defaults, field.name, None)
        if dataclasses.is_dataclass(default) and "." in prefix:
            lines += _key_lines(f"{prefix}{field.name}.", type(default))
        if "meaning" in field.metadata:
            meaning = field.metadata["meaning"]
            if "choices" in field.metadata:
                meaning += f" ({', '.join(field.metadata['choices'])})"
            lines.append(_line(f"{prefix}{field.name}={shown(default)}", meaning))
    return lines


def _line(override: str, meaning: str | None) -> str:
    return f"  {override:<{KEY_WIDTH}} {meaning}"


def wrapped(text: str, width: int) -> str:
    """The text with long lines wrapped.

    Continuation lines are indented to the last column of the line, which comes after two spaces or
    more, and have at least 23 letters.
    """
    lines = []
    for line in text.splitlines():
        columns = re.match(r".*  (?=\S)", line.rstrip())
        margin = min(len(columns[0]) if columns else 0, width - LEAST_TEXT_WIDTH)
        wrapper = textwrap.TextWrapper(
            width, subsequent_indent=" " * margin, break_long_words=False
        )
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)
