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

ABOUT = (
    "Trains a model on all GPUs of this host, one process for each; without a GPU, with two"
    " processes."
)
USES = {
    "{} [key=value ...]": "train",
    "torchrun --nproc_per_node=N {torchrun} [key=value ...]": "the same run under torchrun",
    "{} mode=evaluate checkpoint.resume=PATH": "score the test set with a checkpoint",
    "{} mode=predict checkpoint.resume=PATH": "write the predictions of a trained model",
    "{} mode=export checkpoint.resume=PATH": "write a trained model as .pt2 or ONNX",
    "{} mode=doctor [key=value ...]": "can this host (or these hosts) train?",
    "{} mode=prove [key=value ...]": "same result on any number of processes?",
    "{} -m optimizer.lr=0.1,0.2 [...]": "a sweep: train with each value, compare",
    "{} mode=study study=NAME [...]": "compare several variants in one report",
    "{} --cfg job [key=value ...]": "show the config, run nothing",
    "{} check [key=value ...]": "check a command, run nothing",
    "{} watch RUNS": "show the progress of runs",
    "{} prove train.py [...]": "mode=prove for a script with a session",
    "{} compare RUN RUN [...]": "do runs differ by more than noise?",
    "{} resize RUN N": "change the processes of a run",
    "{} init FOLDER": "start a project of your own",
}
OF_COMMANDS = {
    "init": (
        "FOLDER",
        "Creates a project of your own in a new folder: a package of the same name with a model,\n"
        "a data set, a task, a preset and a test.",
    ),
    "resize": (
        "RUN N",
        "Changes the number of processes of a run while it trains. RUN is the folder of the run.\n"
        "N must be in the range that the run was started with: launch.nproc_per_node=1:4.",
    ),
    "compare": (
        "RUN RUN ... [--metric SET.NAME] [--output PAGE.html]",
        "Shows how runs differ, and whether their scores differ by more than noise.\n"
        "RUN is the folder of a run, or a folder with several runs.\n\n"
        "--metric SET.NAME    the metric to compare by, for example test.accuracy\n"
        "--output PAGE.html   also write a page with the curves",
    ),
    "watch": (
        "FOLDER",
        "Shows the progress of a run, or of all runs in a folder.\n"
        "Ctrl-C ends the display, not the runs.",
    ),
    "check": (
        "[-m] [key=value ...]",
        "Checks the command of a run, or of a sweep (-m), and prints all problems.\n"
        "Starts nothing and writes nothing.",
    ),
    "prove": (
        "train.py [ARGUMENT ...]",
        "Runs a script that uses ddp_train.session on 1 and on 3 processes, and says whether the\n"
        "first updates of the weights are the same. ARGUMENT is an argument of the script.\n"
        "For a module, use -m MODULE in place of train.py.",
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
