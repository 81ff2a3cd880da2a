"""The wheel in an environment of its own: the same program from any folder, with that folder's
presets and packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.commands import LIMIT_SECONDS, ONE, ROOT, checkpoints, read

SMALL = ("data.limit=60", "train.epochs=1", "launch.threads_per_process=1", ONE)
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
"""
WIDE = """
# @package _global_
# My net on the digits.
name: wide
model: {_target_: my_net.Net, width: 8}
optimizer: {lr: 0.02}
"""


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel, and of this one only the packages that it needs. Nothing is
    downloaded."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for package in ("ddp_train", "ddp_lab", "hydra_plugins"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "venv"],
        check=True,
        timeout=LIMIT_SECONDS,
    )
    python = folder / "venv/bin/python"
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    install = [
        *pip,
        "--python",
        python,
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--no-compile",
        source,
    ]
    subprocess.run(install, check=True, timeout=LIMIT_SECONDS)
    return python.parent


def start(*command: str | Path, code: int = 0) -> str:
    """What it prints, from the working folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    done = subprocess.run(
        [str(word) for word in command],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_trains_from_any_folder(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = bin_folder / "ddp-train"
    python = bin_folder / "python"
    Path("my_net.py").write_text(NET)
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/wide.yaml").write_text(WIDE.lstrip())
    Path("conf/model").mkdir()
    Path("conf/model/narrow.yaml").write_text("_target_: my_net.Net\nwidth: 2\n")
    Path("yaml.py").write_text("raise SystemExit('the file of the folder, not the package')")

    help_text = start(command, "--help")
    assert (
        help_text.splitlines()[2].startswith("ddp-train [key=value ...]   ")
        and " launch.py" not in help_text
    )
    assert (
        "    wide                My net on the digits.\n" in help_text
        and "mobilenet_v3_small, narrow, res" in help_text
    )

    start(command, "init", "spot-finder")
    monkeypatch.chdir(tmp_path / "spot-finder")
    start(python, "-m", "pytest", "-q", "-p", "no:cacheprovider")  # one of them is a run
    monkeypatch.chdir(tmp_path)

    start(command, "-m", "experiment=wide", "model.width=3", "run_dir=sweep", *SMALL)
    (row,) = (json.loads(line) for line in Path("sweep/results.jsonl").read_text().splitlines())
    assert (row["trial"], row["status"]) == (0, "completed")
    said = Path("sweep/report.md").read_text()
    assert "ddp-train -m experiment=wide model.width=3" in said
    trial = Path("sweep/0")
    assert checkpoints(trial) == ["step_00000001"]

    longer = ("ddp_train", f"run_dir={trial}", "train.epochs=2")
    assert "loads code from outside" in start(python, "-m", *longer, ONE, code=2), (
        "of the folder as of any other"
    )
    torchrun = [python, "-m", "torch.distributed.run", "--nproc_per_node=1", "-m"]
    start(*torchrun, *longer, "trusted_modules=[my_net]")  # model, data, optimizer as before
    assert checkpoints(trial)[-1] == "step_00000002"
    assert (trial / "report.html").stat().st_size > 1_000_000, (
        "the wheel has the library that draws the plots"
    )
    assert read(trial, "summary.json")["command"] == (
        "python -m ddp_train run_dir=sweep/0 train.epochs=2 'trusted_modules=[my_net]'"
    )
