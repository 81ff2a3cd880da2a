"""Groups of parameters: by name, by depth, with all that looks at groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.config import fine_tuning
from ddp_train.config.checkpoint_checks import differences, values_of_the_state
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, fit
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.models.gpt.network import Gpt
from ddp_train.optim.groups import depths_of, parameter_groups
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from tests.support.jobs import config_of, job_of, largest_difference, learning_rates, table
from tests.support.ranks import on_ranks


def messages_of(config: Config) -> list[str]:
    """The problems of where the model begins, and of the optimizer's groups."""
    run = RequestedRun(config, config, Hardware(cpus=1))
    found = [*config.model.problems(run), *config.optimizer.problems(run)]
    return [str(problem) for problem in (*found, *fine_tuning.problems(config))]


def job_with(optimizer: dict[str, Any], **sections: Any) -> Job:
    config = config_of(
        World(),
        strategy={"name": "single"},
        optimizer=optimizer,
        **{
            "model": {"name": "mlp", "hidden": 8},
            "train": {"global_batch_size": 24, "epochs": 1},
            **sections,
        },
    )
    return job_of(config, World(), (table(48), table(12)))


def names_and(job: Job, *keys: str) -> list[tuple[Any, ...]]:
    """Of each group the names of its parameters, and some of its arguments."""
    names = {parameter: name for name, parameter in job.module.model.named_parameters()}
    groups = job.stepper.optimizer.param_groups
    return [
        (" ".join(names[one] for one in group["params"]), *(group[key] for key in keys))
        for group in groups
    ]


# --- by name --------------------------------------------------------------------------------------


def test_first_match_wins_and_groups_have_their_arguments() -> None:
    groups = [
        {"match": "5.*", "lr": 0.4, "weight_decay": 0.0},
        {"match": "*.bias", "momentum": 0.5},
    ]
    job = job_with({"name": "sgd", "lr": 0.1, "weight_decay": 0.3, "groups": groups})
    assert names_and(job, "lr", "weight_decay", "momentum") == [
        ("1.weight 3.weight", 0.1, 0.3, 0.9),
        ("5.weight 5.bias", 0.4, 0.0, 0.9),
        ("1.bias 3.bias", 0.1, 0.3, 0.5),
    ]
    fit(job)
    factor = learning_rates(job, 2)[1] / 0.1
    assert factor < 1 and job.stepper.last_learning_rates == pytest.approx(
        [0.1 * factor, 0.4 * factor, 0.1 * factor]
    )


def test_groups_follow_the_batch_and_spare_norms_and_biases() -> None:
    scaling = {
        "lr_scaling": "linear",
        "lr_base_batch": 8,
        "decay_norm_and_bias": False,
        "weight_decay": 0.2,
    }
    for name in ("sgd", "lars", "lamb"):
        job = job_with(
            {
                "name": name,
                "lr": 0.1,
                **scaling,
                "groups": [{"match": "5.*", "lr": 0.01, "weight_decay": 0.1}],
            }
        )
        assert names_and(job, "lr", "weight_decay") == [
            ("1.weight 3.weight", pytest.approx(0.3), 0.2),
            ("1.bias 3.bias", pytest.approx(0.3), 0.0),
            ("5.weight", pytest.approx(0.03), 0.1),
            ("5.bias", pytest.approx(0.03), 0.0),
        ]
        adapted = [
            group.get("layer_adaptation", True) for group in job.stepper.optimizer.param_groups
        ]
        assert adapted == [True, False, True, False]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "adadelta"])
