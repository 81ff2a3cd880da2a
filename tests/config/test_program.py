"""How this program was started, and where its presets lie."""

from __future__ import annotations

import ast
import os
import runpy
import sys
from pathlib import Path

import pytest

from ddp_train.commands.help import usage
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.config.program import find_program
from ddp_train.errors import ConfigError
from tests.support.configs import (
    ROOT,
    own_presets,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_files_of_others_stop_no_command() -> None:
    program = own_presets(
        experiment__mine="# @package _global_\nseed: 4\n", models__gpt="port: 1\n"
    )
    Path("conf/experiment/mine.yml").write_text("old: 1\n")
    Path("conf/experiment/.#mine.yaml").symlink_to("nowhere")  # as Emacs does
    assert program.unused() == {}
    assert (
        read_config(
            program, read_overrides(program, ["experiment=mine", "model=gpt", "data=text"])
        )[0].seed
        == 4
    )


def test_file_that_does_not_act_is_named_to_who_chooses_it() -> None:
    program = own_presets(
        experiment__late="# late\n# @package _global_\nseed: 5\n",
        optimizers__mine="name: sgd\n",
        schedule__mine="name: cosine\n",
        nginx__a="port: 80\n",
        traces__a="port: 80\n",
        experiment__other="# @package _global_\ndefaults: [override /optimizer: mine]\n",
    )
    Path("conf/schedule/mine.yaml").rename("conf/schedule/mine.yml")
    misspelt = "conf/optimizers/mine.yaml: there is no group optimizers; did you mean optimizer?"
    not_read = "conf/schedule/mine.yml: only *.yaml is read; rename it to mine.yaml"
    late = (
        "conf/experiment/late.yaml: a preset of a run must begin with the line `# @package"
        " _global_`"
    )
    assert list(program.unused().values()) == [late, misspelt, not_read]
    assert read_overrides(program, ["optimizer=mine"]).problems == [misspelt]
    assert read_overrides(program, ["schedule=mine"]).problems == [not_read]
    assert read_config(program, read_overrides(program, ["experiment=other"]))[1] == [misspelt]
    assert read_config(program, read_overrides(program, ["experiment=late"]))[1] == [late]
    assert read_config(program, read_overrides(program, ["optimizer=sgd"]))[1] == []
    assert find_program(None, [])[0].notes == (
        f"{late}; until then the file is not used, nor are 2 other files. If conf belongs to"
        " another program, give the folder of your presets by --config-dir=FOLDER",
    )


@pytest.mark.parametrize(
    ("script", "argv0", "typed", "torchrun"),
    [
        (ROOT / "launch.py", "launch.py", "python launch.py", "launch.py"),
        (
            ROOT / "launch.py",
            str(ROOT / "launch.py"),
            f"python {ROOT}/launch.py",
            f"{ROOT}/launch.py",
        ),
        (None, "/somewhere/bin/ddp-train", "ddp-train", "-m ddp_train"),
        (None, str(ROOT / "ddp_train/__main__.py"), "python -m ddp_train", "-m ddp_train"),
    ],
)
def test_commands_are_shown_as_they_were_typed(
    script: Path | None, argv0: str, typed: str, torchrun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [argv0])
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("mine").mkdir()
    program, words = find_program(script, ["-cd", "mine", "seed=1", "-m"])
    assert (
        words == ["seed=1", "-m"]
        and program.own == Path("mine")
        and sys.path[-1] == str(Path.cwd())
    )
    assert program.command(words) == f"{typed} --config-dir=mine seed=1 -m"
    assert program.again(["seed=1"])[2:] == ["--config-dir=mine", "seed=1"]
    assert f"torchrun --nproc_per_node=N {torchrun} [key=value ...]  " in usage(typed)
    beside = None if script is None else Path(os.path.relpath(ROOT / "conf"))
    assert (find_program(script, [])[0].own, find_program(script, [])[0].notes) == (beside, ())
    Path("conf").mkdir()
    assert find_program(script, [])[0].own == Path("conf")
    Path("conf/config.yaml").touch()
    other = find_program(script, [])[0]
    assert other.own == beside, "another program's"
    assert other.notes == (
        (
            "conf is not used: its config.yaml shows that it belongs to another program; give the"
            " folder of your presets by --config-dir=FOLDER"
        ),
    )
    assert find_program(script, ["-cd", "mine"])[0].notes == ()
    for flag in (["--config-dir"], ["-cd", "seed=1"], ["-cd="]):
        with pytest.raises(ConfigError, match="needs a folder; use"):
            find_program(script, flag)


def test_launch_py_says_what_its_help_says() -> None:
    assert usage("python launch.py") == (
        ast.get_docstring(ast.parse((ROOT / "launch.py").read_text())) or ""
    )


def test_an_old_python_is_told_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 4))  # as far back as it goes
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert ", and 3.11 or newer is needed; make PYTHON=/path/to/python3.11" in said
