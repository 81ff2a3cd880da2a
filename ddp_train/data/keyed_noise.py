"""Random numbers of a step that are the same on any number of processes.

Each row of a tensor belongs to a sample of the batch. Its numbers are a hash of seed, step, sample,
the number of the call in the step, and the place in the row: they do not depend on which process
computes the sample, beside which others, or in which micro-batch. In an evaluation they depend on
sample, call and place alone. The hash is that of data/rng.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.rng import draw_mark, hash_bits, hash_key, random_bits, shift
from ddp_train.distributed.training_step import CURRENT, Share
from ddp_train.errors import ConfigError, DataError, LaunchError
from ddp_train.text import counted

Rows = Literal["samples", "views", "parts", "shared"]
"""The sample of the batch that each row of a tensor belongs to: see `noise_like`."""

WAYS = (
    "if the rows are the whole batch several times, as after torch.cat([view1, view2]), use"
    " rows='views'; if each sample has several consecutive rows, as after x.flatten(0, 1), use"
    " rows='parts'; if they are not samples, for example weights, use rows='shared'"
)
OTHER_BATCH = (
    "In a session there is another possible cause, a batch that is not the run's: take the batches"
    " of an evaluation from run.test_loader"
)


def noise_like(x: Tensor, *, rows: Rows = "samples", dtype: torch.dtype | None = None) -> Tensor:
    """Return standard normal noise in the shape of x, in place of torch.randn_like(x).

    A sample gets the same noise on any number of processes, with accumulation and after a resume.
    Every process must make the same number of calls in a step. Outside of a run's batches (in a
    plain script, between two steps) it is torch.randn_like itself.

    x: [n, ...]; only its shape, dtype and device matter.
    rows: which sample a row belongs to. samples: row i belongs to sample i. views: all samples,
        then all again, as in torch.cat([view, other]). parts: all parts of the first sample, then
        all of the second, as after flatten(0, 1). shared: rows belong to no sample, and all
        processes get the same numbers.
    dtype: floating-point type of the result; None for that of x.

    Raises DataError if the number of rows does not fit the samples, ConfigError on several GPUs
    with strategy=dp, and LaunchError while a step is captured as a CUDA graph.
    """
    kind = _floating("noise_like", dtype or x.dtype)
    bits = _bits_like(x, "noise_like", rows)
    if bits is None:
        return torch.randn_like(x, dtype=kind)
    # Odd multiples of 2^-52 between -1 and 1, exact in float64: neither end is among them.
    centred = shift(bits, 12).double().mul_(2).add_(1).mul_(2.0**-52).sub_(1)
    return centred.erfinv_().mul_(math.sqrt(2)).to(kind)


def rand_like(x: Tensor, *, rows: Rows = "samples", dtype: torch.dtype | None = None) -> Tensor:
    """Return uniform numbers in [0, 1) in the shape of x, in place of torch.rand_like(x).

    Rules and errors are those of `noise_like`. `rand_like(x) < p` is a random mask, and
    `rand_like(x).argsort(1)` a random permutation for each sample.

    x: as in `noise_like`.
    rows: as in `noise_like`.
    dtype: as in `noise_like`; a narrower type gets the same numbers, truncated.
    """
    kind = _floating("rand_like", dtype or x.dtype)
    bits = _bits_like(x, "rand_like", rows)
    if bits is None:
        return torch.rand_like(x, dtype=kind)
    digits = 1 - round(math.log2(torch.finfo(kind).eps))
    return shift(bits, 64 - digits).to(kind).mul_(2.0**-digits)


def randint_like(
    x: Tensor,
    low: int,
    high: int | None = None,
    *,
    rows: Rows = "samples",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return random integers in the shape of x, in place of torch.randint_like(x, low, high).

    Rules and errors are those of `noise_like`. `randint_like(labels, 1000)` chooses a diffusion
    step for each sample.

    x: as in `noise_like`.
    low: the smallest integer. With `low` alone, integers are from 0 to low - 1.
    high: the largest integer plus 1.
    rows: as in `noise_like`.
    dtype: type of the result; None for that of x.

    Raises DataError also if `low` is not below `high`.
    """
    if high is None:
        low, high = 0, low
    span = high - low
    if not 0 < span <= 1 << 53:
        raise DataError(
            f"ddp_train.randint_like: low={low} must be less than high={high}, by at most 2**53",
            "use low < high, or pass high alone",
        )
    kind = dtype or x.dtype
    bits = _bits_like(x, "randint_like", rows)
    if bits is None:
        return torch.randint_like(x, low, high, dtype=kind)
    fractions = shift(bits, 11).double().mul_(2.0**-53)
    return fractions.mul_(span).floor_().add_(low).to(kind)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, rows: Rows = "samples") -> Tensor:
    """Set elements to zero at random, as torch.nn.functional.dropout does.

    The choice for a sample does not depend on the number of processes; see `noise_like` for how to
    call it and for its errors. To drop a block for whole samples (stochastic depth): `x *
    dropout(torch.ones_like(x[:, :1, :1]), p)` for x of [n, tokens, width].

    x: [n, ...].
    p: probability of zero, 0 to 1; the other elements are divided by 1 - p.
    training: False returns x unchanged.
    rows: as in `noise_like`.

    Returns a tensor like x. Raises DataError for another p.
    """
    if not 0 <= p <= 1:
        raise DataError(
            f"ddp_train.dropout: p={p} is not a probability", "use a number from 0 to 1"
        )
    if not training or p == 0:
        return x
    bits = _bits_like(x, "dropout", rows)
    if bits is None:
        return functional.dropout(x, p)
    if p == 1:
        return x * 0
    is_kept = shift(bits, 1) >= int(p * 2**63)
    return x * is_kept.to(x.dtype).mul_(1 / (1 - p))


