"""Puts the bodies of the user's functions in the places of their calls in the code of a loop.

`loss = trainer.step(x)` becomes the statements of `step`, in which `self` is `trainer` and `x` is
the loop's: who follows names through the loop then finds those that `step` keeps, `trainer.hidden`.
The function's own variables get names that no code has.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ddp_train.models.loop_variables import locals_of
from ddp_train.resilience.failure_report import is_foreign
from ddp_train.sessions.watches.code_names import KEPT, dotted, expression_of
from ddp_train.sessions.watches.frame_names import part_of, variable_of

DEPTH = 4
"""Calls within calls that are followed."""
MOST_CALLS = 200
"""Calls of a loop that are followed."""
MARK = "()"
"""In the names of a function's own variables."""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def is_local(name: str) -> bool:
    """Whether a name is that of a variable of a function that was called."""
    return MARK in name


@dataclass(frozen=True)
class Called:
    """A function of the user's that a call leads to."""

    code: types.CodeType
    variables: dict[str, Any]
    """The globals of its module."""
    cells: dict[str, types.CellType]
    """The variables of functions around it."""
    owner: str
    """The loop's name for the first parameter of a method; "" for any other function."""


class CalledFunctions:
    """Puts the functions that a loop calls into its statements."""

    def __init__(self, frame: types.FrameType) -> None:
        """frame: of the loop."""
        self.frame = frame
        self.count = 0
        """Calls that were replaced."""
        self.owners: set[str] = set()
        """The objects whose methods they were, by the names that the loop has for them."""
        self.active: list[types.CodeType] = []
        """The code of the functions that are put in now, the outermost first."""
        self.nodes: dict[str, Mapping[tuple[str, int], FunctionNode]] = {}
        """The functions of files: by file, then by name and first line."""
        self.kept: dict[str, Callable[[], Any]] = {}
        """Functions that return the value of a variable that a called function has and the loop
        has not, by names such as `weight::ema`."""

    def value_of(self, name: str) -> Any:
        """The value of `q`, `self.q` or `state.['q']`; None if there is none."""
        first, *parts = name.split(".")
        value = self.kept[first]() if first in self.kept else variable_of(first, self.frame)
        for part in parts:
            value = part_of(value, part)
        return value

    def put_into(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements with those of called functions before them. They may be changed."""
        result: list[ast.stmt] = []
        for statement in body:
            for field in ("body", "orelse", "finalbody"):
                if isinstance(getattr(statement, field, None), list):
                    setattr(statement, field, self.put_into(getattr(statement, field)))
            for handler in getattr(statement, "handlers", []):
                handler.body = self.put_into(handler.body)
            if not isinstance(statement, FunctionNode | ast.ClassDef):
                result += self._put_before(statement)
            result.append(statement)
        return result

    def _put_before(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements of functions that a statement calls, whose values replace the calls."""
        for name, value in ast.iter_fields(statement):
            if isinstance(value, ast.expr):
                replacer = _Replacer(self)
                setattr(statement, name, replacer.visit(value))
                yield from replacer.statements

    def called(self, call: ast.Call) -> Called | None:
        """The function that a call leads to; None unless it is the user's own."""
        if len(self.active) == DEPTH:
            return None
        found = self._found(dotted(call.func))
        if found is None:
            return None
        code = found.code
        is_plain = not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)
        if is_foreign(code.co_filename) or not is_plain or code in self.active:
            return None
        return found

    def _found(self, name: str) -> Called | None:
        owner, _, method = name.rpartition(".")
        value = self.value_of(name) if name else None
        if value is None and owner:
            kind = type(self.value_of(owner))
            value = inspect.getattr_static(kind, method, None)
            if isinstance(value, staticmethod):
                owner = ""
                value = value.__func__
        elif isinstance(value, types.FunctionType):
            owner = ""
        elif value is not None:
            owner = name
            method = "forward" if isinstance(value, nn.Module) else "__call__"
            value = inspect.getattr_static(type(value), method, None)
        if isinstance(value, types.FunctionType):
            value = inspect.unwrap(value)
        if not isinstance(value, types.FunctionType):
            return None
        code = value.__code__
        cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
        return Called(code, value.__globals__, cells, owner)

    def statements_of(self, called: Called, call: ast.Call) -> tuple[list[ast.stmt], ast.expr]:
        """The statements of a call, none where the code cannot be read, and what it returns."""
        code = called.code
        node = self._node_of(called)
        if node is None or self.count == MOST_CALLS:
            return [], call
        self.count += 1
        self.owners |= {called.owner} - {""}
        prefix = f"{code.co_name}{MARK}{self.count}_"
        body = copy.deepcopy(node.body)
        given = _given(node, call, called.owner)
        renamer = _Renamer(self._names_in_loop(called, prefix), given, _names_set(body))
        returned = _returned(body)
        begin = [
            _assign(ast.Name(prefix + name, ast.Store()), value)
            for name, value in given.items()
            if not renamer.is_substituted(name)
        ]
        body = [renamer.visit(statement) for statement in body]
        self.active.append(code)
        body = self.put_into(body)
        self.active.pop()
        return begin + body, renamer.visit(returned)

    def given(self, called: Called, call: ast.Call) -> dict[str, ast.expr]:
        """The arguments of a call by parameters; none where the code cannot be read."""
        node = self._node_of(called)
        return _given(node, call, called.owner) if node else {}

    def _node_of(self, called: Called) -> FunctionNode | None:
        """The definition of a function; None where its code cannot be read."""
        code = called.code
        file = code.co_filename
        if file not in self.nodes:
            text = "".join(linecache.getlines(file, called.variables))
            self.nodes[file] = _functions_in(text)
        return self.nodes[file].get((code.co_name, code.co_firstlineno))

    def _names_in_loop(self, called: Called, prefix: str) -> Callable[[str], str]:
        """Gives the names of a function those that they have in the loop.

        prefix: of the function's own variables.
        """
        code = called.code
        cells = called.cells
        variables = called.variables
        of_loop = dict(self.frame.f_globals) | locals_of(self.frame, lambda _: True)

        def name_in_loop(name: str) -> str:
            if name in (*code.co_varnames, *code.co_cellvars):
                return prefix + name
            if name in cells:
                owner = code.co_name
                get = partial(_content_of, cells[name])
            elif name not in variables:
                return name if hasattr(builtins, name) else prefix + name
            else:
                owner = str(variables.get("__name__")).rpartition(".")[2]
                get = partial(variables.get, name)
            if name in of_loop and of_loop[name] is get():
                return name
            self.kept[owner + KEPT + name] = get
            return owner + KEPT + name

        return name_in_loop


