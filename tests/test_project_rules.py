"""Rules of the project: light imports, one error tree, backends by entry point, small functions and
files."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from localllm import errors
from support.code_measures import Function, functions, product

ROOT = Path(__file__).parent.parent
HEAVY = (
    "textual", "llama_cpp", "mlx", "mlx_lm", "starlette", "uvicorn", "numpy", "huggingface_hub",
    "httpx", "aiohttp", "pydantic",
    "jinja2", "psutil", "llguidance",
)  # fmt: skip


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in out.stdout.split()}


@pytest.mark.parametrize(
    "module", ["localllm", "localllm.cli.main", "localllm_backends.llamacpp", "localllm.settings"]
)
def test_importing_the_package_imports_no_heavy_library(module: str) -> None:
    loaded = modules_after(f"import {module}")
    # From version 0.29 on, Typer itself imports pydantic.
    allowed = {"pydantic"} if module == "localllm.cli.main" else set()
    assert loaded.isdisjoint(set(HEAVY) - allowed), loaded & set(HEAVY)


OURS = ("localllm", "localllm_tui")


def modules() -> list[ModuleType]:
    """Return every module of the product except those of the catalog and the backends, which do not
    know our errors."""
    found = []
    for name in OURS:
        package = importlib.import_module(name)
        found += [
            importlib.import_module(m.name)
            for m in pkgutil.walk_packages(package.__path__, f"{name}.")
        ]
    return found


def leaves(
    cls: type[errors.LocalLLMError] = errors.LocalLLMError,
) -> list[type[errors.LocalLLMError]]:
    """Return `cls` and all its subclasses in the product, in any package."""
    modules()
    below = [
        leaf
        for sub in cls.__subclasses__()
        if sub.__module__.startswith(OURS)
        for leaf in leaves(sub)
    ]
    return [cls, *below]


def test_all_errors_derive_from_one_base_class() -> None:
    """All errors of the product belong to one tree. (Errors that only a library's own code catches
    derive from that library's classes.)"""
    strays = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value,
        BaseException) and value.__module__ == module.__name__
        and not name.startswith("_") and any(base.__module__ == "builtins" for base in value.__bases__)
    ]  # fmt: skip
    assert strays == ["localllm.errors.LocalLLMError"]


def test_every_error_has_a_code_status_exit_code_and_crosses_processes() -> None:
    codes = [cls.code for cls in leaves()]
    assert len(set(codes)) == len(codes)
    for cls in leaves():
        assert 400 <= cls.http_status < 600
        assert 0 < cls.exit_code < 128
        made = errors.by_code(cls.code, "what happened", hint="what to do")
        assert type(made) is cls
        body = made.to_openai()["error"]
        assert (body["message"], body["hint"], body["code"]) == (
            "what happened",
            "what to do",
            cls.code,
        )
        assert cls.__name__ in (errors.__doc__ or ""), "the tree in the docstring names every error"


def test_an_unknown_code_is_a_backend_error() -> None:
    assert type(errors.by_code("no such code", "x")) is errors.BackendError


def test_our_backends_are_registered_like_third_party_ones() -> None:
    assert "llamacpp" in {point.name for point in entry_points(group="localllm.backends")}


def test_the_wheel_holds_our_four_packages_and_nothing_else() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(Path(p).name for p in packages) == [
        "localllm",
        "localllm_backends",
        "localllm_catalog",
        "localllm_tui",
    ]
    for folder in ("packaging", "tests"):
        assert not (ROOT / folder / "__init__.py").exists(), (
            f"{folder}/__init__.py would shadow a package of that name"
        )


def test_every_dependency_has_a_floor_and_a_cap() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in config["project"]["dependencies"]:
        assert ">=" in requirement, requirement
        assert "<" in requirement, requirement


PRODUCT = sorted(
    path
    for folder in ("localllm", "backends", "model_catalog", "tui")
    for path in (ROOT / folder).rglob("*.py")
)
MOST_LINES_OF_A_FILE = 500
MOST_PARAMETERS = 8

