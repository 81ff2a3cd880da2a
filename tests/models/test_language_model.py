"""Language models: windows of text, files of tokens, GPT, and the same weights whatever the
split."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.plan import build_plan
from ddp_train.config.bind import bind
from ddp_train.config.validate import check
from ddp_train.data.corpus.documents import standard_library
from ddp_train.data.corpus.sources import open_text, open_tokens
from ddp_train.data.corpus.windows import IGNORED, TokenSource
from ddp_train.data.datasets import check_same_data, digests
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.models.gpt.network import Gpt, build_gpt
from ddp_train.options.schema import RequestedRun
from ddp_train.tasks.sampling import write_tokens
from tests.support.commands import read, run, weights
from tests.support.jobs import config_of, job_of, largest_difference, loader_of, module_of, trained
from tests.support.ranks import on_ranks

LENGTH = 16
NO_TOKENIZERS = importlib.util.find_spec("tokenizers") is None
needs_tokenizers = pytest.mark.skipif(
    NO_TOKENIZERS, reason="the package tokenizers is not installed"
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the package transformers is not installed",
)


def row(count: int, vocabulary: int = 256, seed: int = 0) -> Tensor:
    """Tokens with a pattern that can be learnt."""
    noise = torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(seed))
    return ((torch.arange(count) * 7 + noise) % vocabulary).to(torch.uint8)


# --- the same weights, however it is divided ------------------------------------------------------


class Ragged:
    """Windows of which each counts only some targets, the fourth none: as many as a hash of its
    number says."""

    def __init__(self, source: TokenSource) -> None:
        self.source = source
        self.outputs = source.outputs

    def __len__(self) -> int:
        return len(self.source)

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        ids, targets = self.source.get_batch(indices, epoch)
        kept = torch.from_numpy(indices * 2654435761 % 97 % (LENGTH + 1) * (indices != 3))
        return ids, targets.masked_fill(torch.arange(LENGTH) >= kept[:, None], IGNORED)


SETTINGS = {
    "model": {"name": "gpt", "layers": 2, "heads": 2, "width": 16},
    "data": {"name": "text", "length": LENGTH},
    "train": {"global_batch_size": 12, "epochs": 4, "max_grad_norm": 1.0},
    "optimizer": {"name": "adamw", "lr": 0.01, "beta2": 0.95, "weight_decay": 0.1},
    "schedule": {"name": "constant"},
    "tuning": {"precision": "fp64"},
}
SAMPLES = (
    38  # 12 + 12 + 12 + 2: the last batch has fewer windows than 3 processes have micro-batches
)


def ragged_sources() -> tuple[Ragged, Ragged]:
    made = Ragged(TokenSource([row((SAMPLES + 1) * LENGTH)], LENGTH, 256, seed=5))
    assert len(made) == SAMPLES
    return made, made


def ladder(world: World, accumulation: int) -> tuple[dict[str, Tensor], dict[str, object] | None]:
    settings = {**SETTINGS, "train": {**SETTINGS["train"], "accumulation_steps": accumulation}}
    config = config_of(world, **settings, strategy={"name": "ddp"})
    config.data.placement = "host"
    weights = trained(world, config, ragged_sources())
    score = evaluate(job_of(config, world, ragged_sources()).evaluation)
    return weights, score and score.as_dict()


def by_hand() -> dict[str, Tensor]:
    """The loop that a tutorial would write: one process, the whole batch, the mean over its
    tokens."""
    config = config_of(World(), **SETTINGS, strategy={"name": "single"})
    source = ragged_sources()[0]
    model = module_of(config, source).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    plan = build_plan(config, World(), len(source))
    for step in range(plan.steps):
        ids, targets = source.get_batch(plan.global_batch(step), step // plan.steps_per_epoch)
        optimizer.zero_grad()
        functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.nightly
def test_weights_are_those_of_a_loop_by_hand_on_any_world() -> None:
    """The mean is over the tokens of the global batch; peers take a mean of the means of
    micro-batches."""
    expected = by_hand()
    scores = []
    fresh = module_of(
        config_of(World(), **SETTINGS, strategy={"name": "single"}), ragged_sources()[0]
    ).model
    assert largest_difference(expected, fresh.state_dict()) > 1e-2, (
        "nothing was learnt: the comparison would be idle"
    )
    for ranks, accumulation in itertools.product((1, 2, 3), (1, 4)):
        results = on_ranks(ranks, ladder, accumulation)
        for found, _ in results:
            assert largest_difference(expected, found) < 1e-10, (ranks, accumulation)
        scores.append(results[0][1])
    assert all(score == scores[0] for score in scores), (
        "an evaluation depends on the number of processes"
    )


# --- windows --------------------------------------------------------------------------------------


def windows_by_step(
    world_size: int, accumulation: int, first_step: int = 0
) -> dict[int, list[list[int]]]:
    """The windows of each optimizer step, over all processes, in the order of their first
    tokens."""
    source = TokenSource([row(40 * LENGTH)], LENGTH, 256, seed=3)
    found: dict[int, list[list[int]]] = {}
    for rank in range(world_size):
        world = World(rank, world_size, rank, world_size)
        train = {"global_batch_size": 12, "accumulation_steps": accumulation, "epochs": 3}
        plan = build_plan(config_of(world, train=train), world, len(source))
        for micro_batch in plan.micro_batches(first_step):
            ids, _ = source.get_batch(
                micro_batch.indices[: micro_batch.num_real], micro_batch.epoch
            )
            found.setdefault(micro_batch.step, []).extend(ids.tolist())
    return {step: sorted(windows) for step, windows in sorted(found.items())}


def test_windows_are_the_same_on_any_world_and_after_a_resume() -> None:
    whole = windows_by_step(1, 1)
    assert len(whole) == 12 and len({str(windows) for windows in whole.values()}) == 12
    for ranks, accumulation in itertools.product((1, 2, 3), (1, 4)):
        assert windows_by_step(ranks, accumulation) == whole
        for step in (5, 8):  # within an epoch, and where one ends
            rest = {number: windows for number, windows in whole.items() if number >= step}
            assert windows_by_step(ranks, accumulation, step) == rest


def test_an_epoch_sees_each_token_once_at_an_offset_of_its_own() -> None:
    numbers = torch.arange(10_000, dtype=torch.int16)
    source = TokenSource([numbers], 64, 10_000, seed=1)
    offsets = []
    for epoch in range(8):
        ids, targets = source.get_batch(np.arange(len(source)), epoch)
        seen = ids.flatten()
        assert torch.equal(seen, torch.arange(len(seen)) + seen[0]), "end to end"
        assert torch.equal(targets.flatten(), seen + 1)
        assert len(seen) > 10_000 - 2 * 64
        offsets.append(int(seen[0]))
    assert len(set(offsets)) > 5 and max(offsets) < 64
    assert int(source.get_batch(np.array([0]), None)[0][0, 0]) == 0


@pytest.mark.parametrize("sizes", [[1000], [65, 64, 300, 10, 129]])
def test_a_test_split_counts_each_token_once(sizes: list[int]) -> None:
    """The last window of a part overlaps the one before, and what it repeats is ignored."""
    parts = [
        torch.arange(size, dtype=torch.int16) + 1000 * place for place, size in enumerate(sizes)
    ]
    source = TokenSource(parts, 64, 30_000)
    ids, targets = source.get_batch(np.arange(len(source)), None)
    counted = targets[targets != IGNORED]
    assert counted.tolist() == [t for part in parts if len(part) > 64 for t in part[1:].tolist()]
    assert (ids + 1)[targets != IGNORED].tolist() == counted.tolist()


def test_parts_held_together_give_the_windows_of_parts_apart() -> None:
    """As on a GPU, where all parts are one tensor."""
    parts = [
        torch.arange(size, dtype=torch.int16) + 1000 * place
        for place, size in enumerate([500, 40, 900])
    ]
    for seed in (None, 7):
        apart = TokenSource(parts, 64, 30_000, seed)
        together = apart.select(np.arange(len(apart)))
        together.whole = torch.cat(parts)
        index = np.random.default_rng(0).permutation(len(apart))
        for epoch in (None, 4):
            for one, other in zip(
                apart.get_batch(index, epoch), together.get_batch(index, epoch), strict=True
            ):
                assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_windows_on_a_gpu_are_those_on_the_host() -> None:
    for dtype, vocabulary in ((torch.uint8, 256), (torch.int16, 60_000), (torch.int32, 10**6)):
        tokens = torch.randint(0, vocabulary, (5000,)).to(dtype)
        for seed in (None, 7):
            source = TokenSource([tokens[:3000], tokens[3000:]], 64, vocabulary, seed)
            index = np.arange(len(source))
            held = source.to(torch.device("cuda"))
            for one, other in zip(
                source.get_batch(index, 2), held.get_batch(index, 2), strict=True
            ):
                assert other.is_cuda and torch.equal(one, other.cpu())
    with pytest.raises(DataError, match="has the token id"):
        TokenSource([tokens], 64, 10).to(torch.device("cuda"))


def test_a_resident_corpus_gives_the_same_batches() -> None:
    source = TokenSource([row(3000)], LENGTH, 256, seed=2)
    config = config_of(World(), train={"global_batch_size": 12, "epochs": 2})
    plan = build_plan(config, World(), len(source))
    made = [
        loader_of(source, list(plan.micro_batches()), config.tuning, "cpu", resident=r)
        for r in (False, True)
    ]
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


# --- text -----------------------------------------------------------------------------------------


def text_of(path: Path | None, **keys: object) -> tuple[TokenSource, TokenSource]:
    defaults = {"glob": None, "length": LENGTH, "test_part": 0.2, "tokenizer": None}
    train, test = open_text(seed=0, path=path and str(path), **{**defaults, **keys})
    assert isinstance(train, TokenSource) and isinstance(test, TokenSource)
    return train, test


def test_the_standard_library_is_a_corpus_without_its_tests() -> None:
    files = standard_library()
    names = {path.name for path in files}
    assert len(files) > 400 and {"argparse.py", "typing.py", "zipfile.py"} - names <= {"zipfile.py"}
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)
    assert files == standard_library()


def test_folder_is_split_by_file_and_a_file_by_line(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number} " * 20)
    (tmp_path / "notes.md").write_text("no text" * 100)
    train, test = text_of(tmp_path)
    texts = [bytes(source.parts[0].numpy()).decode() for source in (train, test)]
    files = [set(text.split("\0")) - {""} for text in texts]
    assert len(files[0]) + len(files[1]) == 30 and not files[0] & files[1]
    assert 0.1 < test.tokens / (train.tokens + test.tokens) <= 0.2
    assert train.outputs == 256 and train.bytes_per_token == 1.0 and train.last_token == 0
    assert train.codec and train.codec.decode([104, 105, 255]) == "hi\ufffd"

    file = tmp_path / "one.log"
    file.write_text("".join(f"line {number}\n" for number in range(500)))
    train, test = text_of(file)
    whole = bytes(torch.cat([train.parts[0], test.parts[0]]).numpy()).decode()
    assert whole == file.read_text() and bytes(test.parts[0][:5].numpy()) == b"line "
    assert train.last_token == ord("\n")


def test_a_text_that_changed_is_found_at_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("abc " * 1000)
    then = digests(text_of(file)[0])
    check_same_data("text", None, then, digests(text_of(file)[0]))
    file.write_text("abd " * 1000)
    with pytest.raises(DataError, match="changed since the checkpoint"):
        check_same_data("text", None, then, digests(text_of(file)[0]))


@needs_tokenizers
def test_a_tokenizer_gives_tokens_and_bytes_per_token(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<|endoftext|>": 0, "[UNK]": 1, "one": 2, "two": 3}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("one two " * 50)
    train, test = text_of(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    assert (
        train.outputs == 4
        and train.last_token == 0
        and train.codec
        and "one two" in train.codec.decode([2, 3])
    )
    assert test.bytes_per_token == pytest.approx(400 / 101)
    ids, targets = train.get_batch(np.arange(len(train)), 0)
    assert set(ids.unique().tolist()) == {0, 2, 3} and torch.equal(ids[:, 1:], targets[:, :-1])


# --- files of tokens ------------------------------------------------------------------------------


def write_llm_c(
    path: Path,
    tokens: np.ndarray,
    magic: int = 20240520,
    version: int = 1,
    count: int | None = None,
) -> None:
    """As llm.c's data scripts write it: 256 int32, then the tokens."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())


