"""Rewrite a machine's name as programs print it into the form that people type.

Sources are nvidia-smi, system_profiler, Windows' CIM classes, /proc/cpuinfo, lspci and Vulkan.
"""

from __future__ import annotations

import re
import unicodedata

from localllm.device import cpus, lookup, name_parser, parts_table

# What Mesa adds to a GPU's name: "(RADV NAVI31)", "(radeonsi, navi31, LLVM 19.1, DRM 3.61)".
_MESA = re.compile(r"\((?:radv|radeonsi|amdvlk|llvmpipe)\b[^)]*\)", re.IGNORECASE)
# The graphics of a processor: "w/ Radeon 8060S", "with Radeon Vega Graphics".
_GRAPHICS = re.compile(
    r"\s+(?:w/|with)\s*(radeon(?:\(tm\)|™)?(?:\s+vega)?(?:\s+[0-9]{1,4}[a-z])?(?:\s+graphics)?)\b",
    re.IGNORECASE,
)
_ANY_GRAPHICS = {"radeon", "radeon graphics", "radeon vega", "radeon vega graphics"}
# "Snapdragon(R) X 12-core X1E80100 @ 3.40 GHz", "Snapdragon(R) X2 Elite Extreme - X2E96100 -
# Qualcomm(R) Oryon(TM) CPU".
_SNAPDRAGON = re.compile(
    r"snapdragon(?:\(r\)|®)?(?:[\s-]+(?:x2?|elite|plus|extreme|[0-9]+-core))*"
    r"[\s-]+(x[12][ep]?)-?([0-9]{2})-?(100)\b"
    r"(?:\s*@\s*[0-9.]+\s*ghz|\s*-\s*qualcomm\S*\s+oryon\S*\s+cpu)?",
    re.IGNORECASE,
)
# The product name that `localllm device` prints after the chip: "NVIDIA GB10 (Dell Pro Max)".
_PRODUCT = re.compile(r"^\s*(nvidia gb10)\s*\(.*\)\s*$", re.IGNORECASE)
_CLOCK = re.compile(r"@\s*[0-9.]+\s*ghz", re.IGNORECASE)
# "x86_64" is an architecture, and its 64 no number of a part.
_X86 = re.compile(r"\b(?:x86[_-]64|amd64)\b", re.IGNORECASE)


def typed_form(name: str) -> str:
    """Return `name` without the words that a program adds to a part's own name.

    The graphics of a processor are removed only if the processor has these graphics.
    """
    text = unicodedata.normalize("NFKC", name)
    text = _MESA.sub(" ", text)
    text = _PRODUCT.sub(r"\1", text)
    text = _CLOCK.sub(" ", text)
    text = _X86.sub("x86", text)
    text = _SNAPDRAGON.sub(r"snapdragon \1-\2-\3", text)
    match = _GRAPHICS.search(text)
    if match and _has_graphics(text[: match.start()], match[1]):
        text = text[: match.start()] + text[match.end() :]
    return text


def _has_graphics(processor: str, graphics: str) -> bool:
    """Return True if the named processor is known and has these graphics."""
    row = parts_table.by_cpu(processor)
    if row is None:
        rows, _ = lookup.find(name_parser.read(processor))
        row = next(iter(rows), None)
    plain_name = parts_table.normalised_name(graphics)
    if plain_name in _ANY_GRAPHICS or plain_name == "radeon vega":
        return row is not None or cpus.processor_called(processor) is not None
    if row is None:
        return False
    return any(parts_table.normalised_name(name) == plain_name for name in row.names)
