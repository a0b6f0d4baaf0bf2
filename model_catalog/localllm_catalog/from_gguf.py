"""Build a Model from any GGUF header: layer kinds as llama.cpp derives them, bytes per tensor as
the file states them.

The rules per architecture (architectures.py) are llama.cpp's. All numbers come from gguf_facts.py,
so they are bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import PurePosixPath

from localllm_catalog import architectures, gguf_blocks, stated
from localllm_catalog.gguf import GgufHeader, SkippedArray, TensorInfo
from localllm_catalog.gguf_blocks import BLOCK_TENSOR, BlockTensors, GgufLayer
from localllm_catalog.gguf_facts import Facts
from localllm_catalog.layers import mixer
from localllm_catalog.names import Format, quant_of, shown
from localllm_catalog.types import Experts, FfnKind, Layer, Model, Purpose, Variant


def model_from_gguf(header: GgufHeader, *, repo: str = "", known: Model | None = None) -> Model:
    """Return the Model in a GGUF file, with one exact Variant.

    `weights_bytes` are all tensors except MTP blocks. `active_bytes` are those that one token
    reads: routed experts by the share used, and no token embedding unless it is also the output
    matrix. `known` is the catalog's entry, if the caller found one. It provides facts that a header
    lacks (id, drafts, quality), and its sampling takes precedence. Raises BadHeaderError if the
    header contradicts itself or is not of a language model.
    """
    facts = Facts(header)
    blocks = gguf_blocks.blocks(header, facts.n_layers)
    layers = tuple(_layer(GgufLayer(facts, block, index)) for index, block in enumerate(blocks))
    variant = _variant(header, facts, blocks, repo)
    model = _model(header, facts, layers, variant, blocks)
    if known is None:
        return model
    return replace(
        known,
        layers=layers,
        vocab_size=model.vocab_size,
        native_context=model.native_context,
        tied_embeddings=model.tied_embeddings,
        variants=(variant,),
        shape_warning=model.shape_warning,
        sampling=stated.sampling_over(known.sampling, model.sampling),
    )


# --- tensors --------------------------------------------------------------------------------------

# Tensors that llama.cpp keeps in system memory regardless of offloading (src/llama-arch.cpp:
# LLM_TENSOR_LAYER_INPUT).
_INPUT_TENSORS = frozenset(
    f"{name}.weight"
    for name in ("token_embd", "per_layer_token_embd", "position_embd", "token_types")
)


def _layer(layer: GgufLayer) -> Layer:
    return Layer(mixer.from_gguf(layer), _ffn_kind(layer.block), layer.facts.ffn[layer.index])


def _ffn_kind(block: BlockTensors) -> FfnKind:
    dense = block.has("ffn_up") or block.has("ffn_gate")
    if block.has_experts():
        if dense:
            return "both"
        return "experts"
    if dense or not block.tensors:
        return "dense"
    return "none"


# --- the model ------------------------------------------------------------------------------------


def _experts(facts: Facts, blocks: list[BlockTensors]) -> Experts | None:
    count = facts.number("expert_count", 0)
    if not count:
        return None
    n_used = facts.number("expert_used_count", 1, maximum=count)
    width = facts.number("expert_feed_forward_length", 0) or max(facts.ffn, default=0)
    n_shared = facts.number("expert_shared_count", 0)
    shared_width = facts.number("expert_shared_feed_forward_length", 0)
    if shared_width and not n_shared:
        n_shared = 1
    n_dense = next((index for index, block in enumerate(blocks) if block.has_experts()), 0)
    return Experts(
        count, n_used, width, n_shared, shared_width, n_dense, facts.number("moe_latent_size", 0)
    )


def _weight_group(name: str, n_layers: int) -> str:
    """Return where a tensor's weights count: in a "layer", in the "mtp" blocks after the layers, as
    an "input" table, or for the "output"."""
    match = BLOCK_TENSOR.fullmatch(name)
    if match is not None:
        if int(match[1]) < n_layers:
            return "layer"
        return "mtp"
    if name in _INPUT_TENSORS:
        return "input"
    return "output"


def _tensors_of_step(header: GgufHeader, facts: Facts) -> list[TensorInfo]:
    """Return the tensors that each token's step reads (a part of the experts).

    MTP blocks and row lookup tables are left out, except a table that is also the output matrix.
    """
    lookup_tables = {"per_layer_token_embd.weight"}
    if not facts.tied:
        lookup_tables.add("token_embd.weight")
    return [
        tensor
        for tensor in header.tensors
        if tensor.name not in lookup_tables and _weight_group(tensor.name, facts.n_layers) != "mtp"
    ]


def _variant(header: GgufHeader, facts: Facts, blocks: list[BlockTensors], repo: str) -> Variant:
    count = facts.number("expert_count", 0)
    active_share = 1.0
    if count:
        n_used_by_layer = facts.per_layer("expert_used_count", 0)[: facts.n_layers]
        active_share = min(1.0, sum(n_used_by_layer) / facts.n_layers / count)
    n_bytes: Counter[str] = Counter()
    for tensor in header.tensors:
        n_bytes[_weight_group(tensor.name, facts.n_layers)] += tensor.n_bytes
        if facts.tied and tensor.name == "token_embd.weight":
            n_bytes["tied"] += tensor.n_bytes
    active_bytes = 0
    for tensor in _tensors_of_step(header, facts):
        if tensor.is_expert:
            active_bytes += round(tensor.n_bytes * active_share)
        else:
            active_bytes += tensor.n_bytes
    file_names = tuple(PurePosixPath(name.replace("\\", "/")).name for name in header.files)
    layer_bytes = tuple(block.n_bytes() for block in blocks)
    return Variant(
        Format.GGUF,
        quant_of(file_names[0]) or _stated_quant(header),
        repo,
        file_names if repo else header.files,
        header.file_bytes,
        exact=True,
        weights_bytes=n_bytes["layer"] + n_bytes["input"] + n_bytes["output"],
        active_bytes=active_bytes,
        source="the file's own header",
        mtp_bytes=n_bytes["mtp"],
        layer_bytes=layer_bytes,
        input_bytes=n_bytes["input"],
        output_bytes=n_bytes["output"] + n_bytes["tied"],
    )


def _stated_quant(header: GgufHeader) -> str:
    """Return the quant in the header, else the type of most of the bytes."""
    stated_type = header.integer("general.file_type", -1)
    if stated_type in architectures.FILE_TYPES:
        return architectures.FILE_TYPES[stated_type]
    n_bytes: Counter[str] = Counter()
    for tensor in header.tensors:
        n_bytes[tensor.type] += tensor.n_bytes
    if not n_bytes:
        return "unknown"
    ((main_type, _),) = n_bytes.most_common(1)
    return main_type


def _vocab_size(header: GgufHeader, facts: Facts) -> int:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[1]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, SkippedArray):
        return tokens.count
    if isinstance(tokens, tuple):
        return len(tokens)
    return facts.number("vocab_size", 0)


def _model(
    header: GgufHeader,
    facts: Facts,
    layers: tuple[Layer, ...],
    variant: Variant,
    blocks: list[BlockTensors],
) -> Model:
    experts = _experts(facts, blocks)
    n_params = sum(tensor.n_elements for tensor in header.tensors)
    model = Model(
        id="",
        name="",
        family="",
        params_total=n_params,
        params_active=_active_params(header, facts, experts),
        layers=layers,
        hidden_size=facts.hidden,
        intermediate_size=max(facts.ffn, default=0),
        n_heads=max(facts.heads, default=0),
        head_dim=facts.head_dim_k,
        vocab_size=_vocab_size(header, facts),
        native_context=facts.number("context_length", 0, maximum=architectures.MAX_TOKENS),
        variants=(variant,),
    )
    is_gated = any(".ffn_gate" in tensor.name for tensor in header.tensors)
    model = replace(
        model,
        tied_embeddings=facts.tied,
        experts=experts,
        architecture=architecture_word(layers, experts),
        gguf_architecture=facts.arch,
        mtp_layers=facts.n_mtp,
        lookup_params=_lookup_params(header),
        lookup_rows=facts.lookup_rows(),
        residual_streams=facts.number("hyper_connection.count", 1, minimum=1, maximum=64),
        ffn_matrices=3 if is_gated else 2,
        attention_gate=_has_gated_queries(facts, blocks),
        q_rank=facts.number("attention.q_lora_rank", 0),
    )
    if not mixer.knows(facts.arch):
        warning = (
            f"the architecture {facts.arch!r} is unknown: it is planned with attention in every "
            "layer, so its KV size may be wrong"
        )
        model = replace(model, shape_warning=warning)
    return _with_names(model, header, facts)


def _with_names(model: Model, header: GgufHeader, facts: Facts) -> Model:
    """Return `model` with its names, and with the facts in its chat template and tokenizer."""
    base_name = header.text("general.basename")
    name = shown(header.text("general.name") or base_name or PurePosixPath(header.files[0]).stem)
    template = header.text("tokenizer.chat_template")
    pre_tokenizer = shown(header.text("tokenizer.ggml.pre"))
    model_id = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
    purpose: Purpose = "chat" if facts.kind == "model" else "embedding"
    return replace(
        model,
        id=model_id or "model",
        name=name,
        family=shown(base_name.lower() or facts.arch),
        licence=shown(header.text("general.license")),
        purposes=(purpose,),
        tokenizer_family=architectures.TOKENIZERS.get(pre_tokenizer, pre_tokenizer),
        tokenizer_pre=pre_tokenizer,
        calls_tools=stated.calls_tools(template),
        reasoning_kind=stated.reasoning_kind(template),
        sampling=stated.sampling_of_header(header.metadata),
    )


def _active_params(header: GgufHeader, facts: Facts, experts: Experts | None) -> int:
    """Return the parameters that one token's step reads."""
    total = 0
    for tensor in _tensors_of_step(header, facts):
        if tensor.is_expert and experts is not None:
            total += tensor.n_elements * experts.n_active // experts.n_experts
        else:
            total += tensor.n_elements
    return total


