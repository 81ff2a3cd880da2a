"""Which samples a global batch has: draws by weight, and batches by length. The same on any number
of processes."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.data_digests import plan_digests
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.config.validate import check
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.config import DigitsConfig, LinearRegressionDataConfig
from ddp_train.data.datasets import check_same_data
from ddp_train.data.length_batches import ALIKE, LengthBatches, even_cuts
from ddp_train.data.padding import padded
from ddp_train.data.sample_facts import labels_of, lengths_of, training_weights
from ddp_train.data.splits import Splits, split_for_validation
from ddp_train.data.user_dataset import UserDataset
from ddp_train.data.weighted_draws import WeightedDraws
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit, train
from ddp_train.errors import ConfigError, DataError, PeerError
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


def micro_batches_of(worlds: list[BatchPlan], step: int) -> list[MicroBatch]:
    """Those of all ranks in one step."""
    return [
        one
        for plan in worlds
        for one in itertools.takewhile(lambda one: one.step == step, plan.micro_batches(step))
    ]


# --- draws by weight ------------------------------------------------------------------------------


def test_draws_have_the_frequencies_of_the_weights() -> None:
    weights = np.tile([0.0, 1.0, 2.0, 5.0], 5_000)
    draws = WeightedDraws(weights)
    epoch = draws.epoch(seed=3, epoch=0)
    assert len(epoch) == len(weights) and np.array_equal(epoch, draws.epoch(3, 0))
    assert not np.array_equal(epoch, draws.epoch(3, 1)) and not np.array_equal(
        epoch, draws.epoch(4, 0)
    )
    assert (weights[epoch] > 0).all()
    found = np.bincount(epoch % 4, minlength=4)[1:]
    expected = len(weights) * np.array([1, 2, 5]) / 8
    assert ((found - expected) ** 2 / expected).sum() < 13.8, (
        "chi-squared of 2 degrees of freedom: 1 in 1,000"
    )
    repeats = Counter(
        Counter(epoch.tolist()).values()
    )  # of a weight of 5: Poisson with a mean of 2.5
    assert repeats[2] > 500 and len(set(epoch.tolist())) < 0.7 * len(weights)
    halves = epoch.reshape(2, -1) % 4
    assert abs(np.corrcoef(halves)[0, 1]) < 0.05, "draws do not depend on each other"
    assert set(WeightedDraws(np.array([0, 0, 3e300, 0])).epoch(0, 0)) == {2}, (
        "none at the ends has a weight"
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_world_draws_the_same_and_resumes_where_it_stopped(world: int) -> None:
    draws = WeightedDraws(np.arange(101.0))
    plans = [BatchPlan(101, 24, 2, 10, 0, rank, world, weights=draws) for rank in range(world)]
    assert plans[0].steps_per_epoch == 5 and plans[0].samples_seen(7) == 101 + 48, (
        "an epoch is n draws"
    )
    for step in range(10):
        batch = plans[0].global_batch(step)
        assert np.array_equal(batch, draws.epoch(0, step // 5)[step % 5 * 24 :][:24])
        mine = micro_batches_of(plans, step)
        assert sorted(np.concatenate([one.indices[: one.num_real] for one in mine])) == sorted(
            batch
        )
        assert sum(one.scale * one.num_real for one in mine) / world == pytest.approx(1, abs=1e-12)


def test_balanced_weights_draw_each_training_class_as_often() -> None:
    """8 of the digits' classes are made rare: the draws do not show it."""
    splits = open_datasets(Config(data=DigitsConfig(validation=0.2, limit=900, weights="balanced")))
    labels = labels_of(splits.train)
    assert splits.weights is not None and len(splits.weights) == len(splits.train) == 900
    of_class = [splits.weights[labels == label].sum() for label in range(10)]
    assert np.allclose(of_class, 1) and len({*np.bincount(labels)}) > 1
    source = open_datasets(Config(data=DigitsConfig())).train
    rare = source.select(np.flatnonzero(labels_of(source) * np.arange(len(source)) % 9 == 0))
    weights = training_weights("balanced", rare, np.arange(len(rare)), len(rare))
    drawn = np.bincount(
        labels_of(rare)[
            np.concatenate([WeightedDraws(weights).epoch(0, epoch) for epoch in range(9)])
        ]
    )
    assert (
        drawn.max() < 1.3 * drawn.min()
        and np.bincount(labels_of(rare)).max() > 3 * np.bincount(labels_of(rare)).min()
    )


def test_weights_of_a_file_belong_to_numbers_before_any_split(tmp_path: Path) -> None:
    kept = split_for_validation(1433, 0.3, 0)[0]
    np.save(tmp_path / "w.npy", np.arange(1433, dtype=np.int32))
    (tmp_path / "w.txt").write_text("\n".join(map(str, range(1433))))
    for name in ("w.npy", "w.txt"):
        data = DigitsConfig(validation=0.3, limit=50, weights=str(tmp_path / name))
        assert np.array_equal(open_datasets(Config(data=data)).weights, kept[:50])
    regression = LinearRegressionDataConfig(samples=1433, weights=str(tmp_path / "w.npy"))
    assert np.array_equal(open_datasets(Config(data=regression)).weights, np.arange(1433))


