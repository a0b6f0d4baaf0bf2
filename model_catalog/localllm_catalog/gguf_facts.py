"""The numbers of a GGUF header, bounded, and what llama.cpp derives from them: a header is
untrusted.

What is no language model, or is laid out as Ollama alone does, is refused here.
"""

from __future__ import annotations

from localllm_catalog import architectures, kinds
from localllm_catalog.errors import BadHeaderError
from localllm_catalog.gguf import GgufHeader, SkippedArray, Value

MAX_LAYERS = 2_048
_MAX_WIDTH = 1 << 24
MAX_TOKENS = 1 << 40

# Ollama's own engine has its own names and keeps what sees, hears and drafts in the model's file,
# where llama.cpp wants other files (https://github.com/ollama/ollama convert/,
# https://github.com/ggml-org/llama.cpp/issues/12367).
_OLLAMAS_NAMES = frozenset({"gptoss", "mllama", "qwen25vl"})
_OLLAMAS_TENSORS = ("v.", "mm.", "mtp.", "a.", "s.")
_NOT_OURS = (
    "run it with Ollama, or fetch a GGUF file of the model from the hub (`localllm "
    "recommend` "
    "names some)"
)


def _ollamas_own(header: GgufHeader) -> str:
    """What of a header is laid out as Ollama alone does, "" for one that is llama.cpp's."""
    arch = header.architecture
    inside = next((t.name for t in header.tensors if t.name.startswith(_OLLAMAS_TENSORS)), "")
    sections = header.metadata.get(f"{arch}.rope.dimension_sections")
    signs = (
        (arch in _OLLAMAS_NAMES, f"the architecture {arch!r}"),
        (bool(inside), f"{inside} beside the language model's tensors"),
        (
            isinstance(sections, tuple) and len(sections) == 3,
            "3 rope sections where llama.cpp has 4",
        ),
    )
    return next((what for is_so, what in signs if is_so), "")


