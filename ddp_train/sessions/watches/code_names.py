"""The names in expressions of Python code, with their attributes and items: `q`, `self.q`.

`state["ema"]` is `state.['ema']`: its words are between points.
"""

from __future__ import annotations

import ast

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_in(node: ast.AST) -> set[str]:
    """The names in an expression: of `self.q[0].mean()` both `self.q` and `self`.

    Of `state["ema"]` that alone: other items of `state` are other variables.
    """
    found: set[str] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        name = dotted(part)
        if name:
            found |= {name, *owners_of(name)} - containers_of(name)
        elif isinstance(part, COMPREHENSIONS):
            found |= _names_in_comprehension(part)
        else:
            waiting += ast.iter_child_nodes(part)
    return found


def _names_in_comprehension(node: ast.AST) -> set[str]:
    """Without its own variables, which no other code has: `i` of `losses[i] for i in range(3)`."""
    children = list(ast.iter_child_nodes(node))
    loops = [child for child in children if isinstance(child, ast.comprehension)]
    own = set().union(*(names_in(loop.target) for loop in loops))
    found = set().union(*map(names_in, children))
    return {name for name in found if name.partition(".")[0] not in own}


def owner_of(node: ast.AST) -> str:
    """The name of what is changed: `q` of `q[i]`, `q.data` and `q.mul_(2)`."""
    while True:
        match node:
            case ast.Subscript() if dotted(node):
                return dotted(node)
            case ast.Subscript(value=value) | ast.Attribute(value=value, attr="data"):
                node = value
            case ast.Call(func=ast.Attribute(value=value)):
                node = value
            case _:
                return dotted(node)


def owners_of(name: str) -> set[str]:
    """The objects that an attribute or item is in: `self` and `self.net` of `self.net.rows`."""
    words = name.split(".")
    return {".".join(words[:count]) for count in range(1, len(words))}


def containers_of(name: str) -> set[str]:
    """The dicts that hold a name as an item: of `state.['ema'].mean` `state`."""
    words = name.split(".")
    return {".".join(words[:place]) for place, word in enumerate(words) if word[:1] == "["}


KEPT = "::"
"""In the names of variables that a function has and the loop has not: `weight::ema`."""


def as_code(name: str) -> str:
    """A name as code has it: `state['ema']`."""
    return name.replace(".[", "[").replace(KEPT, ".")


def expression_of(name: str) -> ast.expr:
    """The expression whose name this is."""
    first, *parts = name.split(".")
    found: ast.expr = ast.Name(first, ast.Load())
    for part in parts:
        if part.startswith("["):
            found = ast.Subscript(found, ast.Constant(ast.literal_eval(part[1:-1])), ast.Load())
        else:
            found = ast.Attribute(found, part, ast.Load())
    return found


def dotted(node: ast.AST) -> str:
    """`a.b` of names and attributes, `a.['b']` of items; "" for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            owner = dotted(value)
            return f"{owner}.{attribute}" if owner else ""
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(key)), *_]):
            owner = dotted(value)
            return f"{owner}.{key}" if owner else ""
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))) if "." not in key:
            owner = dotted(value)
            return f"{owner}.[{key!r}]" if owner else ""
    return ""