def tokens_of(path: Path, **keys: object) -> tuple[TokenSource, TokenSource]:
    defaults = {
        "length": LENGTH,
        "vocabulary": 50_257,
        "dtype": "uint16",
        "test_part": 0.1,
        "tokenizer": None,
        "bytes_per_token": None,
    }
    train, test = open_tokens(seed=0, path=str(path), **{**defaults, **keys})
    assert isinstance(train, TokenSource) and isinstance(test, TokenSource)
    return train, test


def all_tokens(source: TokenSource) -> list[int]:
    """What the windows of an evaluation hold, in order."""
    unshifted = TokenSource(source.parts, source.length, source.vocabulary)
    ids, targets = unshifted.get_batch(np.arange(len(unshifted)), None)
    return [int(ids[0, 0]), *targets[targets != IGNORED].tolist()]


def test_files_of_nanogpt_and_llm_c_are_read(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(
        0, 50_257, 3000
    )  # half of them are negative as int16
    nano, llm, llama = (tmp_path / name for name in ("nano", "llm", "llama"))
    for folder in (nano, llm, llama):
        folder.mkdir()
    numbers[:2500].astype(np.uint16).tofile(nano / "train.bin")
    numbers[2500:].astype(np.uint16).tofile(nano / "val.bin")
    write_llm_c(llm / "fineweb_train_000001.bin", numbers[:1500].astype(np.uint16))
    write_llm_c(llm / "fineweb_train_000002.bin", numbers[1500:2500].astype(np.uint16))
    write_llm_c(llm / "fineweb_val_000000.bin", numbers[2500:].astype(np.uint16))
    write_llm_c(llama / "latest.bin", numbers.astype(np.uint32) + 70_000, magic=20240801, version=7)
    for folder in (nano, llm):
        train, test = tokens_of(folder)
        assert all_tokens(test) == numbers[2500:].tolist()
        found = [part.long() & 0xFFFF for part in train.parts]
        assert torch.cat(found).tolist() == numbers[:2500].tolist()
        assert train.outputs == 50_257 and train.last_token == numbers[2499]
    train, test = tokens_of(llama, vocabulary=128_256)
    assert all_tokens(train) + all_tokens(test) == (numbers + 70_000).tolist()
    assert len(all_tokens(test)) == 300, "a tenth is held out where no file is"
    raw = tmp_path / "raw.bin"
    (numbers + 70_000).astype(np.uint32).tofile(raw)
    assert (
        all_tokens(tokens_of(raw, dtype="uint32", vocabulary=128_256)[0])
        == (numbers[:2700] + 70_000).tolist()
    )


def test_files_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    numbers = np.arange(1000, dtype=np.uint16)
    cases = {
        "its header says 999": lambda path: write_llm_c(path, numbers, count=999),
        "version 3, not 1": lambda path: write_llm_c(path, numbers, version=3),
        "not a multiple of the size of a token": lambda path: path.write_bytes(
            numbers.tobytes() + b"x"
        ),
        "cannot be mapped": lambda path: path.write_bytes(b""),
        "has 20 tokens": lambda path: numbers[:22].tofile(path),
    }
    for number, (message, write) in enumerate(cases.items()):
        path = tmp_path / f"{number}.bin"
        write(path)
        with pytest.raises(DataError, match=message) as caught:
            tokens_of(path)
        assert caught.value.remedy
    numbers.tofile(tmp_path / "good.bin")
    source = tokens_of(tmp_path / "good.bin", vocabulary=500)[0]
    with pytest.raises(
        DataError, match=r"has the token id \d+, but the largest id of the vocabulary is 499"
    ) as caught:
        source.get_batch(np.arange(len(source)), 0)
    assert "data.vocabulary=" in caught.value.remedy


# --- what is refused before a process starts ------------------------------------------------------


def problems(**sections: object) -> list[str]:
    asked, found = bind(sections)
    from ddp_train.config.auto import resolve

    machine = Hardware(cpus=2)
    return found + check(RequestedRun(asked, resolve(asked, machine, None), machine, None))


GPT = {"name": "gpt"}


def test_what_does_not_fit_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    expected = [
        ({"data": {"name": "text"}}, "model=cnn: does not take token ids", "use model=gpt"),
        ({"model": GPT}, "model=gpt: needs tokens, and data=digits has none", "use data=text"),
        (
            {"model": {**GPT, "heads": 3}, "data": {"name": "text"}},
            "model.width=128: must be a multiple",
            "=126",
        ),
        (
            {"model": GPT, "data": {"name": "text"}, "task": {"name": "classification"}},
            "has tokens as targets",
            "use task=language_model",
        ),
        (
            {
                "model": GPT,
                "data": {"name": "text"},
                "task": {"name": "language_model", "sample_prompt": "a"},
            },
            "task.sample_prompt=a: has an effect only with",
            "task.sample_tokens",
        ),
        (
            {"model": GPT, "data": {"name": "text", "path": "none"}},
            "data.path=none: no such file or folder",
            "",
        ),
        (
            {"model": GPT, "data": {"name": "text", "path": str(tmp_path)}},
            "no file matches data.glob=*.txt",
            "use 'data.glob=*.md'",
        ),
        (
            {"model": GPT, "data": {"name": "text", "glob": "*.c"}},
            "data.glob=*.c: has an effect only on a folder",
            "data.path=FOLDER",
        ),
        (
            {"model": GPT, "data": {"name": "tokens"}},
            "data.path=null: data=tokens needs",
            "data.path=PATH",
        ),
        (
            {"model": GPT, "data": {"name": "tokens", "path": str(tmp_path)}},
            "no *.bin in this folder",
            "1 .md",
        ),
        (
            {"model": GPT, "data": {"name": "text", "tokenizer": "none"}},
            "data.tokenizer=none: no such file",
            "leave",
        ),
        (
            {"model": GPT, "data": {"name": "text"}, "objective": "test.accuracy"},
            "no metric accuracy",
            "it has loss",
        ),
    ]
    for sections, message, remedy in expected:
        (problem,) = problems(**sections)
        assert message in problem and remedy in problem, problem
    (tmp_path / "tokenizer.json").write_text("{}")
    if NO_TOKENIZERS:
        (problem,) = problems(
            model=GPT, data={"name": "text", "tokenizer": str(tmp_path / "tokenizer.json")}
        )
        assert "needs the package tokenizers" in problem and "pip install tokenizers" in problem
    assert problems(model=GPT, data={"name": "text"}) == []


def test_task_auto_is_what_the_data_set_says() -> None:
    assert config_of(World(), model=GPT, data={"name": "text"}).task.name == "language_model"
    assert config_of(World()).task.name == "auto"
    assert (
        config_of(
            World(), task={"name": "custom", "target": "a.B"}, data={"name": "text"}
        ).task.name
        == "custom"
    )


# --- the model ------------------------------------------------------------------------------------


def test_gpt2_has_its_124_million_parameters() -> None:
    with torch.device("meta"):
        model = Gpt(50_257, 1024, layers=12, heads=12, width=768)
        padded = Gpt(50_257, 1024, layers=12, heads=12, width=768, vocabulary_multiple=64)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert padded.tokens.weight.shape == (50_304, 768)


def test_gpt_looks_at_no_later_token_and_begins_at_chance() -> None:
    torch.manual_seed(0)
    model = build_gpt(
        (LENGTH,), 100, layers=3, heads=2, width=32, dropout=0.0, vocabulary_multiple=1
    )
    ids = torch.randint(0, 100, (4, LENGTH))
    before = model(ids)
    assert before.shape == (4, LENGTH, 100)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 100
    difference = (model(changed) - before).abs().amax((0, 2))
    assert (difference[:9] == 0).all() and (difference[9:] > 0).all()
    loss = functional.cross_entropy(before.flatten(0, 1), torch.randint(0, 100, (4 * LENGTH,)))
    assert abs(loss.item() - math.log(100)) < 0.1
    assert isinstance(model, Gpt)
    assert model.blocks[0].mlp.projection.weight.std().item() == pytest.approx(
        0.02 / math.sqrt(6), rel=0.1
    )  # type: ignore[union-attr]
    with pytest.raises(DataError, match="16 positions, and a sample has 17 tokens") as refused:
        model(torch.zeros(1, 17, dtype=torch.int64))
    assert refused.value.remedy.startswith("cut samples to 16 tokens")
    with pytest.raises(ConfigError, match=r"takes tokens, \[n, t\]"):
        build_gpt((1, 8, 8), 10, layers=1, heads=1, width=8, dropout=0.0, vocabulary_multiple=1)


@pytest.mark.slow
def test_what_the_model_writes_is_keyed_by_the_seed() -> None:
    torch.manual_seed(0)
    model = Gpt(50, 8, layers=1, heads=1, width=16, vocabulary_multiple=64)
    written = [write_tokens(model, [0], 30, 8, 50, 1.0, seed) for seed in (1, 1, 2)]
    assert written[0] == written[1] != written[2] and len(written[0]) == 30 and max(written[0]) < 50
    colder = write_tokens(model, [0], 30, 8, 50, 1e-6, 1)
    logits = model(torch.tensor([[0]]))[0, -1, :50]
    assert colder[0] == int(logits.argmax())


class Echo(nn.Module):
    """A model of somebody's that takes ids and returns an object with logits, as transformers'
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gpt(256, LENGTH, 1, 1, 8)

    def forward(self, ids: Tensor) -> object:
        return type("Output", (), {"logits": self.inner(ids)})()


def test_a_model_that_returns_an_object_with_logits_writes_too() -> None:
    assert len(write_tokens(Echo(), [0], 5, LENGTH, 256, 1.0, 0)) == 5


# --- from end to end ------------------------------------------------------------------------------

SHORT = (
    "experiment=gpt_tiny",
    "model.layers=1",
    "model.heads=2",
    "model.width=32",
    "data.length=32",
    "train.max_steps=12",
    "schedule.warmup_steps=2",
    "train.log_every_steps=4",
    "task.sample_tokens=40",
    "data.limit=300",
)


@pytest.mark.slow
def test_gpt_tiny_learns_and_writes_a_sample(tmp_path: Path) -> None:
    done = run(*SHORT, f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert "language_model, cross_entropy, mean over tokens" in done.stdout
    summary = read(tmp_path / "run", "summary.json")
    assert summary["test"]["bits_per_byte"] == pytest.approx(summary["test"]["loss"] / math.log(2))
    assert 2 < summary["test"]["bits_per_byte"] < 8
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    sample = (tmp_path / "run/sample.txt").read_text()
    assert sample and sample.splitlines()[0] in done.stdout
    again = run(*SHORT, f"run_dir={tmp_path}/again")
    assert again.returncode == 0 and (tmp_path / "again/sample.txt").read_text() == sample


@pytest.mark.slow
def test_gpt2_on_files_of_tokens_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """In loader processes, from mapped files; the run that is not interrupted cuts its windows
    itself."""
    numbers = np.random.default_rng(0).integers(0, 500, 9000)
    write_llm_c(tmp_path / "text_train_000001.bin", numbers[:8000].astype(np.uint16))
    write_llm_c(tmp_path / "text_val_000000.bin", numbers[8000:].astype(np.uint16))
    words = [
        "experiment=gpt2_124m",
        f"data.path={tmp_path}",
        "data.length=32",
        "data.vocabulary=500",
        "data.bytes_per_token=4.5",
        "model.layers=1",
        "model.heads=2",
        "model.width=16",
        "train.global_batch_size=8",
        "train.max_steps=6",
        "schedule.warmup_steps=1",
        "checkpoint.every_steps=4",
        "checkpoint.keep=9",
    ]
    whole = run(*words, f"run_dir={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints/step_00000006")
    done = run(*words, "data.placement=host", "tuning.num_workers=1", f"run_dir={tmp_path}/parts")
    assert done.returncode == 0 and "from step 4" in done.stdout, done.stderr
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    ours, theirs = (read(tmp_path / name, "summary.json")["test"] for name in ("parts", "whole"))
    assert ours == theirs
    assert ours["bits_per_byte"] == pytest.approx(ours["loss"] / math.log(2) / 4.5)


HUGGING_FACE = '''
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(layers):
    """From its configuration: nothing is downloaded."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=layers, n_head=2))
'''


@needs_transformers
@pytest.mark.slow
def test_a_model_of_transformers_trains(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(HUGGING_FACE)
    done = run(
        *("data=text", "data.length=32", "data.limit=300", "train.max_steps=12", "optimizer=adamw"),
        *(
            "model._target_=theirs.gpt2",
            "+model.layers=1",
            "trusted_modules=[theirs]",
            "task=language_model",
        ),
        *("task.sample_tokens=40", f"run_dir={tmp_path}/run"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "run", "summary.json")["test"]["bits_per_byte"] < 8
    assert (tmp_path / "run/sample.txt").read_text()
