"""The Unix socket.

Only its owner can open it. A dead socket is replaced, and a live one is not. /health answers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localllm.cli.serve.listening import listening
from localllm.errors import PortInUseError, UsageError
from localllm.server.app import create_app
from localllm.server.http.run import serve_on
from localllm.server.http.settings import ServerSettings
from localllm.server.http.sockets import bind_unix
from localllm.server.models.router import ModelRouter
from support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no AF_UNIX in Python")


@pytest.fixture
def path() -> Iterator[Path]:
    """Yield a short path: a socket's path has at most about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="ll") as folder:
        yield Path(folder) / "s.sock"


def test_health_and_chat_work_over_the_socket_and_its_file_is_removed(path: Path) -> None:
    settings = ServerSettings(unix_socket=str(path)).secured()
    assert settings.api_key is None  # the file's permissions replace the key

    async def story() -> None:
        with listening(settings) as (socks, address):
            assert str(path) in address
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            app = create_app(ModelRouter({"m": ScriptedEngine()}), settings=settings)
            server = asyncio.create_task(serve_on(app, socks, settings, quiet=True))
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://localllm") as client:
                assert (await client.get("/health")).json() == {"status": "ok"}
                body = {"messages": [{"role": "user", "content": "hi"}]}
                reply = await client.post("/v1/chat/completions", json=body)
                assert reply.json()["choices"][0]["message"]["content"] == "Hello world!"
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
        assert not path.exists()

    asyncio.run(story())


def test_a_foreign_origin_is_refused_on_the_socket_too(path: Path) -> None:
    async def story() -> None:
        app = create_app(
            ModelRouter({"m": ScriptedEngine()}),
            settings=ServerSettings(unix_socket=str(path)).secured(),
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as client:
            assert (
                await client.get("/health", headers={"origin": "https://evil.example"})
            ).status_code == 403

    asyncio.run(story())


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with bind_unix(path):
        with pytest.raises(PortInUseError):
            bind_unix(path)
        assert path.exists()


def test_a_live_socket_too_busy_to_answer_is_not_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        with pytest.raises(PortInUseError):
            bind_unix(path)
        assert path.exists()


def test_a_socket_of_another_kind_stays(path: Path) -> None:
    """A live socket of another type stays.

    It may belong to syslog or to a desktop, and accepts no stream connections.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as foreign:
        foreign.bind(str(path))
        with pytest.raises(UsageError, match="another type of socket"):
            bind_unix(path)
        assert path.exists()


def test_a_link_to_a_socket_and_another_users_socket_are_not_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(UsageError, match="not a socket"):
        bind_unix(link)
    assert link.is_symlink()
    monkeypatch.setattr(os, "geteuid", lambda: path.lstat().st_uid + 1)
    with pytest.raises(UsageError, match="another user"):
        bind_unix(path)
    assert path.exists()


def test_another_servers_socket_at_the_path_is_not_removed_at_the_end(path: Path) -> None:
    with listening(ServerSettings(unix_socket=str(path)).secured()):
        path.unlink()
        theirs = socket.socket(socket.AF_UNIX)
        theirs.bind(str(path))
    assert path.exists()
    theirs.close()


def test_a_file_that_is_not_a_socket_is_not_changed(path: Path) -> None:
    path.write_text("a letter")
    with pytest.raises(UsageError, match="not a socket"):
        bind_unix(path)
    assert path.read_text() == "a letter"


@pytest.mark.parametrize("name", ["missing/s.sock", "x" * 200])
def test_an_invalid_socket_path_is_an_error_with_the_reason(path: Path, name: str) -> None:
    before = os.umask(0o022)
    os.umask(before)
    with pytest.raises(UsageError, match="can't listen on the socket"):
        bind_unix(path.parent / name)
    after = os.umask(before)
    assert after == before
