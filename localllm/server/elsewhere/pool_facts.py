"""What the front of a pool says of itself: how each server is, and what was sent there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.server.elsewhere.boxes import Box, Pool
from localllm.server.http.accounts import Account, used_lines


def told(box: Box) -> dict[str, Any]:
    """A server of the pool, as GET /pool says it."""
    return {
        "name": box.name, "up": box.up, "draining": box.draining, "active": box.active, "served": box.served,
        "failed": box.failed,
    }  # fmt: skip


def counters(pool: Pool, retried: int, accounts: Sequence[Account]) -> str:
    """The front's counters in Prometheus' text format, and what `accounts` have used. What the servers count themselves
    is asked for there."""
    lines = ["# TYPE localllm_pool_retried_total counter", f"localllm_pool_retried_total {retried}"]
    for name, kind in (
        ("up", "gauge"),
        ("draining", "gauge"),
        ("active", "gauge"),
        ("served", "counter"),
        ("failed", "counter"),
    ):
        metric = f"localllm_pool_{name}{'_total' if kind == 'counter' else ''}"
        lines.append(f"# TYPE {metric} {kind}")
        lines += [f'{metric}{{box="{box.name}"}} {int(getattr(box, name))}' for box in pool.boxes]
    return "\n".join([*lines, *used_lines(accounts)]) + "\n"
