"""Measures of the product's code, computed from its syntax trees: size in AST nodes, nodes per
statement, branches, shapes of expressions, and names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
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


MOST_NODES = 60  # of a statement without a body
SHORT_PIECE = 12  # characters


@cache
def sources() -> dict[str, str]:
    """Return the text of every file of the product, by its path in the checkout."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


@cache
def product() -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the product, by its path in the checkout."""
    return {path: ast.parse(text) for path, text in sources().items()}


def syntax(path: str, text: str) -> ast.Module:
    """Return the syntax tree of `text`. A file that equals the one in the checkout is not parsed
    again."""
    if sources().get(path) == text:
        return product()[path]
    return ast.parse(text)


@cache
def all_nodes(tree: ast.Module) -> list[ast.AST]:
    """Return every node of a file. Cached, because many tests walk the same files."""
    return list(ast.walk(tree))


def docstrings(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the `id` of every docstring's statement."""
    found = set()
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | Function) or not node.body:
            continue
        first = node.body[0]
        if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
            continue
        if isinstance(first.value.value, str):
            found.add(id(first))
    return found


def statements(nodes: Iterable[ast.AST]) -> int:
    return sum(isinstance(node, ast.stmt) for node in nodes)


def size(nodes: Iterable[ast.AST]) -> int:
    """Return the number of AST nodes without the contexts Load, Store and Del."""
    return sum(not isinstance(node, ast.expr_context) for node in nodes)


def is_packed(node: ast.AST) -> bool:
    """Return whether `node` assigns several values at once, as in `a, b = x, y`. A swap does not
    count."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    stored = {ast.unparse(element) for element in target.elts}
    return stored != {ast.unparse(element) for element in node.value.elts}


@dataclass(frozen=True)
class Lexed:
    """The number of broken strings of a file, and its comments with their line numbers.

    A string is broken if it is adjacent to another one and one of them has at most `SHORT_PIECE`
    characters.
    """

    n_broken_strings: int
    comments: list[tuple[int, str]]


@cache
def lexed(text: str) -> Lexed:
    """Count the broken strings and collect the comments of `text`. Cached, because the tokenizer
    takes longer than the parser."""
    n = 0
    previous = None
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            length = len(token.string.lstrip("rbfuRBFU").strip("\"'"))
            if previous is not None and min(length, previous) <= SHORT_PIECE:
                n += 1
            previous = length
        elif token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string))
        elif token.type != tokenize.NL:
            previous = None
    return Lexed(n, comments)


def branches(nodes: Iterable[ast.AST]) -> int:
    """Count the branches of these nodes: each if, loop, except, ternary, comprehension and case,
    and each further operand of and/or."""
    return sum(
        len(node.values) - 1 if isinstance(node, ast.BoolOp) else isinstance(node, _BRANCHES)
        for node in nodes
    )


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function with its qualified name, including methods and inner functions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            continue  # contains no named function
        named = isinstance(child, Function | ast.ClassDef)
        if isinstance(child, Function):
            yield prefix + child.name, child
        yield from functions(child, f"{prefix}{child.name}." if named else prefix)


def is_nested(node: ast.AST) -> bool:
    """Return whether `node` is a comprehension with two loops, or contains another
    comprehension."""
    if not isinstance(node, _COMPREHENSIONS):
        return False
    inner = (n for n in ast.walk(node) if n is not node and isinstance(n, _COMPREHENSIONS))
    return len(node.generators) > 1 or any(inner)


@cache
def riddles() -> frozenset[str]:
    """Return names that are too vague: the first column of the glossary's last table."""
    table = (ROOT / "docs" / "glossary.md").read_text("utf-8").partition("## Not named")[2]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", table, re.M)
    return frozenset(name for row in rows[1:] for name in row.split(", "))


def named_values(node: ast.AST) -> Iterator[str]:
    """Yield the names that `node` defines for other code: parameters, fields and attributes."""
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


