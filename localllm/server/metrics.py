"""The page /metrics: the engines' counters, each key's usage, and the machine's power."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from localllm.server.http.accounts import caller, usage_metrics
from localllm.server.http.prometheus import labels, metric
from localllm.server.serving import Server

# These are counters, all others gauges.
_COUNTERS = {
    "requests", "cancelled", "parked", "prompt_tokens", "cached_tokens", "prefilled_tokens",
    "generated_tokens", "steps", "drafts", "busy_s", "drafted_tokens", "accepted_draft_tokens",
    "drafted_ngram_tokens", "accepted_ngram_tokens", "drafted_grammar_tokens",
    "accepted_grammar_tokens", "drafted_model_tokens", "accepted_model_tokens",
    "drafted_mtp_tokens", "accepted_mtp_tokens", "drafted_eagle3_tokens",
    "accepted_eagle3_tokens", "drafted_dflash_tokens", "accepted_dflash_tokens",
    "drafted_assistant_tokens", "accepted_assistant_tokens", "kv_sent_tokens", "kv_sent_bytes",
    "kv_fetched_tokens", "kv_fetched_bytes", "kv_saved_s",
}  # fmt: skip
# Levels of the memory guard (localllm/memory/guard.py). Each is one series; exactly one of them
# is 1.
_PRESSURES = ("none", "shrink", "hold")
# Tokens whose KV was computed again (localllm/engine/metrics.py).
_RECOMPUTED = re.compile(r"recomputed_(\w+)_tokens")
# Prompts that were read here after all (localllm/engine/transfer/peer.py).
_FALLBACK = re.compile(r"kv_fallbacks_(\w+)")
_NAME = re.compile(r"[^a-zA-Z0-9_]")
Snapshots = Mapping[str, Mapping[str, Any]]


async def render_metrics(server: Server, power: Mapping[str, float]) -> str:
    """Return the page. Admins get everything, other callers only their own usage. No model is
    loaded for it.

    `power`: the machine's power figures by name. Names that end in _total are counters."""
    if not caller().admin:
        return "\n".join(usage_metrics(server.accounts.visible_to(caller()))) + "\n"
    snapshots = {worker.name: await worker.snapshot() for worker in server.models.workers()}
    loaded = [(labels(model=name), int(bool(snapshot))) for name, snapshot in snapshots.items()]
    lines = metric("localllm_http_requests_total", "counter", [("", server.requests)])
    lines += metric("localllm_http_active", "gauge", [("", server.active)])
    lines += metric("localllm_model_loaded", "gauge", loaded)
    lines += _llamacpp(server, snapshots)
    lines += _counted(snapshots)
    lines += usage_metrics(server.accounts.visible_to(caller()))
    for name, value in power.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += metric(name, kind, [("", f"{value:.3f}")])
    return "\n".join(lines) + "\n"


def _llamacpp(server: Server, snapshots: Snapshots) -> list[str]:
    """Return the metrics of llama.cpp's server under its names, for dashboards made for it."""
    sums = server.totals
    steps = sum(int(snapshot.get("steps", 0)) for snapshot in snapshots.values())
    occupied = [float(snapshot.get("batch_occupancy", 0.0)) for snapshot in snapshots.values()]
    drafts = sum(int(snapshot.get("drafts", 0)) for snapshot in snapshots.values())
    running = sum(int(snapshot.get("running", 0)) for snapshot in snapshots.values())
    waiting = sum(int(snapshot.get("waiting", 0)) for snapshot in snapshots.values())
    lines: list[str] = []
    for name, kind, about, value in (
        ("prompt_tokens_total", "counter", "Prompt tokens computed", sums.prompt_tokens),
        ("prompt_tokens_cached_total", "counter", "Prompt tokens cached", sums.cached_tokens),
        ("prompt_seconds_total", "counter", "Seconds of prefill", sums.prompt_s),
        ("tokens_predicted_total", "counter", "Tokens generated", sums.predicted_tokens),
        ("tokens_predicted_seconds_total", "counter", "Seconds of decode", sums.predicted_s),
        ("n_decode_total", "counter", "Steps of all engines", steps + sums.embeddings),
        ("n_tokens_max", "counter", "Most tokens of a request", sums.longest_reply_tokens),
        ("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted", sums.draft_tokens),
        ("spec_decode_num_drafts_total", "counter", "Drafts verified", drafts),
        (
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Draft tokens accepted",
            sums.accepted_tokens,
        ),
        (
            "prompt_tokens_seconds",
            "gauge",
            "Mean prefill speed in tokens/s",
            _rate(sums.prompt_tokens, sums.prompt_s),
        ),
        (
            "predicted_tokens_seconds",
            "gauge",
            "Mean decode speed in tokens/s",
            _rate(sums.predicted_tokens, sums.predicted_s),
        ),
        ("requests_processing", "gauge", "Requests that run", running),
        ("requests_deferred", "gauge", "Requests that wait", waiting),
        ("n_busy_slots_per_decode", "gauge", "Mean sequences of a step", max(occupied, default=0)),
    ):
        lines.append(f"# HELP llamacpp:{name} {about}.")
        lines += metric(f"llamacpp:{name}", kind, [("", value)])
    return lines


def _rate(tokens: int, duration_s: float) -> float:
    return tokens / duration_s if duration_s > 0 else 0.0


def _counted(snapshots: Snapshots) -> list[str]:
    """Return the metric lines of the engines' counters and gauges, with one series for each model
    that reports them."""
    found: dict[tuple[str, str], list[tuple[str, object]]] = {}
    for model, snapshot in snapshots.items():
        for key, value in snapshot.items():
            for metric_of, series in _series(model, key, value):
                found.setdefault(metric_of, []).append(series)
    lines: list[str] = []
    for (name, kind), named in sorted(found.items()):
        lines += metric(name, kind, named)
    return lines


def _series(
    model: str, key: str, value: Any
) -> Iterator[tuple[tuple[str, str], tuple[str, object]]]:
    """Yield the metric (name and kind) and the series (labels and value) of one snapshot entry."""
    recomputed = _RECOMPUTED.fullmatch(key)
    fallback = _FALLBACK.fullmatch(key)
    if key == "pressure":
        for level in _PRESSURES:
            at = labels(model=model, level=level)
            yield ("localllm_memory_pressure", "gauge"), (at, int(value == level))
    elif recomputed is not None:
        at = labels(model=model, reason=recomputed[1])
        yield ("localllm_recomputed_tokens_total", "counter"), (at, value)
    elif fallback is not None:
        at = labels(model=model, reason=fallback[1])
        yield ("localllm_kv_fallbacks_total", "counter"), (at, value)
    elif isinstance(value, (int, float)):
        name = "localllm_" + _NAME.sub("_", key)
        series = labels(model=model), +value  # a flag is 1 or 0
        if key in _COUNTERS:
            yield (f"{name}_total", "counter"), series
        else:
            yield (name, "gauge"), series
