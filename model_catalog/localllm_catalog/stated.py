"""Facts that a model's own files state in addition to its shapes: sampling, and properties of the
chat template.

Sampling comes from `general.sampling.*` of a GGUF header (https://github.com/ggml-org/llama.cpp
src/llama-arch.cpp) or from generation_config.json of a folder. It is untrusted: a number outside
its range counts as not stated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from localllm_catalog import readable_calls
from localllm_catalog.types import SamplingDefaults

# Our name: (name in a GGUF header, name in generation_config, least, most).
_SAMPLING_KEYS: Mapping[str, tuple[str, str, float, float]] = {
    "temperature": ("temp", "temperature", 0.0, 100.0),
    "top_p": ("top_p", "top_p", 0.0, 1.0),
    "top_k": ("top_k", "top_k", 0, 2**31 - 1),
    "min_p": ("min_p", "min_p", 0.0, 1.0),
    "repeat_penalty": ("penalty_repeat", "repetition_penalty", 0.01, 10.0),
}


def sampling_of_header(metadata: Mapping[str, Any]) -> SamplingDefaults:
    values = {
        name: metadata.get(f"general.sampling.{gguf}")
        for name, (gguf, *_) in _SAMPLING_KEYS.items()
    }
    return _bounded(values, "the file's own header")


def sampling_of_config(config: Mapping[str, Any]) -> SamplingDefaults:
    values = {name: config.get(config_key) for name, (_, config_key, *_) in _SAMPLING_KEYS.items()}
    return _bounded(values, "generation_config.json")


def sampling_over(first: SamplingDefaults, second: SamplingDefaults) -> SamplingDefaults:
    """Return `first`, with values of `second` for those that it does not state."""
    missing = [f.name for f in fields(first) if getattr(first, f.name) in (None, "")]
    return replace(first, **{name: getattr(second, name) for name in missing})


def _bounded(values: Mapping[str, Any], source: str) -> SamplingDefaults:
    valid_values: dict[str, Any] = {}
    for name, value in values.items():
        _, _, minimum, maximum = _SAMPLING_KEYS[name]
        if not _is_number(value) or not minimum <= value <= maximum:
            continue
        if name != "top_k":
            # A header holds 32-bit floats: 0.6 is read as 0.6000000238 and means 0.6.
            valid_values[name] = round(float(value), 6)
        elif value == int(value):
            valid_values[name] = int(value)
    if valid_values:
        return SamplingDefaults(**valid_values, source=source)
    return SamplingDefaults()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


# A tag named for thinking, in any family's spelling, or gpt-oss's channel for it.
_REASONING = re.compile(r"[<\[|>:_/](?:think|thought)|<\|channel\|>analysis", re.IGNORECASE)


def calls_tools(template: str) -> bool:
    """Return whether a chat template offers tools, or writes tool calls, in a format that the
    server can parse."""
    offers = "tools" in template or "tool_call" in template
    return offers and readable_calls.in_template(template)


def reasoning_kind(template: str) -> str:
    """Return the catalog's word for reasoning in a chat template: "hybrid" or "none"."""
    if _REASONING.search(template):
        return "hybrid"
    return "none"
