"""The catalog's types: Model (one trained model) and Variant (one set of its files)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from localllm_catalog.names import FOLDER_FORMATS, Format

if TYPE_CHECKING:
    from localllm_catalog.layers.mixer import Mixer

FfnKind = Literal["dense", "experts", "both", "none"]
Purpose = Literal["chat", "coding", "autocomplete", "long", "reasoning", "embedding"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its token mixer, with the mixer's memory, and its feed-forward.

    - `ffn`: the kind of feed-forward.
    - `intermediate`: the width of its dense feed-forward (0 = the Model's).
    """

    mixer: Mixer
    ffn: FfnKind = "dense"
    intermediate: int = 0

    @property
    def kind(self) -> str:
        """The kind of its mixer, as in family files."""
        return self.mixer.name

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward has routed experts."""
        return self.ffn in ("experts", "both")

    @property
    def has_dense(self) -> bool:
        """Whether its feed-forward is dense, or has a dense one as well."""
        return self.ffn in ("dense", "both")


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: `n_active` of `n_experts` (each `intermediate` wide) run per token, and
    `n_shared` always.

    The first `n_dense_layers` layers are dense. `latent_size`: routed experts read and write this
    narrower vector instead of the hidden one (0 = the hidden one).
    """

    n_experts: int
    n_active: int
    intermediate: int
    n_shared: int = 0
    shared_intermediate: int = 0
    n_dense_layers: int = 0
    latent_size: int = 0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The vendor's recommended sampling; None = not stated."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Quality:
    """One published score: benchmark, score in its own unit, date and source.

    `kind`: "measured" by a third party, "self-reported" by the vendor, or "estimate" by hand.
    """

    benchmark: str
    score: float
    date: str
    source: str
    kind: str = ""


# The `source` of a variant that is in no listing.
ESTIMATED = "estimated from shapes and format"


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of files of a Model.

    - `file_bytes`: bytes to download.
    - `weights_bytes`: bytes of the tensors (0 = use the files).
    - `active_bytes`: weight bytes that one token reads (0 = not read from a header).
    - `exact`: False if the bytes are an estimate from shapes and format.
    - `files`: if empty, the repo names them (an MLX folder, or a GGUF found by its quant).
    - `mtp_bytes`: MTP blocks inside the files. They are loaded only on request and are not part of
      `weights_bytes`.
    - `layer_bytes`: of each layer, the bytes that each token reads and its routed experts.
    - `input_bytes`: the tables before the layers, from which a token reads one row.
    - `output_bytes`: the matrix that computes logits, even if it is one of those tables. This and
      the two before are read from a header, or empty.
    - `adapter_bytes`: bytes of an adapter on top, included in all of these sums.
    - `measured_ln_ratio`: ln(perplexity / perplexity of the unquantised model), measured on this
      machine.
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
    mtp_bytes: int = 0
    layer_bytes: tuple[tuple[int, int], ...] = ()
    input_bytes: int = 0
    output_bytes: int = 0
    adapter_bytes: int = 0
    measured_ln_ratio: float | None = None
    __hash__ = object.__hash__

    @property
    def is_folder(self) -> bool:
        """`Format.is_folder` of its format. A format that only an external backend knows is a
        file."""
        return self.format in FOLDER_FORMATS

    @property
    def is_estimate(self) -> bool:
        """True if these files are in no listing, and name and size are constructed."""
        return self.source == ESTIMATED


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How many tokens an image becomes by llama.cpp's defaults.

    One token covers `side_px` × `side_px` pixels. The number is from `least` to `most`; larger
    images are scaled down. If `side_px` is 0, it is always `most`.
    """

    least: int
    most: int
    side_px: int = 0

    def __str__(self) -> str:
        if not self.side_px:
            return f"{self.most:,} tokens an image, whatever its size"
        return (
            f"a token for {self.side_px} × {self.side_px} pixels, "
            f"{self.least:,} to {self.most:,} an image"
        )


CompanionKind = Literal["eagle3", "dflash", "mtp", "draft"]


class Companion(NamedTuple):
    """A published drafter for a model: trained heads (eagle3, dflash, mtp) or a small model.

    `file` is empty if the repository has several formats of it. `folder`: it is a folder of
    safetensors, for models in such folders.
    """

    kind: CompanionKind
    repo: str
    file: str = ""
    folder: bool = False

    @property
    def url(self) -> str:
        repo_url = f"https://huggingface.co/{self.repo}"
        if not self.file:
            return repo_url
        return f"{repo_url}/blob/main/{self.file}"


@dataclass(frozen=True, slots=True)
class Model:
    """One trained model. Parameter counts are absolute numbers as its maker states them; contexts
    are in tokens.

    - `extra_params`: in the stated total but not in the language trunk (vision tower, MTP head).
    - `vision_params`: the vision and audio part of `extra_params`.
    - `lookup_params`: tables from which a token reads `lookup_rows` rows (per-layer and n-gram
      embeddings). They take disk space but add little to a step.
    - `lookup_bits`: bits of their weights in the listed files (0 = as in the token embedding).
    - `gguf_architecture`: general.architecture of its GGUF files ("" = not known).
    - `residual_streams`: how many a layer reads and writes (hyper-connections).
    - `ffn_matrices`: 3 for gated feed-forwards, 2 for plain ones.
    - `attention_gate`: queries have a gate of the same size.
    - `q_rank`: MLA's query rank.
    - `params_note`: explains a difference above 3 % from the count by shapes.
    - `shape_warning`: why KV figures of a model read from a file may be off (an unknown
      architecture).
    - `calls_tools`: its template offers tools.
    """

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
    calls_tools: bool = False
    reasoning_kind: str = "none"
    fim: dict[str, str] = field(default_factory=dict)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    mtp_layers: int = 0
    drafts: tuple[str, ...] = ()
    companions: tuple[Companion, ...] = ()
    quality: tuple[Quality, ...] = ()
    variants: tuple[Variant, ...] = ()
    hf_repo: str = ""
    notes: str = ""
    extra_params: int = 0
    vision_params: int = 0
    image_tokens: ImageTokens | None = None
    lookup_params: int = 0
    lookup_rows: int = 1
    residual_streams: int = 1
    gguf_architecture: str = ""
    lookup_bits: float = 0.0
    ffn_matrices: int = 3
    attention_gate: bool = False
    q_rank: int = 0
    params_note: str = ""
    sampling_non_thinking: SamplingDefaults | None = None
    tokenizer_pre: str = ""
    shape_warning: str = ""
    __hash__ = object.__hash__
