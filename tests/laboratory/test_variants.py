"""The variants of a study, from its file and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab.study import variants_report
from ddp_lab.study.trials import Trial
from ddp_lab.study.variants import NEEDS_GPU, merged
from ddp_train.config.overrides import read_overrides
from ddp_train.errors import ConfigError
from tests.support.commands import (
    PROGRAM,
)
from tests.support.studies import TINY, planned, whole


def refused(*words: str) -> str:
    """The message for a command line that is wrong."""
    with pytest.raises(ConfigError) as caught:
        planned(*words)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PROGRAM.options("study")
        if "kind:" not in (PROGRAM.presets / "study" / f"{name}.yaml").read_text()
    ],
)
def test_every_study_of_variants_can_be_made_here(name: str) -> None:
    request, study = whole(name)
    assert study.first.device == "cpu" and not study.named(study.baseline).reason
    assert sum(not variant.reason for variant in study.variants) > 1
    gpu = [
        variant
        for variant in study.variants
        if "device=cuda" in variant.overrides or variant.name in study.config.needs_gpu
    ]
    assert gpu == [] or all(variant.reason for variant in gpu)
    assert all(
        "python launch.py" in command
        for command in variants_report.build_report(request, study, {}, 0.0).commands
    )


@pytest.mark.slow
def test_whatever_a_folder_is_called_its_runs_find_it(tmp_path: Path) -> None:
    for name in ("plain", "a b", "a=1,b={2}", "it's", "$x"):
        folder = tmp_path / name
        read_back = read_overrides(PROGRAM, [Trial([], folder).run_dir_word])
        assert (read_back.problems, read_back.given) == ([], {"run_dir": str(folder)})
    assert (
        planned("study=runs", "data=digits", "study.grid=['seed=1,2']").variants[1].folder
        == "seed_2"
    )


@pytest.mark.slow
def test_rung_has_the_tips_below_it_that_can_run() -> None:
    _, study = whole("tips")
    rungs = {variant.name: variant for variant in study.variants}
    fused = rungs["fused optimizer"]
    assert {
        "tuning=none",
        "tuning.precision=bf16",
        "tuning.channels_last=true",
        "tuning.optimizer=fused",
    } <= {*fused.overrides}
    assert (
        rungs["pin_memory"].reason == NEEDS_GPU and "tuning.pin_memory=true" not in fused.overrides
    )
    assert (fused.against, rungs["AMP"].against) == ("channels_last", "workers auto")


def test_command_line_wins_over_the_study() -> None:
    study = planned("study=tips", "data=synthetic", "study.only=[none]")
    assert study.first.data.name == "synthetic"


@pytest.mark.slow
def test_a_grid_is_every_combination_of_every_variant() -> None:
    study = planned(
        "study=large_batch",
        "study.grid=['train.global_batch_size=96,192',seed=1]",
        "study.baseline='sgd, global_batch_size=96, seed=1'",
    )
    assert [v.name for v in study.variants][:3] == [
        "sgd, global_batch_size=96, seed=1",
        "sgd, global_batch_size=192, seed=1",
        "lars, global_batch_size=96, seed=1",
    ]
    assert study.variants[1].values == {"train.global_batch_size": "192", "seed": "1"}


def test_later_override_replaces_earlier() -> None:
    assert merged(["a=1", "b.c=2"], ["++b.c=3"], ["d=4"]) == ["a=1", "++b.c=3", "d=4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "mode=study: needs the name of a study; add study="),
        (["study=strategy"], "study=strategy: must be one of"),
        (["study=tips", "-m"], "-m: mode=study takes no flag but --help; leave it out"),
        (
            ["study=tips", "study.repeat=3"],
            "study.repeat=3: no such key; did you mean study.repeats?",
        ),
        (["study=tips", "study.repeats=0"], "study.repeats=0: must be at least 1"),
        (
            ["study=tips", "study.only=[none]", "optimizer.lrr=1"],
            "did you mean optimizer.lr? (study.variants: none)",
        ),
        (["study=tips", "lr"], "lr: not of the form key=value"),
        (
            ["study=strategies", "strategy=single"],
            "strategy=single: study=strategies sets strategy for each variant",
        ),
        (
            ["study=strategies", "study.only=[dpp]"],
            "study.only=[dpp]: no variant of that name; did you mean dp?",
        ),
        (
            ["study=strategies", "study.only=[ddp]"],
            "study.only: leaves out the baseline; add single",
        ),
        (
            ["study=strategies", "study.against.dp=one"],
            "study.against=one: no variant of that name; there are 'single', 'dp'",
        ),
        (
            ["study=strategies", "study.only=[single,'ddp, SyncBN']"],
            "study.only: leaves out 'ddp, batch norm', the baseline of 'ddp, SyncBN'; add",
        ),
        (
            ["study=strategies", "study.metric=test.accuracyy"],
            "study.metric=test.accuracyy: task=auto has no metric accuracyy; it has",
        ),
        (
            ["study=strategies", "study.metric=validation.loss"],
            "study.metric=validation.loss: there is no validation set; add data.validation=0.1",
        ),
        (["study=strategies", "study.baseline=one"], "study.baseline=one: no variant of that name"),
        (
            ["study=strategies", "study.variants.mine=3"],
            "study.variants.mine=3: must be a list of overrides",
        ),
        (
            ["study=strategies", "study.variants.mine=[train.epochs=0]"],
            "must be at least 1 (study.variants: mine)",
        ),
        (
            ["study=strategies", "study.only=[single]", "train.epochs=0"],
            "train.epochs=0: must be at least 1",
        ),
        (
            ["study=strategies", "study.only=[single]", "launch.nnodes=2"],
            "a study runs on one host",
        ),
    ],
)
def test_mistakes_are_told_before_anything_runs(words: list[str], message: str) -> None:
    assert message in refused(*words)


@pytest.mark.slow
def test_variants_of_another_model_keep_their_rows() -> None:
    study = planned("study=strategies", "model=mlp", *TINY[:2])
    assert study.named("single, batch norm").reason.startswith(
        "cannot run with the command: model.norm=batch: no such key in model=mlp"
    )
    assert not study.named("ddp").reason


@pytest.mark.slow
def test_a_variant_that_does_not_fit_this_machine_keeps_its_row() -> None:
    study = planned(
        "study=strategies",
        "study.variants.many=[strategy=ddp,launch.nproc_per_node=5]",
        *TINY[:2],
        "study.only=[single,ddp,many]",
    )
    assert study.named("many").reason.startswith(
        "cannot run here: train.global_batch_size=24: cannot be split over 5"
    )