class Draws:
    """The calls that have drawn numbers for the samples of one batch."""

    def __init__(self, share: Share) -> None:
        self.share = share
        if share.epoch is None:
            self.key = hash_key("noise of an evaluation")
        else:
            self.key = hash_key(share.seed, "noise of a step", share.epoch, share.step)
        self.numbers: dict[int, int] = {}
        """The number of each call, by the mark that was drawn in it."""
        self.keys: dict[tuple[torch.device, bool], Tensor] = {}

    def number_of_call(self, name: str) -> int:
        """The number of earlier calls for this batch; a call that is computed again keeps its own.

        Raises DataError for a call that is computed again with another state of torch's generator.
        """
        mark = draw_mark()
        CURRENT.marks += 1
        if mark not in self.numbers:
            if torch._C._current_graph_task_id() != -1:
                raise DataError(
                    f"ddp_train.{name}: the backward pass calls it again, with another random"
                    " state than the forward pass, so it cannot draw the same numbers",
                    "use torch.utils.checkpoint.checkpoint(..., preserve_rng_state=True), its"
                    " default, and call backward() in the step of the forward pass",
                )
            self.numbers[mark] = len(self.numbers)
        return self.numbers[mark]

    def keys_on(self, device: torch.device, shared: bool) -> Tensor:
        """A key for each sample, int64 [n], or one that all samples share."""
        place = device, shared
        if place not in self.keys:
            if shared:
                keys = torch.tensor([hash_key(self.key, "shared")])
            else:
                keys = hash_bits(self.key, torch.from_numpy(self.share.indices))
            self.keys[place] = keys.to(device, non_blocking=True)
        return self.keys[place]


def _draw_bits(x: Tensor, name: str, rows: Rows) -> Tensor | None:
    """64 random bits for each element of x, int64; None without a batch whose samples are known.

    name: of the function that was called, for messages.
    """
    share = CURRENT.share
    if share is None:
        return None
    if CURRENT.step and CURRENT.step.has_replicas:
        raise ConfigError(
            [
                f"strategy=dp: ddp_train.{name} does not know which samples a GPU has; use"
                " strategy=ddp"
            ]
        )
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"ddp_train.{name}: a captured step would draw the same numbers in each replay",
            "use tuning.cuda_graph=false. With a CUDA graph of your own, draw before each"
            " replay, and copy the numbers into a static tensor",
        )
    samples = len(share.indices)
    if not share.num_real and x.ndim and not len(x):
        samples = 0
    _check_rows(x, name, rows, samples)
    if CURRENT.draws is None:
        CURRENT.draws = Draws(share)
    number = CURRENT.draws.number_of_call(name)
    if not x.numel():
        return torch.empty(x.shape, dtype=torch.int64, device=x.device)
    keys = CURRENT.draws.keys_on(x.device, rows == "shared") + hash_key("call", number)
    bits = random_bits(keys, x.numel() // len(keys))
    if rows == "views":
        bits = bits.view(samples, len(x) // samples, -1).transpose(0, 1)
    return bits.reshape(x.shape)


# What a step draws must not become a constant of a compiled graph: the graph breaks here.
_bits_like: Callable[[Tensor, str, Rows], Tensor | None] = torch.compiler.disable(_draw_bits)  # pyright: ignore[reportAssignmentType]


def _check_rows(x: Tensor, name: str, rows: Rows, samples: int) -> None:
    """Raise DataError for a tensor whose rows cannot be those that `rows` names."""
    if rows not in ("samples", "views", "parts", "shared"):
        raise DataError(
            f"ddp_train.{name}: rows={rows!r} must be 'samples', 'views', 'parts' or 'shared'", WAYS
        )
    if rows == "shared":
        return
    shape = list(x.shape)
    if not x.ndim:
        raise DataError(
            f"ddp_train.{name} was given a tensor without rows",
            "pass a tensor [n, ...], or use rows='shared'",
        )
    if len(x) == samples:
        return
    if rows != "samples" and samples and len(x) % samples == 0:
        return
    found = (
        f"ddp_train.{name}: the tensor {shape} has {counted(len(x), 'row')}, but the batch has"
        f" {counted(samples, 'sample')} on this process"
    )
    if rows == "samples":
        raise DataError(
            found, f"pass one row for each sample, [{samples}, ...]; {WAYS}. {OTHER_BATCH}"
        )
    raise DataError(
        f"{found}, and rows={rows!r} needs a multiple of that",
        f"pass the same number of rows for each sample. {OTHER_BATCH}",
    )


def _floating(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype, unchanged. Raises DataError unless it is a floating-point one."""
    if not dtype.is_floating_point:
        raise DataError(
            f"ddp_train.{name}: dtype={dtype} must be floating-point",
            "pass dtype=torch.float32, or a floating-point x",
        )
    return dtype
