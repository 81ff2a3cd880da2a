"""Another number of processes during a run: asked for, or what lost devices leave."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load

from ddp_train.commands import resize as client
from ddp_train.config.auto import at_another_number, resolve
from ddp_train.config.freeze import freeze
from ddp_train.config.validate import check, check_rules
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.distributed.world import World
from ddp_train.engine.resize_hook import ResizeHook
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.launcher import resize as launcher_side
from ddp_train.launcher.resize import RequestListener, address_of
from ddp_train.launcher.size import Change, Size, shown_counts
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.options.sections import LaunchConfig, TrainConfig
from ddp_train.parallel.config import SingleConfig
from ddp_train.parallel.ordered.config import OrderedConfig
from ddp_train.resilience import run_lock
from ddp_train.telemetry.metrics_log import MetricsFile
from tests.campaigns.lost_ranks import board_of, ranks_of
from tests.support.commands import Running, fatal_lines, metrics, read, running, wait_until, weights

CORES = Hardware(8)
GPUS = Hardware(64, 4, "H200", (9, 0), 2**37)
ASKED_FOR = "asked for"
SLOW_NET = '''
import os
import signal
import time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    """Each step takes `delay` seconds, and half a second more while the file `hold` is there; none once `hurry` is.
    One rank is killed whenever it is built and `gone` is there: its device does not come back."""

    def __init__(self, delay=0.1, rank=-1, gone="", norm=False):
        super().__init__()
        if int(os.environ["RANK"]) == rank and Path(gone).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        if norm:
            self.layers.insert(2, nn.BatchNorm1d(16))
        self.delay = delay

    def forward(self, images):
        if self.training and self.delay and not Path(__file__).with_name("hurry").exists():
            time.sleep(self.delay + 0.5 * Path(__file__).with_name("hold").exists())
        return self.layers(images)
'''


def asked_config(value: int | str, **more: Any) -> Config:
    return Config(launch=LaunchConfig(nproc_per_node=value), **more)


# --- a range, and which numbers are in it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "hardware", "processes", "counts"),
    [
        ("2:4", CORES, 4, [2, 3, 4]),
        ("2:8", GPUS, 4, [2, 3, 4, 5, 6, 7, 8]),
        ("2:3", GPUS, 3, [2, 3]),
        ("2:auto", GPUS, 4, [2, 3, 4]),
        ("3:auto", CORES, 8, [3, 4, 5, 6, 7, 8]),
        (3, CORES, 3, []),
    ],
)
def test_a_run_starts_with_as_many_as_there_are_devices(
    value: int | str, hardware: Hardware, processes: int, counts: list[int]
) -> None:
    config = resolve(asked_config(value), hardware, None)
    assert (config.launch.nproc_per_node, config.process_counts) == (processes, counts)
    assert config.process_range == (value if counts else None)
    assert not check(
        RequestedRun(asked_config(value), dataclasses.replace(config, run_dir="r"), hardware, None)
    )


def test_ordered_resize_uses_divisors_of_its_shards() -> None:
    config = resolve(asked_config("2:8", strategy=OrderedConfig()), CORES, None)
    assert config.process_counts == [2, 4, 8]


@pytest.mark.parametrize("mode", ["evaluate", "doctor"])
def test_what_does_not_train_keeps_its_number(mode: str) -> None:
    config = resolve(asked_config("2:4", mode=mode), CORES, None)
    assert (config.launch.nproc_per_node, config.process_counts, config.process_range) == (
        4,
        [],
        None,
    )


@pytest.mark.parametrize(
    ("value", "more", "hardware", "world", "said"),
    [
        (
            "2:x",
            {},
            CORES,
            None,
            "must be a whole number of at least 1, or auto, or a range LOW:HIGH, as 2:8 or 2:auto",
        ),
        (
            "4:2",
            {},
            CORES,
            None,
            "with 1 <= LOW <= HIGH; use launch.nproc_per_node=2:4",
        ),
        ("0:2", {}, CORES, None, "use launch.nproc_per_node=1:2"),
        (
            "5:8",
            {},
            GPUS,
            None,
            "launch.nproc_per_node=5:8: needs one GPU per process, and 4 GPUs are visible",
        ),
        (
            "2:8",
            {"train": TrainConfig(6)},
            CORES,
            None,
            "too small for 7 to 8 processes; use launch.nproc_per",
        ),
        (
            "4:8",
            {"train": TrainConfig(6, 2)},
            CORES,
            None,
            "4 to 8 processes and 2 accumulation steps each; use train",
        ),
        ("2:4", {"strategy": SingleConfig()}, CORES, None, "strategy=single runs in one process"),
        (
            "2:3",
            {"strategy": OrderedConfig()},
            CORES,
            None,
            "8 virtual shards evenly among 3 processes; use powers of two up to 8, for example 1:2",
        ),
        (
            "2:4",
            {},
            CORES,
            World(0, 3, 0, 3),
            "launch.nproc_per_node=2:4: torchrun has set the number of processes to 3",
        ),
    ],
)
def test_a_range_that_cannot_be_is_told_in_one_line(
    value: str, more: dict[str, Any], hardware: Hardware, world: World | None, said: str
) -> None:
    asked = asked_config(value, **more)
    problems = check_rules(asked) or check(
        RequestedRun(asked, resolve(asked, hardware, world), hardware, world)
    )
    assert len(problems) == 1 and said in problems[0]


def test_what_auto_chooses_by_the_number_is_chosen_anew() -> None:
    asked = asked_config("2:8")
    config = resolve(asked, CORES, None)
    other = at_another_number(asked, config, CORES, 2)
    assert (config.launch.threads_per_process, other.launch.threads_per_process) == (1, 4)
    assert other.process_counts == config.process_counts and other.run_dir == config.run_dir
    same = dataclasses.replace(other, launch=config.launch)
    assert same == config


@pytest.mark.parametrize(("batch", "accumulation"), [(96, 1), (50, 1), (50, 3), (7, 2)])
def test_every_size_trains_the_same_global_batches(batch: int, accumulation: int) -> None:
    for world in (1, 2, 3, 5):
        plans = [
            BatchPlan(200, batch, accumulation, 2, seed=0, rank=rank, world_size=world)
            for rank in range(world)
        ]
        if world * accumulation > batch:
            continue
        for step in range(2):
            parts = [[one for one in plan.micro_batches() if one.step == step] for plan in plans]
            assert {len(part) for part in parts} == {len(parts[0])} and len(
                parts[0]
            ) <= accumulation
            sizes = [one.num_real for part in parts for one in part]
            assert max(sizes) - min(sizes) <= 1 and sum(sizes) == batch
            weight = sum(one.scale * one.num_real for part in parts for one in part) / world
            assert weight == pytest.approx(1, abs=1e-15)


# --- how many come next ---------------------------------------------------------------------------


def test_resize_request_uses_given_up_gpus_again() -> None:
    size = Size(2, [1, 2, 3], ["a", "b", "c"], given_up=["b"])
    assert size.gpus_in_use() == ["a", "c"]
    assert size.resized(1).gpus_in_use() == ["a"]
    assert size.resized(3).gpus_in_use() == ["a", "b", "c"]
    assert not size.resized(3).given_up


def test_a_size_without_a_gpu_takes_a_spare_one() -> None:
    size = Size(2, [1, 2, 3, 4], ["a", "b", "c"])
    without_b = size.without(["b"])
    assert without_b and without_b.gpus_in_use() == ["a", "c"]
    without_a = without_b.without(["a"])
    assert without_a and without_a.gpus_in_use() == ["c"]
    assert without_a.without(["c"]) is None, "fewer are not allowed"


def test_why_a_number_is_refused() -> None:
    assert Size(3, [1, 2, 3], ["a", "b", "c"]).refusal(4) == "the run may have 1 to 3 processes"
    assert Size(1, [1, 2, 3, 4], ["a", "b", "c"]).refusal(4) == (
        "each process needs a GPU, and there are 3 GPUs"
    )
    assert Size(1, [1, 2]).refusal(2) == ""


def test_numbers_in_words() -> None:
    assert [shown_counts(counts) for counts in ([2, 3, 4], [2, 4, 8], [2, 3], [2])] == [
        "2 to 4 processes",
        "2, 4 or 8 processes",
        "2 or 3 processes",
        "2 processes",
    ]


# --- asking ---------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run with a range, which has 4 processes."""
    folder = tmp_path / "run"
    freeze(resolve(asked_config("2:4", run_dir=str(folder)), CORES, None))
    return folder


