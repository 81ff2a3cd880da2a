"""The names in expressions of Python code, with their attributes: `q`, `self.q`."""

from __future__ import annotations

import ast


def names_in(node: ast.AST) -> set[str]:
    """The names in an expression: of `self.q[0].mean()` both `self.q` and `self`."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        name = dotted(part)
        if name:
            words = name.split(".")
            found |= {".".join(words[:count]) for count in range(1, len(words) + 1)}
        else:
            waiting += ast.iter_child_nodes(part)
    return found


def owner_of(node: ast.AST) -> str:
    """The name of what is changed: `q` of `q[i]`, `q.data` and `q.mul_(2)`."""
    while True:
        match node:
            case ast.Subscript(value=value) | ast.Attribute(value=value, attr="data"):
                node = value
            case ast.Call(func=ast.Attribute(value=value)):
                node = value
            case _:
                return dotted(node)


def dotted(node: ast.AST) -> str:
    """`a.b` of names and attributes; "" for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            owner = dotted(value)
            return f"{owner}.{attribute}" if owner else ""
    return ""
