"""What a file beside a model is: a model, or a companion that is none by itself. Read from its
header, else from its place.

The header decides where it is known. A listing has no headers: then a name's words do, beside the
names and sizes of the files around it, since "draft", "mtp" or "vision" in a name say something
only of a file that is small among its like.
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
    "side file",
    "pointer",
]
MODELS: frozenset[Kind] = frozenset({"model", "embedding", "reranker"})
# What each companion is in words, and what to do with it.
WORDS: Mapping[Kind, tuple[str, str]] = {
    "projector": (
        "an image or audio projector",
        "it is used with its model from beside it: name the model's own file",
    ),
    "drafter": (
        "a drafter (MTP heads or a draft model)",
        "it is used beside its model: name the model's own file",
    ),
    "adapter": (
        "an adapter (LoRA)",
        "name its base model's file, and this one with --lora",
    ),
    "imatrix": ("an importance matrix", "it serves quantising alone: name the model's own file"),
    "vocabulary": (
        "a vocabulary without weights",
        "name a file of the model that holds its weights",
    ),
    "vocoder": (
        "a vocoder (sound from codes)",
        "no text comes of it: name the language model's own file",
    ),
    "image model": (
        "an image or video model",
        "a diffusion program runs it; name a language model's file",
    ),
    "diffusion model": (
        "a language model that writes by diffusion, all words of a block at once",
        "no engine here runs those; name a model that writes word by word, such as Gemma 4",
    ),
    "speech model": ("a speech recogniser", "whisper.cpp runs it; name a language model's file"),
    "side file": (
        "a side file of macOS (attributes of the file without ._)",
        "name the file without ._",
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
_OF_ARCHITECTURE: Mapping[str, Kind] = {
    arch: kind for kind, archs in _ARCHITECTURES for arch in archs
}
_OF_TYPE: Mapping[str, Kind] = {
    "mmproj": "projector", "adapter": "adapter", "imatrix": "imatrix", "vocab": "vocabulary",
    "control_vector": "adapter",
}  # fmt: skip
# https://github.com/ggml-org/llama.cpp include/llama.h, enum llama_pooling_type.
_POOLING_NONE = 0
_POOLING_RANK = 4


def of_header(metadata: Mapping[str, object], n_tensors: int) -> Kind:
    """What a GGUF header says its file is. `n_tensors` are those of all parts; where there are
    some, `metadata` may end before the tokenizer."""
    arch = str(metadata.get("general.architecture") or "")
    kind = _OF_TYPE.get(str(metadata.get("general.type") or ""))
    if kind is not None:
        return kind
    if any(key.startswith("imatrix.") for key in metadata):
        return "imatrix"
    if "adapter.type" in metadata or arch == "controlvector":
        return "adapter"
    if arch in _OF_ARCHITECTURE:
        return _OF_ARCHITECTURE[arch]
    if n_tensors == 0 and "tokenizer.ggml.tokens" in metadata:
        return "vocabulary"
    if _is_drafter(metadata, arch):
        return "drafter"
    return _model_kind(metadata, arch)


def _is_drafter(metadata: Mapping[str, object], arch: str) -> bool:
    """Whether the file drafts for another model: by its architecture's name, or because all of its
    blocks predict further tokens."""
    if arch.endswith(("-assistant", "-mtp", "-draft")):
        return True
    n_blocks = metadata.get(f"{arch}.block_count")
    return bool(n_blocks) and n_blocks == metadata.get(f"{arch}.nextn_predict_layers")


def _model_kind(metadata: Mapping[str, object], arch: str) -> Kind:
    """Whether a model ranks, embeds or writes."""
    pooling = metadata.get(f"{arch}.pooling_type", _POOLING_NONE)
    if pooling == _POOLING_RANK or f"{arch}.classifier.output_labels" in metadata:
        return "reranker"
    if pooling != _POOLING_NONE or arch in architectures.NO_CACHE:
        return "embedding"
    return "model"


# --- by its place ---------------------------------------------------------------------------------

# Words that no file of a whole model has in its name, and those that make it one all the same.
_NEVER: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("projector", re.compile(r"mm-?proj|(?:^|-)(?:projector|clip)(?:-|$)")),
    ("adapter", re.compile(r"(?:^|-)(?:loras?|adapters?|control-?vectors?)(?:-|$)")),
    ("vocoder",
    re.compile(r"wavtokenizer|vocoder|(?:^|-)(?:snac|dac|vocos|mimi|xcodec2?|neucodec|codec|speech-tokenizer)(?:-|$)")),
    ("vocabulary", re.compile(r"(?:^|-)vocab(?:-only)?(?:-|$)")),
)  # fmt: skip
_MERGED = re.compile(r"(?:^|-)(?:merged?|fused|baked)(?:-|$)")
# Words of files that are companions wherever a whole model lies beside them …
_BESIDE: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "drafter",
        re.compile(
            r"^mtp(?:-|$)|(?:^|-)(?:draft|drafts|drafter|speculator|eagle-?[23]|medusa|dflash)(?:-|$)"
        ),
    ),
    ("imatrix", re.compile(r"^imatrix(?:-|$)")),
)
# … and of those that are where they are small beside it.
_SMALL: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("drafter", re.compile(r"(?:^|-)(?:mtp|nextn|eagle|assistant|heads?)(?:-|$)")),
    ("projector", re.compile(r"(?:^|-)(?:vision|audio|vit|visual|encoder|siglip)(?:-|$)")),
    ("vocoder", re.compile(r"(?:^|-)(?:decoder|tokenizer)(?:-|$)")),
    ("imatrix", re.compile(r"(?:^|-)(?:imatrix|imat)(?:-|$)")),
)
_DRAFTER_FOLDERS = frozenset(
    {"mtp", "draft", "drafts", "drafter", "drafters", "eagle", "eagle3", "speculator", "assistant"}
)
# Weights, counted by bytes and the name's quant, below this share of the model beside them are no
# such model's.
_SMALL_SHARE = 0.35
# … nor is a file below this share of the shortest of them: no two quants are further apart.
_SHORT_SHARE = 0.12
_SPLIT = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")


def among(files: Mapping[str, int]) -> dict[str, Kind]:
    """What each of these GGUF files is (name in its repository or folder → bytes), by their names
    and sizes alone."""
    found: dict[str, Kind] = {name: _never(name) for name in files}
    claims = {name: _claim(name) for name in files if found[name] == "model"}
    plain = [name for name, (kind, _) in claims.items() if kind == "model"] or list(claims)
    sizes = _whole_sizes(files)
    largest = max((_weights(name, sizes[name]) for name in plain), default=0.0)
    shortest = min((sizes[name] for name in plain), default=0)
    for name, (kind, wherever) in claims.items():
        if kind == "model":
            continue
        is_light = _weights(name, sizes[name]) < _SMALL_SHARE * largest
        is_short = sizes[name] < _SHORT_SHARE * shortest
        if is_light or is_short or (wherever and name not in plain):
            found[name] = kind
    return found


def _words(name: str) -> str:
    """A file's name in lower case, its words joined by hyphens, without ending and split number."""
    base = re.sub(r"\.gguf$", "", name.rpartition("/")[2].lower())
    return re.sub(r"[^\w]+|_", "-", _SPLIT.sub("", base)).strip("-")


