"""Names that a loop carries from one step to the next, and that its losses depend on.

A moving baseline, weights of groups, a threshold: where a process computes it of its own samples,
it is another number on each. What a loop adds up for a log is carried too, but no loss depends on
it. So the code of the loop is read: which names does the argument of `run.mean` come from?
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    losses: set[str] = field(default_factory=set)
    """The names in arguments of `run.mean`, and in what decides whether it is called."""

    def read(self, names: set[str]) -> None:
        self.carried |= names - self.seen
        self.seen |= names

    def set(self, target: str, sources: set[str]) -> None:
        self.sources.setdefault(target, set()).update(sources)
        self.seen.add(target)

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
        return found


def carried_into_losses(code: str, line: int, run_names: set[str]) -> list[str] | None:
    """The names that the innermost loop around a line carries into the losses of its next step.

    code: of a file.
    line: its number, from 1, in the loop or at its head.
    run_names: how the code calls the run of the session.

    Those that are set in the loop, and read in it before. None if the loop has no losses, or there
    is none, or the code cannot be read.
    """
    loop = names_of_loop(code, line, run_names)
    return None if loop is None else sorted(loop.carried)


@dataclass(frozen=True)
class LoopNames:
    """Names that the losses of the innermost loop around a line depend on."""

    carried: set[str]
    """Those that are set in the loop, and read in it before."""
    before: dict[str, set[str]]
    """Those that are set in an epoch before that loop begins, each with all that it comes from."""
    used: set[str]
    """Those that the loop uses and does not set."""
    passes: set[str]
    """Those that count passes of that loop within an epoch."""

    def made_from(self, names: set[str]) -> set[str]:
        """Those of `before` that come from one of some names."""
        return {name for name, sources in self.before.items() if sources & names}


def names_of_loop(code: str, line: int, run_names: set[str]) -> LoopNames | None:
    """See `carried_into_losses`."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    loops = _loops_around(tree, line)
    if not loops:
        return None
    flow = Flow(run_names)
    loop = loops[-1]
    if isinstance(loop, ast.For):
        for name in _names_in(loop.target):
            flow.set(name, set())
    _follow(loop.body, set(), flow)
    if not flow.losses:
        return None
    reaching = flow.reaching_losses()
    before = Flow(run_names)
    passes: set[str] = set()
    for place, outer in enumerate(loops[:-1]):
        if isinstance(outer, ast.For) and _is_epochs(outer.iter, run_names):
            earlier = [part for part in outer.body if (part.end_lineno or 0) < loop.lineno]
            _follow(earlier, set(), before)
            between = [one for one in loops[place + 1 : -1] if isinstance(one, ast.For)]
            passes = {name for one in between for name in _names_in(one.target)}
    return LoopNames(
        carried={name for name in flow.carried & reaching if name in flow.sources},
        before={name: before.all_sources(name) for name in before.sources if name in reaching},
        used=reaching - flow.sources.keys(),
        passes=passes,
    )


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
        and _dotted(node.value) in run_names
        for node in ast.walk(items)
    )


def _follow(body: list[ast.stmt], conditions: set[str], flow: Flow) -> None:
    """Follow statements. conditions: the names that decide whether they are done."""
    for statement in body:
        if isinstance(statement, SCOPES):
            continue
        _note_losses(statement, conditions, flow)
        match statement:
            case ast.Assign(targets=targets, value=value):
                _set_all(targets, value, conditions, flow)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                _set_all([target], value, conditions, flow)
            case ast.AugAssign(target=target, value=value):
                names = _names_in(value) | _names_in(target)
                flow.read(names)
                _set_all([target], value, conditions | names, flow)
            case ast.Expr(value=ast.Call() as call):
                _follow_call(call, conditions, flow)
            case ast.If(test=test) | ast.While(test=test):
                names = _names_in(test)
                flow.read(names)
                if any(isinstance(part, JUMPS) for part in ast.walk(statement)):
                    flow.losses |= names | conditions
                inner = conditions | names
                _follow(statement.body, inner, flow)
                _follow(statement.orelse, inner, flow)
            case ast.For(target=target, iter=items):
                _set_all([target], items, conditions, flow)
                _follow(statement.body, conditions | _names_in(items), flow)
            case ast.With(items=items):
                for item in items:
                    flow.read(_names_in(item.context_expr))
                _follow(statement.body, conditions, flow)
            case _:
                flow.read(_names_in(statement))


def _note_losses(statement: ast.stmt, conditions: set[str], flow: Flow) -> None:
    """Take the names that a loss comes from, if the statement itself calls `run.mean`."""
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
        return
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="mean")):
                if _dotted(owner) in flow.run_names:
                    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                    flow.losses |= conditions.union(*map(_names_in, arguments))
            case ast.Call(func=ast.Attribute(value=loss, attr="backward")):
                flow.losses |= conditions | _names_in(loss)


def _follow_call(call: ast.Call, conditions: set[str], flow: Flow) -> None:
    """A call whose value is left, as torch's methods that change a tensor: `q.mul_(x)`."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    flow.read(_names_in(call))
    if isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_"):
        owner = _owner(call.func.value)
        if owner:
            flow.set(owner, conditions.union(*map(_names_in, arguments)))


def _set_all(targets: list[ast.expr], value: ast.expr, conditions: set[str], flow: Flow) -> None:
    sources = _names_in(value) | conditions
    flow.read(_names_in(value))
    for target in targets:
        for part in _parts_of(target):
            if isinstance(part, ast.Subscript):
                name = _owner(part)
                flow.read({name} | _names_in(part.slice))
                flow.set(name, sources | _names_in(part.slice))
            else:
                flow.set(_owner(part), sources)


def _parts_of(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _parts_of(element)
    elif isinstance(target, ast.Starred):
        yield from _parts_of(target.value)
    else:
        yield target


def _names_in(node: ast.AST) -> set[str]:
    """The names in an expression: of `self.q[0].mean()` both `self.q` and `self`."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        name = _dotted(part)
        if name:
            words = name.split(".")
            found |= {".".join(words[:count]) for count in range(1, len(words) + 1)}
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            waiting += [part.func.value, *part.args, *part.keywords]
        else:
            waiting += ast.iter_child_nodes(part)
    return found


def _owner(node: ast.AST) -> str:
    """The name of what is changed: `q` of `q[i]`, `q.data` and `q.mul_(2)`."""
    while True:
        match node:
            case ast.Subscript(value=value) | ast.Attribute(value=value, attr="data"):
                node = value
            case ast.Call(func=ast.Attribute(value=value)):
                node = value
            case _:
                return _dotted(node)


def _dotted(node: ast.AST) -> str:
    """`a.b` of names and attributes; "" for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            owner = _dotted(value)
            return f"{owner}.{attribute}" if owner else ""
    return ""
