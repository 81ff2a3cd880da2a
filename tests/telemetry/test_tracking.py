"""Trackers: real libraries, read back by their own code; a run that is killed and goes on is one
run, told once."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddp_train.config.composition import read_config
from ddp_train.config.freeze import freeze
from ddp_train.config.overrides import read_overrides
from ddp_train.config.packages import SOURCE
from ddp_train.config.prepare import archive_previous_run, prepare
from ddp_train.config.user_code import build_trackers
from ddp_train.errors import ConfigError
from ddp_train.options.sections import TrackerConfig
from ddp_train.telemetry.trackers.delivery import DeliveryLog, TrackerThread
from ddp_train.telemetry.trackers.mlflow import Mlflow
from ddp_train.telemetry.trackers.scalars import plain_values, scalars_of
from ddp_train.telemetry.trackers.tracker import TrackedRun, Tracker
from ddp_train.telemetry.trackers.tracking import Tracking
from tests.support.commands import PROGRAM, SMALL, THREE, metrics, read, run

STEPS = list(range(1, 13))
TRACKERS = "ddp_train.telemetry.trackers"
WANDB = {"_target_": f"{TRACKERS}.wandb.Wandb"}
MLFLOW = {"_target_": f"{TRACKERS}.mlflow.Mlflow"}
NO_SECRETS = {"WANDB_API_KEY": "a" * 40, "MLFLOW_TRACKING_PASSWORD": "open sesame"}


VANISHING = """
import json, os, time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    def __init__(self, run_dir, marker):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.told, self.marker, self.calls = Path(run_dir, "trackers.json"), Path(marker), 0

    def forward(self, images):
        self.calls += self.training
        if self.calls == 7 and os.environ["RANK"] == "0" and not self.marker.exists():
            while not self.told.exists() or [one.get("train") for one in self.entries()] != [6, 6, 6]:
                time.sleep(0.1)
            self.marker.touch()
            os._exit(13)
        return self.layers(images)

    def entries(self):
        return json.loads(self.told.read_text()).values()
"""
"""Rank 0 vanishes without a word within its seventh step, as soon as all trackers were told of the
sixth."""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps. Rank 0 is lost in the seventh, and begins again from the checkpoint after the
    fourth: steps 5 and 6 are recorded twice."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "vanishing.py").write_text(VANISHING)
    run_dir = folder / "run"
    marker = folder / "vanished"
    env = {
        "PYTHONPATH": str(folder),
        **NO_SECRETS,
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
    }
    done = run(
        f"run_dir={run_dir}",
        THREE,
        "name=mine",
        "tracker=[tensorboard,wandb,mlflow]",
        "tracker.details=true",
        "launch.max_restarts=1",
        "train.epochs=4",
        "train.log_every_steps=1",
        "checkpoint.every_steps=4",
        "data.limit=200",
        "deterministic=false",
        "model._target_=vanishing.Net",
        "trusted_modules=[vanishing]",
        f"+model.run_dir={run_dir}",
        f"+model.marker={marker}",
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert not re.search("tracker .* failed", done.stderr)
    return run_dir


@pytest.mark.slow
def test_tensorboard_shows_each_step_once(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(
        str(tracked / "tensorboard"), {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}
    )
    board.Reload()
    assert len(list((tracked / "tensorboard").glob("events.*"))) == 2, "of two processes"
    assert [point.step for point in board.Scalars("train/loss")] == STEPS
    lines = [line for line in metrics(tracked) if line["kind"] == "train"]
    assert [point.value for point in board.Scalars("train/loss")] == pytest.approx(
        [line["loss"] for line in lines]
    )
    assert [point.step for point in board.Scalars("test/accuracy")] == [3, 6, 9, 12]
    assert [point.step for point in board.Scalars("figures/cpu_cores")] == STEPS
    assert [one.step for one in board.Histograms("weights/layers.1.weight")] == [3, 6, 9, 12]
    assert len(board.Images("images")) == 1 or board.Tensors("images"), "a batch of digits"
    assert any("Linear" in node.name for node in board.Graph().node)
    assert set(board.PluginTagToContent("hparams")) == {
        "_hparams_/experiment",
        "_hparams_/session_start_info",
        "_hparams_/session_end_info",
    }
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    start = HParamsPluginData.FromString(
        board.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    )
    values = start.session_start_info.hparams
    assert (
        values["optimizer.lr"].number_value == 0.05
        and values["model.target"].string_value == "vanishing.Net"
    )


@pytest.mark.slow
def test_mlflow_has_one_run_and_each_step_once(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient((tracked.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("ddp-train")
    assert experiment
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == read(tracked, "trackers.json")["mlflow"]["id"]
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params["optimizer.lr"] == "0.05"
    for name, steps in {"train/loss": STEPS, "test/accuracy": [3, 6, 9, 12]}.items():
        assert [point.step for point in client.get_metric_history(found.info.run_id, name)] == steps
    assert (
        found.data.metrics["summary/test.accuracy"]
        == read(tracked, "summary.json")["test"]["accuracy"]
    )
    assert found.data.tags["status"] == "completed"


def wandb_records(folder: Path) -> list[Any]:
    """What an offline run has written, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    # 7 bytes say what it is
    content = file.read_bytes()
    at = 7
    records = []
    part = b""
    # LevelDB's log format: blocks of 32 KiB; checksum, length and kind (whole, first, middle, last)
    # before each part.
    while at + 7 <= len(content):
        if 0 < (left := -at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        part = (b"" if kind in (1, 2) else part) + content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(part))
    return records


