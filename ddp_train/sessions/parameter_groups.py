"""The groups of an optimizer's parameters, by the names of the parameters.

torch keeps moments by place. Where groups, or parameters in them, come in another order than when
a checkpoint was saved, they are found by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Groups = list[list[str]]
"""The names of the parameters in each group; "" for one that has none."""


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def shared_parameters(some: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that are in both, in the order of `others`."""
    known = {id(parameter) for parameter in some}
    return [parameter for parameter in others if id(parameter) in known]


def problem_of(before: Groups, now: Groups) -> str:
    """The reason why a state of one division cannot be loaded in another; "" if it can."""
    if before == now:
        return ""
    names_before = [name for group in before for name in group]
    names = [name for group in now for name in group]
    if Counter(names_before) != Counter(names) or "" in names:
        pairs = zip_longest(names_before, names, fillvalue="nothing")
        was, is_now = next(pair for pair in pairs if pair[0] != pair[1])
        return f"it had {was} where it has {is_now} now"
    if Counter(map(frozenset, before)) != Counter(map(frozenset, now)):
        return "the parameters are divided into other groups"
    return ""


def places_of_groups(before: Groups, now: Groups) -> list[int]:
    """For each group the place that it had. The groups must consist of the same parameters."""
    places = {frozenset(group): place for place, group in enumerate(before)}
    return [places[frozenset(group)] for group in now]


def reordered(state: Mapping[str, Any], before: Groups, now: Groups) -> dict[str, Any]:
    """The state_dict of an optimizer with groups and parameters in the order of `now`."""
    numbers: dict[str, int] = {}
    for names, group in zip(before, state["param_groups"], strict=True):
        numbers |= dict(zip(names, group["params"], strict=True))
    groups = []
    states = {}
    count = 0
    for names, place in zip(now, places_of_groups(before, now), strict=True):
        group = dict(state["param_groups"][place])
        if "param_names" in group:
            given = dict(zip(before[place], group["param_names"], strict=True))
            group["param_names"] = [given[name] for name in names]
        group["params"] = list(range(count, count + len(names)))
        count += len(names)
        groups.append(group)
        for number, name in zip(group["params"], names, strict=True):
            if numbers[name] in state["state"]:
                states[number] = state["state"][numbers[name]]
    return {**state, "state": states, "param_groups": groups}


def has_rates_by_place(state: Mapping[str, Any]) -> bool:
    """True if the state of a schedule has different numbers for the groups, by their places."""
    for name, value in state.items():
        is_list = isinstance(value, list) and bool(value)
        if is_list and name == "_schedulers" and any(map(has_rates_by_place, value)):
            return True
        is_by_group = is_list and name.endswith(("lrs", "_lr", "lambdas"))
        if is_by_group and any(item != value[0] for item in value):
            return True
    return False
