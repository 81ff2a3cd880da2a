"""SECURITY.md, line by line: what must not run, must not be read and must not be written."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.checkpoints.layout import digest_of
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import resolve_and_check
from ddp_train.config.user_code import build_hooks, instantiate
from ddp_train.config.values import is_secret
from ddp_train.errors import ConfigError
from ddp_train.options.custom import Code
from tests.support.commands import (
    ONE,
    PROGRAM,
    ROOT,
    SMALL,
    THREE,
    fatal_lines,
    processes_of,
    read,
    run,
    running,
    weights,
)

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy
LINEAR = "model._target_=torch.nn.Linear"


def problems_of(*words: str, adopted: dict[str, Any] | None = None) -> list[str]:
    """adopted: sections of a checkpoint's config."""
    config, problems = read_config(PROGRAM, read_overrides(PROGRAM, list(words)), adopted)
    return problems + resolve_and_check(config, None)[1]


def named_by_a_checkpoint(target: str, *words: str) -> list[str]:
    return problems_of(
        *words, adopted={"model": {"name": "custom", "target": target, "arguments": {}}}
    )


# --- code -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "subprocess.run",
        "torchvision.os.system",
        "torchvision.io.write_file",
        "ddp_train.launcher.subprocess.run",
        "ddp_train.resilience.run_lock.acquire",
        "torch.nnx.Thing",
    ],
)
def test_code_named_by_a_checkpoint_is_not_imported(target: str) -> None:
    (problem,) = named_by_a_checkpoint(target)
    assert f"model._target_={target}: loads code from outside" in problem
    package = target.partition(".")[0]
    assert f"add 'trusted_modules=[{package}]'" in problem
    assert named_by_a_checkpoint(target, f"trusted_modules=[{package}]") == []
    (problem,) = named_by_a_checkpoint(target, "trusted_modules=[river]")
    assert f"add 'trusted_modules=[river,{package}]'" in problem


@pytest.mark.slow
def test_code_that_the_command_line_names_is_trusted() -> None:
    assert problems_of("model._target_=json.JSONDecoder") == []
    assert problems_of("hooks=[json.JSONDecoder]") == []
    config, _ = read_config(
        PROGRAM,
        read_overrides(
            PROGRAM, ["model._target_=json.JSONDecoder", LINEAR.replace("model", "data")]
        ),
    )
    assert config.trusted_modules == ["json"], "and frozen with the rest"


def test_code_that_a_preset_names_is_trusted(tmp_path: Path) -> None:
    """conf/ is the user's own; a preset could set trusted_modules itself."""
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    program = dataclasses.replace(PROGRAM, own=conf)
    preset = (
        "# @package _global_\ndefaults:\n  - override /model: custom\nmodel:\n  _target_:"
        " json.JSONDecoder\n"
    )
    (conf / "experiment/mine.yaml").write_text(preset)
    config, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert (problems, config.model.target) == ([], "json.JSONDecoder")
    assert resolve_and_check(config, None)[1] == []


def test_trust_in_a_package_does_not_reach_further() -> None:
    (problem,) = named_by_a_checkpoint("os.system", "optimizer._target_=json.JSONDecoder")
    assert problem.startswith("model._target_=os.system: loads code from outside")


@pytest.mark.parametrize(
    "path", ["ddp_lab.study.step_times.json", "ddp_lab.study.step_times.json.JSONDecoder"]
)
def test_a_hook_is_a_class_of_the_module_that_is_trusted(path: str) -> None:
    assert problems_of(f"hooks=[{path}]") == [], "seen when it is loaded, before it is called"
    with pytest.raises(ConfigError, match=re.escape(f"hooks=[{path}]: ")):
        build_hooks([path])


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.os.system",
        "torch.nn.modules.module.warnings.warn",
        "torch.nn.modules.module.torch.load",
        "torch.nn.modules.module.OrderedDict",
        "torchvision.datasets.utils.download_url",
        "torchvision.datasets.utils.zipfile.ZipFile",
        "torchvision.datasets.utils.urllib",
        "torchvision.models._api.sys",
        "torchvision.models._api.import_module",
    ],
)
def test_a_trusted_module_is_no_way_to_what_it_imports(target: str) -> None:
    assert problems_of(f"model._target_={target}") == [], (
        "seen when it is loaded, before it is called"
    )
    with pytest.raises(ConfigError, match=re.escape(f"model._target_={target}: ")):
        instantiate("model", Code(target=target, arguments={}))