@pytest.fixture
def lock(run_dir: Path) -> Iterator[run_lock.Lock]:
    with mock.patch.object(
        run_lock, "is_held", return_value=True
    ):  # by another process: this one would not see it
        held = run_lock.acquire(run_dir / run_lock.FILE)
        yield held
        held.release()


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        client.resize([*words])
    (problem,) = caught.value.problems
    return problem


def test_what_cannot_be_asked(run_dir: Path) -> None:
    assert "needs the folder of a run and a number" in refused()
    assert "needs the folder of a run and a number" in refused(str(run_dir))
    assert "0 is not a number of processes" in refused(str(run_dir), "0")
    assert "three is not a number" in refused(str(run_dir), "three")
    assert "is not the folder of a run; did you mean run?" in refused(f"{run_dir.parent}/runn", "3")
    assert "is not the folder of a run; give the run_dir of a run" in refused(
        f"{run_dir.parent}/nowhere/else", "3"
    )
    with mock.patch.object(client, "command_name", return_value="ddp-train"):
        assert f"start it with `ddp-train run_dir={run_dir} launch.nproc_per_node=2:3`" in refused(
            str(run_dir), "3"
        )
    (run_dir / "summary.json").write_text('{"status": "completed"}')
    assert "the run is completed; nothing is left to train" in refused(str(run_dir), "3")


