"""The remaining time of a download, with a clock that the test controls."""

from __future__ import annotations

from localllm.library.transfer import DownloadMeter, DownloadProgress


def test_no_remaining_time_is_estimated_from_the_first_blocks() -> None:
    now_s = [0.0]
    heard: list[DownloadProgress] = []
    meter = DownloadMeter(1_000_000, heard.append, clock=lambda: now_s[0])
    for time_s, have in ((0.0, 0), (0.3, 100), (2.0, 200), (3.0, 500_000)):
        now_s[0] = time_s
        meter.report("downloading", "tiny.gguf", have)
    assert [progress.eta_s is None for progress in heard] == [True, True, False, False]
    assert heard[-1].eta_s == 3.0
