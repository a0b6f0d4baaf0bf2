"""The values that pass between an engine and a backend (contract.py): what is loaded, what it can
do, what goes into a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from localllm_backends.placement import Placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # Ids of tokens, and what is added to the logit of each.
    Amounts: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]

SequenceId: TypeAlias = int
KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter over a model's weights: its file or folder, what its effect is multiplied by,
    and the bytes of its tensors (0: not known)."""

    path: str
    scale: float = 1.0
    n_bytes: int = 0


# Rows of logits of a step, unless a spec names their number.
_OUTPUTS_PER_SEQUENCE = 16
_MAX_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how much memory to give it; 0 and None mean "the backend's own default".

    `n_ctx` counts KV cells (tokens) shared by all sequences;
    `n_batch` bounds the tokens of one step and `n_outputs` how many of them may want logits.
    `kv_type_k`/`kv_type_v` are the KV cache's element types.
    `n_rewind` asks a recurrent model to keep that many snapshots so that as many tokens can be
    taken back (for drafting).
    `mtp` loads the model's own draft heads with it (LoadError where it has none, or they can't run
    here), and `drafter` is the file of a drafter trained for it (EAGLE-3, DFlash; LoadError where
    it is not for this model): either is left out instead where it is `drafter_optional`, which a
    note says.
    `placement` says where layers, experts and KV lie (LoadError where the engine can't place it
    so).
    `projector` is the file of the image projector beside the model, or `path` where it is among
    the model's own ("": images are not wanted; LoadError where it is of no use to this model).
    `adapters` are added to the weights wherever those are read (LoadError where one is not for this
    model).
    `wired`: weights may be wired down in memory that a GPU shares with everything else.
    `looks_ahead`: a step may be begun before it is asked for.
    """

    path: str
    n_ctx: int = 0
    n_seq_max: int = 8
    n_batch: int = 0
    n_threads: int = 0
    kv_type_k: KvType = "f16"
    kv_type_v: KvType = "f16"
    n_outputs: int = 0
    n_rewind: int = 0
    mtp: bool = False
    drafter: str = ""
    drafter_optional: bool = False
    placement: Placement = field(default_factory=Placement)
    projector: str = ""
    adapters: tuple[LoraAdapter, ...] = ()
    wired: bool = True
    looks_ahead: bool = True

    @property
    def n_gpu_layers(self) -> int:
        return self.placement.gpu_layers

    def outputs_of(self, n_batch: int) -> int:
        """Return how many rows of logits a step of `n_batch` tokens may ask for."""
        usual = min(_MAX_OUTPUTS, self.n_seq_max * _OUTPUTS_PER_SEQUENCE)
        return min(n_batch, self.n_outputs or usual)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoadSpec:
        """The spec that `dataclasses.asdict` made plain data of, and JSON lists of its tuples."""
        placed: dict[str, Any] = dict(data.get("placement") or {})
        for name, value in placed.items():
            if isinstance(value, list):
                placed[name] = tuple(value)
        adapters = tuple(LoraAdapter(**adapter) for adapter in data.get("adapters", ()))
        return cls(**{**data, "placement": Placement(**placed), "adapters": adapters})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this loaded model's memory can do; asked of the object, never guessed from a name.

    `rewind`: "any" = truncate to any length; "bounded" = at least the last `rewind_tokens` tokens
    of the step just made, further back only while the memory still holds them; "none" = only to 0.
    `shares_cells`: `fork` takes no cells until the sequences diverge; where it is False, one for
    each token at once.
    `segments`: `export_range`/`import_range` work on any part of a sequence: a cached prefix can be
    stored in pieces. Where it is False only a whole sequence (0..n) can be exported, and it can be
    imported only whole.
    `states`: the same, but a sequence can be stepped only with the state behind its last token
    (windows, recurrent layers), which is kept apart from its KV.
    `drafts`: longest draft (tokens) that heads loaded with it write (`Backend.draft`); 0 = there
    are none. `draft_kind`: which ("mtp": the model's own; "eagle3", "dflash", "assistant":
    `LoadSpec.drafter`; "": none). Those of "dflash" are made in one pass.
    `sliced_prefill`: prompts can be read beside the steps (`Backend.slice_prefill`).
    `samples`: chunks may ask for a token sampled where the logits are (`SampleSpec`).
    `asynchronous`: a step's result may come back before it is computed; whoever asks it something
    waits.
    `kv_on_device`: KV lies in a device's own memory, and every run of it that is exported costs a
    round trip there (`Backend.export_runs`).
    `first_uses`: the first step of a size takes much longer than those behind it: kernels are
    loaded, and buffers and graphs made.
    `threaded`: steps are computed by threads on the processor (`Backend.use_threads`).
    `interruptible`: a step can be ended from another thread (`Backend.interrupt`).
    `vision`: images can be part of a prompt (`Backend.tokenize_images`). `whole_images`: the tokens
    of one see each other, so that all of them must go into one step.
    """

    rewind: Literal["any", "bounded", "none"]
    rewind_tokens: int
    shares_cells: bool
    segments: bool
    drafts: int = 0
    draft_kind: str = ""
    sliced_prefill: bool = False
    states: bool = False
    samples: bool = False
    asynchronous: bool = False
    kv_on_device: bool = False
    first_uses: bool = False
    interruptible: bool = False
    vision: bool = False
    whole_images: bool = False
    threaded: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model that the engine, the templates and the faces need.

    `fingerprint` identifies weights and tokenizer (used as a cache key); `n_ctx` is the served
    context in tokens.
    `vision`: its prompts may have images.
    `kv_meaning` names, besides those and the KV types, all that gives exported KV its meaning: the
    versions of the libraries that compute it and whatever changes how they do. KV written under
    another one must never be imported.
    `control_texts`: how its control tokens are written (control_text.py).
    `load_notes`: sentences on what loading did otherwise than asked: a KV type that is slow here, a
    drafter that is not this model's.
    """

    architecture: str
    description: str
    fingerprint: str
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_seq_max: int
    n_batch: int
    n_outputs: int
    n_params: int
    weights_bytes: int
    eog_tokens: tuple[int, ...]
    bos_token: int | None
    eos_token: int | None
    adds_bos: bool
    bos_text: str
    eos_text: str
    chat_template: str | None
    kv_type_k: str
    kv_type_v: str
    kv_meaning: str = ""
    vision: bool = False
    fim_tokens: dict[str, int] = field(default_factory=dict)
    load_notes: tuple[str, ...] = ()
    control_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes really allocated by this backend, by purpose; the sum is what unloading gives back.

    `projector_bytes`: the image projector's weights and buffers. `places`: the same bytes by where
    they lie, in the engine's own names (CPU, CUDA0, CPU_Mapped …); empty where it does not say.
    What is mapped from a file counts with the whole of the mapping.
    """

    weights_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    output_bytes: int
    projector_bytes: int = 0
    places: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        context = self.kv_bytes + self.recurrent_bytes + self.compute_bytes + self.output_bytes
        return self.weights_bytes + context + self.projector_bytes


