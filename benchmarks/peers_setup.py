"""Prepare other servers for the comparison: built or installed in the cache folder, never in our
environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.models import serve_command, smollm2_mlx
from benchmarks.processes import Server
from localllm import paths
from localllm.bench.stream import free_port
from localllm.setup.steps import COMPILER_FAULTS

_FOLDER = paths.cache_dir() / "peers"
CONTEXT, STREAMS = 16384, 8
# Packages that llama-cpp-python's server needs in addition to ours.
_PYTHON_SERVER = (
    "sse-starlette",
    "starlette-context",
    "pydantic-settings",
    "python-dotenv",
    "typing-inspection",
)
OURS = "localllm"


class NotHereError(Exception):
    """A peer that is not available on this machine, with the reason."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a comparison: model file, given programs, folder of logs, and peers to leave
    out. `baseline`: a checkout of an earlier commit with its own .venv, to compare with. `streams`:
    concurrent streams of each server. `options`: options of our server."""

    model: Path
    llama_server: Path | None
    logs: Path
    without: Sequence[str] = ()
    baseline: Path | None = None
    streams: int = STREAMS
    options: Sequence[str] = ()

    @property
    def threads(self) -> int:
        """The threads of every server: the number of processors that this process may use."""
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Servers with the same weights, ours first. `only`: the scenarios that the group runs (none:
    all requested ones)."""

    title: str
    servers: Sequence[Server]
    versions: Mapping[str, str]
    only: Sequence[str] = ()


def gguf(wanted: Wanted) -> Group:
    """Return all servers that run a GGUF file on llama.cpp."""
    servers, versions = [_ours(wanted, wanted.model)], {OURS: _version("localllm")}
    for peer in (llama_server, llama_cpp_python, ollama):
        if peer.__name__.replace("_", "-") in wanted.without:
            continue
        try:
            server, said = peer(wanted)
        except NotHereError as e:
            print(f"left out: {e}", file=sys.stderr, flush=True)
            versions[peer.__name__.replace("_", "-")] = f"left out: {e}"
            continue
        servers.append(server)
        versions[server.name] = said
    return Group("The same GGUF file", servers, versions)


def drafting(wanted: Wanted) -> Group:
    """Return the group for copying with a change: llama-server with each of its ways to draft from
    the prompt, and ours with its defaults."""
    servers, versions = [_ours(wanted, wanted.model)], {OURS: _version("localllm")}
    for kind in ("ngram-simple", "ngram-map-k", "ngram-mod"):
        server, said = llama_server(wanted, f"llama-server {kind}", "--spec-type", kind)
        servers.append(server)
        versions[server.name] = said
    return Group("Drafting from the prompt", servers, versions, ("copy", "single"))


def mlx(wanted: Wanted) -> Group:
    """Return the MLX group: the same model as a float32 checkpoint, because MLX's quantised product
    is scalar on a CPU."""
    folder = smollm2_mlx()
    port = free_port()
    theirs = [sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port)]
    server = Server("mlx-lm", theirs, port, "default_model", log=wanted.logs / "mlx-lm.log")
    said = f"mlx-lm {_version('mlx-lm')}, mlx {_version('mlx')}"
    # Scenarios with long texts would take an hour per round, because MLX's products are scalar on
    # this CPU.
    short = ("single", "two", "four", "cancel", "rest")
    return Group(
        "The same MLX checkpoint (float32)",
        [_ours(wanted, folder), server],
        {server.name: said},
        short,
    )


def baseline(wanted: Wanted) -> Group:
    """Compare this tree with an earlier commit of ours: `git worktree add ../before COMMIT`, `make
    -C ../before .venv/.dev`."""
    python = (wanted.baseline or Path()).absolute() / ".venv" / "bin" / "python"
    if not python.is_file():
        raise NotHereError(f"the earlier commit: there is no {python}")
    before = replace(_ours(wanted, wanted.model), name="before", log=wanted.logs / "before.log")
    # Without this variable, Python would import the current folder instead of the other checkout.
    environment = {**before.environment, "PYTHONSAFEPATH": "1"}
    before = replace(before, command=[str(python), *before.command[1:]], environment=environment)
    return Group(
        "This tree and an earlier commit",
        [_ours(wanted, wanted.model), before],
        {OURS: _version("localllm")},
    )


GROUPS: Mapping[str, Callable[[Wanted], Group]] = {
    "gguf": gguf,
    "drafting": drafting,
    "mlx": mlx,
    "baseline": baseline,
}


def _ours(wanted: Wanted, model: Path) -> Server:
    port = free_port()
    options = (
        "--host",
        "127.0.0.1",
        "--context",
        str(CONTEXT),
        "--parallel",
        str(wanted.streams),
        "--quiet",
        *wanted.options,
    )
    environment = {"LOCALLLM_CACHE_DIR": str(wanted.logs / f"cache-{port}")}
    if model.is_file():  # MLX has no option for threads
        environment["LOCALLLM_THREADS"] = str(wanted.threads)
    return Server(
        OURS,
        serve_command(model, port, *options),
        port,
        "",
        environment,
        wanted.logs / "localllm.log",
    )


