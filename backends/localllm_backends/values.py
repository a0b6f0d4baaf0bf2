"""Values that the engine and a backend exchange (contract.py): load settings, capabilities, model
facts and the input of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from localllm_backends.placement import Placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # Token ids, and the amount that is added to the logit of each.
    Amounts: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]

SequenceId: TypeAlias = int
# The types after "iq4_nl" exist only in MLX.
KvType = Literal[
    "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl",
    "q6_0", "q3_0", "q2_0", "turbo4", "turbo3", "turbo2",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter for a model's weights.

    `path` is its file or folder. `scale` multiplies its effect, unless other scales are chosen
    (`Backend.use_adapters`). `n_bytes` is the size of its tensors in bytes (0: not known).
    """

    path: str
    scale: float = 1.0
    n_bytes: int = 0


# Default number of logit rows in a step, if a spec does not set `n_outputs`.
_OUTPUTS_PER_SEQUENCE = 16
_MAX_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A model to load and the memory for it. 0 and None mean the backend's own default.

    `n_ctx`: KV cells (tokens), shared by all sequences.
    `n_batch`: most tokens in one step. `n_outputs`: most tokens in one step with logits.
    `kv_type_k`, `kv_type_v`: element types of the KV cache.
    `n_rewind`: number of snapshots that a recurrent model keeps, so that as many tokens can be
    taken back (for drafting).
    `mtp`: load the model's own draft heads too. LoadError if the model has none or they can't run
    here.
    `drafter`: file of a drafter trained for the model (EAGLE-3, DFlash). LoadError if it belongs to
    another model.
    `drafter_optional`: instead of a LoadError for `mtp` or `drafter`, load without them and add a
    load note.
    `placement`: the memories that hold layers, experts and KV. LoadError if the engine does not
    support it.
    `projector`: file of the image projector, or `path` if the model's own files include it ("": no
    images). LoadError if it does not fit the model.
    `adapters`: LoRA adapters whose effect is added to that of the weights at each use. LoadError if
    one belongs to another model.
    `wired`: the weights may be wired in memory that a GPU shares with the processor.
    `starts_steps_early`: the backend may start a step before it is requested.
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
    starts_steps_early: bool = True

    @property
    def n_gpu_layers(self) -> int:
        return self.placement.gpu_layers

    def outputs_of(self, n_batch: int) -> int:
        """Return how many rows of logits a step of `n_batch` tokens may request."""
        usual = min(_MAX_OUTPUTS, self.n_seq_max * _OUTPUTS_PER_SEQUENCE)
        return min(n_batch, self.n_outputs or usual)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoadSpec:
        """Rebuild a spec from the JSON form of `dataclasses.asdict(spec)`, in which tuples are
        lists."""
        placed: dict[str, Any] = dict(data.get("placement") or {})
        for name, value in placed.items():
            if isinstance(value, list):
                placed[name] = tuple(value)
        adapters = tuple(LoraAdapter(**adapter) for adapter in data.get("adapters", ()))
        return cls(**{**data, "placement": Placement(**placed), "adapters": adapters})


