"""Client of the model hub: repository listings, authentication headers, and error conversion.

A hub's answers are untrusted: names, hashes and sizes are checked before use as paths or numbers.
These variables are read, as huggingface-hub documents them: HF_ENDPOINT (a mirror), HF_TOKEN,
HF_HUB_OFFLINE, HF_HUB_CACHE, HF_HOME, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT (seconds).
HTTP(S)_PROXY, NO_PROXY and the variables of `localllm/certificates.py` also apply.
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

from localllm import __version__, certificates
from localllm.errors import DownloadError, ModelNotFoundError, UsageError
from localllm.foreign_json import JsonPart, MalformedError, check_uncompressed, parse, read
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
_MAX_REDIRECTS = 5
TOKEN_HINT = (
    "if it is private or gated: accept its licence on the hub, then set HF_TOKEN or run "
    "`hf auth login`"
)
_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
LATER_HINT = "run the same command again: it continues where it stopped"


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry limits and timeouts, in seconds.

    - `failures`: consecutive tries without progress before a download fails.
    - `listing_failures`: the same for a listing, so that an outage is reported soon.
    - `longest_wait_s`: upper limit of our own waits.
    - `max_retry_after_s`: a Retry-After up to this is honoured in full. A longer one is an error.
    - `least_bytes_s`: a connection slower than this over `slow_window_s` is closed and reopened.
    - `sleep`: replaced in tests.
    """

    failures: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    max_retry_after_s: float = 300.0
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

    def wait_s(self, failures: int, retry_after_s: float | None) -> float:
        """Seconds to wait before the next try, after `failures` consecutive failures.

        `retry_after_s` is the wait that the server requested.
        """
        own = min(self.longest_wait_s, self.first_wait_s * 2.0 ** max(0, failures - 1))
        return max(own, retry_after_s or 0.0)


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
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    # Otherwise huggingface-hub fetches a list of agents once a day and sends the agent's name.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    for name in _FOLDERS:
        chosen = os.environ.get(name, "").strip()
        if chosen and Path(chosen).expanduser().exists() and not Path(chosen).expanduser().is_dir():
            raise UsageError(
                f"{name} is {chosen}, which is not a folder",
                hint=f"unset {name}, or set it to a folder",
            )
    _check_token_file(Path(constants.HF_TOKEN_PATH))
    try:
        sent: dict[str, str] = build_hf_headers(
            library_name="localllm", library_version=__version__, token=False if anonymous else None
        )
    except (OSError, UnicodeDecodeError) as e:
        place = getattr(e, "filename", None) or constants.HF_TOKEN_PATH
        raise UsageError(
            f"the file of the hub's token can't be read: {place}: {_first_line(e)}",
            hint="correct or unset HF_TOKEN_PATH, or run `hf auth login` again",
        ) from e
    key = sent.get("authorization", "")
    if not (key.isascii() and key.isprintable()):
        wrong = next(sign for sign in key if not (sign.isascii() and sign.isprintable()))
        raise UsageError(
            f"{_token_place()} holds {wrong!r}, which a token can't contain",
            hint="copy the token again from the hub",
        )
    return sent


def _check_token_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UsageError(
            f"the file of the hub's token can't be read: {path} is not a file",
            hint="correct or unset HF_TOKEN_PATH",
        )


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


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
        verify=certificates.verification(),
        follow_redirects=True,
        max_redirects=_MAX_REDIRECTS,
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
            "offline mode is on (HF_HUB_OFFLINE), so the hub can't be used",
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
    failure: HubUnreachableError
    with new_client(headers(), patience, endpoint()) as client:
        while True:
            try:
                with client.stream("GET", url, params={"blobs": "true"}) as response:
                    if response.status_code == 401 and client.headers.pop("authorization", ""):
                        why = "it has expired, was revoked or is mistyped"
                        refusal = f"the hub rejects {_token_place()}: {why}"
                        continue
                    return _listing(response, repo, revision, refusal)
            except httpx.HTTPError as e:
                failure = _no_answer(e, repo)
            except HubUnreachableError as e:
                failure = e
            failures += 1
            retry_after_s = failure.retry_after_s
            if (
                failures >= patience.listing_failures
                or (retry_after_s or 0) > patience.max_retry_after_s
            ):
                raise failure
            patience.sleep(patience.wait_s(failures, retry_after_s))


