"""Client of the model hub: repository listings, authentication headers, and error conversion.

A hub's answers are untrusted: names, hashes and sizes are checked before use as paths or numbers.
These variables are read, as huggingface-hub documents them: HF_ENDPOINT (a mirror), HF_TOKEN,
HF_HUB_OFFLINE, HF_HUB_CACHE, HF_HOME, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT (seconds).
HTTP(S)_PROXY, NO_PROXY and SSL_CERT_FILE also apply.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from localllm import __version__
from localllm.errors import DownloadError, ModelNotFoundError, UsageError
from localllm.library import names
from localllm.library.file_kinds import is_gguf
from localllm.library.names import endpoint as endpoint
from localllm.library.redirects import RedirectRule

if TYPE_CHECKING:
    import httpx

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILES = 20_000
_MAX_FILE_BYTES = 4 * 10**12
_MOST_REDIRECTS = 5
TOKEN_HINT = (
    "if it is private or gated: accept its licence on the hub, then set HF_TOKEN or run "
    "`hf auth login`"
)
_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
LATER_HINT = "run the same command again: it goes on where it stopped"


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry limits and timeouts, in seconds.

    - `failures`: consecutive tries without progress before a download fails.
    - `listing_failures`: the same for a listing, so that an outage is reported soon.
    - `longest_wait_s`: upper limit of our own waits.
    - `longest_asked_s`: a Retry-After up to this is honoured in full. A longer one is an error.
    - `least_bytes_s`: a connection slower than this over `slow_window_s` is closed and reopened.
    - `sleep`: replaced in tests.
    """

    failures: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    longest_asked_s: float = 300.0
    listing_failures: int = 4
    connect_s: float = 10.0
    read_s: float = 30.0
    slow_window_s: float = 30.0
    least_bytes_s: int = 4096
    sleep: Callable[[float], None] = field(default=time.sleep)

    @classmethod
    def from_environment(cls) -> Patience:
        """The defaults, with huggingface-hub's two timeouts if they are set."""
        usual = cls()
        return cls(
            connect_s=_positive("HF_HUB_ETAG_TIMEOUT", usual.connect_s),
            read_s=_positive("HF_HUB_DOWNLOAD_TIMEOUT", usual.read_s),
        )

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """Seconds to wait before the next try, after `failures` consecutive failures.

        `asked_s` is the wait that the server requested.
        """
        own = min(self.longest_wait_s, self.first_wait_s * 2.0 ** max(0, failures - 1))
        return max(own, asked_s or 0.0)


