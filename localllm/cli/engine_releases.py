"""Read llama.cpp's releases through GitHub's API, and download their files.

Downloads continue where an earlier run stopped, and are accepted only with the published digest
(library/transfer.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import paths
from localllm.errors import DownloadError, NotFoundError
from localllm.library import hub
from localllm.library.hub import HubUnreachableError, Patience, RepoFile
from localllm.library.transfer import (
    DownloadMeter,
    DownloadProgress,
    DownloadState,
    Fetch,
    disk_error,
)
from localllm.settings import Settings
from localllm.setup import releases
from localllm.setup.releases import Asset, Release

if TYPE_CHECKING:
    import httpx

# The folders of llama.cpp's source with the headers of its libraries.
_HEADERS = {
    "include": re.compile(r"llama\.h"),
    "ggml/include": re.compile(r"(ggml[a-z-]*|gguf)\.h"),
    "tools/mtmd": re.compile(r"mtmd(-helper)?\.h"),
}
_LARGEST_HEADER_BYTES = 4 << 20
_GIT_DIGEST = re.compile(r"[0-9a-f]{40}")
_NETWORK_HINT = "check the network and the proxy; what is installed still runs"


class ReleaseNotFoundError(
    NotFoundError,
    code="release_not_found",
    default_hint="the releases: https://github.com/ggml-org/llama.cpp/releases",
):
    """llama.cpp has no release with this tag."""


class _AssetFetch(Fetch):
    """The download of one file of a release."""

    def _changed(self) -> DownloadError:
        return DownloadError(
            f"{self._file.name} does not have the digest that its release states",
            hint="nothing was installed; a proxy or mirror may change the file: try another network",
        )


class GitHubReleases:
    """The releases of the repository with this API address (a ReleaseSource)."""

    def __init__(
        self,
        api: str,
        on_progress: Callable[[DownloadProgress], None],
        patience: Patience | None = None,
    ) -> None:
        self._api = api.rstrip("/")
        self._on_progress = on_progress
        # Without a network, `setup` goes on with the next recipe soon.
        self._patience = patience or Patience(listing_failures=2, connect_s=5.0)
        self._releases: dict[str, Release] = {}

    def find(self, tag: str) -> Release:
        """Return the release with this tag. If it names another one with the archives, return
        that."""
        if tag not in self._releases:
            self._releases[tag] = self._find(tag)
        return self._releases[tag]

    def _find(self, tag: str) -> Release:
        path = "/releases/latest"
        if tag != "latest":
            path = f"/releases/tags/{tag}"
        release = releases.read(self._answer(path, tag).json())
        if release.tag_file is None:
            return release
        text = self._answer(release.tag_file.url, tag).text
        with_archives = releases.tag_in(text)
        response = self._answer(f"/releases/tags/{with_archives}", with_archives)
        return releases.read(response.json(), version=release.tag)

    def headers(self, tag: str) -> tuple[Asset, ...]:
        """Return the headers of this tag's source, with git's digests."""
        assets: list[Asset] = []
        for folder, name_pattern in _HEADERS.items():
            rows = self._answer(f"/contents/{folder}?ref={tag}", tag).json()
            try:
                assets += [
                    _header_asset(row) for row in rows if name_pattern.fullmatch(str(row["name"]))
                ]
            except (KeyError, TypeError, ValueError) as e:
                raise DownloadError(
                    f"the list of llama.cpp's headers can't be read: {e}", hint=_NETWORK_HINT
                ) from e
        return tuple(assets)

    def download(self, asset: Asset, folder: str) -> str:
        """Fetch a file into `folder`, and return its path. Raises DownloadError."""
        downloads = paths.private_dir(paths.builds_dir() / ".downloads")
        partial = downloads / f"{asset.digest}.incomplete"
        file = RepoFile(asset.name, asset.size_bytes, asset.digest)
        meter = DownloadMeter(asset.size_bytes, self._on_progress)

        def on_bytes(have_bytes: int, state: DownloadState) -> None:
            meter.report(state, asset.name, have_bytes)

        with self._client() as client:
            _AssetFetch(client, asset.url, file, partial, self._patience, on_bytes).run()
        meter.finished(asset.size_bytes)
        meter.report("done", asset.name, 0)
        target = Path(folder) / asset.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(target)
        except OSError as e:
            raise disk_error(e, target) from e
        return str(target)

    def _client(self) -> httpx.Client:
        if hub.is_offline():
            raise DownloadError(
                "llama.cpp's releases can't be read: offline mode is on (HF_HUB_OFFLINE)",
                hint="unset HF_HUB_OFFLINE",
            )
        from localllm import __version__

        request_headers = {"User-Agent": f"localllm/{__version__}"}
        return hub.new_client(request_headers, self._patience, self._api)

    def _answer(self, path_or_url: str, tag: str) -> httpx.Response:
        """Return the answer for a path of the API or a URL. Retries a broken connection."""
        import httpx

        url = path_or_url
        if path_or_url.startswith("/"):
            url = self._api + path_or_url
        failures = 0
        with self._client() as client:
            while True:
                error: Exception
                try:
                    response = client.get(url)
                    _check_status(response, tag)
                    return response
                except (httpx.HTTPError, HubUnreachableError) as e:
                    error = e
                failures += 1
                if failures >= self._patience.listing_failures:
                    raise DownloadError(
                        f"llama.cpp's releases can't be read: {error}", hint=_NETWORK_HINT
                    ) from error
                self._patience.sleep(self._patience.wait_s(failures, None))


def _check_status(response: httpx.Response, tag: str) -> None:
    status = response.status_code
    if status == 404:
        raise ReleaseNotFoundError(f"llama.cpp has no release {tag}")
    if status in (403, 429):
        raise DownloadError(
            f"{response.url.host} accepts no more requests from this address now ({status})",
            hint="run the same command again in an hour",
        )
    if status in (408, 425) or status >= 500:
        raise HubUnreachableError(f"{response.url.host} answered {status}")
    if response.is_error:
        raise DownloadError(f"{response.url.host} answered {status}", hint=_NETWORK_HINT)


def _header_asset(row: Any) -> Asset:
    digest = str(row["sha"])
    size_bytes = int(row["size"])
    if not _GIT_DIGEST.fullmatch(digest) or not 0 < size_bytes <= _LARGEST_HEADER_BYTES:
        raise ValueError(f"{row['name']} has no usable size and digest")
    return Asset(str(row["name"]), str(row["download_url"]), size_bytes, digest)


def source(on_progress: Callable[[DownloadProgress], None]) -> GitHubReleases:
    """Return the source that the settings name."""
    return GitHubReleases(str(Settings().value("engine_releases")), on_progress)
