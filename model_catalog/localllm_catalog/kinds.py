"""Tell models from companion files such as projectors and drafters, which are not models by
themselves.

The header decides if it is available. A listing has no headers. The words of a file's name then
decide, together with the names and sizes of the other files. Words such as "draft", "mtp" or
"vision" count only if the file is small compared with the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from localllm_catalog import architectures
from localllm_catalog.names import quant_of
from localllm_catalog.quants import MIXTURES

Kind = Literal[
    "model",
    "embedding",
    "reranker",
    "projector",
    "drafter",
    "adapter",
    "imatrix",
    "vocabulary",
    "vocoder",
    "image model",
    "diffusion model",
    "speech model",
    "companion file",
    "pointer",
]
MODELS: frozenset[Kind] = frozenset({"model", "embedding", "reranker"})
# Each kind of companion file in words, and advice to the user.
WORDS: Mapping[Kind, tuple[str, str]] = {
    "projector": (
        "an image or audio projector",
        "it is loaded together with its model: give the model's own file",
    ),
    "drafter": (
        "a drafter (MTP heads or a draft model)",
        "it is loaded together with its model: give the model's own file",
    ),
    "adapter": (
        "an adapter (LoRA)",
        "give its base model's file, and this file with --lora",
    ),
    "imatrix": ("an importance matrix", "it is only for quantisation: give the model's own file"),
    "vocabulary": (
        "a vocabulary without weights",
        "give a file with the model's weights",
    ),
    "vocoder": (
        "a vocoder (sound from codes)",
        "it generates sound, not text: give the language model's own file",
    ),
    "image model": (
        "an image or video model",
        "run it with a diffusion program, or give a language model's file",
    ),
    "diffusion model": (
        "a language model that generates blocks of text by diffusion",
        "no engine here supports those; use an autoregressive model, such as Gemma 4",
    ),
    "speech model": (
        "a speech recogniser",
        "run it with whisper.cpp, or give a language model's file",
    ),
    "companion file": (
        "a macOS metadata file (attributes of the file without ._)",
        "give the file without ._",
    ),
    "pointer": (
        "a Git LFS pointer, not the file itself",
        "run `git lfs pull` there, or download the file again",
    ),
}

# --- by its header --------------------------------------------------------------------------------

_ARCHITECTURES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("projector", ("clip", "mmproj")),
    ("drafter", ("eagle", "eagle2", "eagle3", "dflash", "medusa")),
    ("vocoder", ("wavtokenizer-dec", "snac", "dac", "mimi", "xcodec2", "neucodec")),
    ("speech model", ("whisper",)),
    ("diffusion model", ("diffusion-gemma", "dream", "llada", "llada-moe", "rnd1")),
    # https://github.com/city96/ComfyUI-GGUF (convert.py) and
    # https://github.com/leejet/stable-diffusion.cpp
    ("image model", ("flux", "flux2", "sd1", "sdxl", "sd3", "aura", "auraflow", "hidream", "cosmos",
    "ltxv", "hyvid",
                     "wan", "lumina2", "qwen_image", "pixart", "chroma", "z_image", "omnigen2")),
)  # fmt: skip
_KIND_BY_ARCHITECTURE: Mapping[str, Kind] = {
    arch: kind for kind, archs in _ARCHITECTURES for arch in archs
}
_KIND_BY_TYPE: Mapping[str, Kind] = {
    "mmproj": "projector", "adapter": "adapter", "imatrix": "imatrix", "vocab": "vocabulary",
    "control_vector": "adapter",
}  # fmt: skip
# https://github.com/ggml-org/llama.cpp include/llama.h, enum llama_pooling_type.
_POOLING_NONE = 0
_POOLING_RANK = 4
_DIMENSIONS = (".block_count", ".context_length", ".embedding_length")


def of_header(metadata: Mapping[str, object], n_tensors: int) -> Kind:
    """Return the kind of a GGUF file by its header.

    `n_tensors` is the total of all parts. If it is above 0, `metadata` may end before the
    tokenizer.
    """
    arch = str(metadata.get("general.architecture") or "")
    kind = _KIND_BY_TYPE.get(str(metadata.get("general.type") or ""))
    if kind is not None:
        return kind
    if any(key.startswith("imatrix.") for key in metadata):
        return "imatrix"
    if "adapter.type" in metadata or arch == "controlvector":
        return "adapter"
    if arch in _KIND_BY_ARCHITECTURE:
        return _KIND_BY_ARCHITECTURE[arch]
    if n_tensors == 0 and "tokenizer.ggml.tokens" in metadata:
        return "vocabulary"
    if _is_drafter(metadata, arch):
        return "drafter"
    return _model_kind(metadata, arch)


def is_drafter_config(config: Mapping[str, object]) -> bool:
    """Return whether a config.json describes a drafter for another model (EAGLE-3, DFlash,
    DSpark)."""
    if "dflash_config" in config or "speculators_model_type" in config:
        return True
    stated = config.get("architectures")
    architectures = stated if isinstance(stated, list) else []
    return any("eagle3" in str(name).lower() for name in architectures)


def _is_drafter(metadata: Mapping[str, object], arch: str) -> bool:
    """Return whether the file is a drafter for another model, by its architecture's name, or
    because all of its blocks predict further tokens."""
    if arch.endswith(("-assistant", "-mtp", "-draft")):
        return True
    n_blocks = metadata.get(f"{arch}.block_count")
    return bool(n_blocks) and n_blocks == metadata.get(f"{arch}.nextn_predict_layers")


def _is_of_a_language_model(key: str) -> bool:
    return key.startswith("tokenizer.") or key.endswith(_DIMENSIONS)


def _model_kind(metadata: Mapping[str, object], arch: str) -> Kind:
    """Return whether a model is a reranker, an embedding model, a text model or an image model.

    Diffusion programs write no dimensions of the model (ltx2, wan22, hunyuan_video), and no
    tokenizer.
    """
    if arch and not any(_is_of_a_language_model(key) for key in metadata):
        return "image model"
    pooling = metadata.get(f"{arch}.pooling_type", _POOLING_NONE)
    if pooling == _POOLING_RANK or f"{arch}.classifier.output_labels" in metadata:
        return "reranker"
    if pooling != _POOLING_NONE or arch in architectures.NO_CACHE:
        return "embedding"
    return "model"


# --- by its place ---------------------------------------------------------------------------------

# Words that appear only in names of companion files. A word in _MERGED overrides those of an
# adapter.
_ALWAYS_COMPANION: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("projector", re.compile(r"mm-?proj|(?:^|-)(?:projector|clip)(?:-|$)")),
    ("adapter", re.compile(r"(?:^|-)(?:loras?|adapters?|control-?vectors?)(?:-|$)")),
    ("vocoder",
    re.compile(r"wavtokenizer|vocoder|(?:^|-)(?:snac|dac|vocos|mimi|xcodec2?|neucodec|codec|speech-tokenizer)(?:-|$)")),
    ("vocabulary", re.compile(r"(?:^|-)vocab(?:-only)?(?:-|$)")),
)  # fmt: skip
_MERGED_WORDS = re.compile(r"(?:^|-)(?:merged?|fused|baked)(?:-|$)")
# Words that mark a companion file if there is a complete model in the same listing …
_COMPANION_WORDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "drafter",
        re.compile(
            r"^mtp(?:-|$)|(?:^|-)(?:draft|drafts|drafter|speculator|eagle-?[23]|medusa|dflash)(?:-|$)"
        ),
    ),
    ("imatrix", re.compile(r"^imatrix(?:-|$)")),
)
# … and words that mark one only if the file is also small compared with that model.
_SMALL_COMPANION_WORDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("drafter", re.compile(r"(?:^|-)(?:mtp|nextn|eagle|assistant|heads?)(?:-|$)")),
    ("projector", re.compile(r"(?:^|-)(?:vision|audio|vit|visual|encoder|siglip)(?:-|$)")),
    ("vocoder", re.compile(r"(?:^|-)(?:decoder|tokenizer)(?:-|$)")),
    ("imatrix", re.compile(r"(?:^|-)(?:imatrix|imat)(?:-|$)")),
)
_DRAFTER_FOLDERS = frozenset(
    {"mtp", "draft", "drafts", "drafter", "drafters", "eagle", "eagle3", "speculator", "assistant"}
)
# A companion file has less than this share of the model's weights (bytes ÷ the bits of the name's
# quant).
_SMALL_SHARE = 0.35
# Or it has less than this share of the bytes of the smallest model file. No two quants of a model
# differ that much.
_SHORT_SHARE = 0.12
_SPLIT = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")


def among(files: Mapping[str, int]) -> dict[str, Kind]:
    """Return the kind of each GGUF file, given names in a repository or folder and their bytes."""
    kinds_by_name: dict[str, Kind] = {name: _certain_kind(name) for name in files}
    suggestions = {name: _suggested_kind(name) for name in files if kinds_by_name[name] == "model"}
    model_names = [name for name, (kind, _) in suggestions.items() if kind == "model"]
    if not model_names:
        model_names = list(suggestions)
    sizes = _complete_sizes(files)
    max_weights = max((_n_weights(name, sizes[name]) for name in model_names), default=0.0)
    min_bytes = min((sizes[name] for name in model_names), default=0)
    for name, (kind, at_any_size) in suggestions.items():
        if kind == "model":
            continue
        is_light = _n_weights(name, sizes[name]) < _SMALL_SHARE * max_weights
        is_short = sizes[name] < _SHORT_SHARE * min_bytes
        if is_light or is_short or (at_any_size and name not in model_names):
            kinds_by_name[name] = kind
    return kinds_by_name


def _words(name: str) -> str:
    """Return a file's name in lower case, with its words joined by hyphens, without ending and
    split number."""
    base = re.sub(r"\.gguf$", "", name.rpartition("/")[2].lower())
    return re.sub(r"[^\w]+|_", "-", _SPLIT.sub("", base)).strip("-")


def _certain_kind(name: str) -> Kind:
    if name.rpartition("/")[2].startswith("._"):
        return "companion file"
    words = _words(name)
    for kind, pattern in _ALWAYS_COMPANION:
        if pattern.search(words) and not (kind == "adapter" and _MERGED_WORDS.search(words)):
            return kind
    if re.search(r"(?:^|-)imatrix(?:-|$)", words) and not quant_of(name):
        return "imatrix"
    return "model"


def _suggested_kind(name: str) -> tuple[Kind, bool]:
    """Return the kind that a name suggests, given a model in the same listing ("model" if it
    suggests none).

    The second value is True if the suggestion holds for any size, and False if only for a small
    file.
    """
    words = _words(name)
    if _DRAFTER_FOLDERS & {folder.lower() for folder in name.split("/")[:-1]}:
        return "drafter", True
    for at_any_size, patterns in ((True, _COMPANION_WORDS), (False, _SMALL_COMPANION_WORDS)):
        for kind, pattern in patterns:
            if pattern.search(words):
                return kind, at_any_size
    return "model", False


def _complete_sizes(files: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each file together with the other parts of its split."""
    stems = {name: _SPLIT.sub("", re.sub(r"(?i)\.gguf$", "", name)) for name in files}
    totals: dict[str, int] = {}
    for name, stem in stems.items():
        totals[stem] = totals.get(stem, 0) + files[name]
    return {name: totals[stem] for name, stem in stems.items()}


