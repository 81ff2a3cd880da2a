"""The whole command, from words to files: training, torchrun, resume, evaluation, sweeps, foreign
code, faults."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load

from ddp_train.config.freeze import load_frozen, to_values
from ddp_train.distributed.process_group import local_leader_first
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from tests.house.test_agents import told
from tests.support.commands import (
    LAUNCH,
    ONE,
    SMALL,
    THREE,
    checkpoints,
    environment,
    fatal_lines,
    foreign_code,
    foreign_net,
    metrics,
    processes_of,
    read,
    run,
    spoil,
    torchrun,
    weights,
)
from tests.support.jobs import largest_difference
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy

SAVES = (*SMALL, "launch.threads_per_process=1", "checkpoint.every_steps=10")
FORTY = (*SAVES, "train.max_steps=40")
TWENTY = (*SAVES, "train.max_steps=20")
SUMMARY = {
    "status": str,
    "strategy": str,
    "world_size": int,
    "device": str,
    "backend": str,
    "global_batch_size": int,
    "epochs": int,
    "steps": int,
    "samples_seen": int,
    "seconds": float,
    "samples_per_second": float,
    "epoch_seconds": list,
    "test": dict,
}
FAILURE = {"kind", "rank", "host", "step", "phase", "detail", "remedy", "log"}


def only_run(folder: Path, name: str) -> Path:
    """The one run directory that a command made by itself."""
    (run_dir,) = (folder / "runs" / name).iterdir()
    return run_dir


# --- the default job ------------------------------------------------------------------------------


@pytest.mark.slow
def test_default_job_learns_the_digits_and_leaves_files(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run_dir = only_run(tmp_path, "default")
    assert {path.name for path in run_dir.iterdir()} == {
        "checkpoints",
        "commands.jsonl",
        "config.yaml",
        "lock.json",
        "logs",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "timeline.json",
    }
    assert {path.name for path in (run_dir / "logs").glob("*.log")} == {"rank_0.log", "rank_1.log"}

    summary = read(run_dir, "summary.json")
    for name, kind in SUMMARY.items():
        assert type(summary[name]) is kind, name
    assert summary["test"]["accuracy"] >= 0.97
    assert summary["test"]["samples"] == 364
    assert summary["test"]["loss"] > 0
    assert {
        name: summary[name] for name in ("status", "strategy", "world_size", "device", "backend")
    } == {
        "status": "completed",
        "strategy": "ddp",
        "world_size": 2,
        "device": "cpu",
        "backend": "gloo",
    }
    assert (summary["global_batch_size"], summary["epochs"], summary["steps"]) == (96, 30, 450)
    assert summary["samples_seen"] == 30 * 1433
    assert len(summary["epoch_seconds"]) == 30
    assert 0 < sum(summary["epoch_seconds"]) <= summary["seconds"] < 100

    lines = metrics(run_dir)
    tests = [line for line in lines if line["kind"] == "test"]
    assert {line["kind"] for line in lines} == {"train", "test"}
    assert [line["epoch"] for line in tests] == list(range(1, 31))
    assert {name: tests[-1][name] for name in summary["test"]} == summary["test"]

    text = (run_dir / "config.yaml").read_text()
    assert yaml.safe_load(text) == to_values(load_frozen(text))
    assert "auto" not in yaml.safe_load(text)["launch"].values()
    assert checkpoints(run_dir) == ["step_00000435", "step_00000450"]
    assert weights(run_dir)

    for row in (
        r"^processes +2 x cpu, gloo, ddp",
        r"^global batch +96 = 48 per process x 2 processes x 1 accumulation",
        r"^steps +450 = 30 epochs x 15",
        r"^optimizer +sgd, lr 0.05, cosine schedule",
        r"^test accuracy 9\d\.\d\d% \(3\d\d/364\)",
    ):
        assert len(re.findall(row, done.stdout, re.M)) == 1, row
    assert re.findall(r"^epoch +(\d+)/30 ", done.stdout, re.M) == [
        str(epoch) for epoch in range(1, 31)
    ]
    assert (
        len({line.index("/30") for line in done.stdout.splitlines() if line.startswith("epoch")})
        == 1
    )
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    assert [
        log.name for log in (run_dir / "logs").glob("*.log") if "WARNING" in log.read_text()
    ] == []
    modes = {path.stat().st_mode for path in (run_dir / "checkpoints/step_00000450").iterdir()}
    assert modes == {(run_dir / "summary.json").stat().st_mode}, "as the umask says"


# --- one process, three processes, torchrun -------------------------------------------------------


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps that nobody interrupted, in one process."""
    run_dir = tmp_path_factory.mktemp("by_one") / "run"
    done = run(f"run_dir={run_dir}", ONE, *FORTY)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="module")
