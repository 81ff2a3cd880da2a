"""Names that a loop carries from one step to the next, and that its losses or updates depend on.

A moving baseline, weights of groups, a threshold: where a process computes it of its own samples,
it is another number on each. What a loop adds up for a log is carried too, but no loss depends on
it. So the code of the loop is read: which names does the argument of `run.mean` come from, and what
sets a learning rate, changes weights, or decides about a step?
"""

from __future__ import annotations

import ast
import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_train.sessions.watches.called_functions import CalledFunctions, FunctionNode, is_local
from ddp_train.sessions.watches.code_names import (
    containers_of,
    dotted,
    names_in,
    owner_of,
    owners_of,
)
from ddp_train.sessions.watches.frame_names import code_of, run_names
from ddp_train.sessions.wrapped import Wrapped

CLIP = "clip_grad"
"""The beginning of the names of torch's functions that clip gradients."""
LOAD = "load_state_dict"
JUMPS = (ast.Continue, ast.Break)
WEIGHTS = {"parameters", "named_parameters", "buffers", "state_dict", "param_groups"}
"""Attributes of models and optimizers whose items are weights, or say how these are updated."""
SIZES = (int, float, str, tuple, list)
"""Types of attributes of a model that are no weights."""
GRADIENT = "grad"
"""The attribute by which an optimizer gets a gradient, also one that a loop sets itself."""
LOGS = {"print", "log", "info", "debug", "warning", "set_description", "set_postfix", "add_scalar"}
"""Functions, of any owner, that show what they get: no loss comes from that."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Lambda)


@dataclass
class Flow:
    """The names that a loop's body reads and sets, in the order of its text: `q`, `self.q`."""

    run_names: set[str]
    """How the code calls the run of the session."""
    sources: dict[str, set[str]] = field(default_factory=dict)
    """The names that each one that is set comes from."""
    origins: dict[str, set[str]] = field(default_factory=dict)
    """The same without those that decide whether it is set."""
    carried: set[str] = field(default_factory=set)
    """The names that are read before they are set."""
    seen: set[str] = field(default_factory=set)
    """The names that were read or set."""
    changed: set[str] = field(default_factory=set)
    """The names that are set, or of which a part is."""
    renewed: set[str] = field(default_factory=set)
    """The names that are set."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of objects that have another one too: `stats` after `stats = trainer.stats`."""
    losses: set[str] = field(default_factory=set)
    """The names in arguments of `run.mean` and in updates of weights and learning rates, and in
    what decides whether these are done."""
    has_losses: bool = False
    arguments: set[str] = field(default_factory=set)
    """Those of `losses` that do not decide alone."""
    needs: int = 0
    """Losses and updates that were met."""
    jumps: set[str] = field(default_factory=set)
    """The names that decide about a `break` or `continue` of the loop that is followed now."""
    is_update: Callable[[str], bool] = bool
    """Tells whether a step of the object with a name is an update: of an optimizer."""
    weights: set[str] = field(default_factory=set)
    """The variables of loops over weights, or over parameter groups."""
    loops: int = 0
    """Loops within the loop, around the statement that is followed now."""
    set_under: dict[str, set[str]] = field(default_factory=dict)
    """The names that are set where a condition holds, by its text."""

    def need(self, names: set[str], conditions: set[str]) -> None:
        """Note that losses or updates come from names, and are done under conditions."""
        self.needs += 1
        self.arguments |= names
        self.losses |= names | conditions

    @contextlib.contextmanager
    def inner_loop(self) -> Iterator[None]:
        """A loop within the loop: its jumps matter if it has losses or updates."""
        outer_jumps = self.jumps
        needs = self.needs
        self.jumps = set()
        self.loops += 1
        yield
        self.loops -= 1
        if self.needs > needs:
            self.losses |= self.jumps
        self.jumps = outer_jumps

    def names_in(self, node: ast.AST) -> set[str]:
        """The names in an expression, with what their owners are called elsewhere."""
        return set(map(self.name_elsewhere, names_in(node)))

    def names_in_arguments(self, call: ast.Call) -> set[str]:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        return set().union(*map(self.names_in, arguments))

    def name_elsewhere(self, name: str) -> str:
        """`trainer.stats.mean` for `stats.mean` after `stats = trainer.stats`."""
        owner, point, part = name.partition(".")
        return self.aliases.get(owner, owner) + point + part if point else name

    def owner_of(self, node: ast.AST) -> str:
        """The name of the variable that changes with a part of it: see `code_names.owner_of`."""
        name = owner_of(node)
        return self.aliases.get(name, self.name_elsewhere(name))

    def read(self, names: set[str]) -> None:
        self.carried |= {
            name for name in names - self.seen if not containers_of(name) & self.renewed
        }
        self.seen |= names

    def set(self, target: str, names: set[str], conditions: set[str]) -> None:
        """Set a target to another value.

        names: what the value is computed from.
        conditions: the names that decide whether this is executed.
        """
        self.renewed.add(target)
        self.seen.add(target)
        self.change(target, names, conditions)
        for container in containers_of(target):
            self._add(container, names, conditions)

    def change(self, target: str, names: set[str], conditions: set[str]) -> None:
        """Set a part of a target: an item whose key is not known, or some numbers of a tensor.

        names: what the part is computed from.
        conditions: the names that decide whether this is executed.
        """
        self.changed.add(target)
        self._add(target, names, conditions)

    def _add(self, target: str, names: set[str], conditions: set[str]) -> None:
        self.sources.setdefault(target, set()).update(names | conditions)
        self.origins.setdefault(target, set()).update(names)

    def are_weights(self, items: ast.expr) -> bool:
        """Whether a loop over items is one over weights, or over groups of them."""
        parts = list(ast.walk(items))
        attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        return bool(attributes & WEIGHTS or names & self.weights)

    def is_of_weights(self, node: ast.AST) -> bool:
        """Whether what is changed is a weight, a gradient or a learning rate: `p.data`, `w.grad`,
        `group["lr"]`."""
        parts = list(_objects_of(node))
        attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
        if attributes & {*WEIGHTS, GRADIENT}:
            return True
        return bool(parts) and getattr(parts[-1], "id", "") in self.weights

    def change_weights(self, node: ast.AST, changed: ast.AST, conditions: set[str]) -> None:
        """Note what weights are changed by: the names in a node without the object changed."""
        if not self.is_of_weights(changed):
            return
        *_, first = _objects_of(changed)
        own = self.weights & {dotted(first)}
        names = {name for name in self.names_in(node) if name.partition(".")[0] not in own}
        self.need(names, conditions)

    def may_differ(self, names: set[str]) -> bool:
        """Whether a condition on names may hold in one pass of the loop and not in another."""
        return bool(names & (self.sources.keys() | self.run_names))

    def reaching_losses(self) -> set[str]:
        """All names that the losses come from."""
        return self._with_sources(self.losses, self.sources)

    def reaching_arguments(self) -> set[str]:
        """All names that the arguments of losses are computed from, without names that only decide
        whether something is executed."""
        return self._with_sources(self.arguments, self.origins)

    def set_at_times(self, names: set[str]) -> set[str]:
        """The names among `names` that are set under conditions."""
        return {name for name in names if self.sources.get(name) != self.origins.get(name)}

    def all_sources(self, names: set[str]) -> set[str]:
        """Names, and all that they come from, at any number of steps."""
        return self._with_sources(names, self.sources)

    def _with_sources(self, names: set[str], sources: dict[str, set[str]]) -> set[str]:
        found: set[str] = set()
        waiting = set(names)
        while waiting:
            name = waiting.pop()
            found.add(name)
            waiting |= sources.get(name, set()) - found
            waiting |= containers_of(name) & self.changed - found
        return found


