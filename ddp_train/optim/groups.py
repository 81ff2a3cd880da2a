"""Parameter groups: other learning rates and arguments for parts of a model, by name and by
depth."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.text import matching, unmatched

MATCH = "match"
"""The key of `optimizer.groups` that is no argument of the optimizer: a glob over names of
parameters."""


def parameter_groups(
    trained: Mapping[str, nn.Parameter],
    lr: float | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    depths: Mapping[str, int] | None = None,
    layer_decay: float | None = None,
    frozen: Container[str] = (),
) -> list[dict[str, Any]]:
    """The groups of an optimizer; those with the full learning rate first, frozen parameters in
    groups of their own.

    lr: of what no group gives another one; None: that of the optimizer's class, only without
    layer_decay. groups: each a glob `match` and arguments of the optimizer; the first one that
    matches a name is its group. depths: of each parameter's layer, from 0, see `depths_of`.
    layer_decay: the learning rate of a layer is that of the layer above it times this (ELECTRA,
    arXiv:2003.10555), in groups without one of their own. frozen: names of those that train later.

    Raises ConfigError if a group matches no name, or if those before it match all that it does.
    """
    found = "optimizer.groups=[{{match: {}}}]"
    what = "parameter that trains"
    if problems := unmatched(found, [group[MATCH] for group in groups], list(trained), what):
        raise ConfigError(problems)
    top = max(depths.values(), default=0) if depths else 0
    members: dict[tuple[bool, int, int], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        number = next((n for n, group in enumerate(groups) if matching(group[MATCH], [name])), -1)
        decays = depths and layer_decay and (number < 0 or "lr" not in groups[number])
        place = name in frozen, number, top - depths[name] if depths and decays else 0
        members.setdefault(place, []).append(parameter)
    used = {number for _, number, _ in members}
    if hidden := [group[MATCH] for number, group in enumerate(groups) if number not in used]:
        raise ConfigError(
            [f"{found.format(hidden[0])}: groups before it match all that it does; drop it"]
        )
    made = []
    for place, parameters in sorted(members.items(), key=lambda item: item[0]):
        _, number, below = place
        if number >= 0:
            arguments = {name: value for name, value in groups[number].items() if name != MATCH}
        else:
            arguments = {}
        if layer_decay and lr is not None:
            arguments = {"lr": lr * layer_decay**below, **arguments}
        made.append({"params": parameters, **arguments})
    return made


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
    named = dict(model.named_parameters())
    blocks = list(_blocks(model, ""))
    if not blocks:
        return _depths_of_children(model, named)
    first_of_block = [next((b for b in blocks if name.startswith(b + ".")), "") for name in named]
    inside = [place for place, block in enumerate(first_of_block) if block]
    depths = {}
    depth = 0
    last = ""
    for place, (name, block) in enumerate(zip(named, first_of_block, strict=True)):
        if inside[0] <= place and block != last and (place <= inside[-1] or last):
            depth += 1
        if inside[0] <= place:
            last = block
        depths[name] = depth
    return depths


def _blocks(module: nn.Module, path: str) -> list[str]:
    """The paths of the blocks below a module."""
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    children = [
        (where, child) for where, child in children if any(True for _ in child.parameters())
    ]
    holds = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if holds and len(children) > 1 and len({type(child) for _, child in children}) == 1:
        inner = [
            _blocks(child, where)
            for where, child in children
            if type(child) in (nn.Sequential, nn.ModuleList)
        ]
        if any(inner):
            return [block for found in inner for block in found]
        return [where for where, _ in children]
    return [block for where, child in children for block in _blocks(child, where)]


def _depths_of_children(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, int]:
    path = ""
    while (
        len(
            children := [
                (n, c) for n, c in model.named_children() if any(True for _ in c.parameters())
            ]
        )
        == 1
    ):
        path = f"{path}{children[0][0]}."
        model = children[0][1]
    depths: dict[str, int] = dict.fromkeys(named, 0)
    depth = -1
    for child, layer in children:
        depth += depth < 0 or any(parameter.ndim > 1 for parameter in layer.parameters())
        depths |= {name: depth for name in named if name.startswith(f"{path}{child}.")}
    return depths