@pytest.mark.parametrize("kind", ["loop", "foreach", "fused", "parts"])
def test_a_group_is_an_optimizer_of_its_own(name: str, kind: str) -> None:
    """The same numbers as two of torch's optimizers, one for each part, also where momentum is only
    in one of them."""
    if kind in ("fused", "parts") and not OPTIONS["optimizer"][name].has_fused:
        pytest.skip("torch has no fused one")
    own = {
        "sgd": {"momentum": 0.8},
        "rmsprop": {"alpha": 0.5, "momentum": 0.5},
        "adadelta": {"rho": 0.5},
    }
    given = {"lr": 0.3, "weight_decay": 0.05, **own.get(name, {"beta2": 0.9})}
    theirs = {key: value for key, value in given.items() if key != "beta2"}
    theirs |= {"betas": (0.7, 0.9)} if "beta2" in given else {}
    base = {"betas": (0.7, 0.99)} if "beta2" in given else {}
    torch.manual_seed(0)
    weights = [torch.randn(40, 50) for _ in range(2)]
    ours, reference = ([nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    groups = parameter_groups({"body": ours[0], "head": ours[1]}, [{"match": "head", **given}])
    betas = {"beta1": 0.7, "beta2": 0.99} if base else {}
    optimizer_class = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "adadelta": torch.optim.Adadelta,
    }[name]
    implementation = "fused" if kind == "parts" else kind
    optimizer = build_optimizer(
        groups,
        optimizer_class,
        implementation=implementation,
        captured=kind == "parts",
        lr=0.1,
        **({"momentum": 0.0} if name == "sgd" else {}),
        **betas,
    )
    apart = [
        optimizer_class([reference[0]], lr=0.1, **base),
        optimizer_class([reference[1]], **theirs),
    ]
    for step in range(4):
        for one, other in zip(ours, reference, strict=True):
            one.grad = torch.randn(40, 50, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        for each in (optimizer, *apart):
            each.step()
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [{"lr": 1}],
            (
                "optimizer.groups[0]={lr:1}: needs match, a glob over names of parameters; add"
                " match: head.*"
            ),
        ),
        ([{"match": "", "lr": 1}], "needs match"),
        ([{"match": 3}], "needs match"),
        (
            [{"match": "a"}],
            "optimizer.groups[0]={match:a}: changes nothing; give it lr: 0.01, or another argument",
        ),
        (
            [{"match": "a", "lr": 1}, {"match": "b", "leraning": 1}],
            "no argument leraning; optimizer=adamw takes lr, weight_decay, beta1, beta2, eps for",
        ),
        ([{"match": "a", "wieght_decay": 1}], "did you mean weight_decay?"),
        ([{"match": "a", "lr": 0.0}], "optimizer.groups[0].lr=0.0: must be above 0"),
        ([{"match": "a", "beta1": 1.0}], "optimizer.groups[0].beta1=1.0: must be below 1"),
        ([{"match": "a", "lr": "1e-2x"}], "optimizer.groups[0].lr=1e-2x: must be a number"),
        ([{"match": "a", "lr": True}], "must be a number"),
        ([{"match": "a", "lr": float("nan")}], "a finite number"),
        ([{"match": "a", "layer_decay": 0.5}], "no argument layer_decay"),
    ],
)
def test_a_group_that_says_nothing_or_nonsense_is_refused(
    groups: list[dict[str, Any]], expected: str
) -> None:
    config = config_of(World(), optimizer={"name": "adamw", "groups": groups})
    (problem,) = messages_of(config)
    assert expected in problem


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [{"match": "haed.*", "lr": 1.0}],
            r"optimizer\.groups=\[\{match: haed\.\*\}\]: matches no parameter that trains",
        ),
        (
            [{"match": "5.*", "lr": 1.0}, {"match": "5.bias", "lr": 2.0}],
            "match: 5.bias.*earlier groups match all",
        ),
        (
            [{"match": "1.*", "lr": 1.0}],
            r"matches no parameter that trains; there are, for example, 3\.\*",
        ),
    ],
)
def test_a_group_that_nothing_is_in_is_refused(groups: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        job_with(
            {"name": "sgd", "groups": groups}, model={"name": "mlp", "hidden": 8, "freeze": ["1.*"]}
        )


def test_a_class_of_torch_takes_groups_of_its_own_arguments() -> None:
    own = {
        "_target_": "torch.optim.NAdam",
        "lr": 0.1,
        "layer_decay": 0.5,
        "groups": [{"match": "5.*", "lr": 0.2, "momentum_decay": 0.01}],
    }
    assert names_and(job_with(own), "lr", "momentum_decay") == [
        ("3.weight 3.bias", 0.05, 0.004),
        ("1.weight 1.bias", 0.025, 0.004),
        ("5.weight 5.bias", 0.2, 0.01),
    ]
    own["groups"] = [{"match": "5.*", "momentum_decya": 0.01}]
    with pytest.raises(
        ConfigError,
        match="NAdam has no argument momentum_decya for a group; did you mean momentum_decay",
    ):
        job_with(own)
    config = config_of(World(), optimizer={"_target_": "torch.optim.NAdam", "layer_decay": 0.5})
    assert "multiplies optimizer.lr" in messages_of(config)[0]


# --- by depth -------------------------------------------------------------------------------------


def layers(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, depth in depths_of(model).items():
        found.setdefault(depth, []).append(name)
    return found


def test_layers_are_those_of_beit_where_there_are_encoder_layers() -> None:
    from torchvision.models import vit_b_16

    with torch.device("meta"):
        found = layers(vit_b_16())
        gpt = layers(Gpt(64, 16, 3, 2, 8, 0.0, 1))
    assert list(found) == [*range(14)]
    assert found[0] == [
        "class_token",
        "conv_proj.weight",
        "conv_proj.bias",
        "encoder.pos_embedding",
    ]
    assert all(name.startswith("encoder.layers.encoder_layer_11.") for name in found[12])
    assert found[13] == [
        "encoder.ln.weight",
        "encoder.ln.bias",
        "heads.head.weight",
        "heads.head.bias",
    ]
    assert list(gpt) == [*range(5)] and all(name.startswith("blocks.1.") for name in gpt[2])


def test_layers_are_residual_blocks_and_what_lies_between_stages() -> None:
    from torchvision.models import convnext_tiny, resnet18

    with torch.device("meta"):
        residual = layers(resnet18())
        convnext = layers(convnext_tiny())
    assert list(residual) == [*range(10)] and residual[0] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
    ]
    assert residual[9] == ["fc.weight", "fc.bias"] and "layer1.1.conv1.weight" in residual[2]
    assert len(convnext) == 23 and {name.rpartition(".")[0] for name in convnext[4]} == {
        "features.2.0",
        "features.2.1",
    }


def test_a_model_without_blocks_has_its_children_as_layers() -> None:
    convolutions = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.GroupNorm(1, 2),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3),
        nn.GroupNorm(1, 2),
        nn.Linear(2, 2),
    )
    for model, prefix in ((convolutions, ""), (nn.ModuleDict({"net": convolutions}), "net.")):
        assert list(layers(model).values()) == [
            [f"{prefix}{name}.{kind}" for name in names for kind in ("weight", "bias")]
            for names in ("01", "34", "5")
        ]


