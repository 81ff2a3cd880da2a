"""Weights that a model begins with, from a file: read as data, never as code, and compared name by
name.

Nothing is left out in silence: a name that only one side has, or that has another shape there, is
an error unless `model.init_ignore` names it.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_train.errors import ConfigError, DataError
from ddp_train.text import counted, first_line, matching, unmatched

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
"""Where files of whole training runs keep the weights (Lightning: state_dict)."""
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Further outputs of GoogLeNet and Inception, which `zoo` leaves out."""
SHOWN = 6
"""Names in a message, of each kind."""


@dataclass(frozen=True)
class Weights:
    """Named tensors, and where they came from."""

    tensors: dict[str, Tensor]
    source: str
    """As the user named it."""
    sha256: str
    notes: list[str] = field(default_factory=list)
    """What was assumed to read them."""
    classes: int | None = None
    """That their network tells apart; None: unknown."""


@dataclass(frozen=True)
class Origin:
    """With what a model began, for the plan and for manifests."""

    source: str
    sha256: str
    loaded: int
    """Tensors that were taken."""
    fresh: list[str]
    """Names in the model that were not."""
    notes: list[str]


def read_weights(path: Path, source: str) -> Weights:
    """A .safetensors file, or one of torch.save. source: key and value, for messages.

    Raises DataError if it cannot be read as plain data, or holds no state dict.
    """
    remedy = "name a file that holds a state dict: torch.save(model.state_dict(), PATH)"
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, weights_only=True, map_location="cpu")
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except (
        Exception
    ) as error:  # damaged files raise a dozen kinds of errors; each is reported with its cause
        why = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{source} cannot be read as plain tensors: {why}", remedy) from error
    inside = [
        name
        for name in WRAPPERS
        if isinstance(content, Mapping) and _is_state_dict(content.get(name))
    ]
    if not _is_state_dict(content) and len(inside) == 1:
        return Weights(dict(content[inside[0]]), source, sha256, [f"its entry {inside[0]}"])
    if not _is_state_dict(content):
        what = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            what += f" with {', '.join(map(str, list(content)[:SHOWN])) or 'nothing'}"
        raise DataError(
            f"{source} is not a state dict, from names to tensors: it is {what}", remedy
        )
    return Weights(dict(content), source, sha256)


def _is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
        )
    )


