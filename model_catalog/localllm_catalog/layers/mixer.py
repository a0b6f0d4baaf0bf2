"""The token mixer of a layer (attention or a recurrence), and the registry of mixer kinds.

Each kind is a frozen class. It defines its cells, its bytes, the cells that a token reads, its
weights, and how to read it. The planner calls these methods and never checks a kind's name. The
design follows vLLM's KVCacheSpec classes (https://github.com/vllm-project/vllm).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from localllm_catalog.errors import BadCatalogError, BadHeaderError

if TYPE_CHECKING:
    from fractions import Fraction

    from localllm_catalog.gguf_blocks import GgufLayer
    from localllm_catalog.hf_config import Config


class CacheLayout(NamedTuple):
    """How an engine lays out its caches.

    - `n_ctx`: cells shared by all sequences, in whole steps.
    - `n_batch`: tokens of a step; a window needs cells for them too.
    - `step`: a cache has a multiple of this many cells.
    - `one_each`: a sequence may have a full cache of its own (`per_sequence`).
    """

    n_ctx: int
    n_sequences: int = 1
    n_batch: int = 0
    step: int = 1
    one_each: bool = False

    def padded(self, n_cells: int) -> int:
        """Return `n_cells` rounded up to whole steps."""
        return -(-n_cells // self.step) * self.step


class Widths(NamedTuple):
    """The widths of a model that a mixer's weights depend on.

    - `q_rank`: the rank of latent attention's queries (0 = no rank).
    - `is_gated`: queries have a gate of the same size.
    """

    hidden: int
    n_heads: int
    q_rank: int = 0
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class TableLayer:
    """One layer of a family file: the model's table, and the pattern's word for the layer.

    `shares_kv` is True for the last layers, which share their KV.
    """

    table: Mapping[str, Any]
    word: str
    shares_kv: bool = False

    @property
    def own(self) -> Mapping[str, Any]:
        """The sizes that the table gives for layers of this word."""
        own: Mapping[str, Any] = self.table.get(self.word, {})
        return own


@dataclass(frozen=True, slots=True)
class Mixer:
    """One kind of layer without its feed-forward. The methods here are those of a mixer without
    memory.

    - `word`: the kind's name in family files.
    - `precedence`: kinds try to read a layer in descending order, so general kinds have low
      numbers.
    - `config_words`: the names of such layers in the layer lists of config.json files.
    - `architectures`: those of GGUF files that this kind can read.
    """

    word: ClassVar[str] = ""
    precedence: ClassVar[int] = 0
    config_words: ClassVar[Collection[str]] = ()
    architectures: ClassVar[Collection[str]] = ()

    # --- what it is ---

    @property
    def name(self) -> str:
        """The kind's name, as in family files."""
        return self.word

    @property
    def attends(self) -> bool:
        """True if it is attention over earlier tokens."""
        return False

    @property
    def is_bounded(self) -> bool:
        """True if it forgets the tokens before a window."""
        return False

    @property
    def is_recurrent(self) -> bool:
        """True if it is a recurrence."""
        return False

    @property
    def heads_share_row(self) -> bool:
        """True if all heads read the same row. Reading it then does not limit the speed."""
        return False

    @property
    def reach(self) -> int:
        """The most earlier tokens that it sees; 0 = all."""
        return 0

    @property
    def head_counts(self) -> tuple[int, ...]:
        """The numbers of heads that it states, for queries and for the cache."""
        return ()

    # --- memory ---

    def cells(self, layout: CacheLayout) -> int:
        """Return the cells of its KV cache, for all sequences together."""
        return 0

    @property
    def row(self) -> tuple[int, int]:
        """Elements of one cell: (in the K cache, in the V cache)."""
        return 0, 0

    @property
    def elements(self) -> int:
        """Elements that one token adds to the cache until a window is full."""
        return sum(self.row)

    @property
    def quantised_separately(self) -> tuple[int, ...]:
        """Widths that MLX quantises separately (for example one head's keys and values)."""
        return ()

    @property
    def state_floats(self) -> int:
        """float32 numbers of recurrent state for each sequence, independent of its length."""
        return 0

    @property
    def index_width(self) -> int:
        """Elements within `row` that a sparse attention's indexer adds for each token."""
        return 0

    def n_bytes(self, layout: CacheLayout, k_bytes: Fraction, v_bytes: Fraction) -> int:
        """Return the bytes of its KV cache, given the bytes of an element of K and of V.

        Computed in whole numbers, because fractions take ten times as long. (Cells are whole blocks
        of each type.)
        """
        k_width, v_width = self.row
        k_part = k_width * k_bytes.numerator * v_bytes.denominator
        v_part = v_width * v_bytes.numerator * k_bytes.denominator
        return self.cells(layout) * (k_part + v_part) // (k_bytes.denominator * v_bytes.denominator)

    def mask_cells(self, layout: CacheLayout) -> int:
        """Return the cells that its attention mask covers."""
        if not self.attends:
            return 0
        if self.is_bounded:
            return self.cells(layout)
        return layout.n_ctx

    # --- reading and arithmetic ---

    def seen(self, depth: float, tokens_outside: float = 0.0) -> float:
        """Return how many tokens attention over `depth` earlier tokens computes.

        `tokens_outside` counts tokens outside a window that are computed anyway.
        """
        return depth

    def elements_read(self, depth: int) -> int:
        """Return the cached elements that one token reads after `depth` tokens."""
        return self.elements * int(self.seen(depth))

    def heads(self, n_heads: int) -> int:
        """Return its query heads. The default is the model's `n_heads`."""
        return n_heads

    def flops(self, n_heads: int, depth: float, tokens_outside: float = 0.0) -> float:
        """Return the FLOPs of one token's attention over `depth` earlier tokens (QK and PV, 2 for
        each multiply-add)."""
        return 0.0

    def output_width(self, n_heads: int) -> int:
        """Return the elements that attention writes for one token."""
        return 0

    def is_fused(self, head_widths: Collection[int]) -> bool:
        """Return whether fused kernels for these head widths compute its attention without storing
        the scores."""
        return not self.attends

    # --- weights ---

    def n_params(self, widths: Widths) -> int:
        """Return the weights of the mixer with its norm."""
        return 0

    def kv_params(self, widths: Widths) -> int:
        """Return the weights of the key and value projections, which a layer with shared KV does
        not have."""
        return 0

    # --- words ---

    def describe(self, cells: int, n_sequences: int) -> str:
        """Describe its memory in words, given its cells."""
        return "no memory"

    # --- readers ---

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        """Return the mixer of this layer of a GGUF file, or None if it is of another kind."""
        return None

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        """Return the mixer of this layer of a family file, or None if it is of another kind."""
        return None

    @classmethod
    def read_config(cls, words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
        """Add the sizes of this kind in `config` to `table`, a model's table as in a family file.

        Returns `words`, the kinds of its layers, with corrections for layers that are of this kind.
        """
        return words

    def overridden(self, config: Config) -> Mixer:
        """Return this mixer with the sizes that a config states for one layer."""
        return self

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Mixer | None:
        """Return the mixer of a row of `layer_list`, or None if it is of another kind."""
        if row["kind"] != cls.word:
            return None
        return cls(**{key: value for key, value in row.items() if key != "kind"})

    def to_row(self) -> dict[str, Any]:
        """Return the row of `layer_list` that `from_row` reads. Defaults are left out."""
        stated = {each_field.name: getattr(self, each_field.name) for each_field in fields(self)}
        defaults = {each_field.name: each_field.default for each_field in fields(self)}
        non_defaults = {key: value for key, value in stated.items() if value != defaults[key]}
        return {"kind": self.word, **non_defaults}


# --- the register ---------------------------------------------------------------------------------

KINDS: list[type[Mixer]] = []
_Kind = TypeVar("_Kind", bound=type[Mixer])


def register(kind: _Kind) -> _Kind:
    """Register a kind for the readers. Used as a decorator."""
    KINDS.append(kind)
    KINDS.sort(key=_precedence, reverse=True)
    return kind


def _precedence(kind: type[Mixer]) -> int:
    return kind.precedence


def _kinds_in_order(after: type[Mixer] | None) -> Iterator[type[Mixer]]:
    """Yield the kinds in the order in which they try to read a layer; only those after `after`."""
    start = 0 if after is None else KINDS.index(after) + 1
    yield from KINDS[start:]


def words() -> list[str]:
    """Return the words for kinds of layers in family files."""
    return [kind.word for kind in reversed(KINDS) if kind.word]


def config_words() -> dict[str, str]:
    """Return the family files' word for each layer name in config.json files."""
    words_by_name: dict[str, str] = {}
    for kind in KINDS:
        words_by_name |= dict.fromkeys(kind.config_words, kind.word)
    return words_by_name


def knows(architecture: str) -> bool:
    """Return whether a kind can read GGUF files of this architecture."""
    return any(architecture in kind.architectures for kind in KINDS)


def from_gguf(layer: GgufLayer, after: type[Mixer] | None = None) -> Mixer:
    """Return the mixer of a GGUF file's layer, from the first kind (after `after`) that accepts
    it."""
    for kind in _kinds_in_order(after):
        layer_mixer = kind.from_gguf(layer)
        if layer_mixer is not None:
            return layer_mixer
    raise BadHeaderError(f"layer {layer.index} has an unknown kind", "a newer localllm may know it")


def from_table(layer: TableLayer, after: type[Mixer] | None = None) -> Mixer:
    """Return the mixer of a family file's layer, from the first kind (after `after`) that accepts
    it."""
    for kind in _kinds_in_order(after):
        layer_mixer = kind.from_table(layer)
        if layer_mixer is not None:
            return layer_mixer
    raise BadCatalogError(f"{layer.word!r} is not a layer kind", _known_words_hint())


def from_row(row: Mapping[str, Any], after: type[Mixer] | None = None) -> Mixer:
    """Return the mixer of a `layer_list` row, from the first kind (after `after`) that accepts
    it."""
    for kind in _kinds_in_order(after):
        layer_mixer = kind.from_row(row)
        if layer_mixer is not None:
            return layer_mixer
    raise BadCatalogError(f"{row['kind']!r} is not a layer kind", _known_words_hint())


def read_config(layer_words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
    """Add the sizes that each kind finds in `config` to `table`, general kinds first. Returns the
    layers' words: `layer_words`, as changed by the kinds."""
    for kind in reversed(KINDS):
        layer_words = kind.read_config(layer_words, config, table)
    return layer_words


def _known_words_hint() -> str:
    return f"known: {', '.join(words())}"


# --- mixers around another ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wrapper(Mixer):
    """A mixer that changes the memory of another mixer. `key` marks it in a row of `layer_list`."""

    of: Mixer

    key: ClassVar[str]

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def attends(self) -> bool:
        return self.of.attends

    @property
    def is_bounded(self) -> bool:
        return self.of.is_bounded

    @property
    def is_recurrent(self) -> bool:
        return self.of.is_recurrent

    @property
    def heads_share_row(self) -> bool:
        return self.of.heads_share_row

    @property
    def reach(self) -> int:
        return self.of.reach

    @property
    def head_counts(self) -> tuple[int, ...]:
        return self.of.head_counts

    def cells(self, layout: CacheLayout) -> int:
        return self.of.cells(layout)

    @property
    def row(self) -> tuple[int, int]:
        return self.of.row

    @property
    def quantised_separately(self) -> tuple[int, ...]:
        return self.of.quantised_separately

    @property
    def state_floats(self) -> int:
        return self.of.state_floats

    @property
    def index_width(self) -> int:
        return self.of.index_width

    def seen(self, depth: float, tokens_outside: float = 0.0) -> float:
        return self.of.seen(depth, tokens_outside)

    def heads(self, n_heads: int) -> int:
        return self.of.heads(n_heads)

    def flops(self, n_heads: int, depth: float, tokens_outside: float = 0.0) -> float:
        return self.of.flops(n_heads, depth, tokens_outside)

    def output_width(self, n_heads: int) -> int:
        return self.of.output_width(n_heads)

    def is_fused(self, head_widths: Collection[int]) -> bool:
        return self.of.is_fused(head_widths)

    def n_params(self, widths: Widths) -> int:
        return self.of.n_params(widths)

    def kv_params(self, widths: Widths) -> int:
        return self.of.kv_params(widths)

    def describe(self, cells: int, n_sequences: int) -> str:
        return self.of.describe(cells, n_sequences)

    def overridden(self, config: Config) -> Mixer:
        return self.with_mixer(self.of.overridden(config))

    def with_mixer(self, of: Mixer) -> Self:
        """Return this wrapper around another mixer."""
        return replace(self, of=of)

    @property
    def value(self) -> Any:
        """The value of `key` in a row."""
        return True

    @classmethod
    def wrapping(cls, of: Mixer, value: Any) -> Mixer:
        """Return the wrapper for a row with this value at `key`."""
        return cls(of)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Mixer | None:
        value = row.get(cls.key)
        if not value:
            return None
        rest = {key: entry for key, entry in row.items() if key != cls.key}
        return cls.wrapping(from_row(rest, cls), value)

    def to_row(self) -> dict[str, Any]:
        return {**self.of.to_row(), self.key: self.value}