def _positive(name: str, default: float) -> float:
    try:
        value = float(os.environ.get(name, ""))
    except ValueError:
        return default
    if value > 0:
        return value
    return default


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file of a repository: name, size in bytes, and its hash (sha256, or git's sha1)."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit.

    `left_out` has the GGUF files whose names are not allowed here, in printable form. `anonymous`
    is True if the hub rejected the user's token, so requests omit it.
    """

    repo: str
    commit: str
    files: tuple[RepoFile, ...]
    left_out: tuple[str, ...] = ()
    anonymous: bool = False

    def get(self, name: str) -> RepoFile | None:
        return next((f for f in self.files if f.name == name), None)


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE forbids network access, read as huggingface-hub does."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def headers(*, anonymous: bool = False) -> dict[str, str]:
    """HTTP headers that identify localllm, with the user's token unless `anonymous`.

    The token comes from HF_TOKEN or a stored login. Raises UsageError for a malformed token, or if
    a hub folder variable names a file.
    """
    from huggingface_hub.utils import build_hf_headers

    for name in _FOLDERS:
        chosen = os.environ.get(name, "").strip()
        if chosen and Path(chosen).expanduser().exists() and not Path(chosen).expanduser().is_dir():
            raise UsageError(
                f"{name} is {chosen}, which is no folder", hint=f"unset {name}, or name a folder"
            )
    sent: dict[str, str] = build_hf_headers(
        library_name="localllm", library_version=__version__, token=False if anonymous else None
    )
    key = sent.get("authorization", "")
    if not (key.isascii() and key.isprintable()):
        wrong = next(sign for sign in key if not (sign.isascii() and sign.isprintable()))
        raise UsageError(
            f"{_token_place()} holds {wrong!r}, which no token does",
            hint="copy it anew from the hub",
        )
    return sent


def _token_place() -> str:
    if os.environ.get("HF_TOKEN", "").strip():
        return "HF_TOKEN"
    return "the stored login (`hf auth login`)"


def file_url(listing: Listing, name: str) -> str:
    """The URL of a file at exactly this commit."""
    return f"{endpoint()}/{listing.repo}/resolve/{listing.commit}/{quote(name)}"


def new_client(headers: Mapping[str, str], patience: Patience, endpoint: str) -> httpx.Client:
    """An HTTP client that follows the redirects of the hub at `endpoint`.

    Proxies and certificates come from the environment. The token is sent only to the hub's host:
    httpx drops Authorization elsewhere. RedirectRule limits the redirect targets.
    """
    import httpx

    rule = RedirectRule(endpoint)

    def check(request: httpx.Request) -> None:
        rule.check(str(request.url))

    return httpx.Client(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx.Timeout(patience.read_s, connect=patience.connect_s),
        follow_redirects=True,
        max_redirects=_MOST_REDIRECTS,
        event_hooks={"request": [check]},
    )


def list_files(repo: str, revision: str = "", patience: Patience | None = None) -> Listing:
    """The files of `repo` with sizes and hashes, at `main` or at a branch, tag or commit.

    Retries temporary failures (rate limits, server errors, a broken connection). Raises
    ModelNotFoundError if the hub has no such repository, HubUnreachableError if it can't be reached
    now, and DownloadError for other refusals and unusable answers.
    """
    import httpx

    if is_offline():
        raise HubUnreachableError(
            "the hub may not be asked: offline mode is on (HF_HUB_OFFLINE)",
            hint="unset HF_HUB_OFFLINE",
        )
    if not names.safe_repo(repo):
        raise UsageError(
            f"{repo!r} is not a repository name", hint="repositories look like org/name"
        )
    patience = patience or Patience.from_environment()
    url = f"{endpoint()}/api/models/{repo}"
    if revision:
        url += f"/revision/{quote(revision, safe='')}"
    refusal = ""
    failures = 0
    trouble: HubUnreachableError
    with new_client(headers(), patience, endpoint()) as client:
        while True:
            try:
                response = client.get(url, params={"blobs": "true"})
                if response.status_code == 401 and client.headers.pop("authorization", ""):
                    why = "it has expired, was withdrawn or is mistyped"
                    refusal = f"the hub refuses {_token_place()}: {why}"
                    continue
                return _listing(response, repo, revision, refusal)
            except httpx.HTTPError as e:
                trouble = _no_answer(e, repo)
            except HubUnreachableError as e:
                trouble = e
            failures += 1
            asked_s = trouble.retry_after_s
            if failures >= patience.listing_failures or (asked_s or 0) > patience.longest_asked_s:
                raise trouble
            patience.sleep(patience.wait_s(failures, asked_s))


class HubUnreachableError(DownloadError, code="hub_unreachable"):
    """The hub can't be used now: down, unreachable, or limiting our requests.

    `retry_after_s` is the wait that it requested.
    """


def _listing(response: httpx.Response, repo: str, revision: str, refusal: str) -> Listing:
    """The Listing from the hub's response.

    `refusal` is set if the request was sent without the user's token, and gives the reason. Raises
    DownloadError if a name, size or hash is invalid, and ModelNotFoundError.
    """
    host = response.url.host
    code = response.headers.get("X-Error-Code")
    if code == "RevisionNotFound":
        raise DownloadError(
            f"{repo} has no revision {revision!r}", hint="leave the revision out to get `main`"
        )
    if code != "GatedRepo" and (code == "RepoNotFound" or response.status_code in (401, 404)):
        raise _not_found(host, repo, refusal)
    if response.is_error:
        raise status_error(response.status_code, response.headers, host, repo)
    try:
        info = response.json()
    except ValueError as e:
        if response.text.lstrip().startswith("<"):
            raise HubUnreachableError(
                f"a web page came instead of {host}'s answer: the network's login page (captive "
                "portal), or a proxy's",
                hint="open a page in a browser and log in to the network; if HF_ENDPOINT is set, "
                "check that it is a hub",
            ) from e
        raise _no_answer(e, repo) from e
    try:
        found = _checked(repo, info, is_anonymous=bool(refusal))
    except (AttributeError, KeyError, TypeError) as e:
        raise _unusable(repo, f"it is not written as the hub's are ({e})") from e
    if refusal:
        logging.getLogger(__name__).warning(
            f"{refusal}: {repo} is public, and is asked for without it"
        )
    return found


def _not_found(host: str, repo: str, refusal: str) -> ModelNotFoundError:
    if refusal:
        said = f"{refusal}; without it {host} shows no repository {repo}"
        return ModelNotFoundError(
            said, hint="renew the token (huggingface.co/settings/tokens) or unset it"
        )
    return ModelNotFoundError(
        f"{host} has no repository {repo} that we may see", hint=f"check the name; {TOKEN_HINT}"
    )


def _no_answer(error: Exception, repo: str) -> HubUnreachableError:
    reason = type(error).__name__
    if str(error):
        reason = str(error).splitlines()[0][:200]
    return HubUnreachableError(
        f"{urlsplit(endpoint()).hostname} can't be asked about {repo}: {reason}",
        hint=f"check the connection and {_proxy()}; what is on this disk works without",
    )


def status_error(status: int, headers: Any, host: str, what: str) -> DownloadError:
    """The error for `host`'s status in response to a request for `what`.

    It is a HubUnreachableError if the request may succeed later.
    """
    asked = retry_after(headers)
    if status == 429:
        wait = f"; it asks to wait {asked:.0f} s" if asked else ""
        return HubUnreachableError(
            f"{host} limits our requests (429){wait}",
            hint=f"HF_TOKEN raises the limit; or {LATER_HINT}",
            retry_after_s=asked,
        )
    if status in (408, 425) or status >= 500:
        said = f"{host} answered {status} about {what}"
        return HubUnreachableError(said, hint="try again later", retry_after_s=asked)
    if headers.get("X-Error-Code") == "GatedRepo":
        return DownloadError(f"{what} is gated, and we have no access to it", hint=TOKEN_HINT)
    if status == 401:
        return DownloadError(f"{host} refuses {what} ({status})", hint=TOKEN_HINT)
    if status == 403:
        return _forbidden(host, what, headers)
    hint = "check its name: the repository may have changed"
    if status == 451:
        hint = (
            "the hub may not give it out (451, for legal reasons): "
            "ask its makers, or take another model"
        )
    return DownloadError(f"{host} answered {status} about {what}", hint=hint)


def _forbidden(host: str, what: str, headers: Any) -> DownloadError:
    """The error for a 403, with the hub's own words (X-Error-Message) if there are any.

    Without them, a firewall or proxy between us and the hub sent the 403.
    """
    said = names.shown(str(headers.get("X-Error-Message") or ""))[:300]
    if said:
        return DownloadError(
            f"{host} refuses {what}: {said}",
            hint="the hub's settings of the token or of the repository say so: see "
            "huggingface.co/settings/tokens",
        )
    return DownloadError(
        f"{what} is blocked on the way to {host}: "
        "a 403 came that is not the hub's (a firewall or a proxy)",
        hint="ask whoever runs this network, try another one, or name a mirror in HF_ENDPOINT",
    )


def _proxy() -> str:
    """The proxy used for the hub, without its password, for error messages."""
    from urllib.request import getproxies

    known = getproxies()
    scheme = urlsplit(endpoint()).scheme
    name = scheme if known.get(scheme) else "all"
    address = known.get(name, "").rpartition("@")[2].rpartition("/")[2]
    if address:
        return f"the proxy {address} ({name.upper()}_PROXY)"
    return "the proxy"


def retry_after(sent: Any) -> float | None:
    """Seconds that a server asked us to wait, or None.

    Read from Retry-After, in seconds or as a date (RFC 9110, 10.2.3), else from the hub's RateLimit
    `t`.
    """
    value = str(sent.get("Retry-After") or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", value):
        return float(value)
    if value:
        return _seconds_until(value)
    limit = re.search(r"\br=0\b.*?\bt=([0-9]{1,6})\b", str(sent.get("RateLimit") or ""))
    if limit:
        return float(limit[1])
    return None


def _seconds_until(date: str) -> float | None:
    """Seconds until an HTTP date (0 if it has passed), or None for any other text."""
    from email.utils import parsedate_to_datetime

    try:
        then = parsedate_to_datetime(date)
        return max(0.0, (then - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


def _checked(repo: str, info: Any, *, is_anonymous: bool) -> Listing:
    """A Listing from the hub's JSON.

    Raises DownloadError if a name, size or hash is invalid, and KeyError and the like if a field is
    missing.
    """
    rows = info.get("siblings") or []
    if len(rows) > _MAX_FILES:
        raise _unusable(repo, "it lists too many files")
    if _COMMIT.fullmatch(str(info["sha"])) is None:
        raise _unusable(repo, "it names no commit")
    files = tuple(filter(None, (_file(repo, row) for row in rows)))
    known = {file.name for file in files}
    others = (str(row["rfilename"]) for row in rows)
    unnameable = tuple(ascii(name)[1:-1] for name in others if name not in known and is_gguf(name))
    return Listing(repo, info["sha"], files, unnameable, is_anonymous)


def _file(repo: str, row: Any) -> RepoFile | None:
    name = str(row["rfilename"])
    if ".." in name.split("/") or name.startswith(("/", "\\")) or "\\" in name or ":" in name:
        raise _unusable(repo, f"it lists a file called {name[:80]!r}")
    if not names.safe_file(name):
        return None  # hidden files and the like, which a model does not need
    size = row.get("size")
    digest = row.get("blobId")
    form = _COMMIT
    if row.get("lfs"):
        digest = row["lfs"]["sha256"]
        form = _SHA256
    is_valid = form.fullmatch(str(digest)) and isinstance(size, int)
    if not is_valid or not 0 <= size <= _MAX_FILE_BYTES:
        raise _unusable(repo, f"it gives {name[:80]!r} no usable size and hash")
    return RepoFile(name, size, digest)


def _unusable(repo: str, why: str) -> DownloadError:
    return DownloadError(
        f"{urlsplit(endpoint()).hostname} gave an unusable answer about {repo}: {why}",
        hint="if HF_ENDPOINT names a mirror, check that it is one of the hub",
    )
