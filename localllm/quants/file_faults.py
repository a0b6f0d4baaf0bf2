"""Faults of a GGUF file that its header and its norms show: alone, or compared with a more exact
file of the same model."""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.quants.source import matrices, target_bits
from localllm_catalog import quants
from localllm_catalog.gguf import GgufHeader, SkippedArray, TensorInfo, Value

# Q2_K is stored with 2.6 bits a weight and Q3_K with 3.4; a mixture has at least the bits of its
# base type.
_MIN_BITS_SHARE = 0.85
_TOKENS = "tokenizer.ggml.tokens"
_TEMPLATE = "tokenizer.chat_template"
# Keys that do not change what the model computes, or that are compared in another way.
_NOT_COMPARED = re.compile(
    r"general\.|split\.|quantize\.|imatrix\.|tokenizer\.|.*\.(?:vocab_size|context_length)$"
)
# Without these keys, llama.cpp computes with its own defaults. It reads other missing values from
# the shapes of the tensors.
_NEEDED = re.compile(r".*\.(?:rope\.freq_base|rope\.scaling\..*|attention\.sliding_window)")
_NORM = re.compile(r"blk\.(\d+)\.(attn_norm|ffn_norm|attn_norm_2|post_attention_norm)\.weight")
_F32_BYTES = 4
_LARGEST_NORM_BYTES = 1 << 20
_SAME = 1e-3
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file: its `kind` in one word for programs, and a sentence."""

    kind: str
    text: str


def own_faults(header: GgufHeader, quant: str) -> list[Fault]:
    """Return the faults that the file alone shows. `quant`: the quant that its name states."""
    weights: dict[str, int] = {}
    for tensor in matrices(header):
        weights[tensor.type] = weights.get(tensor.type, 0) + tensor.n_elements
    total = sum(weights.values())
    stated = target_bits(quant)
    if not total or not stated:
        return []
    bits = sum(n * quants.GGUF_TYPES[name].bits for name, n in weights.items()) / total
    if bits >= _MIN_BITS_SHARE * stated:
        return []
    most_common = max(weights, key=weights.__getitem__)
    text = (
        f"its name states {quant}, which has at least {stated:.3g} bits a weight, but it has "
        f"{bits:.3g}: most of its weights are {most_common}"
    )
    return [Fault("quant", text)]


def compared_faults(header: GgufHeader, exact: GgufHeader, other: str) -> list[Fault]:
    """Return what the file states differently from the more exact file `other`."""
    faults = []
    for name in sorted(header.metadata.keys() & exact.metadata.keys()):
        if _NOT_COMPARED.match(name) or _same(header.metadata[name], exact.metadata[name]):
            continue
        ours = _shown(header.metadata[name])
        text = f"{name} is {ours}, but {_shown(exact.metadata[name])} in {other}"
        faults.append(Fault("metadata", text))
    faults += _missing_keys(header, exact, other)
    faults += _vocabulary_faults(header.metadata, exact.metadata, other)
    faults += _layer_faults(header, exact, other)
    return faults


def _missing_keys(header: GgufHeader, exact: GgufHeader, other: str) -> Iterator[Fault]:
    for name in sorted(exact.metadata.keys() - header.metadata.keys()):
        if _NEEDED.fullmatch(name):
            yield Fault("metadata", f"{name} is missing, but {other} has it")


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return a == b


def _shown(value: Value) -> str:
    if isinstance(value, SkippedArray):
        return f"a list of {value.count}"
    text = str(value)
    if len(text) > 60:
        return text[:59] + "…"
    return text


# --- vocabulary and template ----------------------------------------------------------------------


def _vocabulary_faults(
    ours: Mapping[str, Value], theirs: Mapping[str, Value], other: str
) -> Iterator[Fault]:
    sizes = [_count(metadata.get(_TOKENS)) for metadata in (ours, theirs)]
    if sizes[0] != sizes[1]:
        text = f"its vocabulary has {sizes[0]:,} tokens, but {sizes[1]:,} in {other}"
        yield Fault("vocabulary", text)
    if ours.get("tokenizer.ggml.pre") != theirs.get("tokenizer.ggml.pre"):
        text = (
            f"its pre-tokeniser is {ours.get('tokenizer.ggml.pre')}, but "
            f"{theirs.get('tokenizer.ggml.pre')} in {other}"
        )
        yield Fault("vocabulary", text)
    template = ours.get(_TEMPLATE)
    their_template = theirs.get(_TEMPLATE)
    if template == their_template:
        return
    if template is None:
        yield Fault("template", f"it has no chat template, but {other} has one")
    elif their_template is not None:
        text = f"its chat template is not that of {other}: one of the two is older"
        yield Fault("template", text)


def _count(value: Value | None) -> int:
    if isinstance(value, SkippedArray):
        return value.count
    if isinstance(value, tuple):
        return len(value)
    return 0


# --- layers ---------------------------------------------------------------------------------------


def _layer_faults(header: GgufHeader, exact: GgufHeader, other: str) -> Iterator[Fault]:
    """Compare the norms of each layer. They are F32 in every quant, so they are equal."""
    ours = _norms(header)
    theirs = _norms(exact)
    moved: list[str] = []
    changed: list[str] = []
    for layer in sorted(ours.keys() & theirs.keys()):
        if _close(ours[layer], theirs[layer]):
            continue
        place = next((n for n in theirs if _close(ours[layer], theirs[n])), None)
        if place is None:
            changed.append(str(layer))
        else:
            moved.append(f"layer {layer} is layer {place}")
    if moved:
        text = f"its layers are in another order than in {other}: {_listed(moved)}"
        yield Fault("layers", text)
    if changed:
        text = f"the norms of its layers {_listed(changed)} are not those of {other}"
        yield Fault("layers", text)


def _listed(texts: list[str]) -> str:
    if len(texts) > _MAX_LISTED:
        return f"{', '.join(texts[:_MAX_LISTED])} and {len(texts) - _MAX_LISTED} more"
    return ", ".join(texts)


def _norms(header: GgufHeader) -> dict[int, list[float]]:
    """Return the norms of each layer: those of one kind, the first that the layer has.

    Files with several parts are left out: the header does not tell the part of a tensor.
    """
    found: dict[int, list[float]] = {}
    if len(header.files) > 1:
        return found
    for tensor in header.tensors:
        match = _NORM.fullmatch(tensor.name)
        if match is None or tensor.type != "F32" or tensor.n_bytes > _LARGEST_NORM_BYTES:
            continue
        found.setdefault(int(match[1]), []).extend(_numbers(header, tensor))
    return found


def _numbers(header: GgufHeader, tensor: TensorInfo) -> array.array[float]:
    with Path(header.files[0]).open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        numbers = array.array("f", file.read(tensor.n_elements * _F32_BYTES))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _close(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b):
        return False
    scale = max(map(abs, b), default=0.0)
    return all(abs(x - y) <= _SAME * scale for x, y in zip(a, b, strict=True))