class HubUnreachableError(DownloadError, code="hub_unreachable"):
    """The hub can't be used now: down, unreachable, or limiting our requests.

    `retry_after_s` is the wait that it requested.
    """


def _listing(response: httpx.Response, repo: str, revision: str, refusal: str) -> Listing:
    """The Listing from the hub's response, whose body is not read yet.

    `refusal` is set if the request was sent without the user's token, and gives the reason. Raises
    DownloadError if a name, size or hash is invalid, and ModelNotFoundError.
    """
    host = response.url.host
    code = response.headers.get("X-Error-Code")
    if code == "RevisionNotFound":
        raise DownloadError(
            f"{repo} has no revision {revision!r}", hint="omit the revision to get `main`"
        )
    if code != "GatedRepo" and (code == "RepoNotFound" or response.status_code in (401, 404)):
        raise _not_found(host, repo, refusal)
    if response.is_error:
        raise status_error(response.status_code, response.headers, host, repo)
    try:
        check_uncompressed(response.headers.get("content-encoding"))
        body = read(response.iter_bytes())
    except MalformedError as e:
        raise _unusable(repo, e.message) from e
    if body.lstrip()[:1] == b"<":
        raise HubUnreachableError(
            f"{host} answered with a web page, probably the network's login page (captive "
            "portal) or a proxy's error page",
            hint="open a page in a browser and log in to the network; if HF_ENDPOINT is set, "
            "check that it is a hub",
        )
    try:
        info = parse(body)
    except MalformedError as e:
        raise _no_answer(e, repo) from e
    try:
        found = _checked(repo, info, is_anonymous=bool(refusal))
    except MalformedError as e:
        raise _unusable(repo, e.message) from e
    if refusal:
        logging.getLogger(__name__).warning(
            f"{refusal}: {repo} is public, and is downloaded without the token"
        )
    return found


def _not_found(host: str, repo: str, refusal: str) -> ModelNotFoundError:
    if refusal:
        hub_message = f"{refusal}; without a token, {host} has no visible repository {repo}"
        return ModelNotFoundError(
            hub_message, hint="renew the token (huggingface.co/settings/tokens) or unset it"
        )
    return ModelNotFoundError(
        f"{host} has no repository {repo}, or it is private", hint=f"check the name; {TOKEN_HINT}"
    )


def _no_answer(error: Exception, repo: str) -> HubUnreachableError:
    reason = type(error).__name__
    if str(error):
        reason = str(error).splitlines()[0][:200]
    message = f"{urlsplit(endpoint()).hostname} can't be reached for {repo}: {reason}"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return HubUnreachableError(message, hint=certificates.HINT)
    return HubUnreachableError(
        message, hint=f"check the connection and {_proxy()}; installed models work offline"
    )


def status_error(status: int, headers: Any, host: str, subject: str) -> DownloadError:
    """The error for `host`'s status in response to a request for `subject`.

    It is a HubUnreachableError if the request may succeed later.
    """
    retry_after_s = retry_after(headers)
    if status == 429:
        wait = f"; it requests a wait of {retry_after_s:.0f} s" if retry_after_s else ""
        return HubUnreachableError(
            f"{host} limits our requests (429){wait}",
            hint=f"HF_TOKEN raises the limit; or {LATER_HINT}",
            retry_after_s=retry_after_s,
        )
    if status in (408, 425) or status >= 500:
        hub_message = f"{host} answered with status {status} for {subject}"
        return HubUnreachableError(hub_message, hint="try again later", retry_after_s=retry_after_s)
    if headers.get("X-Error-Code") == "GatedRepo":
        return _gated(host, subject, headers)
    if status == 401:
        return DownloadError(
            f"{host} rejects the request for {subject} ({status})", hint=TOKEN_HINT
        )
    if status == 403:
        return _forbidden(host, subject, headers)
    hint = "check the file's name: the repository may have changed"
    if status == 451:
        hint = (
            "the hub may not distribute it for legal reasons (451): ask its publisher, or choose "
            "another model"
        )
    return DownloadError(f"{host} answered with status {status} for {subject}", hint=hint)


