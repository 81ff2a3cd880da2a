"""Numbers that a loop over a test loader adds up and prints, without those of the other processes.

Read from the code alone. Left out is all that is not certain: numbers that do not come from the
batches, that some function gets before they are printed, or that are printed with a rank.
"""

from __future__ import annotations

import ast
import contextlib
import logging

from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.watches.code_names import names_in
from ddp_train.sessions.watches.frame_names import code_of

NOT_ADDED_UP = (
    "%s, line %d: `%s` covers the batches of this process alone, since each process has some of the"
    " batches of run.test_loader. Add it up over all processes before it is printed: %s ="
    " run.sum(%s)"
)
HARMLESS = frozenset({"float", "int", "round", "str", "max", "min", "print"})
"""Functions that may get a number and leave it a number of one process."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
log = logging.getLogger(__name__)


class PrintedCounts:
    """Warns once of such a number."""

    def __init__(self) -> None:
        self.has_warned = False

    def end_pass(self) -> None:
        """To be called on one process where a loop over a test loader has no batches left."""
        if self.has_warned:
            return
        for frame in user_frames():
            count = printed_count(code_of(frame), frame.f_lineno)
            if count:
                self.has_warned = True
                file = frame.f_code.co_filename
                log.warning(NOT_ADDED_UP, file, frame.f_lineno, count, count, count)
                return


def printed_count(code: str, line: int) -> str:
    """The name of a number of a loop that is printed behind it as it is; "" if there is none.

    code: of a file.
    line: the number of the loop's head, from 1.
    """
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(code)
        loops = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0)
        ]
        scopes = [
            node
            for node in ast.walk(tree)
            if isinstance(node, FUNCTIONS) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        if loops:
            return _printed_behind(loops[-1], scopes[-1] if scopes else tree)
    return ""


def _statements(node: ast.AST) -> list[ast.stmt]:
    found = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
    return sorted(found, key=lambda one: one.lineno)


def _printed_behind(loop: ast.For, scope: ast.AST) -> str:
    counts = {name: name for name in _counts_of(loop)}
    end = loop.end_lineno or 0
    for statement in _statements(scope):
        if statement.lineno <= end:
            continue
        if isinstance(statement, ast.Expr) and _is_print(statement.value):
            printed = _open_names(statement) & counts.keys()
            if printed and not any("rank" in name for name in names_in(statement)):
                return counts[min(printed)]
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
            _follow(statement, counts)
    return ""


def _counts_of(loop: ast.For) -> set[str]:
    """The names to which the loop adds what follows from its batches."""
    of_batch = names_in(loop.target)
    counts = set()
    for statement in _statements(loop):
        if isinstance(statement, ast.Assign) and names_in(statement.value) & of_batch:
            of_batch |= set().union(*map(names_in, statement.targets))
        match statement:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                if names_in(value) & of_batch:
                    counts.add(name)
    return counts


def _follow(
    statement: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr, counts: dict[str, str]
) -> None:
    """Take out what a statement sets anew or gives away, and add what it computes of the rest.

    counts: by names, the count that each follows from.
    """
    value = statement.value or ast.Constant(None)
    used = _open_names(value) & counts.keys()
    source = counts[min(used)] if used else ""
    for name in names_in(value) - _open_names(value):
        counts.pop(name, None)
    if isinstance(statement, ast.Expr):
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        for name in names_in(target):
            counts.pop(name, None)
            if source and isinstance(target, ast.Name):
                counts[name] = source


def _is_print(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def _open_names(node: ast.AST) -> set[str]:
    """The names in an expression, without those that a function gets."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.Name):
            found.add(part.id)
        if isinstance(part, ast.Call) and not _is_harmless(part):
            waiting.append(part.func)
        else:
            waiting += ast.iter_child_nodes(part)
    return found


def _is_harmless(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in HARMLESS