@dataclass(frozen=True, slots=True)
class QuantizeOrder:
    """A quant to write.

    `source`: the model's file (its first part) or folder. `target`: the new file or folder.
    `quant`: the quant's usual name ("Q4_K_M", "4bit").
    `imatrix`: file of an importance matrix ("": without one).
    `facts`: keys to add to the metadata of the result.
    `n_threads`: 0 = the backend's own default.
    """

    source: str
    target: str
    quant: str
    imatrix: str = ""
    facts: Mapping[str, str | int] = field(default_factory=dict)
    n_threads: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model's memory can do. Ask the loaded model; do not infer it from its name.

    `rewind`: "any" = truncate to any length. "bounded" = truncate at least the last `rewind_tokens`
    tokens of the newest step, and more only while the memory still holds them. "none" = truncate
    only to 0.
    `shares_cells`: `fork` takes no cells until the sequences diverge. If False, it takes one cell
    for each token at once.
    `unified`: the attention of each step covers the cells of all sequences.
    `segments`: `export_range` and `import_range` work on any part of a sequence, so a cached prefix
    can be stored in pieces. If False, only the full sequence (0..n) can be exported and imported.
    `states`: as `segments`, but a step also needs the state after the sequence's last token
    (windows, recurrent layers). That state is stored apart from the KV.
    `drafts`: longest draft (tokens) of the loaded draft heads (`Backend.draft`); 0 = no heads.
    `draft_kind`: "mtp" = the model's own heads; "eagle3", "dflash", "assistant" =
    `LoadSpec.drafter`; "" = none. "dflash" computes a draft in one pass.
    `pads_drafts`: in a step of several sequences, each takes as many rows as the longest draft needs.
    `sliced_prefill`: prompts can be computed between decode steps (`Backend.slice_prefill`).
    `samples`: the backend can sample a chunk's next token (`SampleSpec`).
    `asynchronous`: `step` may return before the step is computed. Its result then waits for the
    computation.
    `kv_on_device`: KV is in a device's own memory. Each exported range of cells costs a round trip
    to the device (`Backend.export_runs`).
    `slow_first_steps`: the first step of each size takes much longer than later ones, because it
    loads kernels and makes buffers and graphs. `threaded`: processor threads compute the steps
    (`Backend.use_threads`). `interruptible`: another thread can end a step (`Backend.interrupt`).
    `vision` and `audio`: prompts may contain images and sounds (`Backend.tokenize_media`).
    `images_in_one_step`: the tokens of an image attend to each other, so all of them must be in one
    step.
    """

    rewind: Literal["any", "bounded", "none"]
    rewind_tokens: int
    shares_cells: bool
    segments: bool
    drafts: int = 0
    draft_kind: str = ""
    pads_drafts: bool = False
    sliced_prefill: bool = False
    states: bool = False
    samples: bool = False
    asynchronous: bool = False
    kv_on_device: bool = False
    slow_first_steps: bool = False
    interruptible: bool = False
    vision: bool = False
    audio: bool = False
    images_in_one_step: bool = False
    threaded: bool = False
    unified: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model for the engine, the chat templates and the user interfaces.

    `fingerprint` identifies the weights and the tokenizer, without adapters; it is used as a cache
    key.
    `n_ctx`: the served context in tokens.
    `vision`: prompts may contain images.
    `audio_rate_hz`: samples per second of the sounds in prompts (0: the model reads no sounds).
    `kv_layout`: how exported KV is laid out, in addition to the fingerprint and the KV types. It
    names the version of the engine's format and the settings that change the meaning of its bytes.
    KV with another `kv_layout` must not be imported.
    `kv_meaning`: the libraries that compute KV, and the layout. Only KV with the same `kv_meaning`
    has exactly the same bits.
    `control_texts`: how the control tokens are written (control_text.py).
    `adapters`: for each loaded adapter, in the order of `LoadSpec.adapters`, a hash of its contents
    and the scale with which it was loaded.
    `load_notes`: sentences about settings that loading changed, such as a KV type that is slow here
    or a drafter for another model.
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
    kv_layout: str = ""
    vision: bool = False
    audio_rate_hz: int = 0
    fim_tokens: dict[str, int] = field(default_factory=dict)
    load_notes: tuple[str, ...] = ()
    control_texts: tuple[str, ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that this backend has allocated, by purpose. Unloading frees the sum.

    `projector_bytes`: weights and buffers of the image projector.
    `places`: the same bytes by memory, under the engine's own names (CPU, CUDA0, CPU_Mapped …);
    empty if the engine does not report them. A file mapping counts with its full size.
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


# Largest top_k of a `SampleSpec`.
MAX_SAMPLED_TOP_K = 512


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """The tokens in the penalty window of a sequence.

    Each of `ids` occurred `counts` (> 0) times. A positive logit is divided by `repeat`, another
    one is multiplied by it. Then `presence` is subtracted once, and `frequency` once per
    occurrence. The next token pushes one token `leaving` out of the window (-1: none).
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int32]
    leaving: int = -1
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How the token after a chunk's last output is sampled.

    The logits are changed in this order: `bias` is added (token ids and amounts); the tokens in
    `seen` are penalised; `dry_bias` is added (ids and amounts). A token is never sampled if it is
    `banned` or not `allowed` (one bit per token, lowest bit first).

    Then tokens are ranked by logit, and by id if logits are equal. The filters top_k (0: off),
    top_p (1: off) and min_p (0: off) remove tokens, in this order, by the softmax at temperature 1.
    The softmax of the remaining tokens at `temperature` is summed up, by rank if top_k or top_p is
    on and otherwise by id. The sampled token is the one whose interval contains `uniform`, a number
    in [0, 1). At `temperature` 0 the best token is chosen.

    `next_uniform` is the `uniform` of the token after this one, if only the seen tokens change. A
    backend may then start that step at once. None: the next spec depends on this token. Two specs
    for one sequence are equal if they sample the same token.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    next_uniform: float | None = field(default=None, compare=False)
    banned: tuple[int, ...] = ()
    seen: SeenTokens | None = field(default=None, compare=False)
    bias: Amounts | None = field(default=None, compare=False)
    dry_bias: Amounts | None = field(default=None, compare=False)
    allowed: NDArray[np.uint8] | None = field(default=None, compare=False)

    def next(self) -> SampleSpec | None:
        """Return the spec for the token after this one, or None if it is not known yet."""
        if self.next_uniform is None:
            return None
        return replace(self, uniform=self.next_uniform, next_uniform=None)