def _content_of(cell: types.CellType) -> Any:
    """The value of a variable of an enclosing function; None before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class _Replacer(ast.NodeTransformer):
    """Replaces calls in an expression by what they return, inner ones first."""

    def __init__(self, functions: CalledFunctions) -> None:
        self.functions = functions
        self.statements: list[ast.stmt] = []

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = self.functions.called(node)
        if called is None:
            return node
        statements, returned = self.functions.statements_of(called, node)
        self.statements += statements
        return returned


class _Renamer(ast.NodeTransformer):
    """Gives the names in a function those that they have in the loop, or new ones."""

    def __init__(
        self,
        name_in_loop: Callable[[str], str],
        given: dict[str, ast.expr],
        names_set: set[str],
    ) -> None:
        self.name_in_loop = name_in_loop
        self.given = given
        self.names_set = names_set

    def is_substituted(self, name: str) -> bool:
        """Whether a parameter is called what the loop calls its argument."""
        value = self.given.get(name)
        return value is not None and bool(dotted(value)) and name not in self.names_set

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self.is_substituted(node.id):
            return copy.deepcopy(self.given[node.id])
        return ast.Name(self.name_in_loop(node.id), node.ctx)


@functools.lru_cache(maxsize=64)
def _functions_in(text: str) -> Mapping[tuple[str, int], FunctionNode]:
    """The functions in the code of a file, by name and first line, that of a decorator too.

    Nothing where it cannot be read.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            found[node.name, min(lines)] = node
    return found


def _given(node: FunctionNode, call: ast.Call, owner: str) -> dict[str, ast.expr]:
    """The argument of a call for each parameter.

    owner: the loop's name for the object of a method; "" for a function.
    """
    arguments = [*call.args]
    if owner:
        arguments.insert(0, expression_of(owner))
    parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    given = dict(zip(parameters, arguments, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    rest = arguments[len(parameters) :]
    rest += [keyword.value for keyword in call.keywords if not keyword.arg]
    for more in (node.args.vararg, node.args.kwarg):
        if more:
            given[more.arg] = ast.Tuple(rest, ast.Load())
    return given


def _names_set(body: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _returned(body: list[ast.stmt]) -> ast.expr:
    """Make each `return` of a function an assignment. Returns the expression of what they set.

    Where all return as many values, that is a tuple: a loss has not the sources of a score.
    """
    values = [
        node.value
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Return) and node.value
    ]
    lengths = {len(value.elts) if isinstance(value, ast.Tuple) else 1 for value in values}
    names = ["return"]
    if len(lengths) == 1 and lengths != {1}:
        names = [f"return_{place}" for place in range(lengths.pop())]
    _ReturnsAsSets(names).visit(ast.Module(body, []))
    loads: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
    return loads[0] if len(loads) == 1 else ast.Tuple(loads, ast.Load())


class _ReturnsAsSets(ast.NodeTransformer):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in self.names]
        if len(targets) == 1:
            return _assign(targets[0], node.value)
        return _assign(ast.Tuple(targets, ast.Store()), node.value)


def _assign(target: ast.expr, value: ast.expr) -> ast.stmt:
    return ast.fix_missing_locations(ast.Assign([target], value, lineno=0))