def _lookup_params(header: GgufHeader) -> int:
    """Return the parameters of row lookup tables, without the token embedding."""
    return sum(
        tensor.n_elements
        for tensor in header.tensors
        if tensor.name == "per_layer_token_embd.weight"
    )


def _has_gated_queries(facts: Facts, blocks: list[BlockTensors]) -> bool:
    """Return whether the first query matrix also produces a gate: it is then twice as wide as the
    heads."""
    heads_width = max(facts.heads, default=0) * facts.head_dim_k
    for block in blocks:
        query = block.tensors.get("attn_q.weight")
        if query is not None:
            return len(query.shape) == 2 and query.shape[1] == 2 * heads_width
    return False


def architecture_word(layers: tuple[Layer, ...], experts: Experts | None) -> str:
    """Return the catalog's word for an architecture: dense, moe, hybrid or hybrid-moe, with -mla or
    -swa if it applies."""
    mixers = [layer.mixer for layer in layers]
    words = []
    if any(mixer.is_recurrent for mixer in mixers):
        words.append("hybrid")
    if experts is not None:
        words.append("moe")
    word = "-".join(words) or "dense"
    if any(mixer.heads_share_row for mixer in mixers):
        word += "-mla"
    if any(mixer.is_bounded for mixer in mixers):
        word += "-swa"
    return word
