"""Checkpoints in another place: complete or none, and a run on an empty disk goes on from there to
the same bytes."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fsspec.spec import AbstractFileSystem

from ddp_lab.prove.configs import for_proof
from ddp_lab.study.request import resolve_run
from ddp_train.checkpoints.layout import MANIFEST, digest_of, place_of
from ddp_train.checkpoints.mirror import Mirror, owner_of
from ddp_train.checkpoints.mirroring import Mirroring
from ddp_train.checkpoints.writer import Writer
from ddp_train.config.freeze import to_values
from ddp_train.errors import DataError, WriteError
from ddp_train.hardware import Hardware
from ddp_train.optim.config import SgdConfig
from ddp_train.options.schema import Config
from ddp_train.options.sections import CheckpointConfig
from ddp_train.resilience import run_lock
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController
from ddp_train.runs.mirror_run import fetch_alone, finish
from tests.checkpoints.test_checkpoint import snapshot, write_checkpoint
from tests.support.commands import (
    ONE,
    PROGRAM,
    SMALL,
    THREE,
    checkpoints,
    fatal_lines,
    read,
    run,
    weights,
)
from tests.support.configs import problems_of

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    """At a URL that would be a pattern."""
    return Mirror(f"file://{tmp_path}/store[1]*")


def config_of(
    mirror: Mirror,
    run_dir: Path,
    seed: int = 0,
    resume: str = "auto",
    best: bool = False,
    lr: float = 0.05,
) -> Config:
    section = CheckpointConfig(resume=resume, mirror=mirror.url, best=best)
    return Config(run_dir=str(run_dir), seed=seed, checkpoint=section, optimizer=SgdConfig(lr=lr))


def written(
    run_dir: Path,
    mirror: Mirror,
    *steps: int,
    manifest: dict[str, Any] | None = None,
    keep: int = 2,
) -> None:
    """Checkpoints as a run leaves them, each copied before the next one."""
    mirror.claim(owner_of(run_dir))
    mirroring = Mirroring(mirror, run_dir)
    writer = Writer(run_dir, keep=keep, mirroring=mirroring)
    for step in steps:
        taken = snapshot(step)
        writer.submit(
            lambda taken=taken: replace(taken, manifest={**taken.manifest, **(manifest or {})})
        )
        writer.wait()
    copied(mirroring)


def copied(mirroring: Mirroring) -> None:
    assert mirroring.last
    mirroring.last.result(30)
    mirroring.pool.shutdown()


def begun(mirror: Mirror, run_dir: Path, attempt: int = 0, **asked: Any) -> str:
    return fetch_alone(config_of(mirror, run_dir, **asked), attempt)


def test_what_is_kept_here_is_kept_there(mirror: Mirror, tmp_path: Path) -> None:
    written(tmp_path / "run", mirror, 1, 2, 3)
    assert mirror.steps() == [3, 2]
    assert begun(mirror, tmp_path / "run") == "", "nothing there is newer"
    said = begun(mirror, tmp_path / "empty")
    assert said == f"the checkpoint of step 3 was copied from checkpoint.mirror={mirror.url}"
    assert checkpoints(tmp_path / "empty") == ["step_00000003"] and weights(
        tmp_path / "empty"
    ) == weights(tmp_path / "run")
    store = Path(mirror.root)
    assert {path.name for path in store.iterdir()} == {
        "owner.json",
        "step_00000002",
        "step_00000003",
    }


def test_what_is_not_whole_is_passed_over(mirror: Mirror, tmp_path: Path) -> None:
    written(tmp_path / "run", mirror, 1, 2)
    store = Path(mirror.root)
    (store / "step_00000002/model.safetensors").write_bytes(b"cut")
    shutil.copytree(store / "step_00000001", store / "step_00000009")
    (store / "step_00000009" / MANIFEST).unlink()  # an upload that was cut off
    outside = json.loads((store / "step_00000001" / MANIFEST).read_text())
    outside["files"]["../../evil"] = outside["files"].pop("training.pt")
    outside.pop("sha256")
    shutil.copytree(store / "step_00000001", store / "step_00000005")
    (store / "step_00000005" / MANIFEST).write_text(
        json.dumps({**outside, "sha256": digest_of(outside)})
    )
    shutil.copytree(store / "step_00000001", store / "step_00000007")
    (store / "step_00000007" / MANIFEST).write_text("{")
    shutil.copytree(store / "step_00000001", store / "step_00000000")
    (store / "step_00000000" / MANIFEST).unlink()
    assert mirror.steps() == [7, 5, 2, 1]
    leftover = tmp_path / "empty/checkpoints/step_00000001.part-fetched"
    leftover.mkdir(parents=True)  # of a process that was killed while it fetched
    (leftover / "model.safetensors").touch()
    assert "of step 1 was copied" in begun(mirror, tmp_path / "empty")
    assert checkpoints(tmp_path / "empty") == ["step_00000001"] and not list(tmp_path.rglob("evil"))
    written(tmp_path / "empty", mirror, 6)
    assert sorted(mirror.steps_listed()) == [1, 6, 7, 9], (
        "what is newer stays, and what is older goes, whole or not"
    )


def test_what_cannot_be_read_is_not_passed_over_and_not_removed(
    mirror: Mirror, tmp_path: Path
) -> None:
    """A network that fails is no corrupt checkpoint: else a run would begin at 0, and its first
    copy remove all."""
    written(tmp_path / "run", mirror, 1, 2)
    whole = AbstractFileSystem.get_file
    for what in (MANIFEST, "training.pt"):

        def get_file(self: Any, path: str, *more: Any, what: str = what, **named: Any) -> Any:
            if path.endswith(what):
                raise ConnectionError("reset by peer")
            return whole(self, path, *more, **named)

        with mock.patch.object(AbstractFileSystem, "get_file", get_file):
            with pytest.raises(DataError, match="cannot be read: ConnectionError: reset by peer"):
                begun(mirror, tmp_path / "empty")
            assert begun(mirror, tmp_path / "run") == "", "it has its own"
    full = OSError(errno.ENOSPC, "No space left on device")
    message = r"step 2 cannot be copied from .*: No space left on device"
    with (
        mock.patch.object(AbstractFileSystem, "get_file", side_effect=full),
        pytest.raises(WriteError, match=message),
    ):
        begun(mirror, tmp_path / "empty")
    assert not checkpoints(tmp_path / "empty") and mirror.steps() == [2, 1]
    shutil.rmtree(place_of(tmp_path / "run", 2))
    written(tmp_path / "run", mirror, keep=1)
    assert mirror.steps() == [2, 1], "an older disk removes nothing that is newer"


def test_the_best_comes_before_the_newest(mirror: Mirror, tmp_path: Path) -> None:
    by = {"best_by": {"split": "test", "metric": "loss", "better": {}}}
    for step, loss in ((1, 0.1), (2, 0.5), (3, math.nan)):
        written(tmp_path / "run", mirror, step, manifest={**by, "test": {"loss": loss}}, keep=9)
    pulled: list[int] = []
    whole = mirror.pull
    with mock.patch.object(
        mirror, "pull", lambda step, run_dir: (pulled.append(step), whole(step, run_dir))[1]
    ):
        assert mirror.fetch(tmp_path / "empty", mirror.manifests(), -1, with_best=True) == 3
    assert pulled == [1, 3]
    assert "of step 3" in begun(mirror, tmp_path / "another", best=True)
    assert (tmp_path / "another/checkpoints/best").readlink() == Path("step_00000001")
    written(tmp_path / "older", mirror, 8)  # a manifest that does not say what is best
    assert "of step 8" in begun(mirror, tmp_path / "new", best=True)


def test_a_store_that_fails_for_a_while_gets_the_newest(mirror: Mirror, tmp_path: Path) -> None:
    """Training does not wait for it, and the last word counts."""
    whole = mirror.push
    held = threading.Event()

    def push(place: Path) -> None:
        held.wait(10)
        if place.name != "step_00000004":
            raise ConnectionError("no route to host")
        whole(place)

    mirror.claim(owner_of(tmp_path / "run"))
    mirroring = Mirroring(mirror, tmp_path / "run")
    writer = Writer(tmp_path / "run", keep=1, mirroring=mirroring)
    with mock.patch.object(mirror, "push", push):
        for step in (1, 2, 3, 4):
            writer.submit(lambda step=step: snapshot(step))
        writer.wait()
        held.set()
        copied(mirroring)
        assert mirror.steps() == [4]
    shutil.copytree(place_of(tmp_path / "run", 4), place_of(tmp_path / "run", 5))
    later = Mirroring(mirror, tmp_path / "run")
    copied(later)
    assert mirror.steps() == [5, 4], "what an earlier process could not copy is copied at the start"


def test_what_is_written_while_another_is_copied_is_copied_too(
    mirror: Mirror, tmp_path: Path
) -> None:
    """Also a step that the store has: it was damaged here, passed over, and is trained again."""
    run_dir = tmp_path / "run"
    whole = mirror.steps
    held = threading.Event()
    written(run_dir, mirror, 1, 2)
    shutil.rmtree(place_of(run_dir, 2))

    def steps() -> list[int]:
        held.wait(10)
        if not place_of(run_dir, 2).exists():
            mirroring.submit(write_checkpoint(run_dir, snapshot(2, answer=42)))
        return whole()

    with mock.patch.object(mirror, "steps", steps):
        mirroring = Mirroring(mirror, run_dir)
        held.set()
        mirroring.pool.submit(int).result(30)
        copied(mirroring)
    assert mirror.manifests()[2]["answer"] == 42


def at_the_end(mirroring: Mirroring, stop: StopController, config: Config) -> bool:
    return finish(mirroring, config, stop, RankStatus(), "cpu")


@pytest.mark.slow
def test_a_run_waits_for_its_last_copy_as_long_as_it_moves(
    mirror: Mirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(mirror, tmp_path / "run")
    config.launch.timeout_seconds = 0.5
    config.launch.grace_seconds = 0.5
    whole = mirror.push
    seconds = 1.0
    moves = True

    def push(place: Path) -> None:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(0.05)
            if moves:
                mirror.note_progress()
        whole(place)

    def slow() -> Mirroring:
        mirroring = Mirroring(mirror, tmp_path / "run")
        mirroring.submit(place_of(tmp_path / "run", 1))
        return mirroring

    written(tmp_path / "run", mirror, 1)
    with mock.patch.object(mirror, "push", push):
        moving = slow()
        assert at_the_end(moving, StopController(), config), (
            "twice launch.timeout_seconds, but it moves"
        )
        copied(moving)
        stop = StopController()
        stop.requested.set()
        seconds = 0.8
        waited = slow()
        assert not at_the_end(waited, stop, config), "a stop waits for half of launch.grace_seconds"
        told = (
            f"the newest checkpoint has not been copied to checkpoint.mirror={mirror.url} yet; run"
        )
        assert told in caplog.text
        copied(waited)
        moves = False
        seconds = 1.5
        silent = slow()
        with pytest.raises(WriteError, match=r"no data was copied for 0\.5 s"):
            at_the_end(silent, StopController(), config)
        copied(silent)
    failing = mock.patch.object(mirror, "push", side_effect=ConnectionError("no route to host"))
    with failing:
        last = slow()
        with pytest.raises(
            WriteError, match=r"could not be copied to checkpoint\.mirror=file:.*: no route to host"
        ):
            at_the_end(last, StopController(), config)
    copied(last)


def test_a_mirror_of_another_run_is_refused(mirror: Mirror, tmp_path: Path) -> None:
    def of(seed: int, lr: float = 0.05) -> dict[str, Any]:
        return {"config": to_values(config_of(mirror, tmp_path / "run", seed, lr=lr))}

    assert begun(mirror, tmp_path / "new", resume="never") == ""
    written(tmp_path / "run", mirror, 7, manifest=of(seed=1))
    with pytest.raises(
        DataError,
        match=r"seed=2: the run in checkpoint\.mirror=file:.* has seed=1$",
    ) as refused:
        begun(mirror, tmp_path / "new", seed=2)
    assert refused.value.remedy == (
        "use the values of that run, or for a new run another folder for checkpoint.mirror"
    )
    assert not (tmp_path / "new/checkpoints").exists()
    owner = json.loads((Path(mirror.root) / "owner.json").read_text())
    assert owner == owner_of(tmp_path / "run"), "who is refused takes nothing"
    assert begun(mirror, tmp_path / "other", seed=1, lr=0.3).endswith(
        ", optimizer.lr=0.3 (was 0.05)"
    )
    for resume in ("never", str(tmp_path / "run")):
        with pytest.raises(DataError, match="already holds checkpoints, the newest of step 7"):
            begun(mirror, tmp_path / "new", seed=1, resume=resume)
    assert "step 7 was copied" in begun(mirror, tmp_path / "again", 1, seed=1, resume="never"), (
        "they are its own"
    )
    with pytest.raises(DataError, match="cannot be written: "):
        begun(Mirror("file:///proc/here"), tmp_path / "new")


def test_of_two_runs_that_live_the_later_one_has_the_mirror(
    mirror: Mirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.claim(owner_of(tmp_path / "first"))
    first = Mirroring(mirror, tmp_path / "first")
    written(tmp_path / "second", mirror, 5)
    writer = Writer(tmp_path / "first", keep=1, mirroring=first)
    writer.submit(lambda: snapshot(9))
    writer.wait()
    copied(first)
    assert mirror.steps() == [5] and f"the run in {tmp_path}/second on None" in caplog.text
    held = run_lock.acquire(tmp_path / "third/lock.json")
    try:
        mirror.claim(owner_of(tmp_path / "third"))
        assert "step 5" in begun(mirror, tmp_path / "third"), "it is its own"
        with pytest.raises(
            DataError, match=f"belongs to the run in {tmp_path}/third on .*, which is still running"
        ):
            begun(mirror, tmp_path / "fourth")
    finally:
        held.release()
    assert "step 5" in begun(mirror, tmp_path / "fourth"), "the third run is dead"
    with pytest.raises(
        WriteError, match="copies its checkpoints there now, so this run no longer does"
    ):
        at_the_end(first, StopController(), config_of(mirror, tmp_path / "first"))


@pytest.mark.slow
def test_a_run_whose_disk_is_lost_goes_on_from_its_mirror(tmp_path: Path) -> None:
    words = [*SMALL, "checkpoint.best=true", "data.validation=0.1", "deterministic=true"]
    two = "launch.nproc_per_node=2"
    url = f"checkpoint.mirror=file://{tmp_path}/store"
    assert run(*words, two, "train.epochs=5", f"run_dir={tmp_path}/calm").returncode == 0
    began = run(*words, two, "train.epochs=5", "train.max_steps=7", url, f"run_dir={tmp_path}/lost")
    assert began.returncode == 0, began.stderr
    best = read(tmp_path / "lost", "summary.json")["best"]["step"]
    shutil.rmtree(tmp_path / "lost")
    again = run(*words, two, "train.epochs=5", url, f"run_dir={tmp_path}/run")
    assert again.returncode == 0, again.stderr
    assert f"the checkpoint of step 7 was copied from {url}" in again.stdout
    assert weights(tmp_path / "run") == weights(tmp_path / "calm")
    assert set(checkpoints(tmp_path / "run")) - {"best"} == set(checkpoints(tmp_path / "store")) - {
        "owner.json"
    }
    found, expected = (read(tmp_path / name, "summary.json")["best"] for name in ("run", "calm"))
    assert {**found, "checkpoint": ""} == {**expected, "checkpoint": ""} and best <= 7
    shutil.rmtree(tmp_path / "store")
    assert run(*words, ONE, "train.epochs=5", url, f"run_dir={tmp_path}/run").returncode == 0
    left = set(checkpoints(tmp_path / "store")) - {"owner.json"}
    assert set(checkpoints(tmp_path / "run")) - {"best"} == left, (
        "nothing was left to train, but to copy"
    )
    refused = run(*words, ONE, url, "checkpoint.resume=never", f"run_dir={tmp_path}/other")
    assert refused.returncode == 65 and len(fatal_lines(refused.stderr)) == 1, refused.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("runs/mirror", "must be a URL; use s3://BUCKET/RUN, or file:///"),
        ("file://HERE/run/", "is inside the run directory; name a folder on another disk"),
        ("file://HERE/run/checkpoints", "is inside the run directory"),
        ("memory://run", "its copies are lost when the process ends"),
        ("s4://bucket/run", "fsspec has no file system s4://; did you mean s3?"),
    ],
)
def test_what_is_no_url_is_refused(url: str, said: str, tmp_path: Path) -> None:
    url = url.replace("HERE", str(tmp_path))
    (problem,) = problems_of(f"checkpoint.mirror={url}", f"run_dir={tmp_path}/run")
    assert problem.startswith(f"checkpoint.mirror={url}: {said}")


def test_runs_of_a_proof_or_a_study_share_no_mirror(mirror: Mirror, tmp_path: Path) -> None:
    """The second one would resume what the first one had, and all would end in the job's own
    mirror."""
    assert for_proof(config_of(mirror, tmp_path), tmp_path).checkpoint.mirror is None
    found = resolve_run(PROGRAM, ["checkpoint.mirror=file:///there"], Hardware(cpus=2))
    assert found.problems == [
        "checkpoint.mirror=file:///there: all trials of a study would use the same one; leave this"
        " key out"
    ]


# --- a real server --------------------------------------------------------------------------------

MISSING = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server that speaks S3, of moto; the environment with which it is reached."""
    log = (tmp_path / "moto.log").open("w")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        began = time.monotonic()
        while "Running on http://" not in (text := Path(log.name).read_text()):
            assert time.monotonic() - began < 60 and process.poll() is None, text
            time.sleep(0.1)
        address = "http://" + text.partition("Running on http://")[2].split()[0]
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        yield {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    finally:
        process.kill()
        process.wait()
        log.close()


@pytest.mark.nightly
@pytest.mark.skipif(
    bool(MISSING), reason=f"needs s3fs and moto[server]: {', '.join(MISSING)} missing"
)
def test_a_run_goes_on_from_an_object_store(server: dict[str, str], tmp_path: Path) -> None:
    """Its disk is lost, and its process was killed while it wrote."""
    words = [*SMALL, THREE, "train.epochs=5", "deterministic=true"]
    url = "checkpoint.mirror=s3://bucket/run"
    assert run(*words, f"run_dir={tmp_path}/calm").returncode == 0
    began = run(*words, "train.max_steps=7", url, f"run_dir={tmp_path}/lost", env=server)
    assert began.returncode == 0, began.stderr
    with mock.patch.dict("os.environ", server):
        mirror = Mirror("s3://bucket/run")
        assert mirror.steps() == [7, 6]
        mirror.files.put_file(
            str(tmp_path / "moto.log"), f"{mirror.root}/step_00000009/model.safetensors"
        )
        shutil.rmtree(tmp_path / "lost")
        again = run(*words, url, f"run_dir={tmp_path}/run", env=server)
        assert again.returncode == 0, again.stderr
        assert "the checkpoint of step 7 was copied" in again.stdout
        assert weights(tmp_path / "run") == weights(tmp_path / "calm")
        assert mirror.steps() == [15, 12], "what is kept here is kept there"
        assert torch.load(tmp_path / "run/checkpoints/step_00000015/training.pt", weights_only=True)