# Functions above this limit, each with its reason. An entry that is no longer needed fails the
# test.
_TYPER = "Typer reads a command's options off its signature: one parameter each, with its help"
TOO_MANY_PARAMETERS = {
    "localllm/cli/commands/chat.py::chat": _TYPER,
    "localllm/cli/commands/bench.py::bench": _TYPER,
    "localllm/cli/commands/quality.py::quality": _TYPER,
    "localllm/cli/commands/recommend.py::recommend": _TYPER,
    "localllm/cli/commands/setup.py::setup": _TYPER,
}


@cache
def all_functions() -> list[tuple[str, Function]]:
    return [
        (f"{path}::{name}", node)
        for path, tree in product().items()
        for name, node in functions(tree)
    ]


def parameters(node: Function) -> int:
    """Return the number of parameters that a caller may pass."""
    own = [*node.args.posonlyargs, *node.args.args]
    given = own[1:] if own and own[0].arg in ("self", "cls") else own
    return len(given) + len(node.args.kwonlyargs)


def test_no_file_is_too_long() -> None:
    """Functions are limited by their statements and branches (code_limits.toml), because their
    lines depend on the page width."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PRODUCT}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_no_function_has_too_many_parameters() -> None:
    """Dataclasses need no exception here: their constructor is generated, and callers name the
    values."""
    assert {name for name, node in all_functions() if parameters(node) > MOST_PARAMETERS} == set(
        TOO_MANY_PARAMETERS
    )


def test_every_file_has_a_docstring_about_its_purpose() -> None:
    for path in PRODUCT:
        assert path.read_text().lstrip().startswith('"""'), (
            f"{path.name} does not begin with its reason"
        )


# Files of other projects that our comments cite.
FOREIGN_FILES = {
    "convert.py", "encoder.py", "file_download.py", "mlx_lm/models/base.py",
    "mlx_lm/models/cache.py",
    "mlx_lm/utils.py", "utils.py",
}  # fmt: skip


def test_no_comment_or_page_names_a_missing_file() -> None:
    ours = [
        f"/{path.relative_to(ROOT)}"
        for path in ROOT.rglob("*.py")
        if not {".venv", ".cache"} & {*path.parts}
    ]
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "model_catalog").rglob("*.md"),
    ]
    code = [*PRODUCT, *(ROOT / "benchmarks").rglob("*.py")]
    named = {
        name
        for path in [*pages, *code]
        for name in re.findall(r"(?<![\w/.])\w[\w/]*\.py\b", path.read_text())
    }
    gone = {name for name in named if not any(path.endswith(f"/{name}") for path in ours)}
    assert gone == FOREIGN_FILES


# Modules that read files of the kernel, of an archive they unpacked, or that they wrote themselves.
READERS_OF_KNOWN_FILES = {
    "localllm/device/library_facts.py", "localllm/library/file_kinds.py", "localllm/memory/linux.py",
    "localllm/setup/archives.py", "tui/localllm_tui/screens/background_work.py",
}  # fmt: skip


def test_user_files_are_read_only_if_they_are_regular_and_small() -> None:
    """`paths.file_bytes` rejects pipes, devices and large files. Files of the package are
    trusted."""
    found = set()
    for path in [*(ROOT / "localllm").rglob("*.py"), *(ROOT / "tui").rglob("*.py")]:
        source = path.read_text()
        for call in re.findall(r"(\S+)\.read_(?:text|bytes)\(", source):
            if "__file__" not in call and not re.search(r"\b_?[A-Z_]+$", call):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == READERS_OF_KNOWN_FILES


def contracts() -> list[dict[str, Any]]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = config["tool"]["importlinter"]["contracts"]
    return found


def test_every_import_contract_states_its_rule_and_reason() -> None:
    for contract in contracts():
        what, _, why = contract["name"].partition(": ")
        assert what, contract
        assert why, f"{what!r} has no reason behind a colon"


def test_every_package_has_its_own_import_contract() -> None:
    rooms = {f"localllm.{path.parent.name}" for path in (ROOT / "localllm").glob("*/__init__.py")}
    rooms |= {"localllm_backends", "localllm_catalog", "localllm_tui"}
    bound = {sources[0] for c in contracts() if len(sources := c.get("source_modules", [])) == 1}
    assert rooms - bound == {"localllm.cli"}, "the command line alone may know every room"


def test_ci_runs_the_same_checks_as_a_developer() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
