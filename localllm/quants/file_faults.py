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
_TOKENS_KEY = "tokenizer.ggml.tokens"
_TEMPLATE_KEY = "tokenizer.chat_template"
# Keys that do not change what the model computes, or that are compared in another way.
_SKIPPED_KEYS = re.compile(
    r"general\.|split\.|quantize\.|imatrix\.|tokenizer\.|.*\.(?:vocab_size|context_length)$"
)
# Without these keys, llama.cpp computes with its own defaults. It reads other missing values from
# the shapes of the tensors.
_REQUIRED_KEYS = re.compile(r".*\.(?:rope\.freq_base|rope\.scaling\..*|attention\.sliding_window)")
_NORM = re.compile(r"blk\.(\d+)\.(attn_norm|ffn_norm|attn_norm_2|post_attention_norm)\.weight")
_F32_BYTES = 4
_LARGEST_NORM_BYTES = 1 << 20
_NORM_TOLERANCE = 1e-3
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file: its `kind` in one word for programs, and a sentence."""

    kind: str
    text: str


def own_faults(header: GgufHeader, quant: str) -> list[Fault]:
    """Return the faults that the file alone shows. `quant`: the quant that its name states."""
    n_weights: dict[str, int] = {}
    for tensor in matrices(header):
        n_weights[tensor.type] = n_weights.get(tensor.type, 0) + tensor.n_elements
    n_total = sum(n_weights.values())
    stated_bits = target_bits(quant)
    if not n_total or not stated_bits:
        return []
    bits = (
        sum(n_of_type * quants.GGUF_TYPES[name].bits for name, n_of_type in n_weights.items())
        / n_total
    )
    if bits >= _MIN_BITS_SHARE * stated_bits:
        return []
    most_common_type = max(n_weights, key=n_weights.__getitem__)
    text = (
        f"its name states {quant}, which has at least {stated_bits:.3g} bits a weight, but it has "
        f"{bits:.3g}: most of its weights are {most_common_type}"
    )
    return [Fault("quant", text)]


def compared_faults(header: GgufHeader, exact: GgufHeader, exact_name: str) -> list[Fault]:
    """Return what the file states differently from the more exact file `exact_name`."""
    faults = []
    for name in sorted(header.metadata.keys() & exact.metadata.keys()):
        if _SKIPPED_KEYS.match(name) or _is_equal(header.metadata[name], exact.metadata[name]):
            continue
        own_value = _value_text(header.metadata[name])
        text = f"{name} is {own_value}, but {_value_text(exact.metadata[name])} in {exact_name}"
        faults.append(Fault("metadata", text))
    faults += _missing_keys(header, exact, exact_name)
    faults += _vocabulary_faults(header.metadata, exact.metadata, exact_name)
    faults += _layer_faults(header, exact, exact_name)
    return faults


def _missing_keys(header: GgufHeader, exact: GgufHeader, exact_name: str) -> Iterator[Fault]:
    for name in sorted(exact.metadata.keys() - header.metadata.keys()):
        if _REQUIRED_KEYS.fullmatch(name):
            yield Fault("metadata", f"{name} is missing, but {exact_name} has it")


def _is_equal(a: Value, b: Value) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return a == b


def _value_text(value: Value) -> str:
    if isinstance(value, SkippedArray):
        return f"a list of {value.count}"
    text = str(value)
    if len(text) > 60:
        return text[:59] + "…"
    return text


# --- vocabulary and template ----------------------------------------------------------------------


def _vocabulary_faults(
    own_keys: Mapping[str, Value], exact_keys: Mapping[str, Value], exact_name: str
) -> Iterator[Fault]:
    sizes = [_n_entries(keys.get(_TOKENS_KEY)) for keys in (own_keys, exact_keys)]
    if sizes[0] != sizes[1]:
        text = f"its vocabulary has {sizes[0]:,} tokens, but {sizes[1]:,} in {exact_name}"
        yield Fault("vocabulary", text)
    if own_keys.get("tokenizer.ggml.pre") != exact_keys.get("tokenizer.ggml.pre"):
        text = (
            f"its pre-tokeniser is {own_keys.get('tokenizer.ggml.pre')}, but "
            f"{exact_keys.get('tokenizer.ggml.pre')} in {exact_name}"
        )
        yield Fault("vocabulary", text)
    template = own_keys.get(_TEMPLATE_KEY)
    exact_template = exact_keys.get(_TEMPLATE_KEY)
    if template == exact_template:
        return
    if template is None:
        yield Fault("template", f"it has no chat template, but {exact_name} has one")
    elif exact_template is not None:
        text = f"its chat template is not that of {exact_name}: one of the two is older"
        yield Fault("template", text)


def _n_entries(value: Value | None) -> int:
    if isinstance(value, SkippedArray):
        return value.count
    if isinstance(value, tuple):
        return len(value)
    return 0


# --- layers ---------------------------------------------------------------------------------------


def _layer_faults(header: GgufHeader, exact: GgufHeader, exact_name: str) -> Iterator[Fault]:
    """Compare the norms of each layer. They are F32 in every quant, so they are equal."""
    own_norms = _norms_by_layer(header)
    exact_norms = _norms_by_layer(exact)
    moved: list[str] = []
    changed: list[str] = []
    for layer in sorted(own_norms.keys() & exact_norms.keys()):
        if _are_close(own_norms[layer], exact_norms[layer]):
            continue
        same_layer = next(
            (number for number in exact_norms if _are_close(own_norms[layer], exact_norms[number])),
            None,
        )
        if same_layer is None:
            changed.append(str(layer))
        else:
            moved.append(f"layer {layer} is layer {same_layer}")
    if moved:
        text = f"its layers are in another order than in {exact_name}: {_joined_up_to_limit(moved)}"
        yield Fault("layers", text)
    if changed:
        text = (
            f"the norms of its layers {_joined_up_to_limit(changed)} are not those of {exact_name}"
        )
        yield Fault("layers", text)


def _joined_up_to_limit(texts: list[str]) -> str:
    if len(texts) > _MAX_LISTED:
        return f"{', '.join(texts[:_MAX_LISTED])} and {len(texts) - _MAX_LISTED} more"
    return ", ".join(texts)


def _norms_by_layer(header: GgufHeader) -> dict[int, list[float]]:
    """Return the norms of each layer: those of one kind, the first that the layer has.

    Files with several parts are left out: the header does not tell the part of a tensor.
    """
    norms: dict[int, list[float]] = {}
    if len(header.files) > 1:
        return norms
    for tensor in header.tensors:
        match = _NORM.fullmatch(tensor.name)
        if match is None or tensor.type != "F32" or tensor.n_bytes > _LARGEST_NORM_BYTES:
            continue
        norms.setdefault(int(match[1]), []).extend(_norm_values(header, tensor))
    return norms


def _norm_values(header: GgufHeader, tensor: TensorInfo) -> array.array[float]:
    with Path(header.files[0]).open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        values = array.array("f", file.read(tensor.n_elements * _F32_BYTES))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _are_close(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b):
        return False
    scale = max(map(abs, b), default=0.0)
    return all(abs(x - y) <= _NORM_TOLERANCE * scale for x, y in zip(a, b, strict=True))