@dataclass(frozen=True)
class LoopNames:
    """Names that the losses of the innermost loop around a line depend on."""

    carried: set[str]
    """Names that the loop sets, and that are read in it before, or loaded behind it."""
    deciding: set[str]
    """Names that only decide whether something is executed."""
    used: set[str]
    """Names that the loop uses and does not set."""
    counts: set[str]
    """Names that count the passes of the loop, by `enumerate`."""
    reaching: set[str]
    """All these names, without objects whose attributes are known by themselves: `self`."""


@dataclass(frozen=True)
class EpochNames:
    """Names that are set within an epoch, before some line of it."""

    before: dict[str, set[str]]
    """Each with all that it comes from."""
    passes: set[str]
    """Those that count passes over that line."""
    arguments: dict[str, set[str]]
    """Parameters of the function that the line calls, each with all that its argument comes from.
    Without those whose argument is a name."""

    def made_from(self, is_wanted: Callable[[str], bool]) -> set[str]:
        """The names of `before` that come from a wanted name."""
        return _made_from(self.before, is_wanted)

    def arguments_from(self, is_wanted: Callable[[str], bool]) -> set[str]:
        """The parameters of `arguments` whose argument comes from a wanted name."""
        return _made_from(self.arguments, is_wanted)


def _made_from(sources: dict[str, set[str]], is_wanted: Callable[[str], bool]) -> set[str]:
    return {name for name, of_name in sources.items() if any(map(is_wanted, of_name))}