WRONG = {
    "few": (
        "1\n2\n",
        r"has 2 numbers, and the whole training set 4 samples; write one weight for each sample",
    ),
    "word": (
        "1\n2\nthree\n4",
        r"cannot be read: could not convert string to float: 'three'; use balanced, a \.npy file",
    ),
    "nan": ("1\n2\nnan\n4", r"the weight of sample 2 is nan; use finite numbers, 0 or above"),
    "negative": ("1\n-2\n3\n4", r"the weight of sample 1 is -2; use finite numbers"),
    "zero": ("0\n0\n0\n0", r"the weights of the samples that train add up to 0; use a sum above 0"),
    "table": (np.ones((4, 2)), r"has the shape \[4, 2\], and the whole training set 4 samples"),
    "several": (b"", r"cannot be read: .*; use balanced, a \.npy file"),
    "words": (np.array(["a"]), r"cannot be read: could not convert string to float"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_one_clear_error(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    path = tmp_path / (f"{name}.txt" if isinstance(content, str) else f"{name}.npy")
    if isinstance(content, bytes):
        np.savez(path.with_suffix(".npz"), np.ones(4))
        path.with_suffix(".npz").rename(path)
    else:
        path.write_text(content) if isinstance(content, str) else np.save(path, content)
    with pytest.raises(ConfigError, match=rf"data\.weights=\S+{path.name}: {message}"):
        training_weights(str(path), table(4), np.arange(4), 4)


class Own:
    """A data set that tells what it is given."""

    def __init__(self, **told: Any) -> None:
        vars(self).update(told)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.zeros(2), number


def test_what_a_data_set_must_tell() -> None:
    def source(**told: Any) -> UserDataset:
        return UserDataset(Own(**told), 0)

    for told in (
        {"targets": [3, 1, 1, 1]},
        {"labels": np.array([3, 1, 1, 1])},
        {"targets": torch.tensor([3, 1, 1, 1])},
    ):
        assert labels_of(source(**told)).tolist() == [3, 1, 1, 1]
        assert labels_of(source(**told).select(np.array([2, 0]))).tolist() == [1, 3]
    assert lengths_of(source(lengths=lambda: [3, 4, 5, 6]), 6).tolist() == [3, 4, 5, 6]
    assert lengths_of(source(lengths=[9, 4, 5, 6]).select(np.array([1, 3])), 6).tolist() == [4, 6]
    for wrong, message in {
        "none": (
            r"data\.weights=balanced: Own does not tell the labels of its samples; give it an"
            r" attribute `targets`"
        ),
        (
            1.0,
            2.0,
            3.0,
            4.0,
        ): (
            r"`targets` of Own has 4 numbers, values of the type float64; it must have 4 whole"
            r" numbers"
        ),
        (
            1,
            2,
            3,
        ): (
            r"`targets` of Own has 3 numbers, whole numbers; it must have 4 whole numbers, one for"
            r" each sample"
        ),
        ((1, 2), (3,), (4,), (5,)): r"`targets` of Own has 4 numbers, values of the type object",
    }.items():
        with pytest.raises(ConfigError, match=message):
            labels_of(source(**({} if wrong == "none" else {"targets": wrong})))
    for lengths, message in {
        None: (
            r"data\.batch_by=tokens: Own does not tell the lengths of its samples; give it an"
            r" attribute or a method"
        ),
        (1, 2, 0, 3): r"data\.batch_by=tokens: sample 2 has the length 0",
        (
            1,
            70,
            9,
            80,
        ): (
            r"train\.global_batch_size=64: counts tokens with data\.batch_by=tokens, and sample 1"
            r" has 70, and "
            r"1 other sample more than that many; use train\.global_batch_size=80 or more, or leave"
            r" such samples out"
        ),
    }.items():
        with pytest.raises(ConfigError, match=message):
            lengths_of(source(lengths=lengths), 64)


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


# --- batches by length ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    tokens=st.integers(40, 400),
    accumulation=st.integers(1, 3),
)
def test_batches_by_length_hold_each_sample_once(
    lengths: list[int], tokens: int, accumulation: int
) -> None:
    of = np.array(lengths)
    batches = LengthBatches(np.array(lengths), tokens)
    steps = 2 * batches.steps
    plans = {
        world: [
            BatchPlan(len(of), tokens, accumulation, steps, 7, rank, world, lengths=batches)
            for rank in range(world)
        ]
        for world in range(1, 6)
    }
    plan = plans[1][0]
    seen = 0
    for step in range(plan.steps):
        batch = plan.global_batch(step)
        assert (
            plan.samples_seen(step) == seen
            and len(batch) * of[batch].max() <= tokens
            and len(batch)
        )
        assert (of[batch][:-1] >= of[batch][1:]).all()
        seen += len(batch)
        for world, ranks in plans.items():
            mine = micro_batches_of(ranks, step)
            passes = len(mine) // world
            assert (
                len(mine) == passes * world
                and [one.is_last for one in mine] == ([False] * (passes - 1) + [True]) * world
            )
            assert sorted(np.concatenate([one.indices[: one.num_real] for one in mine])) == sorted(
                batch
            )
            assert sum(one.scale * one.num_real for one in mine) / world == pytest.approx(
                1, abs=1e-12
            )
            assert all(len(one.indices) for one in mine), "a process without samples has a stand-in"
            assert sum(one.num_real == 0 for one in mine) == max(0, len(mine) - len(batch))
            most = max(one.num_real * of[one.indices].max() for one in mine)
            assert (
                most
                <= -(-len(batch) // len(mine)) * of[batch].max()
                <= tokens / len(mine) + of[batch].max()
            )
    assert plan.samples_seen(plan.steps) == seen == 2 * len(of)
    for epoch in range(2):
        numbers = [plan.global_batch(epoch * batches.steps + step) for step in range(batches.steps)]
        assert sorted(np.concatenate(numbers)) == list(range(len(of)))


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), parts=st.integers(1, 4))
def test_no_cut_has_a_smaller_largest_part(lengths: list[int], parts: int) -> None:
    lengths.sort(reverse=True)

    def largest(cuts: list[int]) -> int:
        return max(
            (end - start) * lengths[start] for start, end in itertools.pairwise(cuts) if end > start
        )

    cuts = even_cuts(np.array(lengths), parts)
    assert (
        cuts[0] == 0
        and cuts[-1] == len(lengths)
        and cuts == sorted(cuts)
        and len(cuts) == parts + 1
    )
    within = itertools.combinations_with_replacement(range(len(lengths) + 1), parts - 1)
    assert largest(cuts) == min(largest([0, *inner, len(lengths)]) for inner in within)
    if len(lengths) >= parts:
        assert len(set(cuts)) == len(cuts), "no part is empty"


def test_samples_of_about_one_length_meet_others_in_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, 3_000)
    batches = LengthBatches(lengths, 4_000)
    plan = BatchPlan(3_000, 4_000, 1, 3 * batches.steps, 0, lengths=batches)
    of_epoch = [
        [plan.global_batch(step) for step in range(e * batches.steps, (e + 1) * batches.steps)]
        for e in (0, 1)
    ]
    spread = [1 - lengths[batch].min() / lengths[batch].max() for batch in of_epoch[0]]
    assert np.mean(np.array(spread) <= ALIKE) > 0.9, (
        "but for the shortest, of which few fill a bucket"
    )
    tokens = sum(len(batch) * lengths[batch].max() for batch in of_epoch[0])
    assert lengths.sum() / tokens > 1 - batches.padding > 0.93
    assert tokens / (batches.steps * 4_000) > 0.9, "batches are full"
    together = [{frozenset(batch.tolist()) for batch in epoch} for epoch in of_epoch]
    assert len(together[0] & together[1]) <= 1, "other samples stand together in each epoch"
    first = [[lengths[batch].max() for batch in epoch] for epoch in of_epoch]
    assert (
        abs(np.corrcoef(first[0], np.arange(len(first[0])))[0, 1]) < 0.2 and first[0] != first[1]
    ), "batches are shuffled"
    assert not any(plan.is_full(step) for step in range(plan.steps)), "so none is captured"


def test_padding_counts_as_no_token() -> None:
    batch = padded([torch.tensor([5, 6, 7]), np.array([8]), [3, 2]], padding_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9], [3, 2, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100], [3, 2, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    given = padded(
        [
            {"input_ids": [1, 2], "labels": [-100, 2], "kind": [4, 4]},
            {"input_ids": [3], "labels": [3], "kind": [5]},
        ]
    )
    assert given["labels"].tolist() == [[-100, 2], [3, -100]] and given["kind"].tolist() == [
        [4, 4],
        [5, 0],
    ]
    with pytest.raises(
        DataError, match=r"input_ids of the shape \[2\], and labels of the shape \[1\]"
    ):
        padded([{"input_ids": [1, 2], "labels": [2]}])


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
                "data.weights=balance: no such file; use balanced, or the path of a .npy or text"
                " file; did you mean balan"
            ),
        ),
        (
            {"optimizer": linear},
            "optimizer.lr_scaling=linear: with data.batch_by=tokens optimizer.lr_base_batch c",
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
        "tuning.cuda_graph=true: needs data.batch_by=samples (the shapes" in problem
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