# A `SampleSpec` may keep at most so many tokens by top_k.
MAX_SAMPLED_TOP_K = 512


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """The tokens in the window of a line's penalties: each of `ids` came `counts` (> 0) times.
    Their logits are divided by `repeat` where they are positive and else multiplied by it, and lose
    `presence`, and `frequency` as often as they came. The next token pushes one `leaving` out of
    the window (-1: none)."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int32]
    leaving: int = -1
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How the token behind a chunk's last output is sampled. Its logits are changed, in this order:
    `bias` is added to some; those `seen` are penalised; `reduced` is added to some (both: ids and
    amounts); what is not `allowed` (a bit for each token, the lowest first) or is `banned` is never
    sampled.

    Of the tokens ranked by logit (equals by id) top_k (0: all), top_p (1: all) and min_p (0: all)
    leave some, in this order, by their softmax at temperature 1; the softmax of those at
    `temperature` is summed up, in their order where top_k or top_p left them and else by id, and
    the token is the one in which `uniform` in [0, 1) lies. At a `temperature` of 0 it is the best
    one.

    `next_uniform` will sample the token after it, if nothing changes but the tokens that were seen:
    a backend may begin with that step at once. None: that takes a look at this one. Two specs of
    one line are equal where they sample the same token."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    next_uniform: float | None = field(default=None, compare=False)
    banned: tuple[int, ...] = ()
    seen: SeenTokens | None = field(default=None, compare=False)
    bias: Amounts | None = field(default=None, compare=False)
    reduced: Amounts | None = field(default=None, compare=False)
    allowed: NDArray[np.uint8] | None = field(default=None, compare=False)

    def next(self) -> SampleSpec | None:
        """That of the token after it."""
        if self.next_uniform is None:
            return None
        return replace(self, uniform=self.next_uniform, next_uniform=None)


@dataclass(frozen=True, slots=True, eq=False)
class ImagePixels:
    """Decoded pixels: `data` is width × height × 3 bytes, red, green, blue, row by row. `key` is
    their hash."""

    width: int
    height: int
    data: bytes
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ImageRun:
    """Part number `part` of an image as the model reads it: `n_tokens` cells of KV, which take
    `n_positions` positions.
    `grid`: where two-dimensional positions are used, int32 [3, n_tokens] of time, height and width,
    counted from the run's first position. `key` is the hash of the pixels, the part, and all that
    turns them into embeddings."""

    pixels: ImagePixels
    part: int
    key: bytes
    n_tokens: int
    n_positions: int
    grid: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """The tokens of an `ImageRun` from number `start` on that go into a step, with the embeddings
    [n_tokens, width] of the whole run."""

    run: ImageRun
    embeddings: NDArray[np.float32]
    start: int = 0


class Chunk(NamedTuple):
    """Tokens to append to one sequence in a step; the last `outputs` of them want logits (0 = none:
    mid-prefill).
    `sample` asks for a token behind the last one, where `Capabilities.samples`;
    `few`: its row is hardly looked at but for that token, or, without a `sample`, for the best one.
    With an `image` the tokens are only counted, the model reads its embeddings, and the chunk is
    alone in its step."""

    sequence: SequenceId
    tokens: Sequence[int]
    outputs: int = 1
    sample: SampleSpec | None = None
    few: bool = False
    image: ImagePart | None = None


@dataclass(frozen=True, slots=True)
class KvFidelity:
    """How far logits with a KV cache of types `k` and `v` are from those with f16 over a text: KL
    divergence KL(f16 || type) in nats, its mean, and `flips`, the share of positions with another
    best token."""

    k: str
    v: str
    mean_kl: float
    flips: float
