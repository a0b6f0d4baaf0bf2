"""An engine whose process ends twice while it loads a model is replaced by the last good one."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import shutil
import sys
from pathlib import Path

import pytest

from localllm.cli.engine_builds import EngineFallback
from localllm.device.probes import llama_cpp_folder
from localllm.engine.worker import pipe
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import WorkerDiedError
from localllm.setup import builds
from localllm_backends.contract import LoadSpec

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="changes the code of an ELF library"
)
# An undefined instruction, which ends the process (UD2, UDF).
_UNDEFINED = {"x86_64": b"\x0f\x0b", "aarch64": b"\x00\x00\x00\x00"}


def offset_of(library: Path, function: str) -> int:
    """Return the offset of a function's code in the file of a library."""
    loaded = ctypes.CDLL(str(library))
    address = ctypes.cast(loaded[function], ctypes.c_void_p).value
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_, file = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= address < stop and file == str(library):
            return address - start + int(offset, 16)
    raise AssertionError(f"{function} is not in {library}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a build of the wheel's libraries that ends its process when it loads a model."""
    installed = llama_cpp_folder()
    assert installed is not None
    build = builds.Build("b12110-cpu", "cpu", "", "b12110", "2026-11-29", libraries="{build}/lib")
    folder = build.folder / "lib"
    folder.mkdir(parents=True)
    shutil.copytree(installed, folder, dirs_exist_ok=True)
    shutil.copytree(installed.parents[1] / "include", build.folder / "include")
    library = (installed / "libllama.so").resolve()
    at = offset_of(library, "llama_model_load_from_file")
    code = bytearray(library.read_bytes())
    undefined = _UNDEFINED[platform.machine()]
    code[at : at + len(undefined)] = undefined
    for name in folder.glob("libllama.so*"):
        name.write_bytes(code)
    builds.finish(build)
    builds.choose(build.name)
    environment = {"LLAMA_CPP_LIB_PATH": str(folder)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return build.name


def load(model: Path, observer: EngineFallback | None) -> int:
    """Load the model with a supervisor, and return the number of loads."""

    async def loaded() -> int:
        options = WorkerOptions(LoadSpec(str(model), n_ctx=64))
        host = Supervisor(options, observer=observer)
        try:
            await host.engine()
            return host.loads
        finally:
            await host.close()
            await pipe.end_ahead()

    return asyncio.run(loaded())


def test_a_failing_engine_is_replaced_by_the_last_good_one(
    engine: str, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tiny_model, EngineFallback()) == 1
    assert builds.chosen() == builds.OWN
    assert builds.named(engine).fault == "its process ended twice while it loaded a model"
    (said,) = [r.getMessage() for r in caplog.records if r.name == "localllm.cli.engine_builds"]
    assert said.startswith(f"the engine {engine} can't be used: its process ended twice")
    assert "; own runs now" in said


def test_a_failing_engine_is_not_replaced_without_a_fallback(engine: str, tiny_model: Path) -> None:
    with pytest.raises(WorkerDiedError, match="ended while loading"):
        load(tiny_model, None)
    assert builds.chosen() == engine


def test_an_engine_that_the_user_named_is_not_replaced(
    engine: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_BUILD", engine)
    with pytest.raises(WorkerDiedError):
        load(tiny_model, EngineFallback())
    assert builds.chosen() == engine
    assert builds.named(engine).fault == ""


def test_an_engine_whose_library_cannot_be_loaded_is_replaced_at_once(
    engine: str, tiny_model: Path
) -> None:
    for library in (builds.named(engine).folder / "lib").glob("libllama.so*"):
        library.write_bytes(b"not a library")
    assert load(tiny_model, EngineFallback()) == 1
    assert builds.chosen() == builds.OWN
    assert "libllama.so" in builds.named(engine).fault


def test_a_successful_load_resets_the_count_of_failures(engine: str) -> None:
    fallback = EngineFallback()
    assert fallback.died()
    fallback.loaded()
    assert fallback.died()
    assert builds.chosen() == engine
    assert fallback.died()
    assert builds.chosen() == builds.OWN
    assert not fallback.died(), "the wheel is not replaced"
