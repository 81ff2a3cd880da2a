"""Whose weights are off, and by how much, when texts are of different lengths.

    pip install transformers accelerate lightning
    python benchmarks/means.py [--processes 1 2 3] [--output FILE]

ddp_train, Hugging Face's Trainer, Lightning's, and DDP with the usual mean of means, against one
process that computes each global batch at once.

The job: transformers' GPT-2 from a configuration (2 layers, 32 wide, 64 tokens, no dropout), texts
of 2 to 32 tokens, global batches of 24 of them, plain SGD with a learning rate of 0.1, no clipping,
float64, on the CPU over gloo. All start from the same weights and have the same texts in each
global batch. Two data sets of 8 steps: `full` has 192, `uneven` 181 texts, so that its last batch
has 13. On several processes, or with several micro-batches, the parts of a global batch have
unequally many tokens, which is all that this is about.

The reference is a loop by hand: the sum of the losses of all tokens of the global batch over their
number. Off by: the largest difference of a weight from the reference after the last step, as part
of the largest change of a weight that the reference made from the first step to the last.

Each peer has its documented settings. The Trainer: `average_tokens_across_devices` on (its default)
and off; a model that takes `num_items_in_batch` (transformers' own) and one that does not, which is
every module of one's own without `**kwargs` that returns its mean loss; `loss_type` as its class
would have it if it were named GPT2ForCausalLM, and as transformers leaves it for GPT2LMHeadModel:
None.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
VOCABULARY = 64
LONGEST = 32
BATCH = 24
STEPS = 8
LR = 0.1
SEED = 0
IGNORED = -100
TEXTS = {"full": BATCH * STEPS, "uneven": BATCH * (STEPS - 1) + 13}


class Texts(Dataset[Tensor]):
    """Texts of 2 to 32 tokens, short ones more often; the next token follows from the last one, but
    for noise."""

    def __init__(self, train: bool, texts: int) -> None:
        draw = torch.Generator().manual_seed(1)
        lengths = (2 + 31 * torch.rand(texts, generator=draw).square()).long()
        self.texts = []
        for length in lengths.tolist():
            noise = torch.randint(0, 5, (length,), generator=draw)
            self.texts.append((torch.arange(length) * 7 + noise + length) % VOCABULARY)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> Tensor:
        return self.texts[number]

    def collate_fn(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return collate(samples)


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    """Padded, as transformers' models take them."""
    pad = nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(text) for text in texts], batch_first=True)
    labels = pad(texts, batch_first=True, padding_value=IGNORED)
    return {"input_ids": pad(texts, batch_first=True), "attention_mask": mask, "labels": labels}


