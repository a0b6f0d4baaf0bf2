"""Keys of the server: the generated key, and those of config.toml.

A server that other machines can reach generates a key. The key is stored, so that clients keep
working.

    [keys.anna]                    # a named key: its hash, a variable or a file
    sha256 = "…"
    tokens_per_minute = 60000
    share_cache = "team"           # keys with the same value use each other's prefixes
    kv = true                      # may read KV (POST /v1/kv): for a server with --prefill-from
    admin = true                   # may load, unload, fetch and remove models, and see all usage
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from localllm import paths
from localllm.cli.serve.config_tables import named_tables, read_table, variable
from localllm.errors import LocalLLMError, UsageError

if TYPE_CHECKING:
    from localllm.server.http.accounts import NamedKey

_KEY_FIELDS = ("requests_per_minute", "tokens_per_minute", "parallel", "share_cache", "admin", "kv")
_MIN_KEY_CHARS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)

_GENERATED_KEY = re.compile(r"[A-Za-z0-9_-]{24,128}")


def key_path() -> Path:
    return paths.data_dir() / "server-key"


def existing_key() -> str | None:
    """Return the stored key, or None if it is missing or unreadable. Does not generate one."""
    try:
        return _read_key(key_path())
    except OSError:
        return None


def stored_or_new_key(*, new: bool = False) -> str:
    """Return the stored key. Generates a new one if it is unusable, or if `new`. Raises
    LocalLLMError."""
    path = key_path()
    try:
        key = None if new else _read_key(path)
        if key is None:
            key = secrets.token_urlsafe(24)
            paths.private_dir(path.parent)
            paths.write_private(path, key + "\n")
    except OSError as e:
        raise LocalLLMError(
            f"the server's key can't be written to {path}: {e.strerror or e}",
            hint="set your own key: --api-key KEY, or LOCALLLM_API_KEY",
        ) from e
    return key


def _read_key(path: Path) -> str | None:
    try:
        text = paths.file_text(path, encoding="latin-1").strip()
    except FileNotFoundError:
        return None
    if os.name == "posix" and path.stat().st_mode & 0o077:
        path.chmod(0o600)
    if _GENERATED_KEY.fullmatch(text):
        return text
    return None


def load_keys() -> tuple[NamedKey, ...]:
    """Return the named keys of config.toml.

    Raises UsageError that names the invalid table and the problem, but never the key.
    """
    keys = tuple(_key(name, table) for name, table in named_tables("keys", "key").items())
    for key in keys:
        other = next(k for k in keys if k.digest == key.digest)
        if other is not key:
            raise UsageError(
                f"[keys.{other.name}] and [keys.{key.name}] of config.toml are the same key"
            )
    return keys


def _key(name: str, table: dict[str, Any]) -> NamedKey:
    from pydantic import Field

    from localllm.server.http.accounts import NamedKey, digest_of

    where = f"[keys.{name}] of config.toml"
    at_least_one = Field(ge=1, le=10**12)
    switch = (bool, False)
    rate_limit = (Annotated[float, at_least_one] | None, None)
    fields = read_table(
        table,
        where,
        **dict.fromkeys(("sha256", "env", "file"), (str | None, None)),
        share_cache=(str, ""),
        admin=switch,
        kv=switch,
        requests_per_minute=rate_limit,
        tokens_per_minute=rate_limit,
        parallel=(Annotated[int, at_least_one] | None, None),
    )
    if not name.strip():
        raise UsageError(f"{where} has no name")
    if sum(fields[source] is not None for source in ("sha256", "env", "file")) != 1:
        raise UsageError(
            f"{where} must set exactly one of sha256, env and file",
            hint="env names a variable with the key, file a file with the key, and sha256 is "
            "its hash: `printf %s KEY | sha256sum`",
        )
    if fields["sha256"] is None:
        digest = digest_of(_secret(fields, where).encode())
    elif _SHA256.fullmatch(fields["sha256"]):
        digest = bytes.fromhex(fields["sha256"])
    else:
        raise UsageError(f"sha256 in {where} must be 64 hexadecimal digits")
    return NamedKey(name, digest, **{key: fields[key] for key in _KEY_FIELDS})


def _secret(fields: dict[str, Any], where: str) -> str:
    if fields["env"] is not None:
        key = variable(fields["env"], where)
    else:
        path = Path(fields["file"]).expanduser()
        try:
            key = paths.file_text(path).strip()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(
                f"{where}: {path} can't be read ({type(e).__name__})",
                hint="write the key to this file, and make it readable for this user",
            ) from e
    if len(key) < _MIN_KEY_CHARS:
        raise UsageError(
            f"the key of {where} has fewer than {_MIN_KEY_CHARS} characters: it could be guessed",
            hint="`openssl rand -base64 24` makes a key",
        )
    return key
