"""Parameter groups: other learning rates and arguments for parts of a model, by name and by
depth."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.text import matching, unmatched

MATCH = "match"
"""The key of `optimizer.groups` that is not an argument of the optimizer: a glob over names of
parameters."""


def as_groups(params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of parameter groups; parameters alone are one group."""
    given: list[Any] = list(params)
    if given and isinstance(given[0], dict):
        return [{**group, "params": list(group["params"])} for group in given]
    return [{"params": given}]


def split_group(
    group: dict[str, Any],
    belongs: Callable[[Tensor], bool],
    entries: dict[str, Any],
    other_entries: dict[str, Any],
) -> list[dict[str, Any]]:
    """A group as two, without those that are empty.

    entries: of the first group, with the parameters that belong to it.
    other_entries: of the second one.
    """
    first = [parameter for parameter in group["params"] if belongs(parameter)]
    second = [parameter for parameter in group["params"] if not belongs(parameter)]
    parts = [{**group, "params": first, **entries}, {**group, "params": second, **other_entries}]
    return [part for part in parts if part["params"]]


def parameter_groups(
    trained: Mapping[str, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] = (),
    layer_rates: Mapping[str, float] | None = None,
    frozen: Container[str] = (),
) -> list[dict[str, Any]]:
    """The groups of an optimizer; those with the full learning rate first, frozen parameters in
    groups of their own.

    groups: each a glob `match` and arguments of the optimizer; the first one that matches a name is
        its group.
    layer_rates: learning rates of parameters by name, see `layer_rates`; those of a group with a
        rate of its own have that.
    frozen: names of those that train later.

    Raises ConfigError if a group matches no name, or if those before it match all that it does.
    """
    key = "optimizer.groups=[{{match: {}}}]"
    globs = [group[MATCH] for group in groups]
    problems = unmatched(key, globs, list(trained), "parameter that trains")
    if problems:
        raise ConfigError(problems)
    members: dict[tuple[bool, int, float | None], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        number = next((n for n, glob in enumerate(globs) if matching(glob, [name])), -1)
        rate = None
        if layer_rates and (number < 0 or "lr" not in groups[number]):
            rate = layer_rates[name]
        members.setdefault((name in frozen, number, rate), []).append(parameter)
    used = {number for _, number, _ in members}
    for number, glob in enumerate(globs):
        if number not in used:
            rule = (
                "earlier groups match all of its parameters, and the first match wins;"
                " remove this group, or put it first"
            )
            raise ConfigError([f"{key.format(glob)}: {rule}"])
    result = []
    for is_frozen, number, rate in sorted(
        members, key=lambda place: (place[0], place[1], -(place[2] or 0))
    ):
        group: dict[str, Any] = {"params": members[is_frozen, number, rate]}
        if rate is not None:
            group["lr"] = rate
        if number >= 0:
            group.update(groups[number])
            del group[MATCH]
        result.append(group)
    return result


def layer_rates(depths: Mapping[str, int], lr: float, layer_decay: float) -> dict[str, float]:
    """The learning rate of each parameter: that of the layer above it times `layer_decay` (ELECTRA,
    arXiv:2003.10555).

    depths: see `depths_of`.
    lr: learning rate of the last layer.
    """
    top = max(depths.values())
    return {name: lr * layer_decay ** (top - depth) for name, depth in depths.items()}


def depths_of(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter of a model, from 0 at its input, by the order in which the model
    has its modules.

    Layers are the blocks: the members of the outermost nn.Sequential, ModuleList or ModuleDict that
    holds two or more of one class, and no other class with parameters: the encoder layers of a
    transformer, the residual blocks of a stage. What comes before the first block, embeddings or a
    stem, is layer 0; what comes after the last one, norm and head, is the last layer, as in BEiT
    (arXiv:2106.08254). What lies between two stages is a layer of its own. A model without such
    blocks has its direct children as layers, a norm with the one before it.
    """
    blocks = _blocks(model, "")
    if not blocks:
        return _depths_by_child(model)
    depths = {}
    depth = 0
    last_block = ""
    for name, _ in model.named_parameters():
        block = next((path for path in blocks if name.startswith(f"{path}.")), "")
        if block != last_block:
            depth += 1
            last_block = block
        depths[name] = depth
    return depths


def _children(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """The children that have parameters, by their paths."""
    return {
        f"{path}.{name}".lstrip("."): child
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    }


def _blocks(module: nn.Module, path: str) -> list[str]:
    """The paths of the blocks below a module."""
    children = _children(module, path)
    inner = [block for where, child in children.items() for block in _blocks(child, where)]
    classes = {type(child) for child in children.values()}
    is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if is_list and len(children) > 1 and len(classes) == 1:
        are_stages = classes <= {nn.Sequential, nn.ModuleList}
        if not (are_stages and inner):
            return list(children)
    return inner


def _depths_by_child(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter of a model without blocks: its child, see `depths_of`."""
    depths = {name: 0 for name, _ in model.named_parameters()}
    children = _children(model, "")
    while len(children) == 1:
        ((path, child),) = children.items()
        children = _children(child, path)
    depth = -1
    for path, layer in children.items():
        is_norm = all(parameter.ndim < 2 for parameter in layer.parameters())
        if depth < 0 or not is_norm:
            depth += 1
        for name in depths:
            if name.startswith(f"{path}."):
                depths[name] = depth
    return depths