@dataclass(frozen=True, slots=True, eq=False)
class ImagePixels:
    """Decoded pixels of an image.

    `data` holds width × height × 3 bytes: red, green, blue, row by row. `key` is a hash of the
    pixels.
    """

    width: int
    height: int
    data: bytes
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class SoundSamples:
    """Decoded samples of a sound: one channel, `ModelInfo.audio_rate_hz` samples per second.

    `data` holds float32 numbers in the machine's byte order. `key` is a hash of the samples.
    """

    data: bytes
    key: bytes

    @property
    def n_samples(self) -> int:
        return len(self.data) // 4


Media = ImagePixels | SoundSamples


@dataclass(frozen=True, slots=True, eq=False)
class MediaRun:
    """Part number `part` of an image or a sound as model input.

    It takes `n_tokens` KV cells and `n_positions` positions. `grid` is for models with
    two-dimensional positions: int32 [3, n_tokens] with time, height and width, counted from the
    run's first position. `key` is a hash of the pixels or samples, the part number, and everything
    that affects the embeddings.
    """

    media: Media
    part: int
    key: bytes
    n_tokens: int
    n_positions: int
    grid: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """The tokens of a `MediaRun` from number `start` on, as input of a step.

    `embeddings` [n_tokens, width] cover the full run.
    """

    run: MediaRun
    embeddings: NDArray[np.float32]
    start: int = 0


class Chunk(NamedTuple):
    """Tokens to append to one sequence in a step.

    `outputs`: number of last tokens whose logits are wanted (0 in the middle of a prefill).
    `sample`: how to sample a token after the last one, if `Capabilities.samples`.
    `top_k_suffices`: the caller rarely needs the logits apart from the sampled token, or from the
    best one if there is no `sample`.
    `media`: the model reads these embeddings; `tokens` only gives their number. The chunk must be
    alone in its step.
    """

    sequence: SequenceId
    tokens: Sequence[int]
    outputs: int = 1
    sample: SampleSpec | None = None
    top_k_suffices: bool = False
    media: MediaPart | None = None


@dataclass(frozen=True, slots=True)
class KvFidelity:
    """Difference between logits with a KV cache of types `k` and `v` and logits with f16.

    `mean_kl` is the mean KL divergence KL(f16 || type) in nats over a text. `flips` is the share of
    positions with another best token.
    """

    k: str
    v: str
    mean_kl: float
    flips: float