def _n_weights(name: str, n_bytes: int) -> float:
    """Return the number of weights in a file of `n_bytes`, by the quant in its name (16 bits if the
    name has none)."""
    quant = quant_of(name)
    mixture = MIXTURES.get(quant) or MIXTURES.get(quant.removeprefix("UD-"))
    digit = re.search(r"[1-8]", quant)
    if mixture:
        bits = mixture.file_bits
    elif digit and quant[-2:] != "16":
        bits = float(digit[0]) + 0.5
    else:
        bits = 16.0
    return 8 * n_bytes / bits


# --- whose projector it is ------------------------------------------------------------------------

_NOT_A_MODEL_NAME = re.compile(
    r"(?:mm-?proj(?:ector)?|proj|mm|projector|clip|model|ggml|gguf|vision|audio|encoder|text|visual"
    r"|[if]?f?p?(?:16|32)|bf16|q[0-9]\w*)"
)


def projector_words(name: str) -> tuple[str, ...]:
    """Return the words of a projector's name that are from its model's name; empty for
    "mmproj-model-f16.gguf"."""
    return tuple(word for word in model_words(name) if not _NOT_A_MODEL_NAME.fullmatch(word))


def model_words(name: str) -> tuple[str, ...]:
    """Return the words of a model file's name before its quant. Files with other quants of the
    model share them."""
    words = _words(name)
    quant = quant_of(name).lower().replace("_", "-")
    if quant:
        words = words.replace(quant, "-")
    return tuple(word for word in words.split("-") if word)


