"""The page of a run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ddp_train.config.auto import resolve
from ddp_train.config.freeze import load_frozen, not_default, to_text
from ddp_train.config.overrides import read_overrides
from ddp_train.hardware import Hardware
from ddp_train.models.config import MlpConfig
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config, built_in_directions
from ddp_train.options.sections import LaunchConfig, TuningConfig
from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.page import as_page
from ddp_train.telemetry.pages.run_files import as_typed, read_run
from ddp_train.telemetry.pages.run_page import run_page, uses
from ddp_train.telemetry.pages.sweep_page import goes_on
from ddp_train.telemetry.score_lines import built_in_direction
from tests.support.commands import PROGRAM, SMALL, read, run
from tests.support.pages import BOUND, leave_run, report_in, section_of


def test_only_settings_that_are_not_the_default_are_listed() -> None:
    config = Config(
        seed=3,
        device="cpu",
        model=MlpConfig(hidden=99),
        data=CustomDataConfig(target="my.Data", arguments={"size": 8}),
        tuning=TuningConfig(compile=False, pin_memory=False),
        chosen_keys=["device", "tuning.pin_memory"],
    )
    assert not_default(config) == {
        "seed": 3,
        "model": "mlp",
        "model.hidden": 99,
        "data": "custom",
        "data.target": "my.Data",
        "data.arguments.size": 8,
        "tuning.compile": False,
    }, "auto has chosen device and pin_memory, not compile"


def test_keys_that_auto_chose_are_recorded() -> None:
    asked = Config(tuning=TuningConfig(compile=False), launch=LaunchConfig(nproc_per_node="2:4"))
    resolved = resolve(asked, Hardware(gpus=0, cpus=4), None)
    assert {"device", "tuning.pin_memory"} <= {*resolved.chosen_keys}
    assert not_default(resolved) == {"tuning.compile": False, "launch.nproc_per_node": "2:4"}
    assert load_frozen(to_text(resolved)).chosen_keys == resolved.chosen_keys


def test_page_says_the_state_of_its_run(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    page = as_page(run_page(read_run(folder), {"model": "<mlp>"}, 10))
    titles = [section["title"] for section in report_in(page)["sections"]]
    assert {"Memory of a process", "CPU cores in use"} <= {*titles}
    uses = section_of(page, "How to use the run")["lines"]
    assert "mode=evaluate checkpoint.resume=" in uses[0] and "train.epochs=8" in uses[2]
    assert uses[2].startswith("python launch.py run_dir=")
    assert section_of(page, "Settings that are not the default")["lines"] == ["model=<mlp>"]
    assert "<mlp>" not in page and 'http-equiv="refresh"' not in page
    assert len(page.encode()) < BOUND
    write_json(folder / "summary.json", {"status": "failed"})
    write_json(
        folder / "failure.json",
        {
            "kind": "oom",
            "rank": 1,
            "step": 7,
            "phase": "forward",
            "detail": "no memory",
            "remedy": "less",
            "log": "l",
        },
    )
    report = run_page(read_run(folder), {})
    assert (
        report.state.startswith("failed") and "oom; rank 1, step 7, forward" in report.findings[0]
    )
    (folder / "summary.json").write_text("{cut o")
    (folder / "failure.json").unlink()
    (folder / "metrics.jsonl").write_bytes(b'{"kind": "tra')
    report = run_page(read_run(folder), {})
    assert report.state == "ended" and "run_dir=" in report.findings[0]


def leave_recalls(folder: Path, recalls: list[float]) -> Path:
    """A run whose accuracy rises, with other recalls, by which it selects."""
    leave_run(folder, len(recalls))
    rest = iter(recalls)
    lines = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "test":
            line["recall"] = next(rest)
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "checkpoint: {best_metric: test.recall}\n")
    return folder


def test_page_marks_the_best_by_the_metric_that_selects(tmp_path: Path) -> None:
    best = {"metric": "test.recall", "better": "max", "value": 0.7, "step": 20}
    folder = leave_recalls(tmp_path / "r", [0.1, 0.7, 0.3, 0.2])
    write_json(folder / "summary.json", {"status": "completed", "best": best})
    report = run_page(read_run(folder), {})
    table = next(table for table in report.tables if table.title.startswith("Evaluations"))
    assert table.best == 1 and "best by recall" in table.note
    assert report.numbers["best recall, step 20"] == "0.7000"
    assert report.numbers["test accuracy, last"] == "90.00%"


def test_page_marks_no_best_if_the_direction_is_unknown(tmp_path: Path) -> None:
    folder = leave_recalls(tmp_path / "r", [0.1, 0.7, 0.3, 0.2])
    (folder / "summary.json").unlink()
    report = run_page(read_run(folder), {})
    table = next(table for table in report.tables if table.title.startswith("Evaluations"))
    assert table.best is None and not table.note
    assert report.numbers["test recall, last"] == "0.2000"
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "metrics: [{name: recall, better: max}]\n")
    table = next(
        table for table in run_page(read_run(folder), {}).tables if table.title.startswith("Eval")
    )
    assert table.best == 1


def test_directions_of_built_in_metrics_are_those_of_the_tasks() -> None:
    assert {name: built_in_direction(name) for name in built_in_directions()} == {
        **built_in_directions()
    }


def test_processes_of_several_hosts_are_not_told_as_all(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    assert run_page(read_run(folder), {}).numbers["processes"] == "2 x cpu"
    config = folder / "config.yaml"
    config.write_text(
        config.read_text().replace("nproc_per_node: 2", "nproc_per_node: 2, nnodes: 3")
    )
    assert run_page(read_run(folder), {}).numbers["processes"] == "2 x cpu on each of 3 hosts"


def test_of_equal_accuracies_the_lower_loss_is_the_best(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    log = folder / "metrics.jsonl"
    log.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": 0.5', log.read_text()))
    best = read_run(folder).best
    assert best is not None and best["step"] == 40, "the losses fall"
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "checkpoint: {best_metric: test.accuracy}\n")
    best = read_run(folder).best
    assert best is not None and best["step"] == 10, "a run that was asked for it keeps the first"


def test_settings_are_shown_as_they_are_typed(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    command = {"command": "python launch.py ++model.how=oom launch.nproc_per_node=1 run_dir=r"}
    (folder / "commands.jsonl").write_text(json.dumps(command))
    typed = {
        "seed": 3,
        "model": "custom",
        "model.target": "net.Net",
        "model.arguments": {"how": "oom"},
    }
    sections = {section.title: section for section in run_page(read_run(folder), typed).sections}
    lines = sections["Settings that are not the default"].lines  # type: ignore
    assert lines == ["seed=3", "model._target_=net.Net", "model.how=oom", "launch.nproc_per_node=1"]
    assert as_typed({"model": {"name": "custom", "target": "a.B", "arguments": {}}}).keys() == {
        "model.name",
        "model._target_",
    }


@pytest.mark.parametrize("name", ["lr=1", "a,b", "it's", 'a"b\\', "my runs", "[x]", "{y:1}"])
def test_printed_commands_are_read_as_they_are_meant(tmp_path: Path, name: str) -> None:
    folder = leave_run(tmp_path / name)
    printed = [*uses(read_run(folder)), goes_on("python launch.py -m seed=1,2", folder)]
    words = [
        word
        for line in printed
        for word in shlex.split(line)
        if word.startswith(("run_dir", "checkpoint"))
    ]
    read_back = [read_overrides(PROGRAM, [word]) for word in words]
    assert len(words) == 4 and not any(found.problems for found in read_back)
    assert [*read_back[0].given.values()] == [*read_back[-1].given.values()] == [str(folder)]


def test_printed_commands_trust_the_code_of_the_run(tmp_path: Path) -> None:
    run = read_run(leave_run(tmp_path / "run"))
    run.config["trusted_modules"] = ["my_net", "my_data"]
    for command in uses(run):
        found = read_overrides(PROGRAM, [text for text in shlex.split(command) if "=" in text])
        assert found.problems == []
        assert found.given["trusted_modules"] == ["my_net", "my_data"]


@pytest.mark.parametrize("typed", ["python -m ddp_train", "python launch.py", "ddp-train"])
@pytest.mark.parametrize("rest", ["model=mlp", "-m seed=1,2", "--config-dir=mine model=mlp"])
def test_printed_commands_start_as_the_run_was_started(
    typed: str, rest: str, tmp_path: Path
) -> None:
    run = read_run(leave_run(tmp_path / "run"))
    run.commands[-1]["command"] = f"{typed} {rest}"
    for command in uses(run):
        program, _, words = command.partition(f"{typed} ")
        assert program == "" and words.startswith(("mode=", "run_dir=")), command


def test_run_that_trains_nothing_is_repeated_by_its_command(tmp_path: Path) -> None:
    """Its folder holds no checkpoint to evaluate."""
    run = read_run(leave_run(tmp_path / "run"))
    run.config["mode"] = "evaluate"
    assert uses(run) == [run.command]


@pytest.mark.slow
def test_run_leaves_its_page(tmp_path: Path) -> None:
    done = run(*SMALL, "train.epochs=3", "run_dir=r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "r/report.html").read_text()
    assert report_in(page)["state"] == "completed"
    assert section_of(page, "Loss")["chart"]["kind"] == "curves"
    assert {"hardware", "versions", "host"} <= json.loads(
        (tmp_path / "r/commands.jsonl").read_text()
    ).keys()
    assert len(read(tmp_path / "r", "timeline.json")["seconds"]) == 2
    chosen = section_of(page, "Settings that are not the default")["lines"]
    assert not any("launch.page" in line for line in chosen)


def test_a_session_without_losses_tells_training_and_test_apart(tmp_path: Path) -> None:
    """A loop that logs `mse` and scores it: two plots of one name, and no loss."""
    folder = leave_run(tmp_path / "r")
    lines = []
    for step in (10, 20):
        moment = {"step": step, "epoch": step // 10, "time": 1.7e9 + step}
        lines.append({"kind": "train", **moment, "mse": 0.5, "samples_per_second": 9.0})
        lines.append({"kind": "test", **moment, "mse": 0.4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = as_page(run_page(read_run(folder), {}))
    titles = [section["title"] for section in report_in(page)["sections"]]
    assert {"MSE (test)", "MSE (training)"} <= {*titles} and not {"MSE", "mse"} & {*titles}
    table = section_of(page, "Evaluations of the test set")
    assert [column["name"] for column in table["columns"]] == ["epoch", "step", "mse"]