def test_what_a_run_refuses(
    run_dir: Path, lock: run_lock.Lock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "with launch.nproc_per_node=2:4; use 2 to 4 processes" in refused(str(run_dir), "5")
    assert client.resize([str(run_dir), "4"]) == 0 and "the run has" in capsys.readouterr().out
    assert (
        client.resize([str(run_dir), "3"]) == 69
        and "takes no requests at this moment" in capsys.readouterr().err
    )
    with mock.patch.object(socket, "gethostname", return_value="elsewhere"):
        assert f"was started on {os.uname().nodename}; use this command there" in refused(
            str(run_dir), "3"
        )
    freeze(resolve(asked_config(3, run_dir=str(run_dir)), CORES, None))
    assert "stop the run, then resume it with a range: `" in refused(str(run_dir), "2")


def test_a_launcher_answers_one_request_after_the_other(run_dir: Path, lock: run_lock.Lock) -> None:
    codes: dict[str, int] = {}

    def ask(number: str) -> None:
        codes[number] = client.resize([str(run_dir), number])

    with closing(
        RequestListener(run_dir, lambda count: "too few" if count == 2 else "")
    ) as requests:
        threads = {number: threading.Thread(target=ask, args=[number]) for number in ("3", "2")}
        threads["3"].start()
        wait_until(lambda: requests.wait(0.1) or requests.pending is not None, "request")
        threads["2"].start()
        wait_until(lambda: requests.wait(0.1) or "2" in codes, "answer")
        assert codes == {"2": 69}, "while a change is under way"
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address_of(run_lock.owner(run_dir / run_lock.FILE)))
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            requests.wait(1)
        assert requests.pending and requests.pending.count == 3
        requests.answer(True, "done")
        threads["3"].join(5)
        assert codes == {"2": 69, "3": 0}
        late = threading.Thread(target=ask, args=["3"])
        late.start()
        wait_until(lambda: requests.wait(0.1) or requests.pending is not None, "request")
    late.join(5)
    assert codes["3"] == 69, "the run has ended"


