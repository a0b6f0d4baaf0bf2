"""What the house is measured by: statements, branches, shapes of expressions and names, read from
the product's own syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("localllm", "backends", "model_catalog", "tui")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
_BRANCHES = (
    ast.If, ast.For, ast.While, ast.AsyncFor, ast.ExceptHandler, ast.IfExp, ast.comprehension,
    ast.match_case,
)  # fmt: skip


@cache
def product() -> dict[str, ast.Module]:
    """The syntax of every file of the product, by its path in the checkout."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


@cache
def all_nodes(tree: ast.Module) -> list[ast.AST]:
    """Every node of a file: walked once, whatever the number of laws."""
    return list(ast.walk(tree))


def statements(nodes: Iterable[ast.AST]) -> int:
    return sum(isinstance(node, ast.stmt) for node in nodes)


def branches(nodes: Iterable[ast.AST]) -> int:
    """Ways through a function of these nodes: each if, loop, except, ternary, comprehension and
    case, and each further operand of and/or."""
    return sum(
        len(node.values) - 1 if isinstance(node, ast.BoolOp) else isinstance(node, _BRANCHES)
        for node in nodes
    )


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, methods and inner ones included."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            continue  # holds no function with a name
        named = isinstance(child, Function | ast.ClassDef)
        if isinstance(child, Function):
            yield prefix + child.name, child
        yield from functions(child, f"{prefix}{child.name}." if named else prefix)


def is_nested(node: ast.AST) -> bool:
    """Whether `node` is a comprehension with two loops, or with another comprehension in it."""
    if not isinstance(node, _COMPREHENSIONS):
        return False
    inner = (n for n in ast.walk(node) if n is not node and isinstance(n, _COMPREHENSIONS))
    return len(node.generators) > 1 or any(inner)


def riddles() -> frozenset[str]:
    """Names that say too little: the first column of the glossary's last table."""
    table = (ROOT / "docs" / "glossary.md").read_text("utf-8").partition("## Not named")[2]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", table, re.M)
    return frozenset(name for row in rows[1:] for name in row.split(", "))


def named_values(node: ast.AST) -> Iterator[str]:
    """What `node` names for others to use: parameters, fields and attributes."""
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


@dataclass
class Measures:
    """The figures of `tests/house_ceilings.toml`, and where the largest of each stands."""

    figures: dict[str, int] = field(default_factory=dict)
    largest: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, n: int = 1) -> None:
        self.figures[name] = self.figures.get(name, 0) + n

    def maximum(self, name: str, n: int, where: str) -> None:
        if n > self.figures.get(name, -1):
            self.figures[name] = n
            self.largest[name] = where


def measure(trees: dict[str, ast.Module]) -> Measures:
    """Measures a product, or whatever has files of syntax."""
    riddle_names = riddles()
    counted = (
        "functions_over_12_branches",
        "nested_comprehensions",
        "walrus",
        "riddle_functions",
        "riddle_values",
    )
    measures = Measures(dict.fromkeys(counted, 0))
    for path, tree in trees.items():
        nodes = all_nodes(tree)
        n_statements = statements(nodes)
        measures.add("statements", n_statements)
        measures.maximum("statements_of_a_file", n_statements, path)
        if path.startswith("localllm/engine/"):
            measures.add("engine_files")
            measures.add("engine_statements", n_statements)
        for name, function in functions(tree):
            own = list(ast.walk(function))
            n_branches = branches(own)
            measures.add("functions_over_12_branches", n_branches > 12)
            measures.maximum("branches_of_a_function", n_branches, f"{path}::{name}")
            measures.maximum("statements_of_a_function", statements(own) - 1, f"{path}::{name}")
        measures.add("nested_comprehensions", sum(map(is_nested, nodes)))
        measures.add("walrus", sum(isinstance(node, ast.NamedExpr) for node in nodes))
        defined = [node.name for node in nodes if isinstance(node, Function | ast.ClassDef)]
        named = [name for node in nodes for name in named_values(node)]
        measures.add("riddle_functions", sum(name.strip("_") in riddle_names for name in defined))
        measures.add("riddle_values", sum(name.strip("_") in riddle_names for name in named))
    return measures
