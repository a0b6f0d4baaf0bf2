"""The certificates of authorities that HTTPS requests trust, as environment variables name them.

SSL_CERT_FILE and SSL_CERT_DIR replace the usual ones. REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE, which
other programs read, count if SSL_CERT_FILE is not set.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from localllm.errors import UsageError

_FILES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
HINT = (
    "if your network has its own certificate authority, set SSL_CERT_FILE to a PEM file with its "
    "certificate; also check the clock and the proxy"
)


def verification() -> ssl.SSLContext | bool:
    """Return the context for HTTPS requests, or True for the usual one.

    Raises UsageError if a variable names a file or folder that can't be read.
    """
    for name in _FILES:
        place = os.environ.get(name, "").strip()
        if not place:
            continue
        path = Path(place).expanduser()
        if path.is_dir() and name != "SSL_CERT_FILE":
            return _context(name, place, capath=path)
        return _context(name, place, cafile=path)
    folder = os.environ.get("SSL_CERT_DIR", "").strip()
    if folder and not any(map(os.path.isdir, folder.split(os.pathsep))):
        raise UsageError(
            f"SSL_CERT_DIR is {folder}, which is not a folder",
            hint="unset SSL_CERT_DIR, or set it to a folder of certificates",
        )
    return True


def _context(
    name: str, place: str, cafile: Path | None = None, capath: Path | None = None
) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cafile, capath=capath)
    except OSError as e:  # ssl.SSLError for a file without certificates
        reason = e.strerror or str(e)
        if isinstance(e, ssl.SSLError):
            reason = "it holds no certificate in PEM format"
        raise UsageError(
            f"{name} is {place}, which can't be used: {reason}",
            hint=f"unset {name}, or set it to a PEM file of certificates",
        ) from e
