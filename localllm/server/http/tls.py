"""Tries a certificate and its key before anything loads, and says what is wrong with them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from localllm.errors import UsageError
from localllm.server.http.settings import TlsFiles


class _EncryptedError(Exception):
    """The key asks for a password."""


def check_tls(files: TlsFiles) -> None:
    """Raise UsageError unless a server can be run with `files`."""
    for name, path in (("--tls-cert", files.certificate), ("--tls-key", files.key)):
        if path is not None:
            _check_readable(name, path)
    key = files.key or files.certificate
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, _refuse_password)
    except _EncryptedError:
        raise UsageError(
            f"the private key in {key} is encrypted, and nobody is there to type its password",
            hint="write one without a password: openssl pkey -in KEY -out PLAIN_KEY",
        ) from None
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            why = f"the private key in {key} does not belong to the certificate in {files.certificate}"
        elif files.key is None and b"PRIVATE KEY-----" not in _start(files.certificate):
            why = f"there is no private key in {files.certificate}: name its file with --tls-key"
        else:
            why = f"{files.certificate} and {key} are not a certificate and its key as PEM text ({e.reason or e})"
        raise UsageError(f"TLS: {why}", hint="both are files as certbot, mkcert or openssl write them") from e


def _check_readable(name: str, path: Path) -> None:
    try:
        _start(path)
    except OSError as e:
        raise UsageError(f"{name} {path} can't be read: {e.strerror or e}") from e


def _start(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(1_000_000)


def _refuse_password() -> NoReturn:
    raise _EncryptedError
