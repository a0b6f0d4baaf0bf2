"""Format amounts and rates. 1 GB = 1e9 bytes."""

from __future__ import annotations


def gb(n_bytes: float, digits: int | None = None) -> str:
    """Format gigabytes with `digits` decimals.

    Without `digits` it has one decimal from 1 GB on and two below: 43.1 GB, 0.27 GB.
    """
    if digits is None:
        digits = 1 if n_bytes >= 1e9 else 2
    return f"{n_bytes / 1e9:.{digits}f} GB"


def mb(n_bytes: float, digits: int = 1) -> str:
    """Format megabytes, for sizes too small for gigabytes: 67.1 MB."""
    return f"{n_bytes / 1e6:,.{digits}f} MB"


def byte_size(n_bytes: float) -> str:
    """Format a size for lists: 4.7 GB, 98 MB, 12 kB."""
    if n_bytes >= 1e9:
        return gb(n_bytes, 1)
    if n_bytes >= 1e6:
        return mb(n_bytes, 0)
    return f"{n_bytes / 1e3:.0f} kB"


def span(seconds: float) -> str:
    """Format a duration: 0.4 s, 12 s, 3.1 min, 2.5 h."""
    if seconds < 120:
        if seconds < 9.95:
            return f"{seconds:.1f} s"
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def rate(tok_s: float) -> str:
    """Format tokens per second: without decimals from 20 on, with one below."""
    if tok_s >= 20:
        return f"{tok_s:.0f}"
    return f"{tok_s:.1f}"