class LoopCode:
    """The code around a line: the loops there."""

    def __init__(
        self,
        code: str,
        line: int,
        run_names: set[str],
        functions: CalledFunctions | None = None,
    ) -> None:
        """
        code: of a file. Where it cannot be read there are no loops.
        line: its number, from 1, in a loop or at its head.
        run_names: how the code calls the run of the session.
        functions: puts the functions that are called into the code; None leaves calls as they are.
        """
        self.run_names = run_names
        self.functions = functions
        self.loops: list[ast.For | ast.While] = []
        """Outer ones before inner ones."""
        self.beside: list[ast.stmt] = []
        """The statements around the innermost of them that a resumed run does with its weights."""
        self.loads_after: list[ast.Call] = []
        """The calls of `load_state_dict` behind the innermost of them, in its function."""
        with contextlib.suppress(SyntaxError, ValueError):
            tree = ast.parse(code)
            self.loops = _loops_around(tree, line)
            if self.loops:
                scope = _scope_of(self.loops[-1], tree)
                self.loads_after = _loads_after(self.loops[-1], scope)
                self.beside = _beside_epochs(self.loops, scope, run_names)

    @classmethod
    def of_frame(cls, frame: types.FrameType) -> LoopCode:
        """The code around the line that a frame is at, with the functions that it calls."""
        return cls(code_of(frame), frame.f_lineno, run_names(frame), CalledFunctions(frame))

    def value_of(self, name: str) -> Any:
        """The value that a name has now; None if it has none, or where no function is followed."""
        return self.functions.value_of(name) if self.functions else None

    def is_wrapped(self, name: str) -> bool:
        """Whether the value of a name is a model that `run.wrap` returned."""
        return isinstance(self.value_of(name), Wrapped)

    def loop_names(self) -> LoopNames | None:
        """Names of the innermost loop; None if it has no losses, or there is none."""
        if not self.loops:
            return None
        flow = self._new_flow()
        loop = self.loops[-1]
        if isinstance(loop, ast.For):
            for name in names_in(loop.target):
                flow.set(name, set(), set())
        self._follow(loop.body, flow)
        if not flow.has_losses:
            return None
        loaded = set().union(*map(flow.names_in_arguments, self.loads_after))
        flow.need(loaded, set())
        flow.losses |= flow.jumps
        owners = {"self"}
        if self.functions:
            owners |= self.functions.owners - flow.renewed
        reaching = {name for name in flow.reaching_losses() - owners if not is_local(name)}
        return LoopNames(
            carried=flow.carried & reaching & flow.sources.keys() | flow.set_at_times(loaded),
            deciding=reaching - flow.reaching_arguments(),
            used=reaching - flow.sources.keys(),
            counts=_counts_of(loop) & flow.reaching_arguments(),
            reaching=reaching,
        )

    def _new_flow(self) -> Flow:
        return Flow(self.run_names, is_update=self._is_update)

    def _is_update(self, name: str) -> bool:
        if self.functions is None:
            return bool(name)
        return isinstance(self.value_of(name), Optimizer | LRScheduler | torch.amp.GradScaler)

    @property
    def head(self) -> int:
        """The line at which the innermost loop begins."""
        return self.loops[-1].lineno

    def epoch_names(self, line: int, called: types.CodeType | None = None) -> EpochNames:
        """Names that are set in an epoch before some line in it.

        called: the code of the function that this line calls.
        """
        flow = self._new_flow()
        passes: set[str] = set()
        arguments: dict[str, set[str]] = {}
        loops = [loop for loop in self.loops if loop.lineno < line]
        for place, epochs in enumerate(loops):
            if isinstance(epochs, ast.For) and _is_epochs(epochs.iter, self.run_names):
                is_step = epochs is not loops[-1]  # what it makes is of the step alone
                given = {} if is_step else self._given_at(line, epochs, called)
                self._follow([*_statements_before(epochs.body, line)], flow)
                arguments = {
                    name: flow.all_sources(flow.names_in(value)) for name, value in given.items()
                }
                passes = {
                    name
                    for one in loops[place + 1 :]
                    if isinstance(one, ast.For) and not names_in(one.iter) & self.run_names
                    for name in names_in(one.target)
                }
        before = {
            name: flow.all_sources(sources)
            for name, sources in flow.sources.items()
            if not is_local(name)
        }
        return EpochNames(before, passes, arguments)

    def made_beside_epochs(self) -> set[str]:
        """Names that are made from a model that was resumed, outside of the epochs: behind
        `run.resume`, or behind an earlier loop over epochs.

        To be called where the loop over epochs is the innermost.
        """
        flow = self._new_flow()
        self._follow(self.beside, flow)
        return {
            name
            for name, sources in flow.sources.items()
            if not is_local(name) and self._is_of_weights(flow.all_sources(sources))
        }

    def _is_of_weights(self, sources: set[str]) -> bool:
        """Whether names have a model among them, and not alone for its numbers and texts."""
        owners = set().union(*map(owners_of, sources))
        for name in filter(self.is_wrapped, sources):
            parts = [one for one in sources - owners if name in owners_of(one)]
            if not parts or any(not isinstance(self.value_of(one), SIZES) for one in parts):
                return True
        return False

    def is_summed_after_steps(self, line: int) -> bool:
        """Whether a line in an epoch adds up, by `run.sum`, what a model gave before its steps."""
        epochs = [loop for loop in self.loops if _is_epochs_loop(loop, self.run_names)]
        if not epochs:
            return False
        body = epochs[-1].body
        earlier = [part for part in body if (part.end_lineno or 0) < line]
        summed = _summed_at(line, body[len(earlier) :], self.run_names)
        before = self._new_flow()
        has_steps = False
        made: set[str] = set()
        for statement in earlier:
            parts = self.functions.put_into([statement]) if self.functions else [statement]
            own = self._new_flow()
            _follow(parts, set(), own)
            if own.has_losses and not has_steps:
                has_steps = True
                made = {
                    name
                    for name, sources in before.sources.items()
                    if any(map(self.is_wrapped, before.all_sources(sources)))
                }
            made -= own.changed
            _follow(parts, set(), before)
        return bool(made & summed)

    def _given_at(
        self, line: int, epochs: ast.For, called: types.CodeType | None
    ) -> dict[str, ast.expr]:
        """Arguments of the call at a line, by parameters, without those that are plain names.

        called: the code of the function; other calls at the line are left out.
        """
        given: dict[str, ast.expr] = {}
        for node in ast.walk(epochs):
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0):
                found = self.functions.called(node) if self.functions else None
                if self.functions and found and found.code is called:
                    given |= self.functions.given(found, node)
        return {name: value for name, value in given.items() if not dotted(value)}

    def _follow(self, body: list[ast.stmt], flow: Flow) -> None:
        """Note in `flow` what statements read and set; called functions are followed too."""
        if self.functions:
            body = self.functions.put_into(body)
        _follow(body, set(), flow)


