"""Texts that the server gives to a client and reads again later: encrypted and signed for one key.

A text that was changed, or made by another server or for another key, is refused. All these cases
have the same error, so it reveals nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from functools import cache
from pathlib import Path

from localllm import paths

log = logging.getLogger("localllm.server")

# Longest sealed text that is read.
MAX_CHARS = 2**20
_HEAD = "localllm-1."
_NONCE_BYTES = 16
_TAG_BYTES = 32
_SECRET_BYTES = 32


def secret_path() -> Path:
    """The file of the secret that all keys are derived from."""
    return paths.data_dir() / "sealing-secret"


@cache
def _secret(path: Path) -> bytes:
    """The stored secret. It is made at the first use. If the disk can't keep it, sealed texts can
    be read until the server stops."""
    try:
        secret = bytes.fromhex(paths.file_text(path, encoding="ascii"))
        if len(secret) == _SECRET_BYTES:
            return secret
    except (OSError, ValueError):
        pass
    secret = secrets.token_bytes(_SECRET_BYTES)
    try:
        paths.private_dir(path.parent)
        paths.write_private(path, secret.hex())
    except OSError as e:
        log.warning("compacted conversations will be unreadable after a restart: %s", e)
    return secret


def _key(owner: str, purpose: str) -> bytes:
    return hmac.digest(_secret(secret_path()), f"{purpose}\0{owner}".encode(), "sha256")


def _encrypted(data: bytes, owner: str, nonce: bytes) -> bytes:
    """`data` XOR a key stream. The same call decrypts."""
    stream = hashlib.shake_256(_key(owner, "text") + nonce).digest(len(data))
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
    return mixed.to_bytes(len(data), "big")


def seal(text: str, owner: str) -> str:
    """Return `text` sealed for the key named `owner`."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    body = nonce + _encrypted(text.encode(), owner, nonce)
    tag = hmac.digest(_key(owner, "tag"), body, "sha256")
    return _HEAD + base64.urlsafe_b64encode(tag + body).decode()


def unseal(sealed: object, owner: str) -> str | None:
    """Return the text of `sealed`, or None if this server did not seal it for `owner`."""
    if not isinstance(sealed, str) or len(sealed) > MAX_CHARS or not sealed.startswith(_HEAD):
        return None
    try:
        data = base64.b64decode(sealed[len(_HEAD) :], altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    body = data[_TAG_BYTES:]
    tag = hmac.digest(_key(owner, "tag"), body, "sha256")
    if len(body) < _NONCE_BYTES or not hmac.compare_digest(tag, data[:_TAG_BYTES]):
        return None
    return _encrypted(body[_NONCE_BYTES:], owner, body[:_NONCE_BYTES]).decode()