def own_projectors(
    model: str, models: Sequence[str], projectors: Sequence[str], *, one_repo: bool
) -> list[str]:
    """Return those of `projectors` (names) that belong to `model`, one of `models` in the same
    folder or repository.

    If all models are quants of one model, a repository's projectors all belong to it. In a folder,
    a projector whose name clearly means another model is left out. With several models, a projector
    belongs to the model in its name. A name without a model counts only in a repository
    (`one_repo`), since its files belong together.
    """
    if not projectors:
        return []
    models_by_words = {model_words(name) for name in models}
    own_words = model_words(model)
    own_names = []
    for name in projectors:
        words = projector_words(name)
        if len(models_by_words) == 1:
            # One word ("p2", "vision") may have any meaning; several words are a model's name.
            is_own = one_repo or len(words) < 2 or bool(_models_named(words, models_by_words))
        elif words:
            is_own = own_words in _models_named(words, models_by_words)
        else:
            is_own = one_repo
        if is_own:
            own_names.append(name)
    return own_names


def _models_named(words: tuple[str, ...], models: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the models that a projector's words name: the model with exactly these words, else the
    only one that starts with them. A publisher's name before them is ignored."""
    spellings = [words]
    if len(words) > 1:
        spellings.append(words[1:])
    for spelling in spellings:
        if spelling in models:
            return {spelling}
    for spelling in spellings:
        beginning = {
            model_name
            for model_name in models
            if model_name[: len(spelling)] == spelling or spelling[: len(model_name)] == model_name
        }
        if len(beginning) == 1:
            return beginning
    return set()