def _objects_of(node: ast.AST) -> Iterator[ast.AST]:
    """An expression and what it is a part of: of `p.data[0]` that, `p.data` and `p`."""
    while True:
        yield node
        match node:
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                node = value
            case ast.Call(func=ast.Attribute(value=value)):
                node = value
            case _:
                return


def _counts_of(loop: ast.For | ast.While) -> set[str]:
    """The name of the count in `for i, batch in enumerate(loader)`, unless the body sets it."""
    match loop:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=name), *_]),
            iter=ast.Call(func=ast.Name(id="enumerate"), args=[_], keywords=[]),
        ) if not _is_set_first(name, loop.body):
            return {name}
    return set()


def _is_set_first(name: str, body: list[ast.stmt]) -> bool:
    """Whether statements set a name before they use it: `i = run.step`."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return name not in names_in(value)
        if name in names_in(statement):
            return False
    return False


def _statements_around(tree: ast.Module, line: int) -> Iterator[ast.stmt]:
    """The statements that a line is in, outer ones before inner ones.

    Only these are looked into: a walk through all of a file takes longer than to parse it.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop(0)):
            first = getattr(node, "lineno", line)
            if first <= line <= (getattr(node, "end_lineno", line) or 0):
                if isinstance(node, ast.stmt):
                    yield node
                if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                    waiting.append(node)


