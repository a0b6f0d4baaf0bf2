"""Binds the port or socket file, and checks the TLS files, before anything is loaded. Imports no
web framework.

So a port in use is reported at once, and the worker process starts while the web framework is still
being imported."""

from __future__ import annotations

import errno
import functools
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localllm import paths
from localllm.errors import PortInUseError, UsageError
from localllm.server.http.settings import TlsFiles

_FIRST_INHERITED_FD = 3


def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on `host:port` (0 = any free port). There is one socket; `localhost`
    has two, IPv4 and IPv6 on the same port. Raises PortInUseError or UsageError."""
    if host.lower() != "localhost":
        return [_bind_one(host, port)]
    if not has_ipv6_loopback():
        return [_bind_one("127.0.0.1", port)]
    first = _bind_one("127.0.0.1", port)
    try:
        return [first, _bind_one("::1", first.getsockname()[1])]
    except PortInUseError:
        first.close()
        if port != 0:
            raise
    return bind(host, port)


def has_ipv6_loopback() -> bool:
    """Return whether a socket can be bound to `::1`."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def _bind_one(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as e:
        raise UsageError(
            f"{host!r} is not an address of this machine: {e.strerror or e}; choose another --host"
        ) from e
    family, kind, proto, _, address = found[0]
    try:
        sock = socket.socket(family, kind, proto)
    except OSError as e:
        raise UsageError(
            f"can't listen on {host}:{port}: {e.strerror}; choose another --host or --port"
        ) from e
    if os.name == "posix":
        # On Windows, this option would let two servers share the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(256)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is in use") from e
        if e.errno == errno.EACCES:
            raise PortInUseError(f"port {port} on {host} needs administrator rights") from e
        raise UsageError(
            f"can't listen on {host}:{port}: {e.strerror}; choose another --host or --port"
        ) from e
    return sock


def bind_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user can open. It replaces only a dead socket
    of the same user.

    Raises PortInUseError, or UsageError if `path` can't be a socket."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no Unix sockets", hint="use a port: --port")
    _make_room(path)
    sock = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(256)
    except OSError as e:
        sock.close()
        raise UsageError(f"can't listen on the socket {path.name}: {e.strerror or e}") from e
    finally:
        os.umask(old)
    return sock


def _make_room(path: Path) -> None:
    """Remove a dead socket, which is one that refuses connections. Raises PortInUseError or
    UsageError for any other file."""
    try:
        there = path.lstat()
    except OSError:
        return  # absent or not visible: `bind` reports why
    if not stat.S_ISSOCK(there.st_mode):
        raise UsageError(f"{path.name} exists and is not a socket; choose another --unix PATH")
    with socket.socket(socket.AF_UNIX) as probe:
        # With a busy server, a blocking connection would wait.
        probe.setblocking(False)
        answer = probe.connect_ex(str(path))
    if answer == errno.ENOENT:
        return
    if answer in (0, errno.EAGAIN, errno.EINPROGRESS):
        raise PortInUseError(f"another program listens on the socket {path.name}")
    if answer != errno.ECONNREFUSED:
        raise UsageError(
            f"{path.name} can't be tested (another type of socket, or no "
            f"permission): {os.strerror(answer)}"
        )
    if there.st_uid != os.geteuid():
        raise UsageError(
            f"the socket {path.name} belongs to another user", hint="choose another --unix PATH"
        )
    path.unlink(missing_ok=True)


def inherited() -> list[socket.socket]:
    """Return the listening sockets that systemd passed to this process (sd_listen_fds(3)), if any.
    Call it only once.

    Raises UsageError for descriptors that are not listening sockets."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if os.name != "posix" or pid != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for descriptor in range(_FIRST_INHERITED_FD, _FIRST_INHERITED_FD + int(count)):
        try:
            sock = socket.socket(fileno=descriptor)
            listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError as e:
            raise UsageError(
                f"LISTEN_FDS names descriptor {descriptor}, which is not a socket: {e.strerror}"
            ) from e
        if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            raise UsageError(
                f"LISTEN_FDS names descriptor {descriptor}, which is not a listening socket"
            )
        sock.set_inheritable(False)
        found.append(sock)
    return found


@contextmanager
def unix_file(path: Path) -> Iterator[None]:
    """Remove the socket file at `path` after the block, unless another file has replaced it."""
    ours = path.lstat()
    try:
        yield
    finally:
        with suppress(OSError):
            if os.path.samestat(path.lstat(), ours):
                path.unlink()


def check_tls(files: TlsFiles) -> None:
    """Raise UsageError unless a server can run with these files."""
    key = files.key or files.certificate
    for name, path in (("--tls-cert", files.certificate), ("--tls-key", key)):
        try:
            pem = paths.file_bytes(path)
        except OSError as e:
            raise UsageError(f"{name} {path} can't be read: {e.strerror or e}") from e
    hint = "both must be PEM files, such as those of certbot, mkcert or openssl"
    try:
        # An empty password prevents a prompt.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key, password="")
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            why = f"the private key in {key} does not belong to the certificate in {files.certificate}"
        elif b"ENCRYPTED" in pem:
            why = f"the private key in {key} is encrypted, and a server can't ask for its password"
            hint = "write a key without a password: openssl pkey -in KEY -out PLAIN_KEY"
        elif files.key is None and b"PRIVATE KEY-----" not in pem:
            why = f"{key} contains no private key: name the key's file with --tls-key"
        else:
            why = (
                f"{files.certificate} and {key} are not a certificate and its key as PEM text "
                f"({e.reason or e})"
            )
        raise UsageError(f"TLS: {why}", hint=hint) from e


@functools.cache
def trusted_certificates() -> ssl.SSLContext:
    """Return the TLS context for the server's own requests. It uses certifi's certificates, as
    httpx does, because a Python from python.org has no access to the system's."""
    import httpx

    return httpx.create_ssl_context()
