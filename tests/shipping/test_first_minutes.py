"""The first minutes on a machine that lacks something. Each case ends with an answer, or with a
message that states the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

LOCALLLM = [sys.executable, "-m", "localllm"]


def run(
    *words: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *LOCALLLM, *words], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, cwd=environment.get("HOME"),
    )  # fmt: skip


def test_a_model_answers_on_a_full_or_read_only_disk(few_layers: Path, tmp_path: Path) -> None:
    """This simulates a full or read-only disk, also for root: the folders would be inside a
    file."""
    home = tmp_path / "Größe und Maß"
    home.mkdir()
    shutil.copy(few_layers, home / "mein Modell-Q4_1.gguf")
    (home / "eine Datei").write_text("")
    within = {
        f"LOCALLLM_{kind}_DIR": str(home / "eine Datei" / kind) for kind in ("DATA", "CACHE", "LOG")
    }
    done = run(
        "chat", "-m", "mein Modell-Q4_1.gguf", "--max-tokens", "2", "hi", HOME=str(home), **within
    )
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("unshare") is None, reason="needs Linux's unshare"
)
def test_a_network_namespace_without_loopback_is_named_in_the_error(few_layers: Path) -> None:
    apart = ("unshare", "--map-root-user", "--net")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = run("chat", "-m", str(few_layers), "hi", before=apart)
    assert done.returncode == 1
    assert "127.0.0.1 can't be reached" in done.stderr
    assert "ip link set lo up" in done.stderr


SETUP = Path(__file__).parents[2] / "packaging" / "setup.sh"
PROGRAMS = ("sh", "awk", "grep", "sed", "mktemp", "rm", "cat", "date", "getconf")
# pip's errors, and the messages that setup.sh derives from them.
SAID = [
    (
        "ERROR: Could not find a version that satisfies x (from versions: none)",
        "the package index can't be reached",
    ),
    (
        "NewConnectionError: Failed to establish a new connection",
        "the proxy 10.0.0.1:3128 (https_proxy)",
    ),
    ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ("error: CMake failed", "a build needs a C++ compiler"),
]


def set_up(
    folder: Path, *, pip_says: str = "", free_kb: int = 9_000_000, compiler: bool = True
) -> str:
    """Return the output of setup.sh in a folder whose environment has a pip that fails with
    `pip_says`."""
    programs, python = folder / "programs", folder / ".venv" / "bin" / "python"
    stubs = {
        programs / "sleep": "exit 1",
        programs / "df": f"printf 'a b c d\\n1 2 3 {free_kb}\\n'",
        python: f"""case "$*" in *--version) exit 0 ;; *install*) echo '{pip_says}' >&2 ;; esac; exit 1""",
        **({programs / "c++": "exit 0"} if compiler else {}),
        **{programs / name: f'exec {shutil.which(name)} "$@"' for name in PROGRAMS},
    }  # fmt: skip
    for path, body in stubs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (folder / "pyproject.toml").write_text('  "llama-cpp-python>=0.3.36,<0.4",\n')
    environment = {
        "PATH": str(programs),
        "HOME": str(folder),
        "https_proxy": "http://me:secret@10.0.0.1:3128",
    }
    done = subprocess.run(
        ["/bin/sh", str(SETUP), "app"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "secret" not in done.stderr
    assert "hint: " in done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
@pytest.mark.parametrize(
    ("pip_says", "told"), SAID, ids=["no index", "a proxy", "a full disk", "a build"]
)
def test_setup_finds_the_cause_in_the_output_of_pip(
    tmp_path: Path, pip_says: str, told: str
) -> None:
    assert told in set_up(tmp_path, pip_says=pip_says)


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
def test_setup_checks_disk_space_and_compiler_before_it_begins(tmp_path: Path) -> None:
    assert "only 9 MB are free" in set_up(tmp_path / "full", free_kb=9_000)
    assert "a C++ compiler is needed" in set_up(tmp_path / "no compiler", compiler=False)


READY = SETUP.with_name("ready_wheel.py")
WANTED = "llama-cpp-python>=0.3.36,<0.4"


class Index(BaseHTTPRequestHandler):
    """A package index with one page. If `page` is None, it accepts connections and never
    answers."""

    page: ClassVar[str | None] = ""
    gone: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self.page is None:
            self.gone.wait(60)
            return
        body = self.page.encode()
        self.send_response(200 if self.path == "/whl/cpu/llama-cpp-python/" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def index(page: str | None) -> Iterator[str]:
    """The address of a loopback index with this page."""
    serving = type("Serving", (Index,), {"page": page, "gone": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), serving)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/whl/cpu"
    finally:
        serving.gone.set()
        server.shutdown()
        server.server_close()
        thread.join()


def links(*files: str) -> str:
    return "".join(f'<a href="https://example.org/v/{file}#sha256=0">{file}</a>' for file in files)


def looked_up(address: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(READY), address, WANTED],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.strip()


def test_the_newest_ready_wheel_that_fits_is_found() -> None:
    names = [f"llama_cpp_python-{v}-py3-none-any.whl" for v in ("0.3.35", "0.3.37", "0.3.36")]
    others = (
        "llama_cpp_python-0.3.99-cp27-cp27m-plan9_mips.whl",
        "llama_cpp_python-0.4.0-py3-none-any.whl",
        "llama_cpp_python-0.3.99.tar.gz",
        "numpy-0.3.99-py3-none-any.whl",
    )
    with index(links(*names, *others)) as address:
        assert looked_up(address) == (0, "0.3.37")


@pytest.mark.parametrize("page", ["", "<html>a hotel's network</html>", links("x.whl")])
def test_an_index_without_a_fitting_wheel_is_reported(page: str) -> None:
    with index(page) as address:
        code, told = looked_up(address)
    assert code == 1
    assert "has no wheel of llama-cpp-python" in told


def test_an_unreachable_or_missing_index_does_not_stop_setup() -> None:
    with index(None) as address:
        code, told = looked_up(address)
    assert (code, "no answer within 3 s" in told or "timed out" in told) == (1, True)
    code, told = looked_up("http://127.0.0.1:9/whl/cpu")
    assert (code, "can't be reached" in told) == (1, True)


def commands(
    folder: Path, *, version: str = "", computes: bool = True, kind: str = "app", **variables: str
) -> tuple[list[str], str]:
    """The commands of the environment's Python that setup.sh runs, and its messages.

    `version` is the ready wheel that the index has, and `computes` whether it can compute here.
    """
    programs = folder / "programs"
    python = folder / ".venv" / "bin" / "python"
    stubs = {
        programs / "sleep": "exit 1",
        programs / "df": "printf 'a b c d\\n1 2 3 9000000\\n'",
        programs / "c++": "exit 0",
        python: f"""
