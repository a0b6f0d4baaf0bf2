"""`localllm worker`: lend this machine's memory and accelerators to another machine's `serve
--with`.

The protocol of llama.cpp's RPC has no password: every client can read and write the memory of its
process. So the RPC server listens only on loopback. An address filter in front of it admits the
named clients.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from localllm.errors import BackendMissingError, UsageError

SAFER_SETUP = (
    "the protocol has no authentication and no encryption. Safer than an open port: keep the "
    "worker on loopback, and on the server run `ssh -N -L {port}:127.0.0.1:{port} THIS_MACHINE`, "
    "then --with 127.0.0.1:{port}; or use a WireGuard address as --host, with --allow for its peer"
)


def worker(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 50052,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address or network that may connect (repeatable).",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads on a CPU build (0: one per core).")] = 0,
) -> None:
    """Run a part of a model for `localllm serve --with HOST:PORT` on another machine.

    Only loopback is allowed unless --allow names other machines, because the protocol has no
    authentication.
    """
    from localllm.addresses import is_loopback
    from localllm_backends.llamacpp.binding.engine_files import library_path

    allowed = networks(allow or ())
    if not is_loopback(host) and not allowed:
        raise UsageError(
            f"a worker on {host} without --allow would be open to everyone who can reach it",
            hint=SAFER_SETUP.format(port=port),
        )
    if library_path("ggml-rpc") is None:
        raise BackendMissingError(
            "this build of llama.cpp has no RPC",
            hint="run `localllm setup --rpc`: it makes a build with RPC",
        )
    import asyncio

    from localllm.cli import rpc_worker

    with suppress(KeyboardInterrupt):
        asyncio.run(rpc_worker.run(host, port, allowed, threads, SAFER_SETUP.format(port=port)))


def networks(texts: Sequence[str]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Parse the networks of `--allow`. Raises UsageError, also for a network of all addresses."""
    parsed = []
    for text in texts:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as e:
            raise UsageError(
                f"--allow {text!r} must be an address or a network, such as 10.0.0.7 or 10.0.0.0/29"
            ) from e
        if network.prefixlen == 0:
            raise UsageError(
                f"--allow {text} allows every address", hint="give the server's address"
            )
        parsed.append(network)
    return tuple(parsed)