def _never(name: str) -> Kind:
    if name.rpartition("/")[2].startswith("._"):
        return "side file"
    words = _words(name)
    for kind, pattern in _NEVER:
        if pattern.search(words) and not (kind == "adapter" and _MERGED.search(words)):
            return kind
    if re.search(r"(?:^|-)imatrix(?:-|$)", words) and not quant_of(name):
        return "imatrix"
    return "model"


def _claim(name: str) -> tuple[Kind, bool]:
    """What a name's words say of a file beside a model ("model": nothing), and whether wherever it
    lies or small alone."""
    words = _words(name)
    if _DRAFTER_FOLDERS & {folder.lower() for folder in name.split("/")[:-1]}:
        return "drafter", True
    for wherever, patterns in ((True, _BESIDE), (False, _SMALL)):
        for kind, pattern in patterns:
            if pattern.search(words):
                return kind, wherever
    return "model", False


def _whole_sizes(files: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each file together with the other parts of its split."""
    stems = {name: _SPLIT.sub("", re.sub(r"(?i)\.gguf$", "", name)) for name in files}
    totals: dict[str, int] = {}
    for name, stem in stems.items():
        totals[stem] = totals.get(stem, 0) + files[name]
    return {name: totals[stem] for name, stem in stems.items()}


def _weights(name: str, n_bytes: int) -> float:
    """How many weights a file of so many bytes holds, if its quant is what its name says (16 bits
    where it says none)."""
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

_NAMELESS = re.compile(
    r"(?:mm-?proj(?:ector)?|proj|mm|projector|clip|model|ggml|gguf|vision|audio|encoder|text|visual"
    r"|[if]?f?p?(?:16|32)|bf16|q[0-9]\w*)"
)


def projector_words(name: str) -> tuple[str, ...]:
    """The words of a projector's name that are its model's: none of "mmproj-model-f16.gguf"."""
    return tuple(word for word in model_words(name) if not _NAMELESS.fullmatch(word))


def model_words(name: str) -> tuple[str, ...]:
    """The words of a model file's name before its quant, which those of its other quants share."""
    words = _words(name)
    quant = quant_of(name).lower().replace("_", "-")
    if quant:
        words = words.replace(quant, "-")
    return tuple(word for word in words.split("-") if word)


def own_projectors(
    model: str, models: Sequence[str], projectors: Sequence[str], *, one_repo: bool
) -> list[str]:
    """Those of `projectors` (names) that belong to `model`, one of the `models` they lie beside.

    In a repository all do beside quants of one model, in a folder those whose names mean no other.
    Among several models it is the one its name says; a name that says none counts in a repository
    (`one_repo`), whose files belong together, and nowhere else.
    """
    if not projectors:
        return []
    kinds = {model_words(name) for name in models}
    own = model_words(model)
    found = []
    for name in projectors:
        words = projector_words(name)
        if len(kinds) == 1:
            # One word ("p2", "vision") may be anything; several are a model's name.
            is_own = one_repo or len(words) < 2 or bool(_named(words, kinds))
        elif words:
            is_own = own in _named(words, kinds)
        else:
            is_own = one_repo
        if is_own:
            found.append(name)
    return found


def _named(words: tuple[str, ...], models: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The model that a projector's words mean: the one called so, else the only one whose name
    begins so (a publisher's name before it does not count)."""
    spelled = [words]
    if len(words) > 1:
        spelled.append(words[1:])
    for said in spelled:
        if said in models:
            return {said}
    for said in spelled:
        begun = {m for m in models if m[: len(said)] == said or said[: len(m)] == m}
        if len(begun) == 1:
            return begun
    return set()
