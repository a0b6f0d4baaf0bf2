"""The numbers of an untrusted GGUF header, bounded, with llama.cpp's derived values.

Files that are not language models, or that have Ollama's own layout, are rejected here.
"""

from __future__ import annotations

from localllm_catalog import kinds
from localllm_catalog.architectures import MAX_LAYERS
from localllm_catalog.errors import BadHeaderError
from localllm_catalog.gguf import GgufHeader, SkippedArray, Value

_MAX_WIDTH = 1 << 24

# Ollama's own engine uses its own names, and keeps vision, audio and draft tensors in the model's
# file. llama.cpp needs separate files for them (https://github.com/ollama/ollama convert/,
# https://github.com/ggml-org/llama.cpp/issues/12367).
_OLLAMAS_NAMES = frozenset({"gptoss", "mllama", "qwen25vl"})
_OLLAMAS_TENSORS = ("v.", "mm.", "mtp.", "a.", "s.")
_OLLAMA_ONLY = (
    "run it with Ollama, or use a GGUF file of the model "
    "from the hub (`localllm recommend` lists some)"
)


def check_layout(header: GgufHeader) -> None:
    """Raise BadHeaderError if only Ollama can read the file."""
    ollama_part = _ollamas_own(header)
    if ollama_part:
        raise BadHeaderError(
            f"this file is in Ollama's own layout ({ollama_part}), which llama.cpp can't read",
            _OLLAMA_ONLY,
        )


def _ollamas_own(header: GgufHeader) -> str:
    """Return the part of a header that only Ollama writes in this way; "" for a llama.cpp
    header."""
    arch = header.architecture
    if arch in _OLLAMAS_NAMES:
        return f"the architecture {arch!r}"
    for tensor in header.tensors:
        if tensor.name.startswith(_OLLAMAS_TENSORS):
            return f"{tensor.name} among the language model's tensors"
    sections = header.metadata.get(f"{arch}.rope.dimension_sections")
    if isinstance(sections, tuple) and len(sections) == 3:
        return "3 rope sections instead of llama.cpp's 4"
    return ""


class Facts:
    """The numbers of one header, bounded, with llama.cpp's defaults."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.arch = header.architecture
        self.kind = kinds.of_header(header.metadata, len(header.tensors))
        if self.kind not in kinds.MODELS:
            kind_text, instead = kinds.WORDS[self.kind]
            raise BadHeaderError(f"this GGUF is {kind_text}, not a language model", instead)
        if not self.arch:
            raise BadHeaderError(
                "this GGUF lacks the model's architecture (general.architecture)",
                "download another file of the model",
            )
        check_layout(header)
        self.tied = all(tensor.name != "output.weight" for tensor in header.tensors)
        self.n_blocks = self.number("block_count", maximum=MAX_LAYERS, minimum=1)
        self.n_mtp = self.number("nextn_predict_layers", 0, maximum=self.n_blocks - 1)
        self.n_layers = self.n_blocks - self.n_mtp
        self.hidden = self.number("embedding_length", minimum=1)
        self.heads = self.per_layer("attention.head_count", 0)
        self.kv_heads = self.per_layer("attention.head_count_kv", self.heads)
        self.ffn = self.per_layer("feed_forward_length", 0)
        n_first_heads = next((heads for heads in self.heads if heads), 1)
        self.head_dim_k = self.number("attention.key_length", self.hidden // n_first_heads)
        self.head_dim_v = self.number("attention.value_length", self.hidden // n_first_heads)

    def value(self, name: str) -> Value | None:
        """Return the raw value under this architecture's prefix."""
        return self.header.metadata.get(f"{self.arch}.{name}")

    def number(
        self, name: str, default: int | None = None, *, minimum: int = 0, maximum: int = _MAX_WIDTH
    ) -> int:
        """Return a whole number within bounds. Raises BadHeaderError if it is missing without a
        default, or out of bounds."""
        value = self.value(name)
        # some converters write one number per layer instead of a single number
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
        """Return one number per block, whether the file states one for all or an array."""
        value = self.value(name)
        if isinstance(value, SkippedArray):
            raise BadHeaderError(
                f"{self.arch}.{name} has {value.count} elements for {self.n_blocks} blocks"
            )
        if isinstance(value, tuple):
            numbers = [item for item in value if isinstance(item, int) and 0 <= item <= _MAX_WIDTH]
            if len(numbers) != len(value) or len(numbers) < self.n_layers:
                raise BadHeaderError(f"{self.arch}.{name} is not a list of {self.n_layers} numbers")
            return [int(number) for number in numbers] + [0] * (self.n_blocks - len(numbers))
        if value is None:
            if isinstance(default, list):
                return default
            return [default] * self.n_blocks
        return [self.number(name)] * self.n_blocks

    def lookup_rows(self) -> int:
        """Return the rows that a token reads from lookup tables: one, or one for each hashed
        head."""
        return max(
            1, (self.number("ple.ngram_size", 0) - 1) * self.number("ple.heads_per_ngram", 0)
        )