def llama_server(wanted: Wanted, name: str = "llama-server", *options: str) -> tuple[Server, str]:
    """Return llama.cpp's own server, of the same release as our llama.cpp. Its slots share the
    context, as ours do."""
    program = wanted.llama_server or built("llama-server")
    port = free_port()
    command = [
        str(program), "-m", str(wanted.model), "--host", "127.0.0.1", "--port", str(port), "-t",
        str(wanted.threads),
        "-c", str(CONTEXT), "-np", str(wanted.streams), "--kv-unified", "--jinja", *options,
    ]  # fmt: skip
    beside = {"LD_LIBRARY_PATH": str(program.parent)}
    asked = subprocess.run(
        [program, "--version"], capture_output=True, text=True, env={**os.environ, **beside}
    )
    lines = [
        line for line in (asked.stdout + asked.stderr).splitlines() if line.startswith("version")
    ]
    server = Server(name, command, port, "", beside, wanted.logs / "llama-server.log")
    said = (
        f"llama.cpp {lines[0] if lines else ''} (the sources in llama-cpp-python "
        f"{_version('llama-cpp-python')})"
    )
    return server, f"{said}, {' '.join(options)}".rstrip(", ")


def built(name: str) -> Path:
    """Return a program of llama.cpp, compiled once from the sources in llama-cpp-python's own
    release (some minutes)."""
    release = _version("llama-cpp-python")
    folder = _FOLDER / f"llama.cpp-{release}"
    build = folder / "build"
    program = build / "bin" / name
    if program.exists():
        return program
    if shutil.which("cmake") is None:
        raise NotHereError(f"{name}: cmake, which builds it, is not installed")
    print(
        f"building {name} of llama-cpp-python {release}: some minutes, once …",
        file=sys.stderr,
        flush=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob("llama_cpp_python-*/")):
        _run(name, [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
            "llama-cpp-python",
            "-d", str(folder), f"llama-cpp-python=={release}",
        ])  # fmt: skip
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    sources = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    _run(name, [
        "cmake", "-S", str(sources), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_BUILD_TESTS=OFF", f"-DCMAKE_PROJECT_INCLUDE={COMPILER_FAULTS}",
        "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_CURL=OFF",
    ])  # fmt: skip
    _run(
        name,
        ["cmake", "--build", str(build), "--target", name, "--parallel", str(os.cpu_count() or 1)],
    )
    return program


def llama_cpp_python(wanted: Wanted) -> tuple[Server, str]:
    """Return the server of llama-cpp-python, on the same library as ours."""
    folder = _FOLDER / "llama-cpp-python"
    if not (folder / "sse_starlette").exists():
        _run("llama-cpp-python's server", [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder),
            *_PYTHON_SERVER,
        ])  # fmt: skip
    port = free_port()
    command = [
        sys.executable, "-m", "llama_cpp.server", "--model", str(wanted.model), "--host",
        "127.0.0.1", "--port", str(port),
        "--n_ctx", str(CONTEXT), "--n_threads", str(wanted.threads), "--n_threads_batch",
        str(wanted.threads),
        "--interrupt_requests", "False",
    ]  # fmt: skip
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = Server(
        "llama-cpp-python",
        command,
        port,
        "",
        {"PYTHONPATH": path},
        wanted.logs / "llama-cpp-python.log",
    )
    return server, f"llama-cpp-python {_version('llama-cpp-python')}"


def ollama(wanted: Wanted) -> tuple[Server, str]:
    """Return Ollama if it is installed (no package index has it), with a separate folder for the
    one model."""
    program = shutil.which("ollama")
    if program is None:
        raise NotHereError(
            "ollama is not installed, and no package index carries it: see ollama.com/download"
        )
    port, name = free_port(), "bench"
    environment = {
        "OLLAMA_HOST": f"127.0.0.1:{port}", "OLLAMA_MODELS": str(wanted.logs / "ollama"),
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_CONTEXT_LENGTH": str(CONTEXT), "OLLAMA_NUM_PARALLEL": str(STREAMS),
    }  # fmt: skip
    modelfile = wanted.logs / "Modelfile"
    modelfile.write_text(f"FROM {wanted.model}\n", encoding="utf-8")
    maker = subprocess.Popen([program, "serve"], env={**os.environ, **environment})
    try:
        whole = {**os.environ, **environment}
        _run("ollama", [program, "create", name, "-f", str(modelfile)], whole)
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, env=whole
        ).stdout.strip()
    finally:
        maker.terminate()
        maker.wait()
    return Server(
        "ollama", [program, "serve"], port, name, environment, wanted.logs / "ollama.log"
    ), said


def _run(what: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotHereError(
            f"{what}: {' '.join(command[:4])} … failed: {last[-1] if last else 'it said nothing'}"
        )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
