"""Limits on the product's code: shape, size, names, dependency layers and public interfaces. Each
failure lists the places that exceed a limit."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from support.code_measures import (
    ROOT,
    Function,
    all_nodes,
    measure,
    nodes_of_packages,
    product,
    sources,
)
from support.prose_measures import prose


@cache
def trees_of_tests() -> dict[str, ast.Module]:
    files = sorted((ROOT / "tests").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


LIMITS = "tests/code_limits.toml"
SIZE = "tests/code_size.toml"
PROSE = "tests/prose_limits.toml"


def git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return found.stdout if found.returncode == 0 else ""


def versions(path: str) -> list[dict[str, Any]]:
    """Return the contents of a TOML file: in the working tree, then in each commit, newest
    first."""
    texts = [(ROOT / path).read_text("utf-8")]
    texts += [
        git("show", f"{commit}:{path}") for commit in git("log", "--format=%H", "--", path).split()
    ]
    return [tomllib.loads(text) for text in texts if text]


def raised_limits(path: str) -> list[dict[str, Any]]:
    """Return the limits that are missing or higher than in an earlier version of the file."""
    now, *earlier = versions(path)
    found = []
    for before in earlier:
        raised = {
            name: (n, now.get(name)) for name, n in before.items() if now.get(name, n + 1) > n
        }
        if raised:
            found.append(raised)
    return found


def above_limits(texts: dict[str, str]) -> dict[str, str]:
    limits = tomllib.loads((ROOT / LIMITS).read_text())
    measures = measure(texts)
    assert set(limits) == set(measures.figures)
    return {
        name: f"{n:g} > {limits[name]} ({measures.largest.get(name, '')})"
        for name, n in measures.figures.items()
        if n > limits[name]
    }


def test_no_figure_is_above_its_limit() -> None:
    assert above_limits(sources()) == {}


@pytest.mark.parametrize("path", [LIMITS, PROSE])
def test_a_limit_never_rises(path: str) -> None:
    """No limit is raised or removed compared with any earlier version of the file."""
    assert raised_limits(path) == []


def test_the_prose_is_within_its_limits() -> None:
    limits = tomllib.loads((ROOT / PROSE).read_text())
    measured = prose()
    assert set(limits) == set(measured)
    assert {name: n for name, n in measured.items() if n > limits[name]} == {}


def test_no_package_is_larger_than_recorded() -> None:
    recorded = tomllib.loads((ROOT / SIZE).read_text())["nodes"]
    measured = nodes_of_packages(sources())
    assert set(measured) == set(recorded)
    larger = {name: f"{n} > {recorded[name]}" for name, n in measured.items() if n > recorded[name]}
    assert larger == {}, f"raise the figure in {SIZE} and name the feature that needs it there"


def unnamed_growth(before: dict[str, Any], now: dict[str, Any]) -> dict[str, int]:
    """Return the packages whose recorded size rose although `now` names no new feature."""
    grown = {
        name: n - before["nodes"].get(name, 0)
        for name, n in now["nodes"].items()
        if n > before["nodes"].get(name, 0)
    }
    if sum(now["nodes"].values()) <= sum(before["nodes"].values()):
        return {}
    return {} if set(now["features"]) > set(before["features"]) else grown


def test_a_package_grows_only_with_a_feature_that_is_named() -> None:
    history = versions(SIZE)
    for now, before in pairwise(history):
        assert unnamed_growth(before, now) == {}


def test_a_growth_without_a_feature_is_noticed() -> None:
    before = {"nodes": {"a": 10, "b": 5}, "features": ["one: +10"]}
    larger = {"a": 12, "b": 5}
    assert unnamed_growth(before, {"nodes": larger, "features": ["one: +10"]}) == {"a": 2}
    assert unnamed_growth(before, {"nodes": larger, "features": ["one: +10", "two: +2"]}) == {}
    moved = {"a": 12, "b": 3}
    assert unnamed_growth(before, {"nodes": moved, "features": ["one: +10"]}) == {}


def test_a_sampling_parameter_can_be_added_within_the_limits() -> None:
    """The extension in docs/extending.md, a field of `Sampling` with its range and its use in the
    sampler, fits the limits."""
    texts = dict(sources())
    messages = "localllm/engine/messages.py"
    field = "class Sampling:"
    assert texts[messages].count(field) == 1
    head, _, tail = texts[messages].partition(field)
    docstring = tail.index('"""', tail.index('"""') + 3) + 3
    texts[messages] = (
        f"{head}{field}{tail[:docstring]}\n"
        "    sharpness: Annotated[float, FieldRange(0, 2, preset=False)] = 1.0\n"
        f"{tail[docstring:]}"
    )
    texts["localllm/engine/sampling/sharpness.py"] = (
        "def sharpen(logits, sampling):\n"
        "    if sampling.sharpness == 1.0:\n"
        "        return logits\n"
        "    return logits * sampling.sharpness\n"
    )
    assert above_limits(texts) == {}
    size = tomllib.loads((ROOT / SIZE).read_text())
    grown = {
        "nodes": {
            name: max(n, size["nodes"][name]) for name, n in nodes_of_packages(texts).items()
        },
        "features": [*size["features"], "sampling: sharpness"],
    }
    assert unnamed_growth(size, grown) == {}


def test_a_step_fits_on_a_screen() -> None:
    """The engine's `step` consists of five calls whose names are verbs."""
    core = product()["localllm/engine/core.py"]
    step = next(n for n in ast.walk(core) if isinstance(n, ast.FunctionDef) and n.name == "step")
    assert (step.end_lineno or 0) - step.lineno < 25
    called = {
        n.func.attr
        for n in ast.walk(step)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    assert {name.lstrip("_") for name in called} >= {
        "receive",
        "admit",
        "schedule",
        "forward",
        "process",
    }


def floors(package: str) -> int:
    """Return the number of import layers directly below `package`. A module that imports no sibling
    is on layer 1. Any other is one layer above the highest sibling that it imports."""
    folder = package.replace(".", "/") + "/"
    below: dict[str, set[str]] = defaultdict(set)
    for name, tree in product().items():
        if not name.startswith(folder) or name == f"{folder}__init__.py":
            continue
        room = name.removeprefix(folder).partition("/")[0].removesuffix(".py")
        for node in all_nodes(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and f"{node.module}.".startswith(f"{package}.")
            ):
                first = node.module.removeprefix(package).lstrip(".").partition(".")[0]
                below[room] |= {first} if first else {alias.name for alias in node.names}
        below[room] -= {room}

    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in below.get(room, ())), default=0)

    return max(floor(room) for room in below)


