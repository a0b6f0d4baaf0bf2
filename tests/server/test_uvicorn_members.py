"""`Connection` subclasses uvicorn's HTTP protocol and `_Server` its server: neither documents the
members that they use. This test reads the members from our code and looks for each in the
installed uvicorn and h11."""

from __future__ import annotations

import ast
import asyncio
import inspect
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from localllm.server.http import run
from localllm.server.http.connections import Connection


def dotted(node: ast.AST) -> list[str]:
    """Return the names of `self.cycle.done` or `super().closed` without the first, or [] for
    others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    is_self = isinstance(node, ast.Name) and node.id == "self"
    return names if is_self or (is_super and ast.unparse(node) == "super()") else []


def used_members(kind: type) -> Iterator[list[str]]:
    """Yield the members of its base class that `kind` uses: those that it does not define
    itself."""
    own = {*vars(kind), *inspect.get_annotations(kind)}
    for node in ast.walk(ast.parse(inspect.getsource(kind))):
        names = dotted(node)
        of_super = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
        if names and (of_super or names[0] not in own):
            yield names


def missing_members(example: object, used: Iterator[list[str]]) -> set[str]:
    missing = set()
    for names in used:
        value: Any = example
        for i, name in enumerate(names):
            if not hasattr(value, name):
                missing.add(".".join(names[: i + 1]))
                break
            value = getattr(value, name)
    return missing


async def answer_nothing(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that sends no reply."""


async def protocol_with_a_request() -> H11Protocol:
    """Return uvicorn's protocol on a real connection, with a request, so that its `cycle` is
    set."""
    config = uvicorn.Config(answer_nothing, ws="none", lifespan="off", log_config=None)
    config.load()
    protocol = H11Protocol(config, ServerState(), {})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=ours)
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        protocol.transport.close()
    return protocol


def test_the_members_of_uvicorn_s_protocol_that_we_use_exist() -> None:
    used = list(used_members(Connection))
    assert {("cycle", "response_complete"), ("flow", "write_paused"), ("data_received",)} <= {
        tuple(names) for names in used
    }
    missing = missing_members(asyncio.run(protocol_with_a_request()), iter(used))
    assert not missing, (
        f"uvicorn {uvicorn.__version__} (h11 {h11.__version__}) lacks members that "
        f"localllm.server.http.connections.Connection uses: {', '.join(sorted(missing))}. "
        "Adapt Connection, or cap the version of uvicorn in pyproject.toml."
    )


def test_the_members_of_uvicorn_s_server_that_we_use_exist() -> None:
    server = uvicorn.Server(uvicorn.Config(answer_nothing))
    source = inspect.getsource(run)
    used = ["capture_signals", "serve", "server_state", "should_exit", "started"]
    assert all(name in source for name in used)
    missing = [name for name in used if not hasattr(server, name)]
    assert not missing, (
        f"uvicorn {uvicorn.__version__} lacks members of its Server that "
        f"localllm.server.http.run uses: {', '.join(missing)}. "
        "Adapt run.py, or cap the version of uvicorn in pyproject.toml."
    )
