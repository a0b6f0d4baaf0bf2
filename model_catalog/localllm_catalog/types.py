"""The catalog's nouns: Model (one trained model) and Variant (one concrete set of its files)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerKind = Literal["full", "sliding", "mla", "recurrent", "none"]
Format = Literal["gguf", "mlx"]
Purpose = Literal["chat", "coding", "autocomplete", "long", "reasoning", "embedding"]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer remembers per sequence.

    full / sliding: n_kv_heads × (head_dim_k + head_dim_v) elements per token (sliding: of the last `window` tokens).
    mla: one latent row of `mla_rank + mla_rope_dim` elements per token and no V.
    recurrent: `state_elements` float32 per sequence, independent of length.
    `shares_kv`: reads another layer's KV and stores none of its own.
    """

    kind: LayerKind
    n_kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int = 0
    mla_rank: int = 0
    mla_rope_dim: int = 0
    state_elements: int = 0
    shares_kv: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: `n_active` of `n_experts` (each `intermediate` wide) run per token, plus `n_shared` always;
    the first `n_dense_layers` layers are dense."""

    n_experts: int
    n_active: int
    intermediate: int
    n_shared: int = 0
    shared_intermediate: int = 0
    n_dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """The vendor's recommended sampling; None = not stated."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Quality:
    """One published score: benchmark name, score in its own unit, date and source of the claim."""

    benchmark: str
    score: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of files of a Model. `file_bytes` is what is downloaded; `weights_bytes` the tensors alone (0 = use files).

    `active_bytes` are the weight bytes one token streams (0 = derive from the Model's active share).
    `exact` is False where the bytes are an estimate from shapes and format.
    """

    format: Format
    quant: str
    repo: str
    files: tuple[str, ...]
    file_bytes: int
    exact: bool = True
    weights_bytes: int = 0
    active_bytes: int = 0
    mmproj_file: str = ""
    mmproj_bytes: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One trained model. Parameter counts are absolute numbers; contexts are tokens."""

    id: str
    name: str
    family: str
    params_total: int
    params_active: int
    layers: tuple[Layer, ...]
    hidden_size: int
    intermediate_size: int
    n_heads: int
    head_dim: int
    vocab_size: int
    native_context: int
    tied_embeddings: bool = False
    experts: Experts | None = None
    architecture: str = ""
    release_date: str = ""
    licence: str = ""
    modality: tuple[str, ...] = ("text",)
    purposes: tuple[Purpose, ...] = ("chat",)
    tokenizer_family: str = ""
    tool_format: str | None = None
    reasoning_tags: tuple[str, str] | None = None
    reasoning_kind: str = "none"
    fim: dict[str, str] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    mtp_layers: int = 0
    drafts: tuple[str, ...] = ()
    quality: tuple[Quality, ...] = ()
    variants: tuple[Variant, ...] = ()
    hf_repo: str = ""
    notes: str = ""
    sources: tuple[str, ...] = ()
