"""No class has more attributes or methods than a fixed limit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lohan"
MOST_ATTRIBUTES, MOST_METHODS = 20, 25


def _classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def _methods(node: ast.ClassDef) -> list[str]:
    """Return the methods and properties of a class; a setter belongs to its property."""
    functions = (f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))
    return list({function.name: None for function in functions})


def _attributes(node: ast.ClassDef) -> list[str]:
    """Return the fields that a class declares, and those that its methods assign to `self`."""
    names = {
        statement.target.id: None
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            names[part.attr] = None
    return list(names)


def _is_frozen(node: ast.ClassDef) -> bool:
    """Return whether a class is a frozen dataclass, whose fields are values rather than state."""
    return any(
        isinstance(decorator, ast.Call)
        and any(keyword.arg == "frozen" for keyword in decorator.keywords)
        for decorator in node.decorator_list
    )


def too_large(source: str) -> list[str]:
    """Return a line for each class with too many attributes or methods."""
    lines = []
    for node in _classes(source):
        attributes, methods = len(_attributes(node)), len(_methods(node))
        if methods > MOST_METHODS or (attributes > MOST_ATTRIBUTES and not _is_frozen(node)):
            lines.append(f"{node.name}: {attributes} attributes, {methods} methods")
    return lines


def test_classes_are_small():
    large = [
        f"{path.relative_to(PACKAGE)}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in too_large(path.read_text())
    ]
    assert not large, "\n".join(large)


def test_recognizes_large_classes():
    fields = "".join(f"        self.field_{n} = 0\n" for n in range(MOST_ATTRIBUTES + 1))
    methods = "".join(f"    def method_{n}(self): ...\n" for n in range(MOST_METHODS + 1))
    source = f"class A:\n    def __init__(self):\n{fields}\nclass B:\n{methods}"
    assert too_large(source) == [
        f"A: {MOST_ATTRIBUTES + 1} attributes, 1 methods",
        f"B: 0 attributes, {MOST_METHODS + 1} methods",
    ]
