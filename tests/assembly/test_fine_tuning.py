"""Weights to begin with, frozen parts, and what happens when they begin to train."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ddp_train.assembly.initial_weights import load_named_weights, weights_of
from ddp_train.config import fine_tuning
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.inference.trained_model import load
from ddp_train.models.freezing import Frozen
from ddp_train.models.initial_weights import (
    describe_origin,
    load_initial_weights,
    read_weights,
    torchvision_weights,
)
from ddp_train.models.torchvision.config import classifiers as torchvision_classifiers
from ddp_train.models.torchvision.config import names_of_weights
from ddp_train.models.torchvision_networks import build_torchvision
from ddp_train.options.schema import Config, RequestedRun
from tests.campaigns.lost_ranks import Kill, differences, outcome
from tests.support.commands import ONE, SMALL, THREE, checkpoints, fatal_lines, read, run
from tests.support.jobs import config_of, job_of, largest_difference
from tests.support.ranks import on_ranks


def messages_of(config: Config) -> list[str]:
    """The problems of where the model begins, and of the optimizer's groups."""
    run = RequestedRun(config, config, Hardware(cpus=1))
    found = [*config.model.problems(run), *config.optimizer.problems(run)]
    return [str(problem) for problem in (*found, *fine_tuning.problems(config))]


def network(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, outputs))


def refusal(model: nn.Module, path: Path, *ignore: str) -> str:
    with pytest.raises(DataError) as refused:
        load_initial_weights(model, read_weights(path, "model.init_from=w"), ignore)
    return f"{refused.value}; {refused.value.remedy}"


# --- weights to begin with ------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module.model."])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_are_found_under_the_names_of_wrappers(
    prefix: str, suffix: str, tmp_path: Path
) -> None:
    theirs = network()
    ours = network().double()
    content = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(content, path)
    origin = load_initial_weights(ours, read_weights(path, "w"))
    assert all(
        torch.equal(tensor.double(), theirs.state_dict()[name])
        for name, tensor in ours.state_dict().items()
    )
    assert (
        origin.loaded == 9
        and origin.fresh == []
        and (f"prefix {prefix} removed" in describe_origin(origin)) == (prefix != "")
    )


def test_weights_of_a_whole_training_run_are_found_in_it(tmp_path: Path) -> None:
    """As Lightning writes them: with the loss's own tensors beside, which must be named."""
    theirs = network()
    ours = network()
    weights = {f"model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save(
        {"epoch": 3, "state_dict": {**weights, "loss.weight": torch.ones(2)}},
        tmp_path / "last.ckpt",
    )
    assert "not in the model: loss.weight; if this" in refusal(ours, tmp_path / "last.ckpt")
    origin = load_initial_weights(ours, read_weights(tmp_path / "last.ckpt", "w"), ["loss.*"])
    assert torch.equal(ours[2].weight, theirs[2].weight)
    assert origin.notes == ["its entry state_dict", "prefix model. removed"]


def test_folder_without_valid_weights_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs/a/checkpoints/step_00000003").mkdir(parents=True)
    (tmp_path / "runs/a/checkpoints/step_00000003/manifest.json").write_text("{}")
    for folder, remedy in (
        ("runs", "give a run in that folder, for example .*runs/a"),
        ("runs/a", r"name another run, a checkpoint, or a file: model\.init_from=PATH"),
    ):
        with pytest.raises(DataError, match="holds no valid checkpoint") as refused:
            weights_of(str(tmp_path / folder))
        assert re.fullmatch(remedy, refused.value.remedy)


def test_a_prefix_that_only_the_model_has_is_put_before(tmp_path: Path) -> None:
    """Models of torchvision for grey images stand behind a layer that makes them three-coloured."""
    theirs = network()
    ours = nn.Sequential(nn.Identity(), network())
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    assert load_initial_weights(ours, read_weights(tmp_path / "w.pt", "w")).notes == [
        "prefix 1. added"
    ]
    assert torch.equal(ours[1][2].weight, theirs[2].weight)


