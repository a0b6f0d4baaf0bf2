"""Addresses and access rules of `localllm serve`, from its settings."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from localllm.addresses import is_loopback
from localllm.cli.serve.api_keys import load_keys, stored_or_new_key
from localllm.errors import UsageError
from localllm.server.http.settings import CONNECTION_LIMITS, ServerSettings, TlsFiles, image_host
from localllm.server.http.sockets import bind, bind_unix, check_tls, inherited, unix_file
from localllm.settings import Settings

# Fields of `ServerSettings` that are settings of the same name.
_SAME_NAMES = (
    "host",
    "port",
    "api_key",
    "unix_socket",
    "allow_users",
    "allow_plain",
    *CONNECTION_LIMITS,
)


def server_settings(settings: Settings, *, new_key: bool = False) -> ServerSettings:
    """Return the server's settings, with the stored API key if one is generated.

    `new_key` replaces the stored key. Raises UsageError, also for a certificate that can't be used.
    """
    tls = _tls_files(settings)
    secured_settings = ServerSettings(
        keys=load_keys(),
        allowed_hosts=settings.value("allow_host"),
        allowed_origins=settings.value("allow_origin"),
        tls=tls,
        image_hosts=_image_hosts(settings),
        keeps_awake=settings.value("keep_awake"),
        **{name: settings.value(name) for name in _SAME_NAMES},
    ).secured()
    if tls is not None:
        check_tls(tls)
    if not secured_settings.generated_key:
        if new_key:
            raise UsageError(
                "--new-key replaces a generated key, but this server has none",
                hint="keys are made up for addresses that other machines reach, "
                "such as --host 0.0.0.0",
            )
        return secured_settings
    return replace(secured_settings, api_key=stored_or_new_key(new=new_key))


def _image_hosts(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Return the hosts that images may be fetched from. Empty while offline."""
    # One flag may contain several names.
    listed = ",".join(settings.value("allow_image_hosts")).split(",")
    hosts = [name.strip() for name in listed if name.strip()]
    if not hosts or settings.value("offline"):
        return ()
    from localllm.library.hub import is_offline

    if is_offline():
        return ()
    return tuple(image_host(host) for host in hosts)


def _tls_files(settings: Settings) -> TlsFiles | None:
    certificate = settings.value("tls_cert")
    private = settings.value("tls_key")
    if certificate is None and private is not None:
        raise UsageError(
            "--tls-key needs --tls-cert", hint="add --tls-cert with the certificate's file"
        )
    if certificate is None:
        return None
    if not private:
        return TlsFiles(Path(certificate).expanduser(), None)
    return TlsFiles(Path(certificate).expanduser(), Path(private).expanduser())


@contextmanager
def listening(settings: ServerSettings) -> Iterator[tuple[Sequence[socket.socket], str]]:
    """Yield the listening sockets and their address for display. A Unix socket's file is removed at
    the end.

    Uses the sockets of a service manager if it has opened them. Raises PortInUseError or
    UsageError.
    """
    with ExitStack() as resources:
        socks = inherited()
        if socks:
            host = _inherited_host(socks, settings)
        elif settings.unix_socket is None:
            host = settings.host
            socks = bind(settings.host, settings.port)
        else:
            path = Path(settings.unix_socket).expanduser()
            host = ""
            socks = [bind_unix(path)]
            resources.enter_context(unix_file(path))
        for sock in socks:
            resources.enter_context(sock)
        if not host:
            yield socks, f"the Unix socket {socks[0].getsockname()} (path /v1)"
            return
        if ":" in host:
            host = f"[{host}]"
        scheme = "http" if settings.tls is None else "https"
        yield socks, f"{scheme}://{host}:{port_of(socks)}/v1"


def access_text(settings: ServerSettings) -> str:
    """Return which clients the server answers, for display."""
    if settings.keyed:
        return "every client needs a key"
    if settings.unix_socket is not None:
        return "only your user can open the socket"
    if settings.allow_users:
        return "every user of this machine is answered without a key (--allow-users)"
    return "only your user is answered; other users of this machine need a key: --api-key"


def key_notice(settings: ServerSettings) -> str:
    """Return the generated key with the reason why it is required, for display."""
    reason = "this address can be reached from other machines"
    if is_loopback(settings.host):
        reason = "this system does not report which user connects; --allow-users needs no key"
    return f"API key ({reason}): {settings.api_key}"


def reachable_address(address: str) -> str | None:
    """Replace 0.0.0.0 or :: in `address` with this machine's own address.

    Returns None if `address` contains neither, or if this machine has no network.
    """
    wildcard = next((wild for wild in ("//0.0.0.0:", "//[::]:") if wild in address), None)
    if wildcard is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # TEST-NET-1 (RFC 5737): this only selects a route and sends no packet
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return address.replace(wildcard, f"//{probe.getsockname()[0]}:")


def port_of(socks: Sequence[socket.socket]) -> int:
    """The port of the sockets; 0 for a Unix socket."""
    name = socks[0].getsockname()
    if isinstance(name, tuple):
        return int(name[1])
    return 0


def _inherited_host(socks: Sequence[socket.socket], settings: ServerSettings) -> str:
    """Return the host of the service manager's sockets, "" for a Unix socket.

    Raises UsageError if the sockets are open to other machines but the settings require no key.
    """
    hint = "`localllm service install` writes them again"
    names = [sock.getsockname() for sock in socks if sock.family != socket.AF_UNIX]
    if settings.api_key is None and not all(is_loopback(name[0]) for name in names):
        raise UsageError(
            "the service manager's socket can be reached from other machines, and no key is set",
            hint=hint,
        )
    if names and (settings.unix_socket is not None or names[0][1] != settings.port):
        print(
            f"note: listening on the service manager's socket, port {names[0][1]}, which differs "
            f"from the settings: {hint}",
            file=sys.stderr,
        )
    if names:
        return str(names[0][0])
    return ""
