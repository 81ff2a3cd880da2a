"""mode=prove: ten planted defects and more are named by their cause, and nothing is said of sound
jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_lab.prove.answer import Examined
from ddp_lab.prove.configs import for_proof
from ddp_lab.prove.examine import examine
from ddp_lab.prove.main import read_job
from ddp_train import testing
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.testing import prove
from tests.support import commands
from tests.support.jobs import config_of
from tests.support.planted import WithDropout

HERE = "tests.support.planted"
DEFAULTS: dict[str, Any] = {
    "model": "Net",
    "task": "Weighted",
    "data": "Rows",
    "transform": ["Jitter"],
}


def own(transform: list[str], collate: str | None = None, **parts: str) -> dict[str, Any]:
    sections: dict[str, Any] = {name: {"_target_": f"{HERE}.{of}"} for name, of in parts.items()}
    sections["data"] |= {
        "transform": [f"{HERE}.{name}" for name in transform],
        "test_transform": [f"{HERE}.Keep"],
    }
    sections["data"] |= {"collate_fn": f"{HERE}.{collate}"} if collate else {}
    return sections


def examined(tmp_path: Path, **sections: Any) -> Examined:
    train = {"global_batch_size": 24, **sections.pop("train", {})}
    config = config_of(World(), train=train, trusted_modules=["tests"], **sections)
    config = replace(config, launch=replace(config.launch, nproc_per_node=2))
    return examine(
        for_proof(replace(config, prove=replace(config.prove, samples=20)), tmp_path),
        samples_per_micro_batch=12,
    )


DEFECTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unused parameters": (
        {"model": "Spare"},
        "unused",
        "unused parameters",
        "spare.bias, spare.weight",
    ),
    "batch norm": (
        {"model": "Normed"},
        "batch_norm",
        "gradients",
        "(norm) uses the statistics of each process's own",
    ),
    "a count": ({"model": "Counting"}, "state", "state", "forward passes change model.calls"),
    "a count in a buffer": (
        {"model": "CountingInBuffer"},
        "state",
        "gradients",
        "forward passes change calls, on which the loss depends",
    ),
    "a global count": (
        {"model": "Global"},
        "state",
        "state",
        "forward passes change tests.support.planted.STEPS[0]",
    ),
    "numpy": (
        {"model": "NumpyNoise"},
        "randomness",
        "random numbers",
        "layer noise (Noisy) draws from numpy",
    ),
    "samples are mixed": (
        {"model": "Centred"},
        "mixing",
        "gradients",
        "the model's own forward mixes the samples",
    ),
    "mixed before a layer": (
        {"model": "Outside"},
        "mixing",
        "gradients",
        "the model's own forward mixes the samples",
    ),
    "padding that counts": (
        {"model": "Recurrent", "collate": "padded", "transform": []},
        "padding",
        "gradients",
        "the result depends on how a batch is collated",
    ),
    "a score by batch": ({"task": "ScoredByBatch"}, "batches", "evaluation", "recall is "),
    "shuffled when it is made": (
        {"data": "Shuffled"},
        "randomness",
        "order of samples",
        "when it is created again",
    ),
    "a mean in the loss": (
        {"task": "Averaging"},
        "mean",
        "gradients",
        "the loss is not a sum over its units",
    ),
    "units do not add up": (
        {"task": "Rounding"},
        "units batches",
        "weights of units",
        "loss() counts",
    ),
    "a clock in the loss": (
        {"task": "Clocked"},
        "randomness",
        "random numbers",
        "time.perf_counter",
    ),
    "a score with a memory": ({"task": "Smoothed"}, "state", "evaluation", "task.average changes"),
    "data with a memory": (
        {"data": "Remembering"},
        "state",
        "augmentation",
        "Remembering.fetched changes with each",
    ),
    "unseeded data": ({"data": "Unseeded"}, "randomness", "augmentation", "planted.py:"),
    "a cache": (
        {"data": "Cached", "transform": []},
        "state",
        "augmentation",
        "stores what it has drawn (Cached.cache",
    ),
    "own generator": (
        {"transform": ["Keep", "OwnGenerator"]},
        "state",
        "augmentation",
        "OwnGenerator.generator",
    ),
    "a transform that seeds": (
        {"transform": ["SeedsItself"]},
        "randomness",
        "augmentation",
        "SeedsItself seeds",
    ),
}
"""What is planted, the kind of its cause, the check that finds it, and what it must say."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_named_by_its_cause(name: str, tmp_path: Path) -> None:
    planted, kind, check, words = DEFECTS[name]
    found = examined(tmp_path, **own(**{**DEFAULTS, **planted}))
    failures = [one for one in found.findings if one.status == "failure"]
    assert found.causes() == kind.split(), failures
    named = next(one for one in failures if one.check == check)
    assert words in named.detail and named.remedy, named