def test_names_as_in_the_file_are_ignored_too(tmp_path: Path) -> None:
    """The model stands behind another layer, so that all names of the file get a prefix."""
    theirs = {**network().state_dict(), "cls.weight": torch.ones(2)}
    ours = nn.Sequential(nn.Identity(), network())
    drawn = ours[1][2].weight.clone()
    torch.save(theirs, tmp_path / "w.pt")
    weights = read_weights(tmp_path / "w.pt", "w")
    origin = load_initial_weights(ours, weights, ["cls.*", "2.*"])
    assert origin.fresh == ["1.2.weight", "1.2.bias"]
    assert torch.equal(ours[1][2].weight, drawn)
    assert torch.equal(ours[1][0].weight, theirs["0.weight"])


def test_two_networks_in_one_file_are_not_guessed_at(tmp_path: Path) -> None:
    both = {
        f"{part}.{name}": tensor
        for part in ("student", "teacher")
        for name, tensor in network().state_dict().items()
    }
    torch.save(both, tmp_path / "w.pt")
    assert "has several parts that fit the model: student.* and teacher.*" in refusal(
        network(), tmp_path / "w.pt"
    )


def test_all_names_and_shapes_that_differ_are_listed(tmp_path: Path) -> None:
    theirs = network(outputs=10).state_dict()
    ours = network()
    theirs["0.wieght"] = theirs.pop("0.weight")
    theirs["1.momentum"] = torch.ones(1)
    torch.save(theirs, tmp_path / "w.pt")
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert (
        refusal(ours, tmp_path / "w.pt")
        == "model.init_from=w does not fit the model; missing in the file: 0.weight (perhaps"
        " 0.wieght in the file); not in the model: 0.wieght, 1.momentum; of another shape:"
        " 2.weight [10, 5] in the file, [3, 5] in the model, 2.bias [10] in the file, [3] in the"
        " model; if this is intended, add"
        " 'model.init_ignore=[0.*,1.*,2.*]'"
    )
    assert largest_difference(before, ours.state_dict()) == 0, (
        "nothing is taken of what does not fit"
    )
    with pytest.raises(
        ConfigError, match=r"init_ignore=\[3\.\*\]: matches no name; there are, for example, \d\.\*"
    ):
        load_initial_weights(ours, read_weights(tmp_path / "w.pt", "w"), ["3.*", "2.*"])
    origin = load_initial_weights(
        ours, read_weights(tmp_path / "w.pt", "w"), ["2.*", "0.w*", "1.momentum"]
    )
    assert origin.fresh == ["0.weight", "2.weight", "2.bias"] and torch.equal(
        ours[0].bias, theirs["0.bias"]
    )
    assert torch.equal(
        ours[2].bias, before["2.bias"]
    ) and "randomly initialised: 0.weight, 2.weight, 2.bias" in describe_origin(origin)