def _loops_around(tree: ast.Module, line: int) -> list[ast.For | ast.While]:
    """The loops around a line, outer ones before inner ones."""
    around = _statements_around(tree, line)
    return [node for node in around if isinstance(node, ast.For | ast.While)]


def _scope_of(loop: ast.For | ast.While, tree: ast.Module) -> ast.Module | FunctionNode:
    """The innermost function around a loop, or the module."""
    scope: ast.Module | FunctionNode = tree
    for node in _statements_around(tree, loop.lineno):
        if isinstance(node, FUNCTIONS):
            scope = node
    return scope


def _loads_after(loop: ast.For | ast.While, scope: ast.AST) -> list[ast.Call]:
    """The calls of `load_state_dict` behind a loop."""
    return [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == LOAD
        and node.lineno > (loop.end_lineno or 0)
    ]


def _beside_epochs(
    loops: list[ast.For | ast.While], scope: ast.Module | FunctionNode, run_names: set[str]
) -> list[ast.stmt]:
    """The statements that a resumed run does with resumed weights around its loop over epochs.

    loops: that loop, and those around it, outer ones first.
    """
    epochs = loops[-1]
    if not _is_epochs_loop(epochs, run_names):
        return []
    outer = loops[0]
    before = [*_statements_before(scope.body, outer.lineno)]
    first = len(before)
    for place, statement in reversed([*enumerate(before)]):
        is_resume = any(
            isinstance(node, ast.Attribute)
            and node.attr == "resume"
            and dotted(node.value) in run_names
            for node in ast.walk(statement)
        )
        if is_resume or _is_epochs_loop(statement, run_names):
            first = place + 1
            if is_resume:
                break
    beside = [part for part in before[first:] if not _is_epochs_loop(part, run_names)]
    if outer is not epochs:
        beside += [part for part in outer.body if part.end_lineno != epochs.end_lineno]
    return beside


