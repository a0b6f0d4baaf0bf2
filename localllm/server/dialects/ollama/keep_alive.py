"""`keep_alive`: how long a model stays loaded, in the ways that Ollama reads it."""

from __future__ import annotations

import math
import re

from localllm.errors import RequestError

# As Go writes durations: 1h30m, 300ms, -1m; and a bare number of seconds.
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|[+-]?\d+(?:\.\d*)?", re.ASCII)
_PIECE = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h|$)")
_FOR_EVER_S = 1e9
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def keep_alive_s(sent: str | float | None) -> float | None:
    """`keep_alive` in seconds; infinity for a negative one, None where nothing was said. Raises RequestError."""
    if sent is None:
        return None
    if isinstance(sent, str):
        if _DURATION.fullmatch(sent) is None:
            raise RequestError("keep_alive must be seconds or a duration such as 5m", param="keep_alive")
        length = sum(float(n) * _UNIT_S[unit] for n, unit in _PIECE.findall(sent))
        sent = -length if sent.startswith("-") else length
    return math.inf if sent < 0 or sent > _FOR_EVER_S else float(sent)