def test_tied_weights_may_stand_in_the_file_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict(
            {"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
        )
        model["head"].weight = model["embedding"].weight
        return model

    theirs = tied()
    ours = tied()
    save_file({"embedding.weight": theirs["embedding"].weight.detach()}, tmp_path / "w.safetensors")
    assert load_initial_weights(ours, read_weights(tmp_path / "w.safetensors", "w")).loaded == 1
    assert torch.equal(ours["head"].weight, theirs["head"].weight)


class Harm:
    """What a pickle may do."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (Harm(), r"cannot be read as plain tensors: UnpicklingError: Weights only load failed"),
        (
            {"optimizer": {"lr": 0.1}},
            "it is a dict with optimizer",
        ),
        (
            {"model": {"a": torch.ones(1)}, "net": {"a": torch.ones(1)}},
            "it is a dict with model, net",
        ),
        (torch.ones(2), "it is a Tensor"),
        ({}, "it is a dict with nothing"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    content: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "w.pt")
    assert re.search(expected, refusal(network(), Path("w.pt"))) and not Path("harmed").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4 half a zip", pickle.dumps([1])[:-1], b"\0" * 100]
)
def test_a_damaged_file_is_refused(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    assert re.search(
        "cannot be read as plain tensors|is not a state dict", refusal(network(), path)
    )


def test_what_can_be_known_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("hub").mkdir()
    Path("hub/model.safetensors").touch()
    Path("notes.txt").touch()

    def problems(mode: str = "train", resume: str = "auto", **model: Any) -> list[str]:
        section = {"name": "mlp", **model}
        config = config_of(
            World(), model=section, mode=mode, checkpoint={"resume": resume}, run_dir="nowhere"
        )
        return messages_of(config)

    assert problems(init_from="hub/model.safetensors") == []
    assert problems(init_from="away.pt") == [
        f"model.init_from=away.pt: no such file or folder; give the full path, or one from"
        f" {tmp_path}"
    ]
    assert problems(init_from="empty") == [
        "model.init_from=empty: holds no checkpoint; name a run that has saved a checkpoint"
    ]
    assert "name the file: model.init_from=hub/model.safetensors" in problems(init_from="hub")[0]
    assert "or a file that ends with .safetensors, .pt" in problems(init_from="notes.txt")[0]
    assert (
        problems("evaluate", init_from="away.pt")
        == problems(resume="a_run", init_from="away.pt")
        == []
    )
    assert problems(init_ignore=["a"], freeze_epochs=1) == [
        "model.init_ignore=[a]: has an effect only with model.init_from; add model.init_from=PATH,"
        " or leave model.init_ignore out",
        "model.freeze_epochs=1: has an effect only with model.freeze; add 'model.freeze=[GLOB]', or"
        " leave model.freeze_epochs out",
    ]


ARCH = "shufflenet_v2_x0_5"
FILE = "shufflenetv2_x0.5-f707e7126e.pth"
"""The smallest of torchvision's, and where torch's cache has its weights."""


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 10), (3, 1000)])
def test_torchvision_weights_leave_a_head_of_other_classes(
    channels: int, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import get_model

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.manual_seed(5)
    theirs = get_model(ARCH, weights=None).state_dict()
    asked: list[str] = []

    def download(url: str, place: str, digest: str, progress: bool) -> None:
        asked.append(digest)
        torch.save(theirs, place)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    config = config_of(World(), model={"name": "torchvision", "arch": ARCH, "weights": "DEFAULT"})
    for _ in range(2):
        network = build_torchvision((channels, 32, 32), classes, arch=ARCH, weights="DEFAULT")
        origin = load_named_weights(config, network, World(), "cpu")
    assert asked == ["f707e7126e"] and (tmp_path / "hub/checkpoints" / FILE).exists(), (
        "downloaded once, and checked"
    )
    prefix = "1." if channels == 1 else ""
    head = [] if classes == 1000 else [f"{prefix}fc.weight", f"{prefix}fc.bias"]
    assert (
        origin is not None
        and origin.fresh == head
        and f"model.weights=DEFAULT ({FILE})" in origin.source
    )
    ours = network.state_dict()
    same = {name for name in theirs if torch.equal(ours[prefix + name], theirs[name])}
    assert {prefix + name for name in theirs} - {prefix + name for name in same} == set(head)


def test_weights_that_cannot_be_downloaded_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", mock.Mock(side_effect=URLError("no route")))
    with pytest.raises(
        DataError, match=rf"model\.weights=DEFAULT: http.*{FILE} cannot be downloaded: .*no route"
    ) as no:
        torchvision_weights(ARCH, "DEFAULT")
    assert no.value.remedy.endswith(f"copy the file to {tmp_path}/hub/checkpoints/{FILE}")
    assert not list((tmp_path / "hub/checkpoints").iterdir())


def test_names_of_weights_are_those_of_torchvision() -> None:
    import torchvision
    from torchvision.models import get_model_weights, list_models

    classifiers = [
        name for name in list_models(module=torchvision.models) if name in torchvision_classifiers()
    ]
    assert len(classifiers) > 70
    for name in classifiers:
        assert set(names_of_weights(name)) == set(get_model_weights(name).__members__), name
    for model, expected in (
        (
            {"arch": "resnet50", "weights": "IMAGENET1K_V3"},
            "resnet50 has IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT",
        ),
        (
            {"arch": "resnet18", "weights": "DEFAULT", "init_from": "w.pt"},
            "contradicts model.init_from=w.pt",
        ),
    ):
        config = config_of(World(), model={"name": "torchvision", **model})
        assert expected in messages_of(config)[0]


# --- frozen parts ---------------------------------------------------------------------------------


def test_what_is_frozen_rests_until_it_is_not() -> None:
    model = nn.Sequential(
        nn.Linear(4, 5),
        nn.BatchNorm1d(5),
        nn.BatchNorm1d(5, affine=False),
        nn.Dropout(0.5),
        nn.Linear(5, 3),
    )
    model[0].bias.requires_grad_(False)  # the user's own doing
    model[0].register_buffer("mask", torch.ones(1), persistent=False)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model.add_module("more", spectral)
    frozen = Frozen(model, ["[012].*", "more.*"])
    assert [type(layer).__name__ for layer in frozen.at_rest] == [
        "BatchNorm1d",
        "BatchNorm1d",
        "_SpectralNorm",
    ]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["4.weight", "4.bias"] and frozen.lasts
    frozen.unfreeze()
    assert (
        not model[0].bias.requires_grad
        and model[1].weight.requires_grad
        and not frozen.at_rest
        and not frozen.lasts
    )


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (
            ["1.weihgt"],
            r"model\.freeze=\[1\.weihgt\]: matches no parameter; did you mean 1\.weight\?",
        ),
        (["1"], r"model\.freeze=\[1\]: matches no parameter; did you mean 1\.\*\?"),
        (
            ["conv.*"],
            r"model\.freeze=\[conv\.\*\]: matches no parameter; there are, for example, 0\.\*, ",
        ),
        (
            ["*"],
            r"model\.freeze=\[\*\]: these globs match every parameter, so nothing is left to train",
        ),
    ],
)
def test_globs_that_match_none_or_all_are_refused(globs: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Frozen(network(), globs)


PART = {"name": "cnn", "channels": 4, "freeze": ["0.*", "1.*", "3.*", "4.*"]}


def tuned(
    world: World, precision: str, freeze_epochs: int | None, strategy: str = "ddp"
) -> dict[str, Any]:
    """A run of 9 steps in 3 epochs, with an average, clipping and two micro-batches; what it saw of
    gradients."""
    config = config_of(
        world,
        strategy={"name": strategy},
        model={**PART, "freeze_epochs": freeze_epochs},
        data={"name": "digits", "limit": 131},
        train={
            "global_batch_size": 48,
            "epochs": 3,
            "max_grad_norm": 0.5,
            "ema_decay": 0.7,
            "accumulation_steps": 1 if strategy == "ordered" else 2,
        },
        optimizer={"name": "adamw", "lr": 0.01},
        tuning={"precision": precision},
        launch={"threads_per_process": 1},
    )
    job = job_of(config, world)
    before = {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}
    in_buckets: list[int] = []

    class Look:
        def due(self, job: Any) -> int:
            return job.step + 1

        def act(self, job: Any) -> None:
            if strategy == "ddp" and world.size > 1:
                seen: dict[str, Any] = job.strategy.wrapped._get_ddp_logging_data()
                sizes = seen.get("rebuilt_bucket_sizes") or seen["bucket_sizes"]
                assert sum(map(int, str(sizes).split(","))) == seen["total_parameter_size_bytes"]
                in_buckets.append(seen["num_parameter_tensors"])

    job.hooks = [Look(), *job.hooks]
    fit(job)
    moved = {
        name
        for name, tensor in job.module.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    with job.stepper.average.in_model():  # type: ignore[union-attr]
        averaged = {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}
    weights = dict(job.module.model.state_dict())
    return {
        "weights": weights,
        "average": averaged,
        "moved": moved,
        "in_buckets": in_buckets,
        "norm": job.stepper.last_gradient_norm,
        "score": evaluate(job.evaluation),
    }


@pytest.mark.slow
@pytest.mark.parametrize("freeze_epochs", [None, 1])
def test_three_ranks_train_what_one_trains(freeze_epochs: int | None) -> None:
    (one,), three = (on_ranks(count, tuned, "fp64", freeze_epochs) for count in (1, 3))
    for kind in ("weights", "average"):
        assert 0 < largest_difference(one[kind], three[0][kind]) < 1e-10
        assert all(largest_difference(three[0][kind], rank[kind]) == 0 for rank in three[1:])
    assert one["norm"] == pytest.approx(three[2]["norm"], rel=1e-9)
    frozen = {name for name in one["weights"] if name[:2] in ("0.", "1.", "3.", "4.")}
    all_names = set(one["weights"])
    assert len(frozen) == 6 and one["moved"] == three[1]["moved"] == (
        all_names if freeze_epochs else all_names - frozen
    )
    whole = len(all_names)
    assert three[0]["in_buckets"] == [whole - 6] * (3 if freeze_epochs else 9) + [whole] * (
        6 if freeze_epochs else 0
    )


@pytest.mark.slow
def test_ordered_ranks_train_the_same_bits() -> None:
    (one,), two = (on_ranks(count, tuned, "fp32", 1, "ordered") for count in (1, 2))
    assert largest_difference(one["weights"], two[1]["weights"]) == 0 and len(one["moved"]) == len(
        one["weights"]
    )


@pytest.mark.nightly
def test_ranks_that_die_around_the_unfreezing_cost_no_step(tmp_path: Path) -> None:
    """Three restarts: before, in and after it. Batch norm trains on in layers.1, dropout draws,
    three ranks."""
    words = ("model.freeze=[layers.0.*]", "model.freeze_epochs=3")
    expected = outcome(tmp_path / "whole", 3, [], *words)
    kills = [Kill(1, 10, "forward"), Kill(2, 15, "unfreeze"), Kill(0, 15, "forward")]
    found = outcome(tmp_path / "lost", 3, kills, *words)
    assert len(found.killed) == 3, found.killed
    assert differences(found, expected) == [] and found.summary["steps_redone"] == 0


@pytest.mark.slow
def test_run_begins_with_another_and_keeps_what_is_frozen(tmp_path: Path) -> None:
    """Batch norms rest, on three ranks: their statistics stay too. An evaluation, `load` and a
    resumed run need no file; one that does not fit is refused once, before step 0."""
    begun = tmp_path / "begun"
    tuned = tmp_path / "tuned"
    broken = tmp_path / "broken"
    small = ("model.norm=batch", "data.limit=200", "train.epochs=2")
    first = run(*small, ONE, f"run_dir={begun}", "checkpoint.best=true")
    assert first.returncode == 0, first.stderr
    fine = (f"model.init_from={begun}", "model.init_ignore=[17.*]", "model.freeze=[0.*,1.*]")
    command = (*small, THREE, f"run_dir={tuned}", *fine)
    second = run(*command, "train.max_steps=3")
    assert second.returncode == 0, second.stderr
    assert re.search(r"parameters, of which 67,402 train", second.stdout)
    assert (
        "begins with" in second.stdout
        and "randomly initialised: 17.weight, 17.bias" in second.stdout
    )
    best = begun / "checkpoints" / (begun / "checkpoints/best").readlink()
    theirs, ours = (
        load_file(place / "model.safetensors")
        for place in (best, tuned / "checkpoints/step_00000003")
    )
    same = {name for name in ours if torch.equal(ours[name], theirs[name])}
    assert same == {
        "0.weight",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    manifest = read(tuned / "checkpoints/step_00000003", "manifest.json")
    said = manifest["begun_with"]
    assert said["sha256"] == read(best, "manifest.json")["files"]["model.safetensors"]["sha256"]
    assert said["fresh"] == ["17.weight", "17.bias"] and str(begun) in said["source"]
    assert (
        "0.weight" not in manifest["trained"]
        and read(tuned, "summary.json")["parameters"]["trained"] == 67_402
    )

    wrong = run(*SMALL, THREE, f"run_dir={broken}", f"model.init_from={begun}")
    assert wrong.returncode == 65 and len(fatal_lines(wrong.stderr)) == 1
    assert read(broken, "failure.json")["step"] == 0 and "does not fit the model" in wrong.stderr
    begun.rename(tmp_path / "away")
    resumed = run(*command)
    assert resumed.returncode == 0 and "begins with" not in resumed.stdout, resumed.stderr
    newest = tuned / "checkpoints" / checkpoints(tuned)[-1]
    assert read(newest, "manifest.json")["begun_with"] == said
    scored = run("mode=evaluate", f"checkpoint.resume={tuned}", f"run_dir={tmp_path}/scored", ONE)
    assert scored.returncode == 0, scored.stderr
    assert read(tmp_path / "scored", "summary.json")["test"] == read(tuned, "summary.json")["test"]
    assert torch.equal(load(tuned).model.state_dict()["0.weight"], theirs["0.weight"])
    assert weights_of(str(newest)).tensors.keys() == ours.keys()
    for words in (
        (f"config={tuned}", f"run_dir={tmp_path}/again"),
        (*command, "model.freeze=[0.*]"),
    ):
        refused = run(*words)
        assert refused.returncode == 2 and (
            "no such file" in refused.stderr or "model.freeze" in refused.stderr
        )


@pytest.mark.slow
def test_the_average_of_what_is_frozen_is_itself() -> None:
    found = tuned(World(), "fp32", None, "single")
    assert all(
        torch.equal(found["average"][name], found["weights"][name]) == (name not in found["moved"])
        for name in found["weights"]
    )
