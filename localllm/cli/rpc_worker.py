"""The RPC server of `localllm worker`, with an address filter in front of it.

It is a separate module so that other commands don't import asyncio.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

_CHUNK_BYTES = 2**20
_RESTART_DELAY_S = 1.0


async def run(
    host: str,
    port: int,
    allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network],
    threads: int,
    note: str,
) -> None:
    """Serve until cancelled.

    The RPC server runs in its own process and is restarted when it ends. The filter forwards
    connections to it. `note` is printed once it listens. Raises PortInUseError.
    """
    from localllm.errors import PortInUseError

    with socket.socket() as free_port_socket:
        free_port_socket.bind(("127.0.0.1", 0))
        rpc_port = free_port_socket.getsockname()[1]

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = ipaddress.ip_address(writer.get_extra_info("peername")[0])
        if not (peer.is_loopback or any(peer in network for network in allowed)):
            print(f"refused {peer}: its address is not in --allow", file=sys.stderr, flush=True)
            writer.close()
            return
        await _relay(reader, writer, rpc_port)

    try:
        listener = await asyncio.start_server(accept, host, port, limit=_CHUNK_BYTES)
    except OSError as e:
        raise PortInUseError(f"{host}:{port} can't be opened for listening: {e.strerror}") from e
    print(f"worker for other machines on {host}:{port}  (Ctrl-C stops)", file=sys.stderr)
    print(f"note: {note}", file=sys.stderr, flush=True)
    try:
        while True:
            await _serve_once(rpc_port, threads)
            print("the RPC server ended and is restarted", file=sys.stderr, flush=True)
            await asyncio.sleep(_RESTART_DELAY_S)
    finally:
        listener.close()


async def _serve_once(rpc_port: int, threads: int) -> None:
    command = [sys.executable, "-m", "localllm_backends.llamacpp.rpc", f"127.0.0.1:{rpc_port}"]
    if threads:
        command.append(str(threads))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rpc_port: int) -> None:
    try:
        rpc_reader, rpc_writer = await asyncio.open_connection(
            "127.0.0.1", rpc_port, limit=_CHUNK_BYTES
        )
    except OSError:
        writer.close()
        return
    for stream in (writer, rpc_writer):
        stream.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(_CHUNK_BYTES):
                target.write(chunk)
                await target.drain()
        with suppress(OSError):
            target.close()

    await asyncio.gather(carry(reader, rpc_writer), carry(rpc_reader, writer))
