"""Each fault alone: a temporary one is survived, and a permanent one causes a clear error.

No fault leaves a file with wrong content.
"""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from library.hub import API_FAULTS, CONTENT_FAULTS, Hub, Schedule, running
from localllm.errors import DownloadError
from localllm.library import hf_cache, store, transfer
from localllm.library.hub import Patience, RepoFile, file_url, list_files, new_client
from localllm.library.pull import pull

REPO = "maker/Some-Model-GGUF"
BODY = b"GGUF" + random.Random(7).randbytes(149_996)
FILES = {"Some-Model-Q4_K_M.gguf": BODY}
HURRIED = Patience(
    failures=6,
    connect_s=0.3,
    read_s=0.15,
    slow_window_s=0.05,
    least_bytes_s=5_000,
    sleep=lambda seconds: None,
)
# With these faults, each try still receives more of the file, or only requests with a Range are
# affected. Retries succeed.
_OVERCOME = {
    "truncated",
    "short length",
    "hang",
    "reset",
    "drip",
    "range ignored",
    "wrong range",
    "disk full",
}


@pytest.mark.parametrize("fault", CONTENT_FAULTS)
def test_one_fault_of_each_kind_is_survived(fault: str, hub: Hub) -> None:
    hub.add(REPO, FILES)
    hub.schedule = Schedule(seed=1, once=[("content", fault)])
    assert pull(REPO, reserve_bytes=0, patience=HURRIED).path.read_bytes() == BODY
    assert hub.schedule.met == [("content", fault)]


@pytest.mark.parametrize("fault", API_FAULTS)
def test_one_fault_while_listing_is_survived(fault: str, hub: Hub) -> None:
    hub.add(REPO, FILES)
    hub.schedule = Schedule(seed=1, once=[("api", fault)])
    assert pull(REPO, reserve_bytes=0, patience=HURRIED).path.read_bytes() == BODY
    assert hub.schedule.met == [("api", fault)]


@pytest.mark.parametrize("fault", CONTENT_FAULTS)
def test_a_permanent_fault_is_a_clear_error_or_is_overcome(
    fault: str, hub: Hub, cache: Path
) -> None:
    hub.add(REPO, FILES)
    hub.schedule = Schedule(seed=2, always=("content", fault))
    if fault not in _OVERCOME:
        with pytest.raises(DownloadError) as caught:
            pull(REPO, reserve_bytes=0, patience=HURRIED)
        assert caught.value.hint
        assert not hf_cache.scan(cache), "what did not arrive whole is not offered"
        return
    try:
        assert pull(REPO, reserve_bytes=0, patience=HURRIED).path.read_bytes() == BODY
    except DownloadError:
        assert not hf_cache.scan(cache)
        assert hf_cache.partials(cache), "what came is kept for the next time"


def test_every_blob_of_a_cut_download_is_still_a_prefix(hub: Hub, cache: Path) -> None:
    hub.add(REPO, FILES)
    hub.schedule = Schedule(seed=5, once=[("content", "truncated")] * 3, always=("content", "500"))
    with pytest.raises(DownloadError, match="stopped at"):
        pull(REPO, reserve_bytes=0, patience=HURRIED)
    (partial,) = hf_cache.partials(cache)
    kept = partial.read_bytes()
    assert kept
    assert BODY.startswith(kept)


def test_a_file_longer_than_one_response_is_downloaded_in_ranges(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, FILES)
    listing = list_files(REPO)
    file = listing.get("Some-Model-Q4_K_M.gguf")
    assert isinstance(file, RepoFile)
    partial = tmp_path / "partial"
    hub.schedule = Schedule(seed=3, once=[("content", "truncated"), ("content", "range ignored")])
    with new_client({}, HURRIED, hub.url) as client:
        url = file_url(listing, file.name)
        transfer.Fetch(
            client, url, file, partial, HURRIED, lambda *_: None, span_bytes=40_000
        ).run()
    assert partial.read_bytes() == BODY
    assert hub.contents()[0].range == "bytes=0-39999"


def test_an_unreachable_hub_is_reported_within_ten_seconds(
    online: None, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    with running(Hub()) as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)
    with pytest.raises(DownloadError, match="can't be reached") as caught:
        pull(REPO, patience=Patience(sleep=waits.append))
    assert 0 < sum(waits) < 10
    assert "installed models work offline" in caught.value.hint


def test_an_encrypted_hub_never_leads_to_an_unencrypted_address() -> None:
    def redirect(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://elsewhere.example/file"})

    with new_client({}, HURRIED, "https://hub.example") as client:
        hooks = client.event_hooks
    through = httpx.Client(
        transport=httpx.MockTransport(redirect), event_hooks=hooks, follow_redirects=True
    )
    with through, pytest.raises(DownloadError, match="unencrypted"):
        through.get("https://hub.example/x")


def test_a_proxy_of_the_environment_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, FILES)
    listing = list_files(REPO)
    file = listing.get("Some-Model-Q4_K_M.gguf")
    assert file is not None
    with running(Hub()) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with (
            new_client({}, HURRIED, "http://mirror.example") as client,
            pytest.raises(httpx.HTTPStatusError),
        ):
            client.get("http://mirror.example/x/y").raise_for_status()
        assert [s.path for s in proxy.seen] == ["/x/y"]


def test_two_pulls_at_once_fetch_it_once(hub: Hub, cache: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    hub.add(REPO, FILES)
    with ThreadPoolExecutor(2) as pool:
        found = [f.result() for f in [pool.submit(pull, REPO, reserve_bytes=0) for _ in range(2)]]
    assert found[0].path == found[1].path
    assert sum(s.sent_bytes for s in hub.contents()) == len(BODY)
    assert [c.result for c in map(store.verify, hf_cache.scan(cache))] == ["bad"], (
        "random bytes are no GGUF"
    )
