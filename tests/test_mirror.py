"""Checkpoints in another place: complete or none, and a run on an empty disk goes on from there to the same bytes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from ddp_train.errors import DataError, WriteError
from ddp_train.resilience.checkpoint_files import MANIFEST, digest_of, place_of
from ddp_train.training.checkpoint import Writer
from ddp_train.training.mirror import Mirror, Mirroring, fetch
from tests.commands import SMALL, THREE, checkpoints, fatal_lines, read, run, weights
from tests.test_checkpoint import snapshot

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(f"file://{tmp_path}/store")


def written(run_dir: Path, mirror: Mirror, *steps: int) -> None:
    writer = Writer(run_dir, keep=2, mirroring=Mirroring(mirror, run_dir))
    for step in steps:
        writer.submit(lambda step=step: snapshot(step))
    writer.finish()


def test_what_is_kept_here_is_kept_there(mirror: Mirror, tmp_path: Path) -> None:
    written(tmp_path / "run", mirror, 1, 2, 3)
    assert mirror.steps() == [3, 2]
    assert mirror.fetch(tmp_path / "run", with_best=False) is None, "nothing there is newer"
    assert mirror.fetch(tmp_path / "empty", with_best=False) == 3
    assert checkpoints(tmp_path / "empty") == ["step_00000003"] and weights(tmp_path / "empty") == weights(
        tmp_path / "run"
    )


def test_what_is_not_whole_is_passed_over(mirror: Mirror, tmp_path: Path) -> None:
    written(tmp_path / "run", mirror, 1, 2)
    store = tmp_path / "store/checkpoints"
    place_of(tmp_path / "store", 2).joinpath("model.safetensors").write_bytes(b"cut")
    shutil.copytree(store / "step_00000001", store / "step_00000009")
    (store / "step_00000009" / MANIFEST).unlink()  # an upload that was cut off
    outside = json.loads((store / "step_00000001" / MANIFEST).read_text())
    outside["files"]["../../evil"] = outside["files"].pop("training.pt")
    outside.pop("sha256")
    shutil.copytree(store / "step_00000001", store / "step_00000005")
    (store / "step_00000005" / MANIFEST).write_text(json.dumps({**outside, "sha256": digest_of(outside)}))
    assert mirror.steps() == [5, 2, 1]
    assert mirror.fetch(tmp_path / "empty", with_best=False) == 1
    assert checkpoints(tmp_path / "empty") == ["step_00000001"] and not list(tmp_path.rglob("evil"))


def test_a_store_that_fails_for_a_while_gets_the_newest(mirror: Mirror, tmp_path: Path) -> None:
    """Training does not wait for it, and the last word counts."""
    whole, held = mirror.push, threading.Event()

    def push(place: Path) -> None:
        held.wait(10)
        if place.name != "step_00000004":
            raise ConnectionError("no route to host")
        whole(place)

    mirroring = Mirroring(mirror, tmp_path / "run")
    writer = Writer(tmp_path / "run", keep=1, mirroring=mirroring)
    with mock.patch.object(mirror, "push", push):
        for step in (1, 2, 3, 4):
            writer.submit(lambda step=step: snapshot(step))
        writer.wait()
        held.set()
        writer.finish()
        assert mirror.steps() == [4]
        later = Mirroring(mirror, tmp_path / "run")
        later.submit(place_of(tmp_path / "run", 3))
        with pytest.raises(WriteError, match=r"could not be copied to checkpoint\.mirror=file:.*no route to host"):
            later.finish()


def test_a_mirror_of_another_run_is_refused(mirror: Mirror, tmp_path: Path) -> None:
    assert fetch(mirror.url, tmp_path / "new", "never", with_best=False) == ""
    written(tmp_path / "run", mirror, 7)
    with pytest.raises(DataError, match="holds checkpoints, the newest of step 7"):
        fetch(mirror.url, tmp_path / "new", "never", with_best=False)
    with pytest.raises(DataError, match="cannot be written: "):
        fetch("file:///proc/here", tmp_path / "new", "auto", with_best=False)


@pytest.mark.slow
def test_a_run_whose_disk_is_lost_goes_on_from_its_mirror(tmp_path: Path) -> None:
    words = [*SMALL, THREE, "checkpoint.best=true", "data.validation=0.1", "deterministic=true"]
    url = f"checkpoint.mirror=file://{tmp_path}/store"
    assert run(*words, "train.epochs=5", f"run_dir={tmp_path}/calm").returncode == 0
    began = run(*words, "train.epochs=5", "train.max_steps=7", url, f"run_dir={tmp_path}/lost")
    assert began.returncode == 0, began.stderr
    best = read(tmp_path / "lost", "summary.json")["best"]["step"]
    shutil.rmtree(tmp_path / "lost")
    again = run(*words, "train.epochs=5", url, f"run_dir={tmp_path}/run")
    assert again.returncode == 0, again.stderr
    assert f"the checkpoint of step 7 was copied from {url}" in again.stdout
    assert weights(tmp_path / "run") == weights(tmp_path / "calm")
    assert set(checkpoints(tmp_path / "run")) - {"best"} == set(checkpoints(tmp_path / "store"))
    found, expected = (read(tmp_path / name, "summary.json")["best"] for name in ("run", "calm"))
    assert {**found, "checkpoint": ""} == {**expected, "checkpoint": ""} and best <= 7
    refused = run(*words, url, "checkpoint.resume=never", f"run_dir={tmp_path}/other")
    assert refused.returncode == 65 and len(fatal_lines(refused.stderr)) == 1, refused.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("runs/mirror", "must be a URL; use s3://BUCKET/RUN, or file:///"),
        ("s4://bucket/run", "fsspec knows no s4://; did you mean s3?"),
    ],
)
def test_what_is_no_url_is_refused(url: str, said: str, tmp_path: Path) -> None:
    done = run(f"checkpoint.mirror={url}", f"run_dir={tmp_path}/run")
    assert done.returncode == 2 and f"checkpoint.mirror={url}: {said}" in done.stderr, done.stderr


# --- a real server ----------------------------------------------------------------------------------------------------

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
@pytest.mark.skipif(bool(MISSING), reason=f"needs s3fs and moto[server]: {', '.join(MISSING)} missing")
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
        mirror.files.put_file(str(tmp_path / "moto.log"), f"{mirror.root}/step_00000009/model.safetensors")
        shutil.rmtree(tmp_path / "lost")
        again = run(*words, url, f"run_dir={tmp_path}/run", env=server)
        assert again.returncode == 0, again.stderr
        assert "the checkpoint of step 7 was copied" in again.stdout
        assert weights(tmp_path / "run") == weights(tmp_path / "calm")
        assert mirror.steps() == [15, 12], "what is kept here is kept there"
        assert torch.load(tmp_path / "run/checkpoints/step_00000015/training.pt", weights_only=True)
