"""How much of what is computed is padding: batches in random order, sorted by length in windows,
and as planned here.

    python benchmarks/padding.py [--samples 200000] [--output FILE]

Pure arithmetic on lengths; nothing is trained, and the hardware has no part in it but for the
times. The lengths are log-normal, as those of sentences, utterances and documents about are: median
120 tokens, sigma 0.9, cut to 4 ... 2,048. "Window" is what fairseq and torchtext do: shuffle, sort
windows of 50 batches, fill batches up to the limit. Its batches are split among processes as ours
are.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from page import conditions, publish

from ddp_train.data import length_batches
from ddp_train.data.length_batches import LengthBatches, even_cuts

MEDIAN = 120
SIGMA = 0.9
SHORTEST = 4
LONGEST = 2048
WINDOW = 50
MOST_BATCHES = 500
"""Of an epoch that are looked at."""
PARTS = (1, 8)


def drawn_lengths(samples: int) -> np.ndarray:
    draws = np.random.default_rng(0).normal(np.log(MEDIAN), SIGMA, samples)
    return np.exp(draws).clip(SHORTEST, LONGEST).astype(np.int64)


def in_random_order(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Batches in random order with as many samples as have `tokens` tokens on average, without
    padding."""
    size = int(tokens / lengths.mean())
    order = np.random.default_rng(1).permutation(len(lengths))
    return [order[start : start + size] for start in range(0, len(order), size)]


def in_windows(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    size = WINDOW * int(tokens / lengths.mean())
    order = np.random.default_rng(1).permutation(len(lengths))
    batches = []
    for first in range(0, len(order), size):
        window = order[first : first + size]
        window = window[np.argsort(lengths[window], kind="stable")]
        start = 0
        while start < len(window):
            count = 1
            while (
                start + count < len(window)
                and (count + 1) * lengths[window[start + count]] <= tokens
            ):
                count += 1
            batches.append(
                window[start : start + count][::-1]
            )  # the longest first, as even_cuts wants them
            start += count
    return batches


def planned(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    plan = LengthBatches(lengths, tokens)
    epoch = plan.epoch(seed=0, epoch=0)
    return [plan.batch(epoch, step) for step in range(plan.steps)]


def cut_evenly(lengths: np.ndarray, parts: int) -> list[int]:
    each = [len(part) for part in np.array_split(lengths, parts)]
    return [0, *np.cumsum(each).tolist()]


def padding(
    batches: Iterable[np.ndarray],
    lengths: np.ndarray,
    parts: int,
    cut: Callable[[np.ndarray, int], list[int]],
) -> tuple[float, float]:
    """The share of padding among the tokens that are computed, and how many times longer a step
    takes than one without padding, evenly split, if the largest part decides.

    Each part of a batch is as long as its longest sample.
    """
    real = 0
    computed = 0
    slowest = 0
    for batch in batches:
        own = lengths[batch]
        cuts = cut(own, parts)
        pieces = [own[start:end] for start, end in itertools.pairwise(cuts) if end > start]
        sizes = [len(piece) * int(piece.max()) for piece in pieces]
        real = real + int(own.sum())
        computed = computed + sum(sizes)
        slowest = slowest + max(sizes) * parts
    return 1 - real / computed, slowest / real


def rows(samples: int, tokens: int) -> list[str]:
    lengths = drawn_lengths(samples)
    found = []
    for name, make, cut in (
        ("random order", in_random_order, cut_evenly),
        ("window", in_windows, even_cuts),
        ("`data.batch_by=tokens`", planned, even_cuts),
    ):
        batches = make(lengths, tokens)
        some = [
            batches[place]
            for place in np.random.default_rng(2).permutation(len(batches))[:MOST_BATCHES]
        ]
        cells = [
            f"{padded:.1%} | {slower:.2f}"
            for padded, slower in (padding(some, lengths, p, cut) for p in PARTS)
        ]
        found.append(
            f"| {samples:,} | {tokens:,} | {name} | {len(batches):,} | {' | '.join(cells)} |"
        )
    return found


def choices(samples: int, tokens: int) -> list[str]:
    """The results of other values of the two constants, without processes."""
    lengths = drawn_lengths(samples)
    found = []
    before = length_batches.ALIKE, length_batches.LEAST_BATCHES
    for alike in (0.05, 0.1, 0.2):
        cells = []
        for least in (1, 2, 4, 8):
            length_batches.ALIKE = alike
            length_batches.LEAST_BATCHES = least
            batches = planned(lengths, tokens)
            cells.append(
                f"{padding(batches[:MOST_BATCHES], lengths, 1, even_cuts)[0]:.1%}, {len(batches):,}"
            )
        found.append(f"| {alike:g} | {' | '.join(cells)} |")
    length_batches.ALIKE, length_batches.LEAST_BATCHES = before
    return found


def times(samples: int, tokens: int) -> str:
    lengths = drawn_lengths(samples)
    LengthBatches(lengths[:1000], tokens).epoch(0, 0)  # the first use of torch takes longer
    began = time.process_time()
    plan = LengthBatches(lengths, tokens)
    built = time.process_time()
    plan.epoch(0, 0)
    epoch = time.process_time() - built
    return (
        f"{samples:,} samples: {built - began:.2f} s once, {epoch:.2f} s in each epoch, of one core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    small = max(options.samples // 100, 10)
    medium = max(options.samples // 10, 10)
    lines = []
    for samples in (small, options.samples):
        for tokens in (16_384, 65_536):
            lines += rows(samples, tokens)
    publish(
        [
            "# How much padding batches by length save",
            "",
            (
                f"Log-normal lengths, median {MEDIAN} tokens, sigma {SIGMA}, from {SHORTEST} to"
                f" {LONGEST:,}. Padding: its"
            ),
            (
                "part of the tokens that are computed, each process padding its micro-batch to its"
                " own longest sample."
            ),
            (
                "Step: how many times longer it takes than one without padding and split evenly, if"
                " the process with most"
            ),
            "tokens decides.",
            "",
            (
                "| samples | tokens in a global batch | batches | steps per epoch | padding, 1"
                " process | step | 8 processes | step |"
            ),
            "|---:|---:|---|---:|---:|---:|---:|---:|",
            *lines,
            "",
            (
                "Random order: batches of one number of samples, with as many tokens on average as"
                " the limit, without"
            ),
            (
                f"padding. Window: shuffled, sorted within {WINDOW} batches at a time, filled up to"
                " the limit; the number"
            ),
            (
                "of steps then differs from epoch to epoch. It and `data.batch_by=tokens` keep the"
                " limit with padding, and"
            ),
            (
                "are split among 8 processes in the same way, by tokens; random order is split by"
                " samples."
            ),
            "",
            (
                "What the constants of `data/length_batches.py` cost: padding, and steps per"
                f" epoch, of {medium:,} samples"
            ),
            "in batches of 16,384 tokens, on one process.",
            "",
            "| `ALIKE` | `LEAST_BATCHES` 1 | 2 | 4 | 8 |",
            "|---:|---:|---:|---:|---:|",
            *choices(medium, 16_384),
            "",
            f"Planning {times(5 * options.samples, 65_536)}.",
            "",
            *conditions(f"padding.py --samples {options.samples}"),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