@pytest.mark.slow
def test_hash_without_effect_is_a_warning(
    tmp_path: Path,
) -> None:
    found = examined(tmp_path, **own(**{**DEFAULTS, "data": "Hashed"}))
    (warned,) = [one for one in found.findings if one.status != "ok"]
    assert (warned.check, warned.status) == ("augmentation", "warning")
    assert (
        "the data set Hashed uses hash(), which for texts differs between processes, planted.py:"
        in warned.detail
    )


def text_file(folder: Path) -> dict[str, Any]:
    (folder / "words.txt").write_text(
        "how much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 200
    )
    return {"name": "text", "path": str(folder / "words.txt"), "length": 16}


SOUND: dict[str, Any] = {
    "digits": {"model": {"name": "cnn", "channels": 4}},
    "own units and keyed transforms": own(**DEFAULTS),
    "shuffled by seeded generators": own(**{**DEFAULTS, "data": "ShuffledByGlobals"}),
    "dropout and noise": own(**{**DEFAULTS, "model": "WithDropout"}),
    "mixup, drawn by weight": {
        "model": {"name": "mlp", "hidden": 8},
        "data": {"name": "digits", "mixup": 0.5, "weights": "balanced"},
    },
    "language model": {
        "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "dropout": 0.1},
        "data": text_file,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_sound_job_has_no_findings(name: str, tmp_path: Path) -> None:
    sections = {
        key: value(tmp_path) if callable(value) else value for key, value in SOUND[name].items()
    }
    found = examined(tmp_path, **sections)
    assert {one.status for one in found.findings} == {"ok"}, [
        one for one in found.findings if one.status != "ok"
    ]
    assert len(found.findings) == 8 and found.precision == "fp64"
    if name == "dropout and noise":
        drawn = {"dropout", "randn_like"}
    else:
        drawn = {"dropout"} if "language" in name else set()
    assert set(found.draws) == drawn


def go_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove jobs of that folder from now on, by the launcher of this repository."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(commands.ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(testing, "find_program", lambda _, words: (commands.PROGRAM, words))


FORGETFUL = """
class Decay:
    \"""Shrinks the weights by a count that no checkpoint has.\"""

    def __init__(self, job, run_dir, world):
        self.calls = 0

    def due(self, job):
        return job.step + 1

    def act(self, job):
        self.calls += 1
        for parameter in job.module.parameters():
            parameter.data.mul_(1 - 0.01 * self.calls)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_real_processes_are_compared_and_one_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of the table from one command, of a model that begins with the weights of a file: a
    hook that forgets breaks exact resume, and nothing else."""
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    torch.save(WithDropout().state_dict(), tmp_path / "first.pt")
    go_to(tmp_path, monkeypatch)
    words = [
        f"model._target_={HERE}.WithDropout",
        "model.init_from=first.pt",
        f"task._target_={HERE}.Weighted",
        f"data._target_={HERE}.Rows",
    ]
    words += [
        f"data.transform=[{HERE}.Jitter]",
        f"data.test_transform=[{HERE}.Keep]",
        "trusted_modules=[tests,forgetful]",
    ]
    with pytest.raises(AssertionError, match="does not hold: 11 ok, 1 failure"):
        prove(
            *words, "hooks=[forgetful.Decay]", "run_dir=here", "prove.steps=4", "prove.samples=20"
        )
    answer = json.loads(Path("here/prove.json").read_text())
    rows = {row["check"]: row for row in answer["findings"]}
    broken = [name for name, row in rows.items() if row["status"] == "failure"]
    assert broken == ["resume after a kill"] and answer["exit_code"] == 70
    assert "fixed random numbers in dropout, randn_like" in rows["resume on 3 processes"]["detail"]
    assert "state_dict() of a hook" in rows["resume after a kill"]["remedy"]
    assert 0 < rows["gradients, 3 processes"]["numbers"]["found"] < 1e-10
    assert rows["evaluation, 3 processes"]["numbers"]["found"] < 1e-12
    assert Path("here/report.html").is_file() and Path("here/proof/runs.log").is_file()


AVERAGES = """
from torch.nn import functional as F

from ddp_train import all_gather


class Averages:
    units_are_samples = True

    def __init__(self):
        self.right = self.lost = self.own = 0.1

    def loss(self, model, batch):
        outputs = model(batch[0])
        penalty = (self.right + self.lost + self.own) * outputs.square().sum()
        mean = all_gather(outputs.detach())[0].mean().item()
        self.right = 0.5 * self.right + mean
        self.lost = 0.5 * self.lost + mean
        self.own = 0.5 * self.own + outputs.mean().item()
        return F.cross_entropy(outputs, batch[1], reduction="sum") + penalty, len(outputs)

    def score(self, model, batch):
        outputs = model(batch[0])
        return {"loss": (F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs))}


class Saved:
    def __init__(self, job, run_dir, world):
        self.task = job.module.task

    def act(self, job):
        pass

    def state_dict(self):
        return {"right": self.task.right, "own": self.task.own}

    def load_state_dict(self, state):
        self.task.right = state["right"]
        self.task.own = state["own"]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_state_of_gathered_rows_is_judged_by_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss depends on three averages. One is in no checkpoint, one is of a process's own rows;
    the third is right, and not named."""
    (tmp_path / "averages.py").write_text(AVERAGES)
    go_to(tmp_path, monkeypatch)
    words = ["task._target_=averages.Averages", "hooks=[averages.Saved]"]
    words += ["trusted_modules=[averages]", "model=mlp", "train.global_batch_size=20"]
    with pytest.raises(AssertionError, match="does not hold: 7 ok, 2 failure, 3 skipped"):
        prove(*words, "run_dir=here", "prove.steps=4", "prove.samples=20")
    answer = json.loads(Path("here/prove.json").read_text())
    rows = {row["check"]: row for row in answer["findings"]}
    assert "cannot be told from one process" in rows["state"]["detail"]
    lost = rows["resume after a kill"]["detail"]
    own = rows["resume on 3 processes"]["detail"]
    assert "task.lost, on which" in lost and "task.own, on which" in own
    assert "task.right" not in lost + own and rows["gradients, 3 processes"]["status"] == "ok"


def test_proof_of_a_resumed_run_is_refused(tmp_path: Path) -> None:
    words = ["mode=prove", f"checkpoint.resume={tmp_path}/run"]
    with pytest.raises(ConfigError, match="mode=prove resumes no run but its own; to begin") as why:
        read_job(commands.PROGRAM, words)
    assert str(why.value).endswith(f"use model.init_from={tmp_path}/run in its place")


@pytest.mark.slow
def test_proof_passes_its_lines_on_as_they_come() -> None:
    told: list[str] = []
    with pytest.raises(AssertionError, match="must be at least 1"):
        prove("train.epochs=0", tell=told.append)
    assert any("train.epochs=0: must be at least 1" in line for line in told)
