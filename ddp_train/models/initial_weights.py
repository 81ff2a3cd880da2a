"""The weights that a model begins with, from a file.

They are read as data, never as code, and compared name by name.

Nothing is left out in silence: a name that only one side has, or that has another shape there, is
an error unless `model.init_ignore` names it.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_train.errors import ConfigError, DataError
from ddp_train.text import counted, first_line, matching, unmatched, with_article

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
"""Entries in which files of whole training runs keep the weights (Lightning: state_dict)."""
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Further outputs of GoogLeNet and Inception, which `torchvision_networks` leaves out."""
NAMES_IN_MESSAGE = 6
"""The most names of each kind in a message."""
PREFIX_DOTS = 3
"""The most parts of a name that may be a wrapper's prefix."""
STATE_DICT = "name a file that holds a state dict: torch.save(model.state_dict(), PATH)"


@dataclass(frozen=True)
class Weights:
    """Named tensors, and where they came from."""

    tensors: dict[str, Tensor]
    source: str
    """As the user named it."""
    sha256: str
    notes: list[str] = field(default_factory=list)
    """The assumptions that were made to read them."""
    classes: int | None = None
    """Classes that their network tells apart; None: unknown."""


@dataclass(frozen=True)
class Origin:
    """The origin of a model's first weights, for the plan and for manifests."""

    source: str
    sha256: str
    loaded: int
    """Tensors that were loaded."""
    fresh: list[str]
    """Names in the model that were not loaded."""
    notes: list[str]


def read_weights(path: Path, source: str) -> Weights:
    """Read a .safetensors file, or one of torch.save.

    source: key and value, for messages.

    Raises DataError if it cannot be read as plain data, or holds no state dict.
    """
    content, sha256 = _read_file(path, source)
    if _is_state_dict(content):
        return Weights(dict(content), source, sha256)
    description = with_article(type(content).__name__)
    if isinstance(content, Mapping):
        wrappers = [name for name in WRAPPERS if _is_state_dict(content.get(name))]
        if len(wrappers) == 1:
            name = wrappers[0]
            return Weights(dict(content[name]), source, sha256, [f"its entry {name}"])
        names = ", ".join(map(str, list(content)[:NAMES_IN_MESSAGE]))
        description += f" with {names or 'nothing'}"
    raise DataError(
        f"{source} is not a state dict (names to tensors): it is {description}", STATE_DICT
    )


def torchvision_weights(arch: str, name: str) -> Weights:
    """The weights of a classifier of torchvision, from torch's cache, or downloaded into it.

    Raises DataError if they cannot be downloaded.
    """
    from torchvision.models import get_model_weights

    listed: Any = get_model_weights(arch)[name]
    file = Path(torch.hub.get_dir(), "checkpoints", Path(listed.url).name)
    if not file.exists():
        _download(name, listed.url, file)
    weights = read_weights(file, f"model.weights={name} ({file.name})")
    tensors = {
        name: tensor for name, tensor in weights.tensors.items() if not name.startswith(AUXILIARY)
    }
    return replace(weights, tensors=tensors, classes=len(listed.meta["categories"]))


def load_initial_weights(model: nn.Module, weights: Weights, ignore: Sequence[str] = ()) -> Origin:
    """Copy weights into a model, in the model's number type.

    ignore: globs over names, here or as in the file, that stay as they are; so does a head for
        another number of classes, if that of the weights is known.

    Raises ConfigError if a glob matches no name, DataError with all names that do not fit.
    """
    state = model.state_dict()
    own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    tensors, notes = _with_names_of(own, weights)
    # By each name that a user may see: the model's, and that in the file.
    here = {name: name for name in (*own, *tensors)}
    in_file = {theirs: ours for ours, theirs in _names_in_file(tensors, weights).items()}
    names = {**in_file, **here}
    problems = unmatched("model.init_ignore=[{}]", ignore, list(names), "name")
    if problems:
        raise ConfigError(problems)
    ignored = set()
    for glob in ignore:
        # A name of the file may be another one's here.
        found = matching(glob, here) or matching(glob, in_file)
        ignored |= {names[name] for name in found}
    ignored |= _heads_for_other_classes(own, tensors, weights.classes)
    comparison = _Comparison(
        weights.source,
        {name: tensor for name, tensor in own.items() if name not in ignored},
        {name: tensor for name, tensor in tensors.items() if name not in ignored},
    )
    comparison.check()
    model.load_state_dict(comparison.loadable, strict=False)
    fresh = [name for name in own if name in ignored]
    return Origin(
        weights.source,
        weights.sha256,
        len(comparison.loadable),
        fresh,
        [*weights.notes, *notes],
    )