def test_the_rate_falls_from_layer_to_layer() -> None:
    optimizer = {
        "name": "adamw",
        "lr": 0.1,
        "layer_decay": 0.5,
        "groups": [{"match": "3.bias", "lr": 0.7}, {"match": "1.bias", "weight_decay": 0.0}],
    }
    job = job_with(optimizer)
    assert names_and(job, "lr", "weight_decay") == [
        ("5.weight 5.bias", 0.1, 0.01),
        ("3.weight", 0.05, 0.01),
        ("1.weight", 0.025, 0.01),
        ("3.bias", 0.7, 0.01),
        ("1.bias", 0.025, 0.0),
    ]
    config = config_of(World(), optimizer=optimizer)
    said = plan_rows(PlanFacts(config, job.plan, job.module.task, 0.1))["optimizer"]
    assert said.startswith(
        "adamw, lr 0.1, but 3.bias with lr 0.7, 1.bias with weight_decay 0, layer decay 0.5, cosine"
    )
    with pytest.raises(ConfigError, match=r"layer_decay=0\.5: the model has one layer"):
        job_with({"name": "sgd", "layer_decay": 0.5}, model={"name": "linear_regression"})


# --- with all the rest ----------------------------------------------------------------------------


def test_what_a_resumed_run_may_change() -> None:
    """Arguments of groups, as any learning rate; not which parameters are in which group, which
    numbers them."""

    def of(**optimizer: Any) -> Config:
        return config_of(World(), optimizer={"name": "adamw", **optimizer})

    before = of(groups=[{"match": "a.*", "lr": 0.1}], layer_decay=0.5)
    for now, differs in (
        (of(groups=[{"match": "a.*", "lr": 0.2}], layer_decay=0.6), []),
        (of(groups=[{"match": "b.*", "lr": 0.1}], layer_decay=0.5), ["optimizer.groups"]),
        (of(groups=[{"match": "a.*", "eps": 0.1}], layer_decay=0.5), ["optimizer.groups"]),
        (of(groups=[{"match": "a.*", "lr": 0.1}]), ["optimizer.layer_decay"]),
    ):
        found = differences(values_of_the_state(before, now), "here", "another")
        assert [problem.key.partition("=")[0] for problem in found] == differs


def grouped(
    world: World, name: str, freeze_epochs: int | None
) -> tuple[dict[str, Tensor], list[float]]:
    config = config_of(
        world,
        model={"name": "mlp", "hidden": 16, "freeze": ["1.*"], "freeze_epochs": freeze_epochs},
        data={"name": "digits", "limit": 131},
        train={"global_batch_size": 48, "accumulation_steps": 2, "epochs": 3, "max_grad_norm": 1.0},
        optimizer={
            "name": name,
            "lr": 0.01,
            "layer_decay": 0.5,
            "decay_norm_and_bias": False,
            "groups": [{"match": "3.*", "lr": 0.03, "weight_decay": 0.1}],
        },
        tuning={"precision": "fp64"},
    )
    job = job_of(config, world)
    fit(job)
    return dict(job.module.model.state_dict()), job.stepper.last_learning_rates


@pytest.mark.slow
@pytest.mark.parametrize(("name", "freeze_epochs"), [("adamw", 1), ("lamb", 2), ("lars", None)])
def test_three_ranks_train_what_one_trains(name: str, freeze_epochs: int | None) -> None:
    (one,), three = (on_ranks(count, grouped, name, freeze_epochs) for count in (1, 3))
    assert 0 < largest_difference(one[0], three[2][0]) < 1e-10
    assert one[1] == three[0][1] and len(one[1]) == (6 if freeze_epochs else 4)


def test_moments_of_what_was_frozen_begin_when_it_trains() -> None:
    """LAMB counts its steps by group: what trains later must not be in one that has counted
    before."""
    job = job_with(
        {"name": "lamb"},
        model={"name": "mlp", "hidden": 8, "freeze": ["1.*"], "freeze_epochs": 1},
        train={"global_batch_size": 24, "epochs": 3},
    )
    fit(job)
    steps = [
        state["step"].item() for state in job.stepper.optimizer.state.values() if "step" in state
    ]
    assert sorted(steps) == [4, 4, 6, 6], "two steps an epoch; matrices and vectors apart"