def _statements_before(body: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements that are done before a line, in its branch of the code, not in its loop."""
    for statement in body:
        if (statement.end_lineno or 0) < line:
            yield statement
        elif statement.lineno <= line and not isinstance(statement, ast.For | ast.While):
            for part in _blocks_of(statement):
                if part[0].lineno <= line <= (part[-1].end_lineno or 0):
                    yield from _statements_before(part, line)


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements within a statement."""
    parts = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    parts += [handler.body for handler in getattr(statement, "handlers", [])]
    return filter(None, parts)


def _is_epochs(items: ast.expr, run_names: set[str]) -> bool:
    """Whether a loop is one over `run.epochs(...)`, with whatever is around the call."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "epochs"
        and dotted(node.value) in run_names
        for node in ast.walk(items)
    )


def _is_epochs_loop(loop: ast.stmt, run_names: set[str]) -> bool:
    return isinstance(loop, ast.For) and _is_epochs(loop.iter, run_names)


def _summed_at(line: int, body: list[ast.stmt], run_names: set[str]) -> set[str]:
    """The names in what the calls of `run.sum` at a line add up."""
    found: set[str] = set()
    for node in ast.walk(ast.Module(body, [])):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="sum"), args=[value, *_]):
                is_here = node.lineno <= line <= (node.end_lineno or 0)
                if is_here and dotted(owner) in run_names:
                    found |= names_in(value)
    return found


def _follow(body: list[ast.stmt], conditions: set[str], flow: Flow) -> None:
    """Note in `flow` the names that statements read and set, one statement after the other.

    conditions: the names that decide whether the statements are executed.
    """
    for statement in body:
        if isinstance(statement, SCOPES):
            continue
        _note_losses(statement, conditions, flow)
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if dotted(value):
                other_name = flow.name_elsewhere(dotted(value))
                _set_all(statement.targets, value, conditions, flow)
                flow.aliases[name] = other_name
            case ast.Assign(targets=targets, value=value):
                _set_all(targets, value, conditions, flow)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                _set_all([target], value, conditions, flow)
            case ast.AugAssign(target=target, op=op, value=value):
                _set_all([target], ast.BinOp(target, op, value), conditions, flow)
            case ast.Expr(value=ast.Call() as call):
                _follow_call(call, conditions, flow)
            case ast.While(test=test):
                flow.read(flow.names_in(test))
                with flow.inner_loop():
                    _follow(statement.body, conditions | flow.names_in(test), flow)
            case ast.If():
                _follow_test(statement, conditions, flow)
            case ast.For(target=target, iter=items):
                _set_each(target, items, conditions, flow)
                with flow.inner_loop():
                    _follow(statement.body, conditions | flow.names_in(items), flow)
            case ast.With(items=items):
                for item in items:
                    flow.read(flow.names_in(item.context_expr))
                _follow(statement.body, conditions, flow)
            case ast.Try():
                handlers = [part for handler in statement.handlers for part in handler.body]
                parts = [*statement.body, *handlers, *statement.orelse, *statement.finalbody]
                _follow(parts, conditions, flow)
            case _:
                flow.read(flow.names_in(statement))


def _follow_test(statement: ast.If, conditions: set[str], flow: Flow) -> None:
    names = flow.names_in(statement.test)
    flow.read(names)
    if _has_jump([*statement.body, *statement.orelse]):
        flow.jumps |= names | conditions
    inner = conditions | names
    # In a loop within the loop it may hold in the first pass of that: `if i == 0: h = zeros`.
    if not flow.loops and flow.may_differ(names):
        _follow_choice(statement, inner, flow)
    else:
        _follow(statement.body, inner, flow)
        _follow(statement.orelse, inner, flow)


def _has_jump(body: list[ast.stmt]) -> bool:
    """Whether a `break` or `continue` is among statements, and not in a loop among them."""
    for statement in body:
        if isinstance(statement, JUMPS):
            return True
        is_no_loop = isinstance(statement, ast.If | ast.With | ast.Try)
        if is_no_loop and any(map(_has_jump, _blocks_of(statement))):
            return True
    return False


def _follow_choice(statement: ast.If, conditions: set[str], flow: Flow) -> None:
    """Follow an `if` that holds in some passes: elsewhere what it sets is that of a pass before."""
    test = ast.dump(statement.test)
    before = set(flow.seen)
    flow.seen |= flow.set_under.get(test, set())
    _follow(statement.body, conditions, flow)
    after_body = flow.seen
    flow.set_under[test] = after_body
    flow.seen = set(before)
    _follow(statement.orelse, conditions, flow)
    if _ends_by_jump(statement.orelse):
        flow.seen = after_body
    elif not _ends_by_jump(statement.body):
        flow.seen &= after_body


def _ends_by_jump(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], JUMPS)


def _note_losses(statement: ast.stmt, conditions: set[str], flow: Flow) -> None:
    """Take the names that losses and updates come from, if the statement itself has some."""
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
        return
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="mean")):
                if dotted(owner) in flow.run_names:
                    flow.has_losses = True
                    flow.need(flow.names_in_arguments(node), conditions)
            case ast.Call(func=ast.Attribute(value=loss, attr="backward")):
                flow.has_losses = True
                flow.need(flow.names_in(loss), conditions)
            case ast.Call(func=ast.Attribute(value=owner, attr="step")):
                if flow.is_update(dotted(owner)):
                    flow.need(flow.names_in_arguments(node), conditions)
            case ast.Call(func=ast.Attribute(value=owner, attr=method)):
                if method.endswith("_"):
                    flow.change_weights(node, owner, conditions)
                if method.startswith(CLIP) or method == LOAD:
                    flow.need(flow.names_in_arguments(node), conditions)
                if method == "save" and dotted(owner) == "torch":
                    flow.need(set(), conditions)
            case ast.Call(func=ast.Name(id=function)):
                if function.startswith(CLIP):
                    flow.need(flow.names_in_arguments(node), conditions)
            case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                flow.has_losses |= getattr(node, "attr", "") == GRADIENT
                flow.change_weights(statement, node, conditions)


def _follow_call(call: ast.Call, conditions: set[str], flow: Flow) -> None:
    """A call whose value is left: torch's methods that change a tensor, `rows.clear()`."""
    method = getattr(call.func, "attr", "")
    owner = flow.owner_of(getattr(call.func, "value", call.func))
    if owner and method == "clear":
        flow.set(owner, set(), conditions)
        return
    if (method or dotted(call.func)) in LOGS:
        return
    flow.read(flow.names_in(call))
    if owner and method.endswith("_"):
        flow.set(owner, flow.names_in_arguments(call), conditions)


def _set_all(targets: list[ast.expr], value: ast.expr, conditions: set[str], flow: Flow) -> None:
    if isinstance(value, ast.Tuple) and len(targets) == 1:
        parts = getattr(targets[0], "elts", [])
        if len(parts) == len(value.elts) and not any(
            isinstance(part, ast.Starred) for part in (*parts, *value.elts)
        ):
            flow.read(flow.names_in(value))
            for part, one in zip(parts, value.elts, strict=True):
                _set_all([part], one, conditions, flow)
            return
    names = flow.names_in(value)
    flow.read(names)
    for target in targets:
        for part in _parts_of(target):
            if isinstance(part, ast.Name):
                flow.aliases.pop(part.id, None)
            name = flow.owner_of(part)
            if isinstance(part, ast.Subscript) and not dotted(part):
                flow.read({name} | flow.names_in(part.slice))
                flow.change(name, names | flow.names_in(part.slice), conditions)
            else:
                flow.set(name, names, conditions)


def _set_each(target: ast.expr, items: ast.expr, conditions: set[str], flow: Flow) -> None:
    """Set the target of a loop over items; of `zip` and `enumerate` each part by its own."""
    match target, items:
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=zipped) if len(
            parts
        ) == len(zipped):
            for part, one in zip(parts, zipped, strict=True):
                _set_each(part, one, conditions, flow)
        case (
            ast.Tuple(elts=[count, part]),
            ast.Call(func=ast.Name(id="enumerate"), args=[counted, *_]),
        ):
            _set_all([count], ast.Constant(0), conditions, flow)
            _set_each(part, counted, conditions, flow)
        case _:
            _set_all([target], items, conditions, flow)
            if flow.are_weights(items):
                flow.weights |= names_in(target)


def _parts_of(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _parts_of(element)
    elif isinstance(target, ast.Starred):
        yield from _parts_of(target.value)
    else:
        yield target