COUNTED = (
    "broken_strings",
    "functions_over_12_branches",
    "nested_comprehensions",
    "riddle_functions",
    "riddle_values",
    "statements_over_60_nodes",
    "walrus",
)
MAXIMA = ("branches_of_a_function", "statements_of_a_function")
PER_1000_STATEMENTS = ("lambdas", "packed_assignments")


@dataclass
class Measures:
    """The figures that `tests/code_limits.toml` limits, and the place of the largest of each."""

    figures: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    largest: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, n: float = 1) -> None:
        self.figures[name] = self.figures.get(name, 0) + n

    def maximum(self, name: str, n: float, where: str) -> None:
        if n > self.figures.get(name, -1):
            self.figures[name] = n
            self.largest[name] = where


@cache
def measure_file(path: str, text: str) -> tuple[Measures, Counter[str]]:
    """Return the figures of one file, and the counts for the ratios."""
    measures = Measures()
    totals: Counter[str] = Counter()
    tree = syntax(path, text)
    nodes = all_nodes(tree)
    texts_only = docstrings(nodes)
    totals["nodes"] = size(nodes) - 2 * len(texts_only)
    measures.add("broken_strings", lexed(text).n_broken_strings)
    for node in nodes:
        if isinstance(node, ast.stmt) and id(node) not in texts_only:
            totals["statements"] += 1
            if not hasattr(node, "body") and size(ast.walk(node)) > MOST_NODES:
                measures.add("statements_over_60_nodes")
        totals["ifs"] += isinstance(node, ast.If)
        totals["conditional_expressions"] += isinstance(node, ast.IfExp)
        totals["lambdas"] += isinstance(node, ast.Lambda)
        totals["packed_assignments"] += is_packed(node)
        measures.add("nested_comprehensions", is_nested(node))
        measures.add("walrus", isinstance(node, ast.NamedExpr))
    for name, function in functions(tree):
        inside = list(ast.walk(function))
        n_branches = branches(inside)
        where = f"{path}::{name}"
        measures.add("functions_over_12_branches", n_branches > 12)
        measures.maximum("branches_of_a_function", n_branches, where)
        measures.maximum("statements_of_a_function", statements(inside) - 1, where)
    riddle_names = riddles()
    defined = [node.name for node in nodes if isinstance(node, Function | ast.ClassDef)]
    named = [name for node in nodes for name in named_values(node)]
    measures.add("riddle_functions", sum(name.strip("_") in riddle_names for name in defined))
    measures.add("riddle_values", sum(name.strip("_") in riddle_names for name in named))
    return measures, totals


def measure(texts: dict[str, str]) -> Measures:
    """Measure the files of a product. `texts` maps the path of each file to its text."""
    measures = Measures()
    totals: Counter[str] = Counter()
    for path, text in texts.items():
        of_file, counts = measure_file(path, text)
        totals += counts
        for name, n in of_file.figures.items():
            if name in MAXIMA:
                measures.maximum(name, n, of_file.largest[name])
            else:
                measures.add(name, n)
    n_statements = totals["statements"]
    measures.figures["nodes_per_statement"] = totals["nodes"] / n_statements
    for name in PER_1000_STATEMENTS:
        measures.figures[f"{name}_per_1000_statements"] = 1000 * totals[name] / n_statements
    per_if = totals["conditional_expressions"] / totals["ifs"]
    measures.figures["conditional_expressions_per_if"] = per_if
    return measures


def package(path: str) -> str:
    """Return the package of a product file, with its name in `tests/code_size.toml`."""
    parts = path.split("/")
    if parts[0] == "localllm" and len(parts) > 2:
        return f"localllm.{parts[1]}"
    return parts[0]


def nodes_of_packages(texts: dict[str, str]) -> dict[str, int]:
    """Return the number of AST nodes of each package, without docstrings."""
    found: Counter[str] = Counter()
    for path, text in texts.items():
        nodes = all_nodes(syntax(path, text))
        found[package(path)] += size(nodes) - 2 * len(docstrings(nodes))
    return dict(found)
