"""Names that a loop carries from one step to the next, and that its losses depend on.

A moving baseline, weights of groups, a threshold: where a process computes it of its own samples,
it is another number on each. What a loop adds up for a log is carried too, but no loss depends on
it. So the code of the loop is read: which names does the argument of `run.mean` come from?
"""

from __future__ import annotations

import ast
import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ddp_train.sessions.called_functions import CalledFunctions, is_local
from ddp_train.sessions.code_names import containers_of, dotted, names_in, owner_of
from ddp_train.sessions.frame_names import code_of, run_names

JUMPS = (ast.Continue, ast.Break)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass
class Flow:
    """What a loop's body does with names, in the order of its text: `q`, `self.q`."""

    run_names: set[str]
    """How the code calls the run of the session."""
    sources: dict[str, set[str]] = field(default_factory=dict)
    """The names that each one that is set comes from."""
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
    """The names in arguments of `run.mean`, and in what decides whether it is called."""
    loops: int = 0
    """Loops within the loop, around the statement that is followed now."""
    set_under: dict[str, set[str]] = field(default_factory=dict)
    """The names that are set where a condition holds, by its text."""

    def names_in(self, node: ast.AST) -> set[str]:
        """The names in an expression, with what their owners are called elsewhere."""
        return set(map(self.name_elsewhere, names_in(node)))

    def name_elsewhere(self, name: str) -> str:
        """`trainer.stats.mean` for `stats.mean` after `stats = trainer.stats`."""
        owner, point, part = name.partition(".")
        return self.aliases.get(owner, owner) + point + part if point else name

    def owner_of(self, node: ast.AST) -> str:
        """What is changed by a change of a part of it: see `code_names.owner_of`."""
        name = owner_of(node)
        return self.aliases.get(name, self.name_elsewhere(name))

    def read(self, names: set[str]) -> None:
        self.carried |= {
            name for name in names - self.seen if not containers_of(name) & self.renewed
        }
        self.seen |= names

    def set(self, target: str, sources: set[str]) -> None:
        self.renewed.add(target)
        self.seen.add(target)
        self.change(target, sources)
        for container in containers_of(target):
            self.sources.setdefault(container, set()).update(sources)

    def change(self, target: str, sources: set[str]) -> None:
        """Set a part of it: an item whose key is not known, some numbers of a tensor."""
        self.sources.setdefault(target, set()).update(sources)
        self.changed.add(target)

    def may_differ(self, names: set[str]) -> bool:
        """Whether a condition on names may hold in one pass of the loop and not in another."""
        return bool(names & (self.sources.keys() | self.run_names))

    def reaching_losses(self) -> set[str]:
        """All names that the losses come from."""
        return self._with_sources(self.losses)

    def all_sources(self, name: str) -> set[str]:
        """All names that one comes from, at any number of steps."""
        return self._with_sources(self.sources[name])

    def _with_sources(self, names: set[str]) -> set[str]:
        found: set[str] = set()
        waiting = set(names)
        while waiting:
            name = waiting.pop()
            found.add(name)
            waiting |= self.sources.get(name, set()) - found
            waiting |= containers_of(name) & self.changed - found
        return found


@dataclass(frozen=True)
class LoopNames:
    """Names that the losses of the innermost loop around a line depend on."""

    carried: set[str]
    """Those that are set in the loop, and read in it before."""
    used: set[str]
    """Those that the loop uses and does not set."""
    reaching: set[str]
    """All of them, without objects as a whole of which the attributes are known: `self`."""