echo "$*" >> {folder / "commands"}
case "$*" in
*find_spec*llama_cpp*) exit {0 if "INSTALLED" in variables else 1} ;;
*cache*list*) exit 0 ;;
*ready_wheel.py*) {f"echo {version}" if version else "echo 'no such index'; exit 1"} ;;
*starter.path*) echo {folder / "model.gguf"} ;;
*self_test*) echo 'Illegal instruction' >&2; exit {0 if computes else 132} ;;
esac""",
        **{programs / name: f'exec {shutil.which(name)} "$@"' for name in (*PROGRAMS, "touch")},
    }
    for path, body in stubs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (folder / "pyproject.toml").write_text(f'  "{WANTED}",\n')
    done = subprocess.run(
        ["/bin/sh", str(SETUP), kind],
        cwd=folder,
        env={"PATH": str(programs), "HOME": str(folder), "ACCELERATOR": "none", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "commands").read_text().splitlines(), done.stderr


def installs(ran: list[str]) -> list[str]:
    """The installations of llama-cpp-python among the commands: "ready" or "compiled"."""
    pip = [line for line in ran if " install " in line and "llama-cpp-python" in line]
    return ["ready" if "--only-binary" in line else "compiled" for line in pip]


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
def test_a_ready_wheel_is_installed_and_no_compiler_runs(tmp_path: Path) -> None:
    ran, told = commands(tmp_path, version="0.3.37")
    (first, *_) = [line for line in ran if "--only-binary" in line]
    assert "--index-url https://abetlen.github.io/llama-cpp-python/whl/cpu" in first
    assert first.endswith("llama-cpp-python==0.3.37")
    assert "installing the ready wheel of llama-cpp-python 0.3.37" in told
    assert "built from source" not in told


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
def test_without_a_ready_wheel_llama_cpp_is_compiled(tmp_path: Path) -> None:
    ran, told = commands(tmp_path)
    assert installs(ran) == ["compiled"]
    assert "no ready wheel: no such index" in told


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
def test_a_ready_wheel_that_computes_wrongly_is_replaced_by_a_compilation(tmp_path: Path) -> None:
    ran, told = commands(tmp_path, version="0.3.37", computes=False)
    assert "the ready wheel does not compute on this machine: Illegal instruction" in told
    assert installs(ran)[0] == "ready"
    assert installs(ran)[-1] == "compiled"
    removed = next(number for number, line in enumerate(ran) if "uninstall" in line)
    assert "compiled" in installs(ran[removed:])


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
@pytest.mark.parametrize("kind", ["app", "dev"])
def test_a_broken_build_in_pips_cache_is_compiled_again(kind: str, tmp_path: Path) -> None:
    ran, told = commands(tmp_path, computes=False, kind=kind)
    assert "the wheel does not compute on this machine: Illegal instruction" in told
    dropped = next(n for n, line in enumerate(ran) if "cache remove" in line)
    assert installs(ran[:dropped])[0] == "compiled"
    assert "compiled" in installs(ran[dropped:])


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("dev", {}),
        ("app", {"LLAMA_WHEELS": "none"}),
        ("app", {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}),
        ("app", {"INSTALLED": "1"}),
    ],
    ids=["tests", "none wanted", "own flags", "installed"],
)
def test_the_index_is_not_queried_if_no_ready_wheel_is_wanted(
    kind: str, variables: dict[str, str], tmp_path: Path
) -> None:
    ran, _ = commands(tmp_path, version="0.3.37", kind=kind, **variables)
    assert not any("ready_wheel.py" in line for line in ran)
    assert "ready" not in installs(ran)