def network(loss_type: str | None = "ForCausalLM") -> nn.Module:
    """transformers' GPT-2, the same weights on each call, float64. loss_type: transformers leaves
    it None here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    sizes = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=32,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
    )
    model = GPT2LMHeadModel(sizes).double()
    model.loss_type = loss_type  # pyright: ignore[reportAttributeAccessIssue]
    return model


def in_order(texts: int) -> Subset[Tensor]:
    """The texts in the order in which ddp_train trains with them: that of its plan, which is the
    same for any number of processes."""
    from ddp_train.data.batch_plan import epoch_order

    return Subset(Texts(True, texts), epoch_order(SEED, 0, texts).tolist())


def sum_of_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Over the tokens of a batch, and their number."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
        :, :-1
    ]
    targets = batch["labels"][:, 1:]
    total = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (targets != IGNORED).sum()


def reference(texts: int) -> dict[str, Tensor]:
    """Weights after training by hand, one process, each global batch in one pass."""
    model = network()
    data = in_order(texts)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in DataLoader(data, BATCH, collate_fn=collate):
        total, tokens = sum_of_losses(model, batch)
        (total / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


# --- peers; each runs in processes of its own, and rank 0 saves its weights -----------------------


class MeanLoss(nn.Module):
    """A user's module: it returns the mean loss over its batch, and does not know
    `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        total, tokens = sum_of_losses(self.network, batch)
        return {"loss": total / tokens}


def trainer(
    texts: int,
    accumulation: int,
    average_tokens: bool = True,
    own_loss: bool = False,
    loss_type: str | None = "ForCausalLM",
) -> dict[str, Tensor]:
    """Hugging Face's Trainer. own_loss: of a module that does not take `num_items_in_batch`."""
    from transformers import Trainer, TrainingArguments

    model = MeanLoss() if own_loss else network(loss_type)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH // accumulation // ranks(),
            num_train_epochs=1,
            gradient_accumulation_steps=accumulation,
            average_tokens_across_devices=average_tokens,
            optim="sgd",
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            weight_decay=0.0,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            logging_strategy="no",
        )
        made = Trainer(model, arguments, data_collator=collate, train_dataset=in_order(texts))
        assert made.model_accepts_loss_kwargs is not own_loss
        made.train()
        assert made.state.global_step == STEPS, made.state.global_step
    return weights(model.network if isinstance(model, MeanLoss) else model)


def lightning(texts: int, accumulation: int) -> dict[str, Tensor]:
    """Lightning's Trainer with a `training_step` that returns the mean loss, as its documentation
    shows."""
    import lightning as pl
    from torch.utils.data.distributed import DistributedSampler

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MeanLoss()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        made = pl.Trainer(
            accelerator="cpu",
            devices=ranks(),
            strategy="ddp" if ranks() > 1 else "auto",
            max_epochs=1,
            logger=False,
            accumulate_grad_batches=accumulation,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            precision="64-true",
            use_distributed_sampler=False,  # its own shuffles
        )
        data = in_order(texts)
        sampler = DistributedSampler(data, ranks(), int(os.environ["RANK"]), shuffle=False)
        made.fit(
            module,
            DataLoader(data, BATCH // accumulation // ranks(), sampler=sampler, collate_fn=collate),
        )
        assert made.global_step == STEPS, made.global_step
    return weights(module.model.network)


def plain_ddp(texts: int, accumulation: int) -> dict[str, Tensor]:
    """DistributedDataParallel as in its tutorials: DistributedSampler, the mean of a micro-batch
    over their number."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = MeanLoss()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    data = in_order(texts)
    batches = list(
        DataLoader(
            data,
            BATCH // accumulation // ranks(),
            sampler=DistributedSampler(data, shuffle=False),
            collate_fn=collate,
        )
    )
    for number, batch in enumerate(batches, 1):
        wrapped.require_backward_grad_sync = last = number % accumulation == 0 or number == len(
            batches
        )
        (wrapped(**batch)["loss"] / accumulation).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    found = weights(model.network)
    dist.barrier()
    return found


TRAINER = "transformers Trainer"
PEERS = {
    TRAINER: (trainer, {}),
    f"{TRAINER}, `loss_type` as GPT2LMHeadModel has it": (trainer, {"loss_type": None}),
    f"{TRAINER}, `average_tokens_across_devices=False`": (trainer, {"average_tokens": False}),
    f"{TRAINER}, a module that returns its mean loss": (trainer, {"own_loss": True}),
    "Lightning Trainer": (lightning, {}),
    "plain DDP, mean of means": (plain_ddp, {}),
}
JOBS = [(kind, accumulation) for kind in TEXTS for accumulation in (1, 4)]


def train_as(names: list[str], folder: Path) -> None:
    """All jobs of some peers, in the processes that torchrun started."""
    torch.set_num_threads(1)
    for name, (kind, accumulation) in itertools.product(names, JOBS):
        train, settings = PEERS[name]
        trained = train(TEXTS[kind], accumulation, **settings)
        if os.environ["RANK"] == "0":
            torch.save(trained, folder / f"{list(PEERS).index(name)}_{kind}_{accumulation}.pt")
    os._exit(0)  # some leave a process group open; tearing it down is not what is looked at


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


# --- comparison -----------------------------------------------------------------------------------


def run(command: list[str], processes: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        sys.exit(
            f"{command} on {processes} processes ended with"
            f" {done.returncode}:\n{done.stderr[-4000:]}"
        )


def of_peers(
    names: list[str], processes: int, folder: Path
) -> dict[str, dict[tuple[str, int], dict[str, Tensor]]]:
    """The weights of each after each job."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    run([*torchrun, __file__, "--peers", json.dumps(names), "--folder", str(folder)], processes)
    return {
        name: {
            (kind, many): torch.load(folder / f"{list(PEERS).index(name)}_{kind}_{many}.pt")
            for kind, many in JOBS
        }
        for name in names
    }


def of_ours(processes: int, folder: Path) -> dict[tuple[str, int], dict[str, Tensor]]:
    """The losses of `python launch.py` with this file's model and data."""
    from safetensors.torch import load_file

    found = {}
    for kind, accumulation in JOBS:
        run_dir = folder / f"{processes}_{kind}_{accumulation}"
        run(
            [
                sys.executable,
                "launch.py",
                "model._target_=benchmarks.means.network",
                "task=language_model",
                "data._target_=benchmarks.means.Texts",
                f"data.texts={TEXTS[kind]}",
                f"train.global_batch_size={BATCH}",
                "train.epochs=1",
                f"train.accumulation_steps={accumulation}",
                f"launch.nproc_per_node={processes}",
                f"seed={SEED}",
                "optimizer=sgd",
                f"optimizer.lr={LR}",
                "optimizer.momentum=0",
                "schedule=constant",
                "tuning.precision=fp64",
                "tuning.num_workers=0",
                f"run_dir={run_dir}",
                "device=cpu",
            ],
            processes,
        )
        found[kind, accumulation] = load_file(
            run_dir / f"checkpoints/step_{STEPS:08}/model.safetensors"
        )
    return found


def off_by(found: dict[str, Tensor], truth: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    moved = max((truth[name] - start[name]).abs().max().item() for name in truth)
    return max((found[name] - truth[name]).abs().max().item() for name in truth) / moved


def rows(
    processes: list[int], folder: Path
) -> Iterator[tuple[str, int, dict[tuple[str, int], float]]]:
    """Who, on how many processes, off by how much in each job."""
    truths = {kind: reference(texts) for kind, texts in TEXTS.items()}
    start = weights(network())
    functions = trainer, lightning, plain_ddp
    together = [
        [name for name, (other, _) in PEERS.items() if other is function] for function in functions
    ]
    for names, size in itertools.product([["ddp_train"], *together], processes):
        if names == ["ddp_train"]:
            trained = {"ddp_train": of_ours(size, folder)}
        else:
            trained = of_peers(names, size, folder)
        for name in names:
            found = {job: off_by(trained[name][job], truths[job[0]], start) for job in JOBS}
            print(f"{name}, {size} processes: {found}", file=sys.stderr, flush=True)
            yield name, size, found


def table(found: list[tuple[str, int, dict[tuple[str, int], float]]]) -> list[str]:
    head = [
        f"{kind}, {accumulation} micro-batch{'es' if accumulation > 1 else ''}"
        for kind, accumulation in JOBS
    ]
    return [
        f"| | processes | {' | '.join(head)} |",
        f"|---|---:|{'---:|' * len(JOBS)}",
        *(
            f"| {name} | {size} | {' | '.join(shown(off[job]) for job in JOBS)} |"
            for name, size, off in found
        ),
    ]


def shown(part: float) -> str:
    return f"{part:.1%}" if part > 5e-4 else f"{part:.0e}"


def main() -> None:
    from page import conditions, load_average, publish

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peers", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peers:
        train_as(arguments.peers, arguments.folder)
    before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        found = sorted(
            rows(arguments.processes, Path(folder)),
            key=lambda row: ["ddp_train", *PEERS].index(row[0]),
        )
    words = " ".join(sys.argv[1:])
    facts = conditions(
        f"means.py {words}".strip(),
        f"{before} at the start, {load_average()} at the end",
        ("transformers", "accelerate", "lightning"),
    )
    publish(
        ["# Means over tokens: who is off, and by how much", "", *table(found), "", *facts],
        arguments.output,
    )


if __name__ == "__main__":
    main()