@pytest.mark.parametrize("target", ["torch.nn.Identity", "torchvision.models.resnet18"])
def test_what_is_meant_to_be_loaded_is(target: str) -> None:
    assert isinstance(instantiate("model", Code(target=target, arguments={})), torch.nn.Module)


@pytest.mark.parametrize(
    "words",
    [
        [LINEAR, "+model.inner._target_=os.system"],
        [LINEAR, "+model.inner=[{deep:{_target_:os.system}}]"],
        ["hydra.sweeper._target_=os.system"],
        ["hydra.launcher._target_=builtins.exec"],
        ["+hydra.callbacks={mine:{_target_:os.system}}"],
        ["+hydra.job_logging.handlers.mine.class=os.system"],
    ],
)
def test_no_other_key_loads_code(words: list[str]) -> None:
    problems = problems_of(*words)
    assert len(problems) == 1, problems
    assert (
        "only model._target_ may name code" in problems[0]
        or "is code from outside hydra" in problems[0]
    )


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.mark.slow
def test_a_checkpoint_is_data_and_never_code(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    marker = tmp_path / "executed"
    words = [*SMALL, ONE, f"run_dir={run_dir}"]
    assert run(*words, "train.max_steps=3").returncode == 0
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    torch.save({"optimizer": Payload(marker), "scaler": {}}, checkpoint / "training.pt")
    content = (checkpoint / "training.pt").read_bytes()
    manifest = read(checkpoint, "manifest.json")
    manifest["files"]["training.pt"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_text(
        json.dumps({**manifest, "sha256": digest_of(manifest)})
    )
    done = run(*words, "train.max_steps=6")
    assert done.returncode == 65, done.stderr
    (fatal,) = fatal_lines(done.stderr)
    assert "holds no valid checkpoint" in fatal
    assert (
        "is skipped: training.pt cannot be loaded by torch.load(weights_only=True)" in done.stderr
    )
    assert not marker.exists()
    torch.load(checkpoint / "training.pt", weights_only=False)
    assert marker.exists(), "the payload works where somebody lets it"


BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
SCRIPTS = {
    ("ddp_train/launcher/fork_server.py", "exec"),
    ("ddp_train/config/hydra_parser.py", "exec"),
}
"""The script that the user started, forked in place of `python train.py`: as in a new interpreter;
and Hydra's parser, compiled from its own file with the asserts that `python -O` leaves out."""
PICKLE_ERRORS = ("PicklingError", "UnpicklingError")
PICKLES_ALONE = {"ddp_train/data/dataset_content.py"}
"""Modules that pickle what they digest, and never unpickle."""
PLAIN_PICKLES = {"ddp_train/recovery/packing.py"}
"""Modules whose Unpickler knows the few names that it finds: see tests/recovery/test_packing.py."""
SAFE_LOADERS = {"ddp_train/config/yaml_files.py", "ddp_train/plain_yaml.py"}
"""Modules that call yaml.load with a subclass of yaml.SafeLoader, or its twin of libyaml."""
BANNED_FUNCTIONS = {"eval", "exec", "os.system", "os.popen", "system", "popen"}


@pytest.mark.slow
def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    found = []
    for path in [ROOT / "launch.py", *(ROOT / "ddp_train").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            module = str(path.relative_to(ROOT))
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                imported = {alias.name.split(".")[0] for alias in node.names}
                if imported & BANNED_IMPORTS and module not in PICKLES_ALONE | PLAIN_PICKLES:
                    found.append(where)
            elif (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] in BANNED_IMPORTS
            ):
                found += [where for alias in node.names if alias.name not in PICKLE_ERRORS]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                given = {
                    one.arg: ast.unparse(one.value)
                    for one in node.keywords
                    if one.arg in ("weights_only", "shell")
                }
                unsafe_load = (
                    called in ("torch.load", "yaml.load")
                    and given.get("weights_only") != "True"
                    and module not in SAFE_LOADERS
                )
                banned = called.rpartition(".")[2] in BANNED_CALLS or called in BANNED_FUNCTIONS
                banned = banned and (module, called) not in SCRIPTS
                if module in PICKLES_ALONE and called.rpartition(".")[2] in ("load", "loads"):
                    banned = True
                if banned or unsafe_load or given.get("shell") == "True":
                    found.append(where)
    assert found == []


# --- secrets --------------------------------------------------------------------------------------

KEEPER = """
import hashlib
from torch import nn


class Net(nn.Module):
    def __init__(self, api_key, header, mark, fail):
        super().__init__()
        assert hashlib.sha256(api_key.encode()).hexdigest() == mark, "not the value of the environment"
        assert header == "Bearer " + api_key
        if fail:
            raise ValueError("no luck")
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images):
        return self.layers(images)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fail", [False, True])
def test_secret_of_the_environment_is_never_written(fail: bool, tmp_path: Path) -> None:
    secret = "canary-5c1d7a"
    unused = "canary-00ff42"
    (tmp_path / "keeper.py").write_text(KEEPER)
    env = {"PYTHONPATH": str(tmp_path), "MY_SERVICE": secret, "UNUSED_TOKEN": unused}
    words = [
        "model._target_=keeper.Net",
        "+model.api_key='${oc.env:MY_SERVICE}'",
        "+model.header='Bearer ${model.api_key}'",
        f"+model.mark={hashlib.sha256(secret.encode()).hexdigest()}",
        f"+model.fail={str(fail).lower()}",
        "data.limit=200",
        "checkpoint.every_steps=3",
        "train.epochs=1000000",
    ]
    with running(tmp_path / "run", *words, THREE, env=env) as job:
        if fail:
            assert job.end() == 70
            assert "no luck" in job.said()
        else:
            job.wait_for_file("checkpoints/step_00000003/manifest.json")
            titles = [
                Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                for pid in processes_of(job.run_dir)
            ]
            assert len(titles) == 4, "the launcher and three workers"
            assert not [title for title in titles if "canary" in title]
            job.process.terminate()
            job.end()
            assert weights(job.run_dir)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(written) >= 6
    assert {job.output, job.output.with_suffix(".err"), job.run_dir / "config.yaml"} <= set(written)
    assert [path for path in written if b"canary" in path.read_bytes()] == []
    assert "${oc.env:MY_SERVICE}" in (job.run_dir / "config.yaml").read_text()


@pytest.mark.parametrize(
    "key", ["api_key", "password", "wandb_token", "token", "secret", "inner.private_key"]
)
def test_a_secret_in_plain_sight_is_refused_without_repeating_it(key: str) -> None:
    (problem,) = problems_of(LINEAR, f"+model.{key}=hunter2")
    assert problem.startswith(f"model.{key}=(hidden): ")
    assert "${oc.env:NAME}" in problem
    assert "hunter2" not in problem


def test_a_secret_in_the_wrong_place_is_not_repeated() -> None:
    assert problems_of("train.password=hunter2") == ["train.password=(hidden): no such key"]


@pytest.mark.parametrize(
    "key", ["pad_token", "tokens", "max_tokens", "token_dim", "keys", "secretary", "passes"]
)
def test_words_of_a_vocabulary_are_no_secrets(key: str) -> None:
    assert not is_secret(key)


def test_a_variable_that_is_not_set_is_named() -> None:
    (problem,) = problems_of(LINEAR, "+model.token='${oc.env:NOT_SET_ANYWHERE}'")
    assert problem.startswith(
        "model.token=${oc.env:NOT_SET_ANYWHERE}: the environment has no such variable"
    )


def test_the_environment_still_gives_ordinary_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS_OF_TODAY", "7")
    overrides = read_overrides(
        PROGRAM, ["train.epochs=${oc.env:EPOCHS_OF_TODAY}", "seed=${oc.env:NOT_SET_ANYWHERE,3}"]
    )
    config, problems = read_config(PROGRAM, overrides)
    assert problems == []
    assert (config.train.epochs, config.seed) == (7, 3)