def by_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same in three processes, and its standard output."""
    folder = tmp_path_factory.mktemp("by_three")
    done = run("name=three", THREE, *FORTY, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return only_run(folder, "three"), done.stdout


@pytest.mark.slow
def test_three_ranks_are_one_run_whatever_starts_them(
    by_three: tuple[Path, str], tmp_path: Path
) -> None:
    ours, our_output = by_three
    done = run("name=three", *FORTY, command=torchrun(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = only_run(tmp_path, "three")
    for run_dir, output in ((ours, our_output), (theirs, done.stdout)):
        assert len(list(run_dir.parents[1].rglob("config.yaml"))) == 1
        assert sorted(path.name for path in (run_dir / "logs").glob("*.log")) == [
            f"rank_{rank}.log" for rank in range(3)
        ]
        assert re.findall(r"^step +(\d+)/40 ", output, re.M) == [*map(str, range(3, 40, 3)), "40"]
        assert len(re.findall(r"^(test accuracy|processes|global batch)", output, re.M)) == 3
        assert read(run_dir, "summary.json")["world_size"] == 3
    one, other = (load_frozen((run_dir / "config.yaml").read_text()) for run_dir in (ours, theirs))
    assert dataclasses.replace(one, run_dir=None) == dataclasses.replace(other, run_dir=None)
    assert weights(ours) == weights(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["modle=mlp"], "modle=mlp: no such key; did you mean mode?"),
        (
            ["-m", "optimizer.lr=0.1,0.2"],
            f"use: python {LAUNCH[1]} -m optimizer.lr=0.1,0.2 launch.nproc_per_node=3",
        ),
        (
            ["hydra.verbose=false"],
            "hydra.verbose=false: Hydra's own keys act on sweeps only; add -m, or leave the key out",
        ),
        (
            ["launch.nproc_per_node=2"],
            "launch.nproc_per_node=2: torchrun was started with --nproc_per_node=3; leave"
            " launch.nproc_per_node out, or start torchrun with --nproc_per_node=2",
        ),
    ],
    ids=["typo", "sweep", "a key of Hydra's", "number of processes"],
)
def test_torchrun_is_refused_and_leaves_no_file(
    words: list[str], problem: str, tmp_path: Path
) -> None:
    done = run(*words, command=torchrun(), cwd=tmp_path)
    assert done.returncode != 0
    parts = (done.stdout + done.stderr).split("launch.py FAILED")
    assert len(parts) == 2
    for part in parts:  # at once, and on torchrun's last page
        assert part.count(problem) == part.count("1 problem in the configuration") == 1
    assert list(tmp_path.iterdir()) == []


def test_orphaned_worker_ends_before_it_imports_torch(tmp_path: Path) -> None:
    """One that died in the worker's first moments: the kernel does not end it, and the agent's
    store is gone."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen
        variables = {
            **{
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0",
            },
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(nobody.getsockname()[1])},
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-X", "importtime", LAUNCH[1], f"run_dir={tmp_path / 'run'}"]
        done = subprocess.run(
            command,
            env=environment(variables),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == PeerError.exit_code
    assert (
        "FATAL peer (rank 0)" in done.stderr
        and "so torchrun's agent, which serves the store, has ended" in done.stderr
    )
    assert re.search(r"\| +ddp_train\b", done.stderr) and not re.search(r"\| +torch\b", done.stderr)
    assert list(tmp_path.iterdir()) == []


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resumed_run_ends_in_the_same_bytes(by_one: Path, tmp_path: Path) -> None:
    """A new interpreter goes on, with another seed of str hashes than that of the zygote."""
    run_dir = tmp_path / "run"
    first = run(f"run_dir={run_dir}", ONE, *TWENTY)
    assert first.returncode == 0, first.stderr
    assert checkpoints(run_dir) == ["step_00000010", "step_00000020"]
    second = run(f"run_dir={run_dir}", ONE, *FORTY, env={"PYTHONHASHSEED": "7"})
    assert second.returncode == 0, second.stderr
    assert re.search("^steps +40, of which 3 go once .* from step 20$", second.stdout, re.M)
    assert weights(run_dir) == weights(by_one)
    steps = [line["step"] for line in metrics(run_dir) if line["kind"] == "train"]
    assert steps == sorted(set(steps)), "no step was trained twice"
    assert (
        read(run_dir, "summary.json")["samples_seen"]
        == read(by_one, "summary.json")["samples_seen"]
    )
    assert read(run_dir, "summary.json")["test"] == read(by_one, "summary.json")["test"]


@pytest.mark.slow
def test_resumed_run_of_three_ranks_equals_one_process(
    by_one: Path, by_three: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for words in (TWENTY, FORTY):
        done = run(f"run_dir={run_dir}", THREE, *words)
        assert done.returncode == 0, done.stderr
    assert "from step 20" in done.stdout
    assert weights(run_dir) == weights(by_three[0])
    assert largest_difference(load(weights(run_dir)), load(weights(by_one))) < 1e-5


@pytest.mark.slow
def test_start_over_sets_old_checkpoints_aside(by_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(by_one, run_dir)
    done = run(f"run_dir={run_dir}", ONE, *TWENTY, "checkpoint.resume=never")
    assert done.returncode == 0, done.stderr
    assert "from step" not in done.stdout
    assert (
        "note: checkpoint.resume=never: files of an earlier run in" in done.stderr
        and "checkpoints_before_1" in done.stderr
    )
    assert [line["step"] for line in metrics(run_dir) if line["kind"] == "train"] == [
        3,
        6,
        9,
        12,
        15,
        18,
        20,
    ]
    assert (run_dir / "metrics_before_1.jsonl").read_text() == (
        by_one / "metrics.jsonl"
    ).read_text()
    # What is left of the run before must not push out what this one saves, nor be what the next one
    # goes on from.
    assert checkpoints(run_dir) == ["step_00000010", "step_00000020"]
    (before,) = run_dir.glob("checkpoints_*")
    assert sorted(path.name for path in before.iterdir()) == checkpoints(by_one), "nothing is lost"


@pytest.mark.slow
def test_a_spoilt_checkpoint_is_passed_over_with_a_warning(by_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(by_one, run_dir)
    assert checkpoints(run_dir) == ["step_00000030", "step_00000040"]
    spoil(run_dir, "step_00000040")
    done = run(f"run_dir={run_dir}", ONE, *FORTY)
    assert done.returncode == 0, done.stderr
    assert "from step 30" in done.stdout
    warnings = [
        line
        for line in (run_dir / "logs/rank_0.log").read_text().splitlines()
        if " WARNING " in line
    ]
    assert len(warnings) == 1
    assert "step_00000040 is skipped: model.safetensors does not match its sha256" in warnings[0]
    assert done.stderr.count("is skipped") == 1
    assert weights(run_dir) == weights(by_one)


@pytest.mark.slow
def test_a_spoilt_checkpoint_does_not_push_out_a_good_one(by_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(by_one, run_dir)
    spoil(run_dir, "step_00000040")
    done = run(
        f"run_dir={run_dir}",
        ONE,
        *SMALL,
        "train.max_steps=35",
        "checkpoint.every_steps=5",
        "checkpoint.keep=1",
    )
    assert done.returncode == 0, done.stderr
    assert "step_00000035" in checkpoints(run_dir), "all that is left is the spoilt one"


@pytest.mark.slow
def test_run_with_spoilt_checkpoints_does_not_start_over(by_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(by_one, run_dir)
    for name in checkpoints(run_dir):
        spoil(run_dir, name)
    done = run(f"run_dir={run_dir}", ONE, *FORTY)
    assert done.returncode == 65
    (line,) = fatal_lines(done.stderr)
    assert f"{run_dir} holds no valid checkpoint" in line
    assert "Traceback" not in done.stderr
    assert read(run_dir, "failure.json")["exit_code"] == 65


@pytest.mark.slow
def test_checkpoint_of_another_model_is_refused_by_names(by_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [word for word in FORTY if not word.startswith("model=")]
    done = run(f"run_dir={run_dir}", ONE, *words, "model=cnn", f"checkpoint.resume={by_one}")
    assert done.returncode == 65
    (line,) = fatal_lines(done.stderr)
    assert "belongs to another model" in line
    assert re.search(r"differs in .*\b\d+\.(weight|bias)", line)
    assert "Traceback" not in done.stderr
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_a_completed_run_is_not_trained_again(by_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(by_one, run_dir)
    done = run(f"run_dir={run_dir}", ONE, *TWENTY)
    assert done.returncode == 0, done.stderr
    assert "nothing is left to train: 40 steps done, 20 were asked for\n" in done.stdout
    assert metrics(run_dir) == metrics(by_one)
    assert weights(run_dir) == weights(by_one)
    assert not re.search(r"^epoch ", done.stdout, re.M)
    again = read(run_dir, "summary.json")
    before = read(by_one, "summary.json")
    for name in ("status", "steps", "samples_seen", "test", "epoch_seconds"):
        assert again[name] == before[name], name


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [ONE, THREE])
def test_an_evaluation_repeats_the_score_of_the_training(
    processes: str, by_three: tuple[Path, str], tmp_path: Path
) -> None:
    trained = by_three[0]
    run_dir = tmp_path / "run"
    done = run("mode=evaluate", f"checkpoint.resume={trained}", f"run_dir={run_dir}", processes)
    assert (done.returncode, done.stderr) == (0, "")
    summary = read(run_dir, "summary.json")
    assert summary["test"] == read(trained, "summary.json")["test"]
    assert (summary["mode"], summary["steps"]) == ("evaluate", 40)
    config, before = (
        load_frozen((folder / "config.yaml").read_text()) for folder in (run_dir, trained)
    )
    assert (config.model, config.data) == (before.model, before.data)
    assert not (run_dir / "checkpoints").exists()


def test_nothing_is_imported_from_where_the_user_stands(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('this is the wrong file')\n")
    done = run(*SMALL, "train.epochs=1", ONE, "run_dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here/summary.json").exists()


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep of two trials, the first of which fails, and its standard output."""
    sweep = tmp_path_factory.mktemp("half_failed") / "sweep"
    done = run("-m", "optimizer.lr=1e30,0.01", *SMALL, "train.max_steps=6", ONE, f"run_dir={sweep}")
    assert done.returncode == 70, done.stderr
    return sweep, done.stdout


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failed_trial_and_shows_both(
    half_failed: tuple[Path, str],
) -> None:
    sweep, said = half_failed
    failed, completed = (
        json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()
    )
    assert (failed["trial"], failed["status"], failed["exit_code"]) == (0, "failed", 70)
    assert "trial 0 (1 of 2): optimizer.lr=1e+30" in said
    assert "not finite" in failed["reason"]
    assert (completed["trial"], completed["status"], completed["exit_code"]) == (1, "completed", 0)
    assert completed["overrides"] == ["optimizer.lr=0.01"], "what all trials share is left out"
    assert failed["kind"] == "non_finite_loss" and "objective" not in failed
    assert completed["objective"] == read(sweep / "1", "summary.json")["test"]["loss"]
    assert read(sweep / "0", "failure.json")["kind"] == "non_finite_loss"
    assert read(sweep / "0", "summary.json")["status"] == "failed"
    assert not (sweep / "1/failure.json").exists()
    assert re.search(r"^ *trials *$", said, re.M)
    assert f"best trial 1: optimizer.lr=0.01  test.loss {completed['objective']:.4f}" in said
    assert re.search(r"^ +0 .*failed", said, re.M) and re.search(r"^ +1 .*completed", said, re.M)
    assert f"results {sweep}/results.jsonl" in said.replace("\n", "")
    assert f"report {sweep}/report.html" in said.replace("\n", "")
    trials, reasons = json.loads((sweep / "report.json").read_text())["tables"]
    assert trials["columns"][:4] == ["trial", "test.loss", "optimizer.lr", "status"]
    good, bad = trials["rows"]
    assert good[:4] == [1, completed["objective"], "0.01", "completed"], "the best first"
    assert bad[:4] == [0, None, "1e+30", "failed (70): non_finite_loss"]
    assert reasons["rows"] == [[0, "optimizer.lr=1e+30", failed["reason"]]]
    assert f"mode=evaluate checkpoint.resume={sweep}/1" in said
    assert (failed["run_dir"], completed["run_dir"]) == (f"{sweep}/0", f"{sweep}/1")


@pytest.mark.slow
def test_the_page_for_agents_has_the_keys_that_are_written(half_failed: tuple[Path, str]) -> None:
    sweep, _ = half_failed
    rows = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    others = {"at_once", "alone", "evaluations", "last_value", "metrics"}
    assert {key for row in rows for key in row} | others == told("results.jsonl")
    assert read(sweep / "1", "summary.json").keys() == told("summary.json")
    assert read(sweep / "0", "failure.json").keys() == told("failure.json")
    assert {key for line in metrics(sweep / "1") for key in line} == told("metrics.jsonl")


@pytest.mark.slow
def test_sweep_evaluates_each_checkpoint_with_its_model(by_one: Path, tmp_path: Path) -> None:
    """The checkpoints are of model=mlp, the default is another; a run and a single checkpoint both
    are a path."""
    places = f"{by_one},{by_one}/checkpoints/step_00000030"
    words = (
        "-m",
        "mode=evaluate",
        f"checkpoint.resume={places}",
        "tuning.pin_memory=true",
        f"run_dir={tmp_path}/sweep",
    )
    done = run(*words, ONE, "objective=test.accuracy")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: tuning.pin_memory=true has no effect on CPU") == 2
    newest, older = (
        json.loads(line) for line in (tmp_path / "sweep/results.jsonl").read_text().splitlines()
    )
    assert newest["loss"] == read(by_one, "summary.json")["test"]["loss"] != older["loss"]
    assert read(tmp_path / "sweep/1", "summary.json")["steps"] == 30


@pytest.mark.slow
def test_a_bad_value_refuses_the_whole_sweep(tmp_path: Path) -> None:
    done = run(
        "-m",
        "optimizer.lr=0.01,-1",
        "train.global_batch_size=96,97",
        *SMALL,
        "name=bad",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "2 problems in the configuration" in done.stderr
    assert done.stderr.count("optimizer.lr=-1") == 1
    assert done.stderr.count("train.global_batch_size=97: cannot be split") == 1
    assert (done.stdout, list(tmp_path.iterdir())) == ("", [])


# --- foreign code ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_somebody_elses_model_data_and_optimizer_on_three_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run(
        "model._target_=foreign.Net",
        "data._target_=foreign.Halves",
        "+data.rows=160",
        "trusted_modules=[foreign]",
        "optimizer._target_=torch.optim.NAdam",
        "optimizer.lr=0.01",
        "train.max_steps=20",
        "tuning.num_workers=1",
        f"run_dir={run_dir}",
        THREE,
        env=foreign_code(tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "foreign.Net, 1,210 parameters" in done.stdout
    assert "160 samples" in done.stdout
    summary = read(run_dir, "summary.json")
    assert summary["test"]["samples"] == 50
    assert summary["test"]["accuracy"] > 0.7, "a sum is easy to learn"
    assert set(load(weights(run_dir))) == {
        "layers.1.weight",
        "layers.1.bias",
        "layers.3.weight",
        "layers.3.bias",
    }


def fetched(world: World, folder: str) -> bool:
    """What a data set with a download does: only the leader fetches, slowly; is it there for
    everyone?"""
    file = Path(folder, "data set")
    with local_leader_first(world, "cpu"):
        if world.is_local_leader:
            time.sleep(0.5)
            file.touch()
        return file.exists()


def test_one_process_per_host_downloads(tmp_path: Path) -> None:
    assert on_ranks(3, fetched, str(tmp_path)) == [True, True, True]


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_exception_on_one_rank_is_told_once_by_that_rank(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = foreign_net(fault="raise", rank=1, call=3)
    done = run(*words, f"run_dir={run_dir}", THREE, env=foreign_code(tmp_path))
    assert done.returncode == 70
    assert processes_of(run_dir) == {}
    lines = done.stderr.splitlines()
    assert lines.count("Traceback (most recent call last):") == 1
    assert lines.count("ValueError: boom") == 1
    assert any("foreign.py" in line for line in lines), "the traceback leads to the user's own line"
    (fatal,) = fatal_lines(done.stderr)
    assert "rank 1 on" in fatal
    failure = read(run_dir, "failure.json")
    assert failure.keys() >= FAILURE
    assert (failure["kind"], failure["rank"], failure["step"]) == (
        "exception",
        1,
        2,
    )  # two steps were done
    assert failure["phase"] == "forward"
    assert failure["detail"] == "ValueError: boom"
    assert failure["log"] == str(run_dir / "logs/rank_1.log")
    assert "ValueError: boom" in Path(failure["log"]).read_text()
    assert read(run_dir, "summary.json")["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "under_torchrun"),
    [("raise", 0, False), ("vanish", 2, False), ("raise", 1, True)],
)
def test_a_checkpoint_that_is_being_written_survives_the_failure(
    fault: str, rank: int, under_torchrun: bool, tmp_path: Path
) -> None:
    """80 MB take much longer to write than the step that fails, the one after."""
    run_dir = tmp_path / "run"
    env = foreign_code(tmp_path)
    words = [
        *foreign_net(fault=fault, rank=rank, call=5, ballast=20_000_000),
        "checkpoint.every_steps=4",
    ]
    if under_torchrun:
        done = run(*words, f"run_dir={run_dir}", env=env, command=torchrun())
    else:
        done = run(*words, f"run_dir={run_dir}", THREE, env=env)
    assert done.returncode == (1 if under_torchrun else 70), done.stderr
    assert checkpoints(run_dir) == ["step_00000004"]
    assert weights(run_dir)
    assert processes_of(run_dir) == {}


@pytest.mark.slow
def test_nan_on_one_rank_stops_all_before_the_step_and_names_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = foreign_net(fault="nan", rank=1, call=4)
    done = run(
        *words, "checkpoint.every_steps=1", f"run_dir={run_dir}", THREE, env=foreign_code(tmp_path)
    )
    assert done.returncode == 70
    assert processes_of(run_dir) == {}
    failure = read(run_dir, "failure.json")
    assert failure.keys() >= FAILURE
    assert (failure["kind"], failure["rank"], failure["step"]) == (
        "non_finite_loss",
        1,
        3,
    )  # three steps were done
    assert (
        "rank 1" in failure["detail"] and "samples of this rank are finite: " in failure["detail"]
    )
    (fatal,) = fatal_lines(done.stderr)
    assert "non_finite_loss (rank 1 on" in fatal
    assert "Traceback" not in done.stderr
    assert checkpoints(run_dir)[-1] == "step_00000003", "the fourth step was not taken"
    assert all(tensor.isfinite().all() for tensor in load(weights(run_dir)).values())