@dataclass(frozen=True)
class EpochNames:
    """Names that are set within an epoch, before some line of it."""

    before: dict[str, set[str]]
    """Each with all that it comes from."""
    passes: set[str]
    """Those that count passes over that line."""

    def made_from(self, is_wanted: Callable[[str], bool]) -> set[str]:
        """Those of `before` that come from a name of some kind."""
        return {name for name, sources in self.before.items() if any(map(is_wanted, sources))}


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
        with contextlib.suppress(SyntaxError, ValueError):
            self.loops = _loops_around(ast.parse(code), line)

    @classmethod
    def of_frame(cls, frame: types.FrameType) -> LoopCode:
        """The code around the line that a frame is at, with the functions that it calls."""
        return cls(code_of(frame), frame.f_lineno, run_names(frame), CalledFunctions(frame))

    def value_of(self, name: str) -> Any:
        """The value that a name has now; None if it has none, or where no function is followed."""
        return self.functions.value_of(name) if self.functions else None

    def loop_names(self) -> LoopNames | None:
        """Names of the innermost loop; None if it has no losses, or there is none."""
        if not self.loops:
            return None
        flow = Flow(self.run_names)
        loop = self.loops[-1]
        if isinstance(loop, ast.For):
            for name in names_in(loop.target):
                flow.set(name, set())
        self._follow(loop.body, flow)
        if not flow.losses:
            return None
        owners = {"self"}
        if self.functions:
            owners |= self.functions.owners
        reaching = {name for name in flow.reaching_losses() - owners if not is_local(name)}
        return LoopNames(
            carried=flow.carried & reaching & flow.sources.keys(),
            used=reaching - flow.sources.keys(),
            reaching=reaching,
        )

    @property
    def head(self) -> int:
        """The line at which the innermost loop begins."""
        return self.loops[-1].lineno

    def epoch_names(self, line: int) -> EpochNames:
        """Names that are set in an epoch before some line in it."""
        flow = Flow(self.run_names)
        passes: set[str] = set()
        loops = [loop for loop in self.loops if loop.lineno < line]
        for place, epochs in enumerate(loops):
            if isinstance(epochs, ast.For) and _is_epochs(epochs.iter, self.run_names):
                earlier = [part for part in epochs.body if (part.end_lineno or 0) < line]
                self._follow(earlier, flow)
                between = [one for one in loops[place + 1 :] if isinstance(one, ast.For)]
                passes = {name for one in between for name in names_in(one.target)}
        before = {name: flow.all_sources(name) for name in flow.sources if not is_local(name)}
        return EpochNames(before, passes)

    def _follow(self, body: list[ast.stmt], flow: Flow) -> None:
        if self.functions:
            body = self.functions.put_into(body)
        _follow(body, set(), flow)


def _loops_around(tree: ast.AST, line: int) -> list[ast.For | ast.While]:
    """The loops around a line, outer ones before inner ones."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or 0)
    ]


def _is_epochs(items: ast.expr, run_names: set[str]) -> bool:
    """Whether a loop is one over `run.epochs(...)`, with whatever is around the call."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "epochs"
        and dotted(node.value) in run_names
        for node in ast.walk(items)
    )


def _follow(body: list[ast.stmt], conditions: set[str], flow: Flow) -> None:
    """Follow statements. conditions: the names that decide whether they are done."""
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
            case ast.AugAssign(target=target, value=value):
                names = flow.names_in(value) | flow.names_in(target)
                flow.read(names)
                _set_all([target], value, conditions | names, flow)
            case ast.Expr(value=ast.Call() as call):
                _follow_call(call, conditions, flow)
            case ast.If() | ast.While():
                _follow_test(statement, conditions, flow)
            case ast.For(target=target, iter=items):
                _set_all([target], items, conditions, flow)
                flow.loops += 1
                _follow(statement.body, conditions | flow.names_in(items), flow)
                flow.loops -= 1
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


def _follow_test(statement: ast.If | ast.While, conditions: set[str], flow: Flow) -> None:
    names = flow.names_in(statement.test)
    flow.read(names)
    if any(isinstance(part, JUMPS) for part in ast.walk(statement)):
        flow.losses |= names | conditions
    inner = conditions | names
    # In a loop within the loop it may hold in the first pass of that: `if i == 0: h = zeros`.
    if isinstance(statement, ast.If) and not flow.loops and flow.may_differ(names):
        _follow_choice(statement, inner, flow)
    else:
        _follow(statement.body, inner, flow)
        _follow(statement.orelse, inner, flow)


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
    """Take the names that a loss comes from, if the statement itself calls `run.mean`."""
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
        return
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="mean")):
                if dotted(owner) in flow.run_names:
                    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                    flow.losses |= conditions.union(*map(flow.names_in, arguments))
            case ast.Call(func=ast.Attribute(value=loss, attr="backward")):
                flow.losses |= conditions | flow.names_in(loss)


def _follow_call(call: ast.Call, conditions: set[str], flow: Flow) -> None:
    """A call whose value is left: torch's methods that change a tensor, `rows.clear()`."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    method = getattr(call.func, "attr", "")
    owner = flow.owner_of(getattr(call.func, "value", call.func))
    if owner and method == "clear":
        flow.set(owner, conditions)
        return
    flow.read(flow.names_in(call))
    if owner and method.endswith("_"):
        flow.set(owner, conditions.union(*map(flow.names_in, arguments)))


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
    sources = flow.names_in(value) | conditions
    flow.read(flow.names_in(value))
    for target in targets:
        for part in _parts_of(target):
            if isinstance(part, ast.Name):
                flow.aliases.pop(part.id, None)
            name = flow.owner_of(part)
            if isinstance(part, ast.Subscript) and not dotted(part):
                flow.read({name} | flow.names_in(part.slice))
                flow.change(name, sources | flow.names_in(part.slice))
            else:
                flow.set(name, sources)


def _parts_of(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _parts_of(element)
    elif isinstance(target, ast.Starred):
        yield from _parts_of(target.value)
    else:
        yield target