def test_the_engine_has_at_most_eight_dependency_layers() -> None:
    packages = [
        "localllm.engine",
        *(
            f"localllm.engine.{p.parent.name}"
            for p in (ROOT / "localllm/engine").glob("*/__init__.py")
        ),
    ]
    assert {package: n for package in packages if (n := floors(package)) > 8} == {}


# Only `localllm/memory` reads these sources. The two exceptions are backends, which may not import
# localllm: they ask their own library and the system.
MEMORY_SOURCES = (
    "MemAvailable",
    "MemTotal",
    "memory.max",
    "memory.limit_in_bytes",
    "virtual_memory",
)
OTHER_READERS = {
    "backends/localllm_backends/llamacpp/kv_probe.py",
    "backends/localllm_backends/mlx/memory.py",
}


def test_system_memory_is_read_only_in_the_memory_package() -> None:
    reads = {
        name
        for name, tree in product().items()
        for node in all_nodes(tree)
        if (isinstance(node, ast.Attribute) and node.attr in MEMORY_SOURCES)
        or (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.strip(":") in MEMORY_SOURCES
        )
    }
    assert {name for name in reads if not name.startswith("localllm/memory/")} == OTHER_READERS


# The folders that may contain a backend's or an accelerator's name. Other code uses the registry of
# formats, `KINDS`, or the facts that a backend declares.
DEVICES = ("localllm/device/", "localllm/setup/", "backends/")
NAME_OWNERS = dict.fromkeys(("llamacpp", "mlx"), ("backends/",)) | dict.fromkeys(
    ("cuda", "rocm", "vulkan", "metal"), DEVICES
)


def test_names_of_backends_and_accelerators_appear_only_in_their_own_module() -> None:
    found = {
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in product().items()
        for node in all_nodes(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in NAME_OWNERS
        and not path.startswith(NAME_OWNERS[node.value])
    }
    assert found == set()


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (name, node)
        for name, tree in product().items()
        for node in all_nodes(tree)
        if isinstance(node, ast.ClassDef)
    ]


