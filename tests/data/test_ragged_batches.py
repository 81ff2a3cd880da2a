"""Which samples a global batch has: draws by weight, and batches by length. The same on any number
of processes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.data_digests import plan_digests
from ddp_train.config.validate import check
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.config import DigitsConfig
from ddp_train.data.datasets import check_same_data
from ddp_train.data.padding import padded
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import UserDataset
from ddp_train.data.weighted_draws import WeightedDraws
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit, train
from ddp_train.errors import DataError, PeerError
from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from tests.support.jobs import config_of, job_of, largest_difference, table
from tests.support.ranks import on_ranks

SENTENCES = 41
WORDS = 11
TOKENS = 64
STEPS = 11
"""A global batch has at most 64 tokens; the run ends in its second epoch."""
LENGTHS = [2 + number * 7 % 16 for number in range(SENTENCES)]


class Sentences:
    """Of 2 to 17 words; collate_fn pads."""

    collate_fn = staticmethod(padded)

    def __init__(self, train: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths = LENGTHS
        self.sentences = [torch.randint(0, WORDS, (length,), generator=draw) for length in LENGTHS]

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, number: int) -> Tensor:
        return self.sentences[number]


class Reader(nn.Module):
    """The next word from the mean of all words up to here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5)
        self.head = nn.Linear(5, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        seen = torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return self.head((self.embedding(input_ids).cumsum(1) / seen).tanh())


# --- draws by weight ------------------------------------------------------------------------------


def test_other_weights_are_other_data() -> None:
    def digests(of: float) -> dict[str, str]:
        return BatchPlan(2, 2, 1, 1, 0, weights=WeightedDraws(np.array([1.0, of]))).digests()

    assert digests(1) == digests(1) and BatchPlan(2, 2, 1, 1, 0).digests() == {}
    for then, now in ((digests(1), digests(2)), ({}, digests(1)), (digests(1), {})):
        with pytest.raises(
            DataError,
            match="data=digits changed since the checkpoint: the weights of its samples differ",
        ):
            check_same_data("digits", None, {"count": "2", **then}, {"count": "2", **now})


# --- training -------------------------------------------------------------------------------------


def config(world: World, accumulation: int = 1, **more: Any) -> Config:
    return config_of(
        world,
        **{
            "task": {"name": "language_model"},
            "model": {"_target_": f"{__name__}.Reader"},
            "data": {"_target_": f"{__name__}.Sentences", "batch_by": "tokens"},
            "train": {
                "global_batch_size": TOKENS,
                "accumulation_steps": accumulation,
                "max_steps": STEPS,
            },
            "optimizer": {"name": "sgd", "lr": 0.3},
            "schedule": {"name": "constant"},
            "tuning": {"precision": "fp64", "num_workers": 0},
            **more,
        },
    )


def made(world: World, first_step: int = 0, **more: Any) -> Any:
    sentences = UserDataset(Sentences(True), 0)
    return job_of(config(world, **more), world, (sentences, sentences), first_step)


def weights_of(job: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}


def fitted(job: Any) -> dict[str, Tensor]:
    fit(job)
    return weights_of(job)


def interrupted(world: World) -> dict[str, Tensor]:
    """Stopped within the first epoch, and within the second, and gone on each time in a new job."""
    state = None
    weights = {}
    done = 0
    for until in (4, STEPS - 1, STEPS):
        job = made(world, first_step=done, accumulation=2)
        if state:
            job.module.model.load_state_dict(weights)
            job.stepper.load_state(state)
            job.stepper.continue_from(done)
        batches = iter(job.batches)
        while job.step < until:
            train(job, batches, until)
        state = copy.deepcopy(job.stepper.state())
        weights = weights_of(job)
        done = until
    return weights


def drawn(world: World) -> dict[str, Tensor]:
    """A table, by weights of which some are 0."""
    config = config_of(
        world,
        model={"name": "mlp", "hidden": 5, "layers": 1},
        train={"global_batch_size": 12, "epochs": 2},
        tuning={"precision": "fp64", "num_workers": 0},
    )
    source = table(31)
    return fitted(job_of(config, world, Splits(source, source, None, np.arange(31.0) % 4)))  # pyright: ignore


def rungs(world: World) -> dict[str, dict[str, Tensor]]:
    found = {
        f"accumulation {number}": fitted(made(world, accumulation=number)) for number in (1, 2)
    }
    found["drawn"] = drawn(world)
    if world.size == 3:
        of = np.array([1.0, 1.0 + (world.rank == 2)])  # as if one host had another file
        with pytest.raises(
            PeerError, match="a digest of the samples' weights is not the same for all processes"
        ):
            plan_digests(BatchPlan(2, 2, 1, 1, 0, weights=WeightedDraws(of)), "cpu")
        found["interrupted"] = interrupted(world)
    if world.size in (1, 4):
        found["ordered"] = fitted(made(world, strategy={"name": "ordered", "virtual_shards": 4}))
    return found


def by_hand() -> dict[str, Tensor]:
    """Plain PyTorch, sentence by sentence: nothing is padded."""
    job = made(World(), strategy={"name": "single"})
    model = job.module.model
    sentences = Sentences(True).sentences
    plan = job.plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    assert plan.steps_per_epoch < STEPS < 2 * plan.steps_per_epoch
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = [sentences[number] for number in plan.global_batch(step)]
        losses = [
            functional.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="sum")
            for ids in batch
        ]
        (sum(losses) / sum(len(ids) - 1 for ids in batch)).backward()
        optimizer.step()
    return weights_of(job)


