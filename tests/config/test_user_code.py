"""Users' classes and functions are imported and called."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare
from ddp_train.config.user_code import build_hooks, instantiate
from ddp_train.errors import ConfigError
from ddp_train.options.custom import Code
from tests.support.commands import PROGRAM

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_trusted_code_is_imported_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_train.config.user_code import instantiate

    (tmp_path / "mine_alone.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\nThing = dict\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "model._target_=mine_alone.Thing",
        "model.size=3",
        "trusted_modules=[mine_alone]",
        "run_dir=run",
    ]
    config = prepare(PROGRAM, words, None).config
    assert config.words_to_resume == "run_dir=run 'trusted_modules=[mine_alone]'", "typed again"
    odd = dataclasses.replace(config, run_dir="a run=(1)", trusted_modules=[])
    assert shlex.split(odd.words_to_resume) == ['run_dir="a run=(1)"'], (
        "as Hydra reads it, behind a shell"
    )
    assert not (tmp_path / "imported").exists()
    assert instantiate("model", config.model) == {"size": 3}
    assert (tmp_path / "imported").exists()
    with pytest.raises(ConfigError, match="mine_alone has no Thin; did you mean Thing"):
        instantiate("model", dataclasses.replace(config.model, target="mine_alone.Thin"))


def test_arguments_are_judged_by_the_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_train.config.user_code import instantiate

    (tmp_path / "mine_broken.py").write_text(
        "Dict, SIZE = dict, 3\nclass Thing:\n    def __init__(self, size):\n        len(size)\n"
    )
    (tmp_path / "mine_lacking.py").write_text("import nosuch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be called with size=1, width=3: .*'width'"):
        instantiate("model", Code(target="mine_broken.Thing", arguments={"size": 1, "width": 3}))
    with pytest.raises(ConfigError, match=r"argument 'mode'; remove model\.mode"):
        arguments = {"size": 1, "mode": 3}
        instantiate("model", Code(target="mine_broken.Thing", arguments=arguments))
    with pytest.raises(
        ConfigError, match=r"cannot be called with siez=1: .*'size'; did you mean size\?"
    ):
        instantiate("model", Code(target="mine_broken.Thing", arguments={"siez": 1}))
    with pytest.raises(
        ConfigError,
        match=r"model._target_=mine_broken.SIZE: must be a class or function, and is of type int",
    ):
        instantiate("model", Code(target="mine_broken.SIZE"))
    with pytest.raises(TypeError, match="not iterable") as raised:  # dict has no signature
        instantiate("model", Code(target="mine_broken.Dict"), 3)
    assert not raised.value.__context__
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        instantiate("model", Code(target="mine_broken.Thing", arguments={"size": 3}))
    with pytest.raises(ModuleNotFoundError, match="nosuch"):
        instantiate("model", Code(target="mine_lacking.Thing"))
    with pytest.raises(ConfigError, match="No module named 'mine_nowhere'"):
        instantiate("model", Code(target="mine_nowhere.Thing"))


def test_workers_refuse_what_the_source_does_not_show() -> None:
    from ddp_train.config.user_code import build_hooks

    for path in ("json.JSONDecoder", "json.dumps"):
        with pytest.raises(
            ConfigError, match=rf"hooks=\[{path}\]: must be a class with a method act, or with"
        ):
            build_hooks([path])
    with pytest.raises(ConfigError, match="has no StepTime; did you mean StepTimes"):
        build_hooks(["ddp_lab.study.step_times.StepTime"])


def test_an_optimizer_of_torch_is_known_by_its_name() -> None:
    for name in ("nadam", "NAdam"):
        read = read_overrides(PROGRAM, [f"optimizer={name}", "optimizer.lr=0.002"])
        config, problems = read_config(PROGRAM, read)
        assert not problems
        assert (config.optimizer.target, config.optimizer.arguments) == (
            "torch.optim.NAdam",
            {"lr": 0.002},
        )
    (problem,) = read_overrides(PROGRAM, ["optimizer=adamw,nadam,radam"], sweep=True).problems
    assert problem.endswith(
        "to sweep over classes of torch, use optimizer._target_=torch.optim.NAdam,torch.optim.RAdam"
    )


def test_code_that_refuses_our_arguments_is_told_what_to_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_other.py").write_text(
        "class Quiet:\n    def act(self, job): ...\n"
        "class Every(Quiet):\n    def __init__(self, every): ...\n"
        "def plain(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    passed = "is called with the arguments (job, run_dir, world), but "
    every = f"{passed}Every.__init__ accepts (every); let Every.__init__ accept (job, run_dir, world, every)"
    for item, rule in (
        (
            "mine_other.Quiet",
            f"{passed}Quiet.__init__ accepts no arguments; let Quiet.__init__ accept"
            " (job, run_dir, world)",
        ),
        ("mine_other.Every", every),
        ({"_target_": "mine_other.Every", "every": 3}, every),
    ):
        with pytest.raises(ConfigError, match=re.escape(rule)):
            build_hooks([item], None, None, None)
    with pytest.raises(
        ConfigError, match=r"\(params\), but plain accepts no arguments; let plain accept"
    ):
        instantiate("optimizer", Code("mine_other.plain"), [])