def test_another_user_is_not_heard(run_dir: Path, lock: run_lock.Lock) -> None:
    with closing(RequestListener(run_dir, lambda count: "")) as requests:
        with mock.patch.object(launcher_side, "peer_of", return_value=(1, 12345)):
            thread = threading.Thread(target=client.resize, args=[[str(run_dir), "3"]])
            thread.start()
            requests.wait(5)
            thread.join(5)
        assert requests.pending is None


# --- whole runs -----------------------------------------------------------------------------------

WORDS = (
    "model._target_=slow_net.Net",
    "trusted_modules=[slow_net]",
    "data.limit=200",
    "tuning.precision=fp64",
    "train.global_batch_size=50",
    "train.log_every_steps=3",
    "train.epochs=15",
    "optimizer=adamw",
    "launch.threads_per_process=1",
    "checkpoint.every_steps=1000",
    "data.validation=0.2",
    "checkpoint.best=true",
    "train.ema_decay=0.9",
    "train.evaluate_every_epochs=3",
)
CLOCKS = ("time", "figures", "seconds")


def slow_net(folder: Path) -> dict[str, str]:
    (folder / "slow_net.py").write_text(SLOW_NET)
    return {"PYTHONPATH": str(folder)}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What of metrics.jsonl does not depend on clocks, nor on the number of processes."""
    lines = [line for line in metrics(folder) if line["kind"] != "resize"]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in CLOCKS and not name.endswith("_per_second")
        }
        for line in lines
    ]


def ask(job: Running, processes: int) -> None:
    """As the command does, and in its place: a new interpreter takes half a second."""
    assert client.resize([str(job.run_dir), str(processes)]) == 0, job.said()


def assert_close(found: Path, expected: Path, without: int | None = None) -> None:
    """without: the step at which the training loss is not compared."""
    ours = load(weights(found))
    theirs = load(weights(expected))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-10) for name in theirs)
    for one, other in zip(lines_of(found), lines_of(expected), strict=True):
        if (one["kind"], one["step"]) == ("train", without):
            assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=0.1)
        assert one == pytest.approx(other, abs=1e-10)
    best = [read(folder, "summary.json")["best"] for folder in (found, expected)]
    assert best[0]["step"] == best[1]["step"] and best[0]["value"] == pytest.approx(
        best[1]["value"], abs=1e-10
    )
    keys = ("steps", "samples_seen", "status")
    assert [read(found, "summary.json")[key] for key in keys] == [
        read(expected, "summary.json")[key] for key in keys
    ]


@pytest.mark.slow
def test_a_run_whose_number_changes_ends_where_it_would_have(tmp_path: Path) -> None:
    """3, 2 and 3 as asked for; 2 since a device is lost, which fails again at first when it is
    asked for, and is back then; at last the launcher is killed in the middle of a change. Shares of
    49 samples are uneven on 2 and on 3."""
    env = slow_net(tmp_path)
    place = tmp_path / "run"
    gone = tmp_path / "gone"
    uneven = (*WORDS, "train.global_batch_size=49")
    with running(
        tmp_path / "calm", *uneven, "launch.nproc_per_node=3:3", "+model.delay=0", env=env
    ) as calm:
        assert calm.end() == 0, calm.said()
    words = (
        *uneven,
        "launch.nproc_per_node=2:3",
        "launch.max_restarts=1",
        "+model.rank=2",
        f"+model.gone={gone}",
    )
    with running(place, *words, env=env) as job:
        job.wait_for_step()
        ask(job, 2)
        assert len(ranks_of(job)) == 2
        ask(job, 3)
        gone.touch()
        os.kill(ranks_of(job)[2], signal.SIGKILL)
        wait_until(lambda: sum(line["kind"] == "resize" for line in metrics(place)) == 3, "change")
        assert client.resize([str(place), "3"]) == 69, "it is tried again, and fails again"
        gone.unlink()
        ask(job, 3)
        assert job.said().count("restarting (1 of 1 restarts)") == 2
        with closing(board_of(job, 3)) as board:
            codes: list[int] = []
            asking = threading.Thread(target=lambda: codes.append(client.resize([str(place), "2"])))
            asking.start()
            wait_until(lambda: any(status.goes_on for status in board.ranks), "change")
        job.process.kill()
        asking.join(30)
        assert codes == [69]
    (tmp_path / "hurry").touch()
    with running(
        place, WORDS[1], env=env
    ) as again:  # run_dir alone: all else as it was, the range too
        assert again.end() == 0, again.said()
    assert_close(place, tmp_path / "calm")
    summary = read(place, "summary.json")
    lost = (3, 2, "rank 2 failed twice, and no new step was saved in between")
    changes = [(one["from"], one["to"], one["why"]) for one in summary["resizes"]]
    assert changes[:3] == [(3, 2, ASKED_FOR), (2, 3, ASKED_FOR), lost] and changes[-1] == (
        2,
        3,
        ASKED_FOR,
    )
    assert (
        all(one["seconds"] is None or 0 < one["seconds"] < 60 for one in summary["resizes"])
        and summary["steps_redone"] == 0
    )
    assert summary["world_size"] == 3 and read(place, "summary.json")["status"] == "completed"
    noted = [line for line in metrics(place) if line["kind"] == "resize"]
    assert [line["step"] for line in noted] == [one["step"] for one in summary["resizes"]]


def test_a_change_that_another_followed_at_once_is_noted_too(tmp_path: Path) -> None:
    changes = [
        Change(4, 3, "one", time.monotonic() - 9, 1.0),
        Change(3, 2, "two", time.monotonic() - 1, 2.0),
        Change(2, 4, "three", time.monotonic(), 3.0),
    ]
    log = MetricsFile(tmp_path, True, 5)
    record: Any = SimpleNamespace(metrics=log, resizes=[{"time": 1.0}])
    hook = ResizeHook(record, [change.as_dict() for change in changes], 5, "cpu")
    job: Any = SimpleNamespace(step=5)
    assert hook.due(job) == 6
    for job.step in (5, 6, 7):
        hook.act(job)
    found = [
        (line["step"], line["from"], line["to"], line["seconds"] is None)
        for line in metrics(tmp_path)
    ]
    assert found == [(5, 3, 2, True), (5, 2, 4, False)] and hook.due(job) > 10**9
    assert ResizeHook(record, [change.as_dict() for change in changes], 5, "cpu").due(job) > 10**9


@pytest.mark.nightly
def test_ordered_four_two_four_has_the_same_bytes(tmp_path: Path) -> None:
    env = slow_net(tmp_path)
    words = [*WORDS, "strategy=ordered", "train.global_batch_size=48", "tuning.precision=fp32"]
    with running(
        tmp_path / "calm", *words, "launch.nproc_per_node=1", "+model.delay=0", env=env
    ) as calm:
        assert calm.end() == 0, calm.said()
    with running(tmp_path / "run", *words, "launch.nproc_per_node=2:4", env=env) as job:
        job.wait_for_step()
        assert client.resize([str(job.run_dir), "2"]) == 0, job.said()
        assert client.resize([str(job.run_dir), "4"]) == 0, job.said()
        (tmp_path / "hurry").touch()
        assert job.end() == 0, job.said()
    assert weights(tmp_path / "run") == weights(tmp_path / "calm")
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "calm")


@pytest.mark.slow
def test_below_the_lowest_number_the_run_ends_as_it_would_have(tmp_path: Path) -> None:
    env = slow_net(tmp_path)
    gone = tmp_path / "gone"
    gone.touch()
    (tmp_path / "hurry").touch()
    words = (
        *WORDS,
        "launch.nproc_per_node=2:3",
        "launch.max_restarts=1",
        "+model.rank=1",
        f"+model.gone={gone}",
    )
    with running(tmp_path / "run", *words, env=env) as job:
        assert job.end() == 70
    said = job.said()
    reason = "rank 1 failed twice, and no new step was saved in between"
    assert said.count(f"continuing with 2 processes; {reason}") == 1
    assert len(fatal_lines(said)) == 4 and "not restarted: launch.max_restarts=1 is used up" in said
    assert read(tmp_path / "run", "failure.json")["kind"] == "died"
