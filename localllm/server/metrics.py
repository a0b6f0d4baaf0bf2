"""GET /metrics: the engines' counters in Prometheus' text format, without prompts, users or paths."""

from __future__ import annotations

import re
from typing import Any

from localllm.server.http.accounts import caller, label, used_lines
from localllm.server.models.router import ModelRouter
from localllm.server.serving import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# These are counters, all others gauges.
_COUNTERS = {
    "requests", "cancelled", "parked", "prompt_tokens", "cached_tokens", "prefilled_tokens", "generated_tokens",
    "steps", "busy_s", "drafted_tokens", "accepted_draft_tokens", "drafted_ngram_tokens", "accepted_ngram_tokens",
    "drafted_grammar_tokens", "accepted_grammar_tokens", "drafted_model_tokens", "accepted_model_tokens",
    "drafted_mtp_tokens", "accepted_mtp_tokens",
}  # fmt: skip
# The memory guard's levels (localllm/engine/host/memory.py), one series each: exactly one is 1.
_PRESSURES = ("none", "shrink", "hold")
# Tokens whose KV was computed again (localllm/engine/host/metrics.py).
_RECOMPUTED = re.compile(r"recomputed_(\w+)_tokens")
_NAME = re.compile(r"[^a-zA-Z0-9_]")


async def render(server: Server) -> str:
    """The page. Does not load a model that is not loaded."""
    lines = [
        "# TYPE localllm_http_requests_total counter",
        f"localllm_http_requests_total {server.requests}",
        "# TYPE localllm_http_active gauge",
        f"localllm_http_active {server.active}",
        "# TYPE localllm_model_loaded gauge",
    ]
    snapshots = await _snapshots(server.models)
    lines += [f'localllm_model_loaded{{model="{label(name)}"}} {int(bool(s))}' for name, s in snapshots.items()]
    plain = {k for s in snapshots.values() for k, v in s.items() if isinstance(v, (int, float))}
    for key in sorted(k for k in plain if not _RECOMPUTED.fullmatch(k)):
        counter = key in _COUNTERS
        metric = "localllm_" + _NAME.sub("_", key) + ("_total" if counter else "")
        lines.append(f"# TYPE {metric} {'counter' if counter else 'gauge'}")
        for name, s in snapshots.items():
            if isinstance(s.get(key), (int, float)):
                lines.append(f'{metric}{{model="{label(name)}"}} {_number(s[key])}')
    lines += _recomputed(snapshots) + _pressure(snapshots) + used_lines(server.accounts.seen_by(caller()))
    return "\n".join(lines) + "\n"


def _recomputed(snapshots: dict[str, dict[str, Any]]) -> list[str]:
    """Tokens whose KV was computed again, by reason: shows a cache that is too small."""
    series = [
        f'localllm_recomputed_tokens_total{{model="{label(name)}",reason="{found[1]}"}} {value}'
        for name, s in snapshots.items()
        for key, value in s.items()
        if (found := _RECOMPUTED.fullmatch(key))
    ]
    return ["# TYPE localllm_recomputed_tokens_total counter", *series] if series else []


def _pressure(snapshots: dict[str, dict[str, Any]]) -> list[str]:
    known = {name: s["pressure"] for name, s in snapshots.items() if "pressure" in s}
    if not known:
        return []
    return ["# TYPE localllm_memory_pressure gauge"] + [
        f'localllm_memory_pressure{{model="{label(name)}",level="{level}"}} {int(now == level)}'
        for name, now in known.items()
        for level in _PRESSURES
    ]


async def _snapshots(models: ModelRouter) -> dict[str, dict[str, Any]]:
    return {worker.name: await worker.snapshot() for worker in models.workers()}


def _number(value: float) -> str:
    """Whole numbers in full: a counter rounded to six digits would stand still."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
