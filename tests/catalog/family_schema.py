"""The strict schema of shipped family files: families/*.toml and sources.toml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Count = Annotated[int, Field(gt=0)]
Url = Annotated[str, StringConstraints(pattern=r"^https://[^\s]+$")]
Date = Annotated[str, StringConstraints(pattern=r"^20[0-9]{2}-[01][0-9](-[0-3][0-9])?$")]
ModelId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,63}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Fraction01 = Annotated[float, Field(ge=0, le=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Sliding(_Table):
    """Layers that attend to the last `window` tokens. Other fields override the model's figures for
    them."""

    window: Count
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None


class Full(_Table):
    """Overrides for full-attention layers. `v_is_k`: the layers have no value projection."""

    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    v_is_k: bool = False
    index_dim: Count | None = None


class Mla(_Table):
    """Multi-head latent attention: ranks and the widths of one head."""

    rank: Count
    rope: Annotated[int, Field(ge=0)]
    nope: Count
    v: Count
    q_rank: Count | None = None
    index_dim: Count | None = None


class Recurrent(_Table):
    """Sizes of a recurrent layer. `kind` determines which are required (layout.recurrent_sizes)."""

    kind: Literal["gated_delta", "mamba2", "short_conv", "kda"]
    conv: Count
    key_heads: Count | None = None
    value_heads: Count | None = None
    heads: Count | None = None
    inner: Count | None = None
    state: Count | None = None
    groups: Count | None = None
    gate_rank: Count | None = None


class ExpertsTable(_Table):
    count: Count
    active: Count
    ffn: Count
    shared: Count | None = None
    shared_ffn: Count | None = None
    dense_layers: int = 0
    latent: Count | None = None
    beside_dense: bool = False


class CompanionTable(_Table):
    """A published GGUF file, or folder of safetensors, with a draft model."""

    kind: Literal["eagle3", "dflash", "mtp", "draft"]
    repo: Text
    file: Text = ""
    folder: bool = False


class Reasoning(_Table):
    """Whether and how the model reasons."""

    kind: Literal["always", "hybrid", "channels"]
    tags: list[Text] = []  # in files of earlier releases


class SamplingTable(_Table):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction01 | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction01 | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=2)] | None = None


class SamplingWithSource(SamplingTable):
    """Sampling values with their source, and the values for disabled reasoning."""

    source: Text
    non_thinking: SamplingTable | None = None


class LookupTable(_Table):
    """Lookup tables of which each token reads `rows` rows. `bits`: bits per weight in the listed
    files."""

    params: Count
    rows: Count
    bits: Annotated[float, Field(gt=0, le=32)]


class ImageTokensTable(_Table):
    """The number of tokens of an image: one for each `side` × `side` pixels, from `least` to
    `most`. Without `side` it is always `most`."""

    side: Count | None = None
    least: Count
    most: Count


class Gguf(_Table):
    """GGUF files of one repository. `bytes` is exact, `about` is rounded by its source, and
    `estimate` is computed from shapes."""

    repo: Text
    file: Text | None = None
    files: dict[str, list[Text]] = {}
    bytes: dict[str, Count] = {}
    about: dict[str, Count] = {}
    estimate: list[Text] = []
    mmproj: Text | None = None
    mmproj_bytes: Count | None = None
    heads: bool = False  # the files carry the model's draft heads (MTP)
    source: Text | None = None


class Mlx(_Table):
    repo: Text
    quant: Text
    bytes: Count | None = None
    about: Count | None = None
    source: Text | None = None


class ModelTable(_Table):
    """One [[models]] table, merged with the family's [defaults]."""

    id: ModelId
    family: Text
    name: Text
    hf_repo: Text
    release_date: Date
    licence: Text
    params: Count
    active: Count | None = None
    architecture: Literal[
        "dense", "dense-swa", "moe", "moe-swa", "moe-mla", "hybrid", "hybrid-moe", "hybrid-moe-mla",
        "hybrid-conv",
        "hybrid-conv-moe",
    ]  # fmt: skip
    modality: list[Literal["text", "image", "video", "audio"]] = ["text"]
    purposes: Annotated[
        list[Literal["chat", "coding", "autocomplete", "long", "reasoning", "embedding"]],
        Field(min_length=1),
    ]
    layers: Count
    hidden: Count
    ffn: Count | None = None
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count
    vocab: Count
    context: Count
    tied: bool = False
    pattern: list[Text] = ["full"]
    # as read from a file's header; build.build_layers checks it
    layer_list: list[dict[str, Any]] = []
    sliding: Sliding | None = None
    full: Full | None = None
    shared_kv_layers: Count | None = None
    shared_kv_ffn: Count | None = None
    per_layer_embedding: Count | None = None
    lookup: LookupTable | None = None
    mla: Mla | None = None
    recurrent: Recurrent | None = None
    experts: ExpertsTable | None = None
    attention_gate: bool = False
    ffn_matrices: Literal[2, 3] = 3
    residual_streams: Count | None = None
    gguf_architecture: str | None = None
    split_blocks: bool = False
    mtp_layers: Count | None = None
    image_tokens: ImageTokensTable | None = None
    vision_params: Count | None = None
    mtp_params: Count | None = None
    params_note: Text | None = None
    tokenizer: Text
    tokenizer_pre: Text | None = None
    tools: bool | dict[str, Any] = False  # a table in files of earlier releases
    reasoning: Reasoning | None = None
    fim: dict[Literal["prefix", "suffix", "middle", "order"], Text] = {}
    sampling: SamplingWithSource | None = None
    drafts: list[ModelId] = []
    companions: list[CompanionTable] = []
    external_drafts: list[Text] = []
    quality: dict[str, dict[str, float]] = {}
    notes: Text | None = None
    sources: Annotated[list[Url], Field(min_length=1)]
    gguf: list[Gguf] = []
    mlx: list[Mlx] = []


class SourceTable(_Table):
    title: Text
    url: Url
    date: Date
    kind: Text | None = None
