"""A temperature for a model's probabilities: fitted on answers that are known to be right, and kept for that model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from localllm import json_store, paths
from localllm.errors import LocalLLMError

# Natural logarithms of the least and the greatest temperature that are tried.
_LEAST, _MOST = math.log(0.05), math.log(20.0)


def softmax(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities of log-odds `scores`."""
    best = max(scores)
    weights = [math.exp((s - best) / temperature) for s in scores]
    total = sum(weights)
    return [w / total for w in weights]


def loss(examples: Sequence[tuple[Sequence[float], int]], temperature: float) -> float:
    """Mean negative log-likelihood, in nats, of the right options."""
    shares = [softmax(scores, temperature)[right] for scores, right in examples]
    return -sum(math.log(max(p, 1e-300)) for p in shares) / len(shares)


def fit(examples: Sequence[tuple[Sequence[float], int]]) -> float:
    """The temperature under which `examples` (an answer's scores, and which option is right) are likeliest (temperature
    scaling: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017). Few examples, or ones that are all right,
    leave it near 1: its logarithm is taken to be normal around 0."""

    def cost(log_t: float) -> float:
        return len(examples) * loss(examples, math.exp(log_t)) + log_t * log_t / 2

    low, high = _LEAST, _MOST
    while high - low > 0.01:
        step = (high - low) / 16
        best = min((low + i * step for i in range(17)), key=cost)
        low, high = max(_LEAST, best - step), min(_MOST, best + step)
    return math.exp((low + high) / 2)


def saved(fingerprint: str) -> float:
    """What was fitted for the model with that fingerprint; 1 where nothing was."""
    said = json_store.read(_file(fingerprint)).get("temperature")
    return float(said) if isinstance(said, int | float) and 0 < said < math.inf else 1.0


def save(fingerprint: str, temperature: float, examples: int) -> None:
    """Keep it. Raises LocalLLMError where the disk refuses."""
    try:
        json_store.write(_file(fingerprint), {"temperature": temperature, "examples": examples})
    except OSError as e:
        raise LocalLLMError(f"the temperature can't be kept: {e.strerror}", hint="is the disk full?") from e


def _file(fingerprint: str) -> Path:
    return paths.decisions_dir() / f"{fingerprint.partition('-')[0]}.json"