class Facts:
    """The numbers of one header, bounded, with llama.cpp's defaults."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.arch = header.architecture
        self.kind = kinds.of_header(header.metadata, len(header.tensors))
        if self.kind not in kinds.MODELS:
            what, instead = kinds.WORDS[self.kind]
            raise BadHeaderError(f"this GGUF is {what}, not a language model", instead)
        if not self.arch:
            raise BadHeaderError(
                "this GGUF does not say what model it is (general.architecture)",
                "get another file of it",
            )
        foreign = _ollamas_own(header)
        if foreign:
            raise BadHeaderError(
                f"this file is in Ollama's own layout ({foreign}), which llama.cpp does not read",
                _NOT_OURS,
            )
        self.tied = all(tensor.name != "output.weight" for tensor in header.tensors)
        self.n_blocks = self.number("block_count", maximum=MAX_LAYERS, minimum=1)
        self.n_mtp = self.number("nextn_predict_layers", 0, maximum=self.n_blocks - 1)
        self.n_layers = self.n_blocks - self.n_mtp
        self.hidden = self.number("embedding_length", minimum=1)
        self.heads = self.per_layer("attention.head_count", 0)
        self.kv_heads = self.per_layer("attention.head_count_kv", self.heads)
        self.ffn = self.per_layer("feed_forward_length", 0)
        first = next((heads for heads in self.heads if heads), 1)
        self.head_dim_k = self.number("attention.key_length", self.hidden // first)
        self.head_dim_v = self.number("attention.value_length", self.hidden // first)

    def value(self, name: str) -> Value | None:
        """The raw value under this architecture's prefix."""
        return self.header.metadata.get(f"{self.arch}.{name}")

    def number(
        self, name: str, default: int | None = None, *, minimum: int = 0, maximum: int = _MAX_WIDTH
    ) -> int:
        """A whole number within bounds; BadHeaderError where it is missing without a default, or
        absurd."""
        value = self.value(name)
        # some converters write one number per layer where one would do
        if isinstance(value, tuple) and value:
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise BadHeaderError(
                f"{self.arch}.{name} is {value!r}, not a number from {minimum} to {maximum}"
            )
        return value

    def per_layer(self, name: str, default: int | list[int]) -> list[int]:
        """One number per block, whether the file states one for all or an array."""
        value = self.value(name)
        if isinstance(value, SkippedArray):
            raise BadHeaderError(
                f"{self.arch}.{name} has {value.count} elements for {self.n_blocks} blocks"
            )
        if isinstance(value, tuple):
            numbers = [item for item in value if isinstance(item, int) and 0 <= item <= _MAX_WIDTH]
            if len(numbers) != len(value) or len(numbers) < self.n_layers:
                raise BadHeaderError(
                    f"{self.arch}.{name} does not hold {self.n_layers} plain numbers"
                )
            return [int(number) for number in numbers] + [0] * (self.n_blocks - len(numbers))
        if value is None:
            if isinstance(default, list):
                return default
            return [default] * self.n_blocks
        return [self.number(name)] * self.n_blocks

    def is_sliding(self, index: int) -> bool:
        """Whether llama.cpp gives this layer the windowed cache."""
        if not self.window:
            return False
        pattern = self.value("attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return index < len(pattern) and bool(pattern[index])
        if self.arch not in architectures.SLIDING:
            return False
        period, first_is_full, _ = architectures.SLIDING[self.arch]
        if self.arch == "exaone4" and self.n_layers != 64:
            return False
        period = self.number("attention.sliding_window_pattern", period, maximum=MAX_LAYERS)
        if not period:
            return True
        if first_is_full:
            return index % period != 0
        return index % period < period - 1

    @property
    def window(self) -> int:
        """Tokens a sliding layer sees; 0 where this architecture has none."""
        stated = isinstance(self.value("attention.sliding_window_pattern"), tuple)
        if self.arch not in architectures.SLIDING and not (
            stated or self.arch in architectures.SLIDING_STATED
        ):
            return 0
        window = self.number(
            "attention.sliding_window",
            architectures.SLIDING.get(self.arch, (0, False, 0))[2],
            maximum=MAX_TOKENS,
        )
        if self.arch == "llama4" and window:
            return 8192
        return window

    def is_recurrent(self, index: int) -> bool:
        """Whether this layer keeps a fixed state instead of (Falcon-H1: beside) a growing cache."""
        stated = self.value("attention.recurrent_layers")
        if isinstance(stated, tuple):
            return index < len(stated) and bool(stated[index])
        if self.arch in architectures.ALL_RECURRENT:
            return True
        if self.arch in architectures.FULL_EVERY:
            every = self.number(
                "full_attention_interval", architectures.FULL_EVERY[self.arch], minimum=1
            )
            return (index + 1) % every != 0
        if self.arch in architectures.SPLIT_BLOCKS:
            return self.kv_heads[index] == 0 and self.ffn[index] == 0
        return self.arch in architectures.ZERO_HEADS_RECUR and self.kv_heads[index] == 0

    def state_elements(self) -> int:
        """float32 elements one recurrent layer holds per sequence (llama-hparams.cpp, n_embd_r +
        n_embd_s)."""
        heads = max(self.heads, default=0)
        wkv = self.number("wkv.head_size", 0)
        cached = self.number("shortconv.l_cache", 0)
        if wkv:
            return self.hidden * (self.number("token_shift_count", 2) + wkv)
        if cached:
            return self.hidden * (cached - 1)
        conv = self.number("ssm.conv_kernel", 0)
        kda = self.number("kda.head_dim", 0)
        if kda:
            return 3 * ((conv or 4) - 1) * heads * kda + kda * kda * heads
        if self.arch == "minimax-01":
            return self.head_dim_k * self.head_dim_k * heads
        inner = self.number("ssm.inner_size", 0)
        state = self.number("ssm.state_size", 0)
        groups = self.number("ssm.group_count", 0)
        return max(0, conv - 1) * (inner + 2 * groups * state) + state * inner

    def table_state_elements(self, index: int) -> int:
        """Elements a layer holds more that reads n-gram tables: the history of its dilated
        convolution (qwen4exp)."""
        layers = self.value("ple.layers")
        if not isinstance(layers, tuple) or index not in layers:
            return 0
        rows = max(0, self.number("ple.conv_kernel", 0) - 1) * self.number("ple.ngram_size", 0)
        return rows * self.hidden * self.number("hyper_connection.count", 1)

    def index_elements(self, index: int) -> int:
        """Elements per token that a sparse attention's indexer keeps on this layer: its key, and
        what keys are pooled into. (llama.cpp's llama-memory-hybrid-idx.cpp: key, gate and pooled
        key side by side; llama-kv-cache-dsa.cpp, -msa.cpp: a key.)
        """
        own = self.value("attention.indexer.types")
        if self.arch in architectures.NO_INDEX_WHERE_DENSE:
            dense = self.number("leading_dense_block_count", 0)
        else:
            dense = 0
        if index < dense or (isinstance(own, tuple) and not any(own[index : index + 1])):
            return 0
        return architectures.INDEX_ROWS.get(self.arch, 0) * self.number(
            "attention.indexer.key_length", 0
        )

    def lookup_rows(self) -> int:
        """Rows of the looked-up tables a token reads: one, or one of every hashed head."""
        return max(
            1, (self.number("ple.ngram_size", 0) - 1) * self.number("ple.heads_per_ngram", 0)
        )