def torchvision_weights(arch: str, name: str) -> Weights:
    """Those of a classifier of torchvision, from torch's cache, or downloaded into it. Raises
    DataError."""
    from torchvision.models import get_model_weights

    found: Any = get_model_weights(arch)[name]
    file = Path(torch.hub.get_dir(), "checkpoints", Path(found.url).name)
    if not file.exists():
        digest = re.search(r"-([0-9a-f]{8,})\.", file.name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(
                found.url, str(file), digest and digest[1], progress=False
            )
        except (OSError, RuntimeError) as error:  # no network; another content than the name says
            why = f"model.weights={name}: {found.url} cannot be downloaded: {first_line(error)}"
            raise DataError(why, f"check the network, or copy the file to {file}") from error
    weights = read_weights(file, f"model.weights={name} ({file.name})")
    ours = {
        name: tensor for name, tensor in weights.tensors.items() if not name.startswith(AUXILIARY)
    }
    return replace(weights, tensors=ours, classes=len(found.meta["categories"]))


def begin_with(model: nn.Module, weights: Weights, ignore: Sequence[str] = ()) -> Origin:
    """Copies weights into a model, in the model's number type. ignore: globs over names that stay
    as they are; so does a head for another number of classes, if that of the weights is known.

    Raises ConfigError if a glob matches no name, DataError with all names that do not fit.
    """
    own = model.state_dict()
    tensors, notes = _with_names_of(own, weights)
    if problems := unmatched("model.init_ignore=[{}]", ignore, [*own, *tensors], "name"):
        raise ConfigError(problems)
    ignored = {name for glob in ignore for name in matching(glob, [*own, *tensors])}
    ignored |= {
        name
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape == (weights.classes, *own[name].shape[1:])
    }
    wanted = {name: tensor for name, tensor in own.items() if name not in ignored}
    given = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    taken = {
        name: tensor
        for name, tensor in given.items()
        if name in wanted and tensor.shape == wanted[name].shape
    }
    places = {
        _place(own[name]) for name in taken
    }  # tied weights: a file may have them under one of their names
    missing = [name for name in wanted if name not in given and _place(own[name]) not in places]
    if missing or taken.keys() != given.keys():
        raise _misfit(weights.source, wanted, given, missing)
    model.load_state_dict(taken, strict=False)
    fresh = [name for name in own if name in ignored]
    return Origin(weights.source, weights.sha256, len(taken), fresh, [*weights.notes, *notes])


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.numel():
        return (tensor.data_ptr(), tensor.shape)
    return (id(tensor),)


def _with_names_of(
    own: Mapping[str, Tensor], weights: Weights
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a file under the names that a model has for them: without the prefix that a
    wrapper has added there (`module.` of DDP, `model.` of Lightning, `_orig_mod.` of
    torch.compile), or with that of one here."""
    tensors = weights.tensors
    if tensors.keys() & own.keys():
        return tensors, []
    fits: dict[tuple[str, str], int] = {}
    ours = [prefix for prefix in _prefixes(own) if all(name.startswith(prefix) for name in own)]
    for theirs in _prefixes(tensors):
        inner = [name.removeprefix(theirs) for name in tensors if name.startswith(theirs)]
        for prefix in ours:
            fits[theirs, prefix] = sum(prefix + name in own for name in inner)
    most = max(fits.values(), default=0)
    best = [pair for pair, count in fits.items() if count == most]
    if not most:
        return tensors, []
    if len(best) > 1:
        several = " and ".join(theirs + "*" for theirs, _ in best)
        raise DataError(
            f"{weights.source} fits in several ways: {several} there are equally like the names of"
            " the model",
            "save the part that is meant under its own names: torch.save(part.state_dict(), PATH)",
        )
    ((theirs, prefix),) = best
    found = {
        prefix + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
        for name, tensor in tensors.items()
    }
    if theirs:
        note = f"prefix {theirs} taken off"
    else:
        note = f"prefix {prefix} put before its names"
    return found, [note]


def _prefixes(names: Mapping[str, Tensor]) -> list[str]:
    """The beginnings of names up to their third dot, the empty one first."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:count]) + "." for count in range(1, min(4, len(parts)))}
    return sorted(found, key=lambda prefix: (prefix.count("."), prefix))


def _misfit(
    source: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], missing: list[str]
) -> DataError:
    left = [name for name in given if name not in wanted]
    shapes = [name for name in given if name in wanted and given[name].shape != wanted[name].shape]
    parts = [
        _listed(
            "the model has, and it has not:",
            [_with_guess(name, wanted, given, left) for name in missing],
        ),
        _listed("it has, and the model has not:", left),
        _listed(
            "of another shape:",
            [f"{n} {list(given[n].shape)}, here {list(wanted[n].shape)}" for n in shapes],
        ),
    ]
    globs = list(
        dict.fromkeys(
            name.rpartition(".")[0] + ".*" if "." in name else name
            for name in (*missing, *left, *shapes)
        )
    )
    remedy = f"if that is as it should be, name it: model.init_ignore=[{','.join(globs[:SHOWN])}]"
    return DataError(
        f"{source} does not fit the model; {'; '.join(filter(None, parts))}",
        remedy
        + (
            f" and {len(globs) - SHOWN} more, or fewer and wider globs"
            if len(globs) > SHOWN
            else ""
        ),
    )


def _listed(heading: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    if names:
        return f"{heading} {', '.join(names[:SHOWN])}{more}"
    return ""


def _with_guess(
    name: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], left: list[str]
) -> str:
    """A missing name, with one that is left over, has its shape and resembles it."""
    like = [other for other in left if given[other].shape == wanted[name].shape]
    close = difflib.get_close_matches(name, like, n=1, cutoff=0.5)
    return f"{name} (is it {close[0]} there?)" if close else name


def in_words(origin: Origin) -> str:
    """For the plan."""
    if origin.fresh:
        fresh = f"left as drawn: {', '.join(origin.fresh[:SHOWN])}"
    else:
        fresh = "nothing is left as drawn"
    more = f" and {len(origin.fresh) - SHOWN} more" if len(origin.fresh) > SHOWN else ""
    parts = [
        f"{counted(origin.loaded, 'tensor')} of {origin.source}",
        f"sha256 {origin.sha256[:12]}",
        *origin.notes,
    ]
    return ", ".join([*parts, fresh + more])