def test_no_group_of_a_pattern_is_repeated_possessively() -> None:
    """Python before 3.11.4 (Debian 12 has 3.11.2) includes half of the last repetition in the
    match: https://github.com/python/cpython/issues/101955."""
    repeated = re.compile(r"(?<!\\)\)(?:[*+?]|\{[\d,]+\})\+")
    assert repeated.search("(?:a|b)*+")
    found = [
        f"{path}:{node.lineno}"
        for path, tree in product().items()
        for node in all_nodes(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and repeated.search(node.value)
    ]
    assert not found


def test_no_class_name_is_used_twice() -> None:
    """Each class name has one meaning in the whole product, so that it can be searched for."""
    found = defaultdict(list)
    for name, node in classes():
        found[node.name].append(f"{name}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


# Protocols that only one class of ours implements, each with the reason: another project implements
# the other side.
ONE_IMPLEMENTATION: dict[str, str] = {}


def members(node: ast.ClassDef) -> set[str]:
    named = {n.name for n in node.body if isinstance(n, Function)}
    return (
        named
        | {
            n.target.id
            for n in node.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
    ) - {"__init__"}


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def test_a_protocol_inside_a_package_has_more_than_one_implementation() -> None:
    """A protocol with one implementation only repeats the members of that class. (Across packages,
    a protocol states what one package needs from another, so one implementation is fine.)"""

    def package(name: str) -> str:
        return name.rpartition("/")[0]

    alone = set()
    others = [(at, members(node)) for at, node in classes() if not is_protocol(node)]
    for name, protocol in classes():
        if not is_protocol(protocol) or members(protocol) == {"__call__"}:
            continue
        fulfil = [at for at, has in others if members(protocol) <= has]
        if len(fulfil) == 1 and package(fulfil[0]) == package(name):
            alone.add(protocol.name)
    assert alone == set(ONE_IMPLEMENTATION)


def private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in ("_replace", "_asdict", "_fields")
    )


def last_name(node: ast.expr) -> str:
    """Return the last name of `a.b.c` or `c`, or "" for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the private names of the product that a test uses, except names that the test
    defines."""
    nodes = all_nodes(tree)
    own = {n.name for n in nodes if isinstance(n, Function | ast.ClassDef)}
    own |= {
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("localllm"):
            yield from ((node.lineno, alias.name) for alias in node.names if private(alias.name))
        if isinstance(node, ast.Call) and last_name(node.func).endswith("setattr"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    last = argument.value.rpartition(".")[2]
                    if private(last) and last not in own:
                        yield node.lineno, argument.value


# Private names of other projects that offer no public alternative, as (file, name).
FOREIGN_PRIVATE = {
    # Textual's own pilot has no public way to read the screen.
    *(
        (f"tests/tui/{name}.py", what)
        for name, what in (
            ("conftest", "self.app.screen._compositor"),
            ("test_long_answers", "d.app.screen._compositor"),
            ("test_nothing_escapes", "d.app.screen._compositor"),
            ("test_screen_manners", "d.app.screen._compositor"),
        )
    ),
    # The event loop of Windows, simulated on another system.
    ("tests/shipping/windows_like/sitecustomize.py", "asyncio.unix_events._UnixSelectorEventLoop"),
}


def test_tests_use_only_public_names() -> None:
    found = {
        (name, what) for name, tree in trees_of_tests().items() for _, what in private_names(tree)
    }
    assert found - FOREIGN_PRIVATE == set()


def test_no_test_sleeps() -> None:
    """A test waits for the event that it tests. A fixed pause is too short on a slow machine and
    too long on a fast one."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees_of_tests().items()
        for node in all_nodes(tree)
        if isinstance(node, ast.Call)
        and last_name(node.func) == "sleep"
        and ast.unparse(node.func) in ("time.sleep", "sleep", "asyncio.sleep")
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]
    assert found == []


def calls(node: ast.AST) -> set[str]:
    """Return the names of all called functions, and "check" for a program whose failure raises
    (`subprocess.run(…, check=True)`)."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    checked = {
        "check"
        for n in found
        if any(k.arg == "check" and ast.unparse(k.value) == "True" for k in n.keywords)
    }
    return checked | {last_name(n.func) for n in found}


def test_every_test_asserts_something() -> None:
    """A test asserts something directly, or calls a helper of the tests or of the backends'
    conformance suite that does."""
    helpers: dict[str, ast.AST] = {}
    for tree in [
        *trees_of_tests().values(),
        product()["backends/localllm_backends/conformance.py"],
    ]:
        helpers |= {n.name: n for n in all_nodes(tree) if isinstance(n, Function | ast.ClassDef)}
    asserting = {"raises", "warns", "fail", "check", "check_integrity"}
    called = {name: calls(node) for name, node in helpers.items()}
    new = {
        name
        for name, node in helpers.items()
        if any(isinstance(n, ast.Assert) for n in ast.walk(node))
    }
    while new - asserting:
        asserting |= new
        new = {name for name, names in called.items() if names & asserting}
    silent = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in trees_of_tests().items()
        for node in all_nodes(tree)
        if isinstance(node, Function)
        and node.name.startswith("test_")
        and node.name not in asserting
    ]
    assert silent == []