@pytest.mark.slow
def test_wandb_has_one_id_and_each_step_once(tracked: Path) -> None:
    run_id = read(tracked, "trackers.json")["wandb"]["id"]
    folders = sorted((tracked / "wandb").glob("offline-run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [run_id]
    assert len(list((tracked / "wandb").glob(f"replaced-offline-run-*-{run_id}"))) == 1
    rows = []
    summary = {}
    config = {}
    for folder in folders:
        for record in wandb_records(folder):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project, record.run.display_name) == (
                    run_id,
                    "ddp-train",
                    "mine",
                )
            for item in record.config.update if record.HasField("config") else ():
                config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            for item in record.summary.update if record.HasField("summary") else ():
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("history"):
                rows.append(
                    {
                        one.key or "/".join(one.nested_key): one.value_json
                        for one in record.history.item
                    }
                )
    steps = [json.loads(row["_step"]) for row in rows if "train/loss" in row]
    assert steps == STEPS
    assert config["optimizer.lr"] == 0.05
    assert summary["test.accuracy"] == read(tracked, "summary.json")["test"]["accuracy"]


@pytest.mark.slow
def test_no_secret_is_in_a_file(tracked: Path) -> None:
    for path in tracked.parent.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [
                name for name, secret in NO_SECRETS.items() if secret.encode() in content
            ], path


@pytest.mark.slow
def test_the_figures_of_a_run(tracked: Path) -> None:
    lines = [line["figures"] for line in metrics(tracked) if line["kind"] == "train"]
    assert all(set(line) == {"cpu_cores", "resident_gib"} for line in lines)
    assert all(len(values) == 3 and min(values) > 0 for line in lines for values in line.values())
    total = read(tracked, "summary.json")["figures"]
    assert total["resident_gib"] == pytest.approx(
        max(max(line["resident_gib"]) for line in lines), rel=0.01
    )
    assert 0 < total["cpu_cores"] < 64


@pytest.mark.slow
def test_trackers_that_fail_are_named_once_and_training_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tensorboard").touch()  # no folder can be made there
    done = run(
        f"run_dir={run_dir}",
        THREE,
        *SMALL,
        "train.epochs=3",
        "train.log_every_steps=1",
        "launch.grace_seconds=4",
        "tracker=[tensorboard,mlflow]",
        env={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert sorted(line.split()[2] for line in warnings) == ["mlflow", "tensorboard"]
    assert all(line.endswith("; training continues") for line in warnings)
    assert len(metrics(run_dir)) == 12


class Noted(Tracker):
    """A tracker that notes what it is told, and fails where it is asked to."""

    def __init__(
        self, keeps: float = math.inf, run_id: str = "one", bad_step: int | None = None
    ) -> None:
        self.keeps = keeps
        self.run_id = run_id
        self.bad_step = bad_step
        self.out_of_reach = False
        self.opened: list[str | None] = []
        self.told: list[Any] = []
        self.closed = threading.Event()

    def open(self, run: TrackedRun, run_id: str | None) -> str:
        self.opened.append(run_id)
        if self.bad_step is not None and len(self.opened) == 1:
            raise ConnectionError("nobody there")
        return self.run_id

    def last_step(self) -> float:
        return self.keeps

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if step == self.bad_step or self.out_of_reach:
            raise OSError("disk full")
        self.told.append((step, scalars))

    def close(self, status: str, summary: dict[str, Any]) -> None:
        self.told.append((status, summary))
        if status == "completed":
            self.closed.wait()


def line(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": float(step)}


def steps_told(tracker: Noted, run_dir: Path, kept: int, more: range) -> list[int]:
    """The steps of which a tracker is told by a process that begins with `kept` lines and then
    records `more`."""
    tracking = Tracking({"noted": tracker}, grace_seconds=30.0, timeout_seconds=600.0)
    tracking.start(
        TrackedRun(run_dir, "", "", {}, kept), [line(step) for step in range(1, kept + 1)]
    )
    for step in more:
        tracking.write(line(step))
    tracking.finish({"status": "preempted"})
    return [step for step, _ in tracker.told if isinstance(step, int)]


@pytest.mark.parametrize(
    ("keeps", "again"), [(4, [5, 6, 7, 8]), (math.inf, [7, 8]), (0, [1, 2, 3, 4, 5, 6, 7, 8])]
)
def test_what_a_tracker_has_is_not_told_again(
    keeps: float, again: list[int], tmp_path: Path
) -> None:
    assert steps_told(Noted(), tmp_path, 0, range(1, 7)) == [1, 2, 3, 4, 5, 6]
    going_on = Noted(keeps)
    assert steps_told(going_on, tmp_path, 4, range(5, 9)) == again
    assert going_on.opened == ["one"]
    assert read(tmp_path, "trackers.json") == {"noted": {"id": "one", "train": 8}}


def test_what_was_not_told_before_a_kill_is_told_now(tmp_path: Path) -> None:
    assert steps_told(Noted(), tmp_path, 0, range(1, 3)) == [
        1,
        2,
    ]  # the process died with 3 and 4 on their way
    assert steps_told(Noted(), tmp_path, 4, range(5, 7)) == [3, 4, 5, 6]
    assert steps_told(Noted(run_id="another"), tmp_path, 6, range(7, 8)) == list(range(1, 8)), (
        "the first is gone"
    )


def test_what_was_missed_in_an_outage_is_told_after_it(tmp_path: Path) -> None:
    tracker = Noted()
    tracking = Tracking({"noted": tracker}, grace_seconds=30.0, timeout_seconds=600.0)
    tracking.start(TrackedRun(tmp_path, "", "", {}, 0), [])
    tracking.threads[0].wait_until_idle()
    for step in range(1, 6):
        tracker.out_of_reach = step in (2, 3)
        tracking.write(line(step))
        tracking.threads[0].wait_until_idle()
    tracking.finish({"status": "preempted"})
    assert [step for step, _ in tracker.told if isinstance(step, int)] == [1, 2, 3, 4, 5]
    assert read(tmp_path, "trackers.json") == {"noted": {"id": "one", "train": 5}}


def test_a_password_in_an_address_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def failing() -> None:
        raise ConnectionError("no answer from https://me:open-sesame@host:5000/api")

    background = TrackerThread(
        "noted", Noted(), TrackedRun(tmp_path, "", "", {}, 0), DeliveryLog(tmp_path)
    )
    background.call_later(failing)
    background.wait_until_idle()
    assert "no answer from https://host:5000/api" in caplog.text and "Traceback" in caplog.text
    assert "sesame" not in caplog.text


def test_a_damaged_list_of_trackers_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trackers.json").write_text('{"noted": {"id"')
    assert steps_told(Noted(), tmp_path, 0, range(1, 3)) == [1, 2]
    assert "trackers.json is damaged" in caplog.text
    assert read(tmp_path, "trackers.json") == {"noted": {"id": "one", "train": 2}}


@pytest.mark.slow
def test_mlflow_has_one_run_whatever_fails_and_takes_long_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "ALLOW_FILE_STORE": "true",
        "DISABLE_TELEMETRY": "true",
        "TRACKING_URI": tmp_path.as_uri(),
    }.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    tracker = Mlflow()
    with pytest.raises(Exception, match="not a name"):
        tracker.open(TrackedRun(tmp_path, "mine", "project", {"not a name: %": 1}, 0), None)
    run_id = tracker.open(TrackedRun(tmp_path, "mine", "project", {"long": "x" * 7_000}, 0), None)
    experiment = tracker.client.get_experiment_by_name("project")
    assert experiment
    (found,) = tracker.client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.data.params["long"]) == (run_id, "x" * 6_000)


def test_each_later_line_is_tried_and_nobody_waits_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Noted(bad_step=3)
    tracking = Tracking({"noted": tracker}, grace_seconds=30.0, timeout_seconds=1.0)
    tracking.start(TrackedRun(tmp_path, "", "", {}, 0), [])
    for step in range(1, 5):
        tracking.write(line(step))
    tracking.finish({"status": "completed", "test": {"loss": 1.0}, "backend": "none"})
    assert tracker.told[:3] == [
        (1, {"train/loss": 1.0}),
        (2, {"train/loss": 2.0}),
        (4, {"train/loss": 4.0}),
    ]
    assert tracker.told[3] == (
        "completed",
        {"status": "completed", "test.loss": 1.0, "backend": "none"},
    )
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "tracker noted failed: ConnectionError: nobody there; training continues",
        "tracker noted did not finish within 0.5 s: its last lines may be missing",
    ]
    tracker.closed.set()


def test_a_tracker_that_stands_still_does_not_fill_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    run = TrackedRun(tmp_path, "", "", {}, 0)
    background = TrackerThread("noted", Noted(), run, DeliveryLog(tmp_path))
    background.call_later(release.wait)
    for _ in range(10_010):
        background.call_later(lambda: None)
    assert background.calls.qsize() <= 10_000
    assert [record.message for record in caplog.records if "behind" in record.message] == [
        "tracker noted is 10,000 lines behind, so later lines are left out; training continues"
    ]
    release.set()


def test_a_line_becomes_numbers() -> None:
    figures = {"cpu_cores": [1.0, 3.0], "resident_gib": [1.0, 4.0]}
    seventh = {
        "kind": "train",
        "step": 7,
        "epoch": 1,
        "loss": None,
        "note": "x",
        "figures": figures,
    }
    assert scalars_of(seventh) == {
        "train/epoch": 1.0,
        "figures/cpu_cores": 2.0,
        "figures/resident_gib": 4.0,
    }
    assert scalars_of({"kind": "test", "step": 1, "loss": math.inf, "accuracy": 0.5}) == {
        "test/accuracy": 0.5
    }
    assert plain_values({"a": {"b": None, "c": [1, 2], "d": {}}, "e": True}) == {
        "a.b": "null",
        "a.c": "[1,2]",
        "e": True,
    }


@pytest.mark.parametrize(
    ("overrides", "classes"),
    [
        ([], {}),
        (["tracker=none"], {}),
        (["tracker=wandb"], {"wandb": WANDB}),
        (["tracker=[wandb,mlflow]"], {"wandb": WANDB, "mlflow": MLFLOW}),
        (["tracker=wandb", "tracker.classes.wandb.key=1"], {"wandb": {**WANDB, "key": 1}}),
        (["tracker=wandb", "tracker.classes.wandb._target_=my.W"], {"wandb": {"_target_": "my.W"}}),
        (["tracker=my.Tracker"], {"tracker": {"_target_": "my.Tracker"}}),
        (
            ["tracker=[wandb,{_target_: my.FileTracker, name: '1 \"', depth: 2}]"],
            {
                "wandb": WANDB,
                "file_tracker": {"_target_": "my.FileTracker", "name": '1 "', "depth": 2},
            },
        ),
        (
            ["tracker=[a.Tracker,b.Tracker]"],
            {"tracker": {"_target_": "a.Tracker"}, "tracker_2": {"_target_": "b.Tracker"}},
        ),
        (
            ["tracker=[{_target_: my.Tracker, token: '${oc.env:TOKEN}'}]"],
            {"tracker": {"_target_": "my.Tracker", "token": "${oc.env:TOKEN}"}},
        ),
    ],
)
def test_trackers_are_classes_by_name(
    overrides: list[str], classes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    config, problems = read_config(PROGRAM, read_overrides(PROGRAM, overrides))
    assert problems == []
    assert config.tracker == TrackerConfig(classes=classes)


def test_wrong_tracker_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        prepare(PROGRAM, ["tracker=[tensorboard,wandb]", "device=cpu"], None)
    (problem,) = caught.value.problems
    assert (
        problem == f"tracker=wandb: wandb is not installed; run {sys.executable} -m pip install"
        f" '{SOURCE}[wandb]'"
    )
    read_words = read_overrides(PROGRAM, ["tracker=[tensorboard,wandbb]"])
    assert read_words.problems == [
        "tracker=[tensorboard,wandbb]: must be one of mlflow, none, tensorboard, wandb; did you"
        " mean wandb?"
    ]
    assert not list(tmp_path.iterdir())


OWN_TRACKER = """
import json
import threading

import ddp_train


class Journal(ddp_train.Tracker):
    environment = {"JOURNAL_MODE": "quiet"}

    def __init__(self, path, run_id):
        self.path = path
        self.run_id = run_id
        self.made_in = threading.current_thread().name

    def open(self, run, run_id):
        self.add("open", run.first_step, run_id)
        return run_id or self.run_id

    def write(self, step, scalars):
        if "train/loss" in scalars:
            self.add("write", step, scalars["train/loss"])

    def close(self, status, summary):
        self.add("close", status, summary.get("test.accuracy"))

    def add(self, *line):
        with open(self.path, "a") as file:
            threads = [self.made_in, threading.current_thread().name]
            file.write(json.dumps([*threads, *line]) + "\\n")
"""


@pytest.mark.slow
def test_own_tracker_of_three_ranks_is_one_run_when_resumed(tmp_path: Path) -> None:
    (tmp_path / "my_tracker.py").write_text(OWN_TRACKER)
    journal = tmp_path / "journal"
    tracker = f"tracker=[{{_target_: my_tracker.Journal, path: {journal}, run_id: seven}}]"
    for epochs in (1, 2):
        done = run(
            *SMALL,
            THREE,
            "run_dir=run",
            "train.log_every_steps=1",
            f"train.epochs={epochs}",
            tracker,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {(made, called) for made, called, *_ in lines} == {("MainThread", "journal")}
    first, second = ([step for step, *_ in part] for part in written_between_opens(lines))
    opens = [line[3:] for line in lines if line[2] == "open"]
    assert opens == [[0, None], [first[-1], "seven"]]
    recorded = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert first + second == [line["step"] for line in recorded]
    summary = read(tmp_path / "run", "summary.json")
    assert lines[-1][2:] == ["close", "completed", summary["test"]["accuracy"]]


def written_between_opens(lines: list[list[Any]]) -> list[list[list[Any]]]:
    """Step and loss of each line written, for each time that the tracker was opened."""
    parts: list[list[list[Any]]] = []
    for _, _, call, *values in lines:
        if call == "open":
            parts.append([])
        if call == "write":
            parts[-1].append(values)
    return parts


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("pathlib.Path", "loads code from outside ddp_train.telemetry.trackers"),
        ("nowhere_at_all.Tracker", "loads code from outside ddp_train.telemetry.trackers"),
        (f"{TRACKERS}.tracking.Tracking", "must be a class derived from ddp_train.Tracker"),
        (f"{TRACKERS}.tensorboard.Tracker", "must be a class derived from ddp_train.Tracker"),
        (f"{TRACKERS}.wandb.Missing", f"{TRACKERS}.wandb has no Missing"),
    ],
)
def test_only_trackers_are_loaded(target: str, problem: str, tmp_path: Path) -> None:
    of_other_run = prepare(PROGRAM, [f"run_dir={tmp_path}", "device=cpu"], None).config
    of_other_run.tracker.classes = {"mine": {"_target_": target}}
    freeze(of_other_run)
    with pytest.raises(ConfigError) as caught:
        prepare(PROGRAM, [f"config={tmp_path}/config.yaml"], None)
    assert any(
        text.startswith(f"tracker.classes.mine._target_={target}: ") and problem in text
        for text in caught.value.problems
    ), caught.value.problems


class NeedsPackage(Noted):
    package = "no_such_package"


def test_missing_package_of_own_tracker_is_an_error() -> None:
    path = f"{__name__}.NeedsPackage"
    with pytest.raises(ConfigError, match=r"no_such_package is not installed; run .* pip install"):
        build_trackers({"mine": {"_target_": path}})
    with pytest.raises(ConfigError, match="cannot be called with colour='red'"):
        build_trackers({"mine": {"_target_": f"{__name__}.Noted", "colour": "red"}})


def test_a_run_that_is_not_continued_has_other_ids(tmp_path: Path) -> None:
    assert archive_previous_run(tmp_path) == []
    for name in ("checkpoints", "tensorboard"):
        (tmp_path / name).mkdir()
    for name in ("trackers.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    archive_previous_run(tmp_path)
    expected = [
        "checkpoints_before_1",
        "tensorboard_before_1",
        "trackers_before_1.json",
        "metrics_before_1.jsonl",
    ]
    assert Counter(path.name for path in tmp_path.iterdir()) == Counter(expected)
    (tmp_path / "trackers.json").touch()  # of a run that was killed before its first checkpoint
    (note,) = archive_previous_run(tmp_path)
    assert note.endswith("were renamed to trackers_before_2.json")