@pytest.mark.slow
def test_ragged_language_model_trains_as_sentence_by_sentence() -> None:
    """On 1, 2, 3 and 4 processes, with 1 and 2 micro-batches a step; after stops in mid-epoch in
    the same bytes."""
    expected = by_hand()
    untrained = weights_of(made(World(), strategy={"name": "single"}))
    assert largest_difference(expected, untrained) > 1e-2, "the comparison would be idle"
    found = {ranks: on_ranks(ranks, rungs) for ranks in (1, 2, 3, 4)}
    for ranks, (rank, number) in itertools.product(found, ((0, 1), (-1, 2))):
        weights = found[ranks][rank][f"accumulation {number}"]
        assert largest_difference(weights, expected) < 1e-10, (ranks, number)
        assert largest_difference(found[ranks][rank]["drawn"], found[1][0]["drawn"]) < 1e-10, ranks
    for ranks in (1, 4):
        assert largest_difference(found[ranks][0]["ordered"], found[1][0]["ordered"]) == 0
        assert largest_difference(found[ranks][0]["ordered"], expected) < 1e-10
    assert largest_difference(found[3][1]["interrupted"], found[3][1]["accumulation 2"]) == 0


# --- what the config says of it -------------------------------------------------------------------

GPU = Hardware(cpus=16, gpus=1, gpu_name="NVIDIA H200", compute_capability=(9, 0))


def problems(machine: Hardware = Hardware(cpus=2), **sections: Any) -> list[str]:  # noqa: B008
    sections = {"data": {"_target_": f"{__name__}.Sentences", "batch_by": "tokens"}, **sections}
    found = config_of(World(), machine, trusted_modules=["tests"], **sections)
    return [
        problem
        for problem in check(RequestedRun(found, found, machine, None))
        if "g++" not in problem
    ]


def test_contradictions_are_refused() -> None:
    assert problems(train={"accumulation_steps": 5}) == [], (
        "96 tokens are not split into equal parts"
    )
    data = {"_target_": f"{__name__}.Sentences"}
    linear = {"name": "sgd", "lr_scaling": "linear"}
    both = {**data, "batch_by": "tokens", "weights": "balanced"}
    balanced = {"weights": "balanced"}
    for sections, message in [
        ({"data": both}, "data.weights=balanced: contradicts data.batch_by=tokens"),
        (
            {"data": {"name": "linear_regression", **balanced}, "model": {"name": "mlp"}},
            (
                "data.weights=balanced: data=linear_regression has no class labels; use"
                " data.weights=FILE"
            ),
        ),
        (
            {"data": {**data, "weights": "balance"}},
            (
                "data.weights=balance: no such file; use data.weights=balanced, or the path of a"
                " .npy or text file"
            ),
        ),
        (
            {"optimizer": linear},
            "optimizer.lr_scaling=linear: with data.batch_by=tokens optimizer.lr_base_batch must",
        ),
    ]:
        assert [message in problem for problem in problems(**sections)] == [True], sections
    assert problems(optimizer={**linear, "lr_base_batch": 4096}) == []


def test_steps_of_different_shapes_are_not_captured() -> None:
    resolved = config_of(
        World(), GPU, data={"_target_": "a.B", "batch_by": "tokens"}, model={"name": "mlp"}
    )
    assert (
        resolved.tuning.cuda_graph is False
        and resolved.reasons["cuda_graph"] == "because of data.batch_by"
    )
    assert resolved.tuning.compile is False and resolved.tuning.cudnn_benchmark is False
    found = problems(GPU, tuning={"cuda_graph": True}, launch={"nproc_per_node": 1})
    assert any(
        "tuning.cuda_graph=true: needs data.batch_by=samples (with tokens, the shapes" in problem
        for problem in found
    )


def test_the_plan_says_what_an_epoch_is() -> None:
    def rows(job: Any, config: Config) -> dict[str, str]:
        return plan_rows(PlanFacts(config, job.plan, job.module.task, 0.3, parameters=1))

    shown = rows(
        made(World(), strategy={"name": "single"}), config(World(), strategy={"name": "single"})
    )
    assert (
        shown["global batch"]
        == "at most 64 tokens, up to 19% of them padding: 1 to 8 samples of about one length, in 1"
        " part"
    )
    data = DigitsConfig(weights="balanced", limit=50)
    asked = config_of(World(), data=vars(data), strategy={"name": "single"})
    assert rows(job_of(asked, World()), asked)["data"].startswith(
        "digits, 50 samples to train on, an epoch is 50 draws with replacement (weights balanced)"
    )
