"""The size and density of packages, which a reviewer looks at. No limit hangs on it.

    python benchmarks/size.py ddp_train ddp_train/config ddp_lab

Tokens are counted without comments, docstrings and layout, so that neither shorter lines nor longer
names change them. Where a line has many, it says several things at once.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
MANY_PARAMETERS = 6


@dataclass
class Size:
    """The counts over all files of a package."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    conditional_expressions: int = 0
    nested_conditionals: int = 0
    tuple_assignments: int = 0
    functions_with_many_parameters: int = 0
    longest_function: int = 0

    def add(self, text: str) -> None:
        """Counts one file."""
        tree = ast.parse(text)
        self.files += 1
        for node in ast.walk(tree):
            self._count(node)
        docstrings = set(docstring_lines(tree))
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
            if token.type in LAYOUT or is_docstring:
                continue
            self.tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
        self.lines += len(lines)

    def _count(self, node: ast.AST) -> None:
        if isinstance(node, ast.IfExp):
            self.conditional_expressions += 1
            children = ast.iter_child_nodes(node)
            self.nested_conditionals += any(isinstance(child, ast.IfExp) for child in children)
        elif isinstance(node, ast.Assign):
            targets = isinstance(node.targets[0], ast.Tuple)
            self.tuple_assignments += targets and isinstance(node.value, ast.Tuple)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            self.longest_function = max(self.longest_function, length)
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [one for one in given if one.arg not in ("self", "cls")]
            self.functions_with_many_parameters += len(parameters) > MANY_PARAMETERS

    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and figures, for a table."""
        thousands = max(self.lines, 1) / 1000
        yield "files", f"{self.files:,}"
        yield "lines of code", f"{self.lines:,}"
        yield "tokens", f"{self.tokens:,}"
        yield "tokens a line", f"{self.tokens / max(self.lines, 1):.1f}"
        conditionals = self.conditional_expressions / thousands
        yield "conditional expressions in 1,000 lines", f"{conditionals:.1f}"
        yield "conditionals inside others", f"{self.nested_conditionals}"
        tuples = self.tuple_assignments / thousands
        yield "assignments of tuples in 1,000 lines", f"{tuples:.1f}"
        yield "functions of over six parameters", f"{self.functions_with_many_parameters}"
        yield "lines of the longest function", f"{self.longest_function}"


def docstring_lines(tree: ast.AST) -> Iterator[int]:
    """The first lines of strings that are statements: docstrings, and those below fields."""
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            yield node.lineno


def size_of(folder: Path) -> Size:
    """The size of all Python files below a folder."""
    size = Size()
    for path in sorted(folder.rglob("*.py")):
        size.add(path.read_text())
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        print(folder)
        for name, figure in size_of(folder).rows():
            print(f"  {figure:>8}  {name}")