def _gated(host: str, subject: str, headers: Any) -> DownloadError:
    """The error for a gated repository, with the hub's own words if there are any.

    They tell a licence that was not accepted from a request that awaits a review.
    """
    hub_message = names.shown(str(headers.get("X-Error-Message") or ""))[:300]
    message = f"{subject} is gated, and this account has no access"
    if hub_message:
        message = f"{message}: {hub_message}"
    if "review" in hub_message.lower() or "awaiting" in hub_message.lower():
        hint = f"wait until its authors accept the request: https://{host}/settings/gated-repos"
        return DownloadError(message, hint=hint)
    return DownloadError(message, hint=TOKEN_HINT)


def _forbidden(host: str, subject: str, headers: Any) -> DownloadError:
    """The error for a 403, with the hub's own words (X-Error-Message) if there are any.

    Without them, a firewall or proxy between us and the hub sent the 403.
    """
    hub_message = names.shown(str(headers.get("X-Error-Message") or ""))[:300]
    if hub_message:
        return DownloadError(
            f"{host} rejects the request for {subject}: {hub_message}",
            hint="check the permissions of the token (huggingface.co/settings/tokens) and of "
            "the repository",
        )
    return DownloadError(
        f"{subject} is blocked before {host}: the 403 is "
        "not from the hub, but from a firewall or a proxy",
        hint="ask the network's administrator, try another network, or set a mirror in HF_ENDPOINT",
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


def _checked(repo: str, info: JsonPart, *, is_anonymous: bool) -> Listing:
    """A Listing from the hub's JSON.

    Raises DownloadError if a name, size or hash is invalid, and MalformedError if a field is
    missing or has the wrong type.
    """
    rows = [*info.get("siblings").items()]
    if len(rows) > _MAX_FILES:
        raise _unusable(repo, "it lists too many files")
    commit = info.get("sha").text()
    if _COMMIT.fullmatch(commit) is None:
        raise _unusable(repo, "it names no commit")
    files = tuple(filter(None, (_file(repo, row) for row in rows)))
    known = {file.name for file in files}
    others = (row.get("rfilename").text() for row in rows)
    unnameable = tuple(ascii(name)[1:-1] for name in others if name not in known and is_gguf(name))
    return Listing(repo, commit, files, unnameable, is_anonymous)


def _file(repo: str, row: JsonPart) -> RepoFile | None:
    name = row.get("rfilename").text()
    if not name:
        raise row.get("rfilename").wrong("a file's name")
    if ".." in name.split("/") or name.startswith(("/", "\\")) or "\\" in name or ":" in name:
        raise _unusable(repo, f"it lists a file called {name[:80]!r}")
    if not names.safe_file(name):
        return None  # hidden files and the like, which a model does not need
    digest = row.get("blobId")
    form = _COMMIT
    if row.get("lfs").value:
        digest = row.get("lfs").get("sha256")
        form = _SHA256
    size = row.get("size").count()
    if size is None or size > _MAX_FILE_BYTES or not form.fullmatch(digest.text()):
        raise _unusable(repo, f"it gives {name[:80]!r} no usable size and hash")
    return RepoFile(name, size, digest.text())


def _unusable(repo: str, why: str) -> DownloadError:
    return DownloadError(
        f"{urlsplit(endpoint()).hostname} gave an unusable answer for {repo}: {why}",
        hint="if HF_ENDPOINT is set, check that it is a mirror of the hub",
    )
