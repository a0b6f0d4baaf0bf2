"""The page /metrics: the engines' counters, each key's usage, and the machine's power."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from localllm.server.http.accounts import caller, used_lines
from localllm.server.http.prometheus import labels, metric
from localllm.server.serving import Server

# These are counters, all others gauges.
_COUNTERS = {
    "requests", "cancelled", "parked", "prompt_tokens", "cached_tokens", "prefilled_tokens",
    "generated_tokens", "steps", "busy_s", "drafted_tokens", "accepted_draft_tokens",
    "drafted_ngram_tokens", "accepted_ngram_tokens", "drafted_grammar_tokens",
    "accepted_grammar_tokens", "drafted_model_tokens", "accepted_model_tokens",
    "drafted_mtp_tokens", "accepted_mtp_tokens", "drafted_eagle3_tokens",
    "accepted_eagle3_tokens", "drafted_dflash_tokens", "accepted_dflash_tokens",
    "drafted_assistant_tokens", "accepted_assistant_tokens",
}  # fmt: skip
# Levels of the memory guard (localllm/memory/guard.py). Each is one series; exactly one of them
# is 1.
_PRESSURES = ("none", "shrink", "hold")
# Tokens whose KV was computed again (localllm/engine/metrics.py).
_RECOMPUTED = re.compile(r"recomputed_(\w+)_tokens")
_NAME = re.compile(r"[^a-zA-Z0-9_]")
Snapshots = Mapping[str, Mapping[str, Any]]


async def render_metrics(server: Server, power: Mapping[str, float]) -> str:
    """Return the page. Admins get everything, other callers only their own usage. No model is
    loaded for it.

    `power`: the machine's power figures by name. Names that end in _total are counters."""
    if not caller().admin:
        return "\n".join(used_lines(server.accounts.visible_to(caller()))) + "\n"
    snapshots = {worker.name: await worker.snapshot() for worker in server.models.workers()}
    loaded = [(labels(model=name), int(bool(snapshot))) for name, snapshot in snapshots.items()]
    lines = metric("localllm_http_requests_total", "counter", [("", server.requests)])
    lines += metric("localllm_http_active", "gauge", [("", server.active)])
    lines += metric("localllm_model_loaded", "gauge", loaded)
    lines += _counted(snapshots)
    lines += used_lines(server.accounts.visible_to(caller()))
    for name, value in power.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += metric(name, kind, [("", f"{value:.3f}")])
    return "\n".join(lines) + "\n"


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
    if key == "pressure":
        for level in _PRESSURES:
            at = labels(model=model, level=level)
            yield ("localllm_memory_pressure", "gauge"), (at, int(value == level))
    elif recomputed is not None:
        at = labels(model=model, reason=recomputed[1])
        yield ("localllm_recomputed_tokens_total", "counter"), (at, value)
    elif isinstance(value, (int, float)):
        name = "localllm_" + _NAME.sub("_", key)
        series = labels(model=model), +value  # a flag is 1 or 0
        if key in _COUNTERS:
            yield (f"{name}_total", "counter"), series
        else:
            yield (name, "gauge"), series
