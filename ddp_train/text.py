"""Formats values, counts and errors for messages. Torch-free."""

from __future__ import annotations

import difflib
import fnmatch
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OF_AVERAGE = "ema_"
"""Begins the names of the metrics that the average of the weights has: ema_loss, ema_accuracy."""
RESERVED = ("loss", "samples", "correct", "kind", "step", "epoch", "time")
"""Keys of a line of metrics.jsonl, which no further metric may have as its name."""
NAME_IS_RESERVED = "lines of metrics.jsonl already have a field of that name"
MOST_EXAMPLES = 4
"""Names that a message shows where none is close to what was typed."""
MOST_PROBLEMS = 20
"""The most messages of one kind that somebody reads."""


def shown(value: Any) -> str:
    """A value as it is typed in a Hydra override: `null`, `true`, `[a,b]`, `{k:v}`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{shown(v)}" for k, v in value.items()) + "}"
    return str(value)


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys: `optimizer.lr`. An empty dict is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def word(key: str, value: object) -> str:
    """An override whose value Hydra's grammar takes as this text, whatever it holds. A shell needs
    its own quotes."""
    text = str(value)
    if re.fullmatch(r"[\w./-]+", text):
        return f"{key}={text}"
    return f"{key}={in_double_quotes(text)}"


def shell_word(key: str, value: object) -> str:
    """The same override with the quotes that a shell needs, to be pasted."""
    return shlex.quote(word(key, value))


def words_to_resume(run_dir: object, trusted_modules: Sequence[str]) -> str:
    """The overrides that resume a run, to be pasted. The user's code must be trusted again:
    SECURITY.md."""
    return shlex.join([word("run_dir", run_dir), *words_of_trust(trusted_modules)])


def words_of_trust(trusted_modules: Sequence[str]) -> list[str]:
    """The override that trusts packages of the user; none if there are none."""
    if not trusted_modules:
        return []
    return [f"trusted_modules=[{','.join(trusted_modules)}]"]


def in_double_quotes(text: str) -> str:
    """A text in Hydra's grammar, whatever it holds."""
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), text)
    return f'"{escaped}"'


def counted(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`, `2 batches`."""
    plural = noun + ("es" if noun.endswith(("s", "batch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def did_you_mean(word: str, candidates: list[str]) -> str:
    """'; did you mean X?' for the closest candidate; empty if none is close."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def did_you_mean_glob(glob: str, candidates: Iterable[str]) -> str:
    """'; did you mean X?' for the closest name or glob; empty if none is close.

    What matches anything tells nothing of what was meant, and another number is no slip: `3.*` is
    not close to `1.*`.
    """
    numbers = set(re.findall(r"\d+", glob))
    by_letters: dict[str, str] = {}
    for candidate in candidates:
        if numbers.issuperset(re.findall(r"\d+", candidate)):
            by_letters.setdefault(_without_wildcards(candidate), candidate)
    close = difflib.get_close_matches(_without_wildcards(glob), by_letters, n=1, cutoff=0.7)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""


def _without_wildcards(glob: str) -> str:
    return re.sub(r"\[[^]]*\]|[^\w.-]", "", glob).strip(".")


def see_page(title: str) -> str:
    """The end of a message that needs a page of docs/, which an installed package does not have.

    title: the heading of the page.
    """
    return f' (see the page "{title}" of the documentation)'


def first_line(error: BaseException) -> str:
    """The first line of an error's message: torch appends a C++ stack."""
    return str(error).strip().partition("\n")[0]


def with_article(noun: str) -> str:
    """`an AveragedModel`, `a Linear`."""
    article = "an" if noun[:1] in "AEIOaeio" else "a"
    return f"{article} {noun}"


def snake_case(name: str) -> str:
    """LanguageModel -> language_model, MulticlassF1Score -> multiclass_f1_score, BinaryAUROC ->
    binary_auroc."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"\W+", "_", parted).lower()


def matching(glob: str, names: Iterable[str]) -> list[str]:
    """The dotted names that a glob matches as a whole: `layer1.*`, `*.bias`. A star stands for dots
    too."""
    return [name for name in names if fnmatch.fnmatchcase(name, glob)]


def unmatched(
    found: str, globs: Iterable[str], names: Sequence[str], what: str = "parameter"
) -> list[str]:
    """A problem for each glob that matches no name, with one that was probably meant or else some
    of the names, and one for all that are more than MOST_PROBLEMS.

    found: key and value, a `{}` for the glob. what: the names are of.
    """
    parents = dict.fromkeys(name.rpartition(".")[0] + ".*" for name in names if "." in name)
    wider = dict.fromkeys(name.split(".")[0] + ".*" for name in names if "." in name)
    known = list({**wider, **parents, **dict.fromkeys(names)})
    examples = ""
    if known:
        examples = f"; there are, for example, {', '.join(_examples(list(wider), known))}"
    missed = [glob for glob in globs if not matching(glob, names)]
    problems = [
        f"{found.format(glob)}: matches no {what}{did_you_mean_glob(glob, known) or examples}"
        for glob in missed[:MOST_PROBLEMS]
    ]
    further = len(missed) - MOST_PROBLEMS
    if further > 0:
        problems.append(f"{found.format('...')}: {further:,} more of them match no {what}")
    return problems


def _examples(outermost: list[str], known: list[str]) -> list[str]:
    """Some names: the first and last modules where there are many, for the head comes last."""
    if len(outermost) <= MOST_EXAMPLES:
        return known[:MOST_EXAMPLES]
    half = MOST_EXAMPLES // 2
    return [*outermost[:half], "...", *outermost[-half:]]


def by_rank(findings: Iterable[str]) -> str:
    """Findings grouped by rank: `ranks 0 and 2: a float; rank 1: a str`."""
    ranks_of: dict[str, list[str]] = {}
    for rank, finding in enumerate(findings):
        ranks_of.setdefault(finding, []).append(str(rank))
    groups = []
    for finding, numbers in ranks_of.items():
        *first, last = numbers
        if first:
            groups.append(f"ranks {', '.join(first)} and {last}: {finding}")
        else:
            groups.append(f"rank {last}: {finding}")
    return "; ".join(groups)