def describe_origin(origin: Origin) -> str:
    """The origin of a model's first weights in words, for the plan."""
    if origin.fresh:
        fresh = f"randomly initialised: {_first_names(origin.fresh)}"
    else:
        fresh = "nothing is randomly initialised"
    parts = [
        f"{counted(origin.loaded, 'tensor')} of {origin.source}",
        f"sha256 {origin.sha256[:12]}",
        *origin.notes,
        fresh,
    ]
    return ", ".join(parts)


class _Comparison:
    """The tensors that a model wants beside those that a file has for it."""

    def __init__(
        self, source: str, wanted: Mapping[str, Tensor], available: Mapping[str, Tensor]
    ) -> None:
        self.source = source
        self.wanted = wanted
        self.available = available
        shared = [name for name in available if name in wanted]
        self.loadable = {
            name: available[name] for name in shared if available[name].shape == wanted[name].shape
        }
        # Tied weights: a file may have them under one of their names.
        places = {_place(wanted[name]) for name in self.loadable}
        self.missing = [
            name for name in wanted if name not in available and _place(wanted[name]) not in places
        ]
        self.surplus = [name for name in available if name not in wanted]
        self.misshapen = [name for name in shared if name not in self.loadable]

    def check(self) -> None:
        """Raise DataError with all names that do not fit."""
        misfits = [*self.missing, *self.surplus, *self.misshapen]
        if not misfits:
            return
        missing = [self._with_guess(name) for name in self.missing]
        shapes = [
            f"{name} {list(self.available[name].shape)} in the file,"
            f" {list(self.wanted[name].shape)} in the model"
            for name in self.misshapen
        ]
        kinds = [
            ("missing in the file:", missing),
            ("not in the model:", self.surplus),
            ("of another shape:", shapes),
        ]
        parts = [f"{heading} {_first_names(names)}" for heading, names in kinds if names]
        globs = list(dict.fromkeys(_glob_around(name) for name in misfits))
        listed = ",".join(globs[:NAMES_IN_MESSAGE])
        remedy = f"if this is intended, add 'model.init_ignore=[{listed}]'"
        more = len(globs) - NAMES_IN_MESSAGE
        if more > 0:
            remedy += f" with {more} more names, or use wider globs"
        raise DataError(f"{self.source} does not fit the model; {'; '.join(parts)}", remedy)

    def _with_guess(self, name: str) -> str:
        """A missing name, with a surplus one that has its shape and resembles it."""
        shape = self.wanted[name].shape
        candidates = [other for other in self.surplus if self.available[other].shape == shape]
        close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
        if not close:
            return name
        return f"{name} (perhaps {close[0]} in the file)"


def _read_file(path: Path, source: str) -> tuple[Any, str]:
    """The content of a file, and its sha256."""
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, weights_only=True, map_location="cpu")
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except Exception as error:
        # Damaged files raise a dozen kinds of errors; each is reported with its cause.
        why = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{source} cannot be read as plain tensors: {why}", STATE_DICT) from error
    return content, sha256


def _is_state_dict(content: Any) -> bool:
    if not isinstance(content, Mapping) or not content:
        return False
    return all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )


def _download(name: str, url: str, file: Path) -> None:
    """Fetch a file of weights, whose name has the beginning of its sha256."""
    digest = re.search(r"-([0-9a-f]{8,})\.", file.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(file), digest and digest[1], progress=False)
    except (OSError, RuntimeError) as error:  # no network; another content than the name says
        why = f"model.weights={name}: {url} cannot be downloaded: {first_line(error)}"
        raise DataError(why, f"check the network, or copy the file to {file}") from error


def _heads_for_other_classes(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], classes: int | None
) -> set[str]:
    """Names that both sides have, in another shape because the file's has its number of classes."""
    heads = set()
    for name in own.keys() & tensors.keys():
        shape = own[name].shape
        shape_in_file = tensors[name].shape
        if shape != shape_in_file and shape_in_file == (classes, *shape[1:]):
            heads.add(name)
    return heads


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that share their memory."""
    if tensor.numel():
        return (tensor.data_ptr(), tensor.shape)
    return (id(tensor),)


def _with_names_of(
    own: Mapping[str, Tensor], weights: Weights
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a file under the names that a model has for them, and a note of what changed.

    The prefix that a wrapper added there is taken off (`module.` of DDP, `model.` of Lightning,
    `_orig_mod.` of torch.compile), or that of one here is put before them.
    """
    tensors = weights.tensors
    if tensors.keys() & own.keys():
        return tensors, []
    counts = _names_that_fit(own, tensors)
    most = max(counts.values(), default=0)
    if not most:
        return tensors, []
    best = [pair for pair, count in counts.items() if count == most]
    if len(best) > 1:
        several = " and ".join(prefix_in_file + "*" for prefix_in_file, _ in best)
        raise DataError(
            f"{weights.source} has several parts that fit the model: {several}",
            "save the part that you mean alone: torch.save(part.state_dict(), PATH)",
        )
    prefix_in_file, prefix = best[0]
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix_in_file):
            name = prefix + name.removeprefix(prefix_in_file)
        renamed[name] = tensor
    if prefix_in_file:
        return renamed, [f"prefix {prefix_in_file} removed"]
    return renamed, [f"prefix {prefix} added"]


def _names_in_file(tensors: Mapping[str, Tensor], weights: Weights) -> dict[str, str]:
    """The name in the file for each tensor that `_with_names_of` may have renamed."""
    by_tensor = {id(tensor): name for name, tensor in weights.tensors.items()}
    return {name: by_tensor[id(tensor)] for name, tensor in tensors.items()}


def _names_that_fit(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[tuple[str, str], int]:
    """The number of names that fit for each pair of prefixes.

    The first is a prefix in the file, the second one of all the model's names that takes its place.
    """
    prefixes = [prefix for prefix in _prefixes(own) if all(name.startswith(prefix) for name in own)]
    counts = {}
    for prefix_in_file in _prefixes(tensors):
        inner = [
            name.removeprefix(prefix_in_file) for name in tensors if name.startswith(prefix_in_file)
        ]
        for prefix in prefixes:
            counts[prefix_in_file, prefix] = sum(prefix + name in own for name in inner)
    return counts


def _prefixes(names: Iterable[str]) -> list[str]:
    """The beginnings of names up to their third dot, the empty one first."""
    prefixes = {""}
    for name in names:
        parts = name.split(".")
        longest = min(PREFIX_DOTS, len(parts) - 1)
        prefixes |= {".".join(parts[:count]) + "." for count in range(1, longest + 1)}
    return sorted(prefixes, key=lambda prefix: (prefix.count("."), prefix))


def _glob_around(name: str) -> str:
    """A glob over the layer of a name."""
    layer, dot, _ = name.rpartition(".")
    return f"{layer}.*" if dot else name


def _first_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others, for a message."""
    listed = ", ".join(names[:NAMES_IN_MESSAGE])
    more = len(names) - NAMES_IN_MESSAGE
    if more <= 0:
        return listed
    return f"{listed} and {more} more"
