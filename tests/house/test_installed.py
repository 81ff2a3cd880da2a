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

SMALL = ("data.limit=60", "train.epochs=1", ONE)
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
    wheel = [
        *pip,
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--wheel-dir",
        folder,
        source,
    ]
    subprocess.run(wheel, check=True, timeout=LIMIT_SECONDS)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "venv"],
        check=True,
        timeout=LIMIT_SECONDS,
    )
    python = folder / "venv/bin/python"
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    (built,) = folder.glob("*.whl")
    install = [
        *pip,
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        built,
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

    torchrun = [python, "-m", "torch.distributed.run", "--nproc_per_node=1", "-m", "ddp_train"]
    start(*torchrun, "experiment=wide", *SMALL[:2])
    (run_dir,) = Path("runs/wide").iterdir()
    assert checkpoints(run_dir) == ["step_00000001"]
    assert (run_dir / "report.html").stat().st_size > 1_000_000, (
        "the wheel has the library that draws the plots"
    )

    longer = (python, "-m", "ddp_train", f"run_dir={run_dir}", "train.epochs=2", ONE)
    assert "loads code from outside" in start(*longer, code=2), "of the folder as of any other"
    start(*longer, "trusted_modules=[my_net]")  # model, data, optimizer as before
    assert checkpoints(run_dir)[-1] == "step_00000002"
    assert read(run_dir, "summary.json")["command"].startswith(
        f"python -m ddp_train run_dir={run_dir} train.epochs=2 "
    )

    start(command, "-m", "model=narrow", "model.width=3,5", "run_dir=sweep", *SMALL)
    rows = [json.loads(line) for line in Path("sweep/results.jsonl").read_text().splitlines()]
    assert [(row["overrides"], row["status"]) for row in rows] == [
        (["model.width=3"], "completed"),
        (["model.width=5"], "completed"),
    ]
    assert "ddp-train -m model=narrow model.width=3,5" in Path("sweep/report.md").read_text()
