"""Read a checkpoint's tokenizer files: token ids, exact bytes, control tokens and the chat
template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError
from localllm_backends.plain_files import check_plain_file
from localllm_backends.vocabulary import TokenBytes

# Names of fill-in-the-middle tokens in published coder models, by llama.cpp's name of the role
# (llama.cpp src/llama-vocab.cpp, special_fim_*_id).
_FIM = {
    "pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> ▁<PRE> <｜fim▁begin｜> <|code_prefix|>",
    "suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> ▁<SUF> <｜fim▁hole｜> <|code_suffix|>",
    "mid": "<|fim_middle|> <fim-middle> <fim_middle> <MID> ▁<MID> <｜fim▁end｜> <|code_middle|>",
    "pad": "<|fim_pad|> <fim-pad> <fim_pad>",
    "rep": "<|fim_repo|> <|repo_name|> <fim-repo> <reponame>",
    "sep": "<|file_sep|>",
}
_SPACE = "▁"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`; {} if there is no such file. Raises LoadError if it is not
    JSON."""
    if not path.is_file():
        return {}
    check_plain_file(path)
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise LoadError(f"{path.name} can't be read: {e}") from e
    if isinstance(data, dict):
        return data
    return {}


def byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's table from bytes to printable characters (openai/gpt-2,
    encoder.py)."""
    printable: set[int] = set()
    for first, last in ("!~", "¡¬", "®ÿ"):
        printable.update(range(ord(first), ord(last) + 1))
    table = {}
    # Bytes without a printable character are numbered from 256 on.
    n_others = 0
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(256 + n_others)] = byte
            n_others += 1
    return table


class MlxVocabulary(TokenBytes):
    """The vocabulary of a checkpoint. It depends only on the checkpoint's files."""

    def __init__(self, folder: Path, config: dict[str, Any], n_vocab: int) -> None:
        settings = read_json(folder / "tokenizer_config.json")
        source = _tokenizer_json(folder)
        self._parsing, self._literal = _tokenizers(source)
        parsed = json.loads(source)
        added_tokens = parsed.get("added_tokens", [])
        self._added = {int(t["id"]): str(t["content"]) for t in added_tokens}
        self._control = frozenset(int(t["id"]) for t in added_tokens if t.get("special"))
        controls = [self._added[i] for i in sorted(self._control)]
        added = [text for i, text in self._added.items() if i not in self._control]
        super().__init__(n_vocab, controls, added)
        self._kind = _kind(parsed.get("decoder"))
        self._chars = byte_of_char()
        # All end tokens that the checkpoint names, in its order.
        generation = read_json(folder / "generation_config.json")
        ends = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
        text = config.get("text_config")
        if isinstance(text, dict):
            ends += _ids(text.get("eos_token_id"))
        ends += _ids(self._named(settings.get("eos_token"), None))
        self.eog_tokens = tuple(dict.fromkeys(t for t in ends if 0 <= t < n_vocab))
        self.bos_token = self._named(settings.get("bos_token"), config.get("bos_token_id"))
        self.eos_token = self._named(settings.get("eos_token"), config.get("eos_token_id"))
        start = list(self._parsing.encode("", add_special_tokens=True).ids)
        adds_bos = settings.get("add_bos_token", start[:1] == [self.bos_token])
        self.adds_bos = bool(adds_bos) and self.bos_token is not None
        self.chat_template = chat_template(folder, settings)
        self.fim_tokens: dict[str, int] = {}
        for role, names in _FIM.items():
            for name in names.split():
                token = self._parsing.token_to_id(name)
                if token is not None:
                    self.fim_tokens[role] = token
                    break

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Return the token ids of `text`, with BOS first if `add_bos` and the model uses one."""
        tokenizer = self._parsing if special else self._literal
        ids = []
        if add_bos and self.adds_bos and self.bos_token is not None:
            ids.append(self.bos_token)
        for piece in self.always_parsed.pieces(text):
            valid = piece.encode("utf-8", "replace").decode()
            ids += tokenizer.encode(valid, add_special_tokens=False).ids
        return ids

    def is_control(self, token: int) -> bool:
        """Return True for added tokens that the tokenizer marks as special."""
        return token in self._control

    def _bytes(self, token: int, special: bool) -> bytes:
        if token in self._control and not special:
            return b""
        text = self._parsing.id_to_token(token)
        # Logits may be wider than the vocabulary: padding rows for the hardware have no token.
        if text is None:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if self._kind == "bytelevel":
            data = bytearray()
            for char in text:
                if char in self._chars:
                    data.append(self._chars[char])
                else:
                    data += char.encode()
            return bytes(data)
        if self._kind == "sentencepiece":
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return str(text).replace(_SPACE, " ").encode()
        return str(text).encode()

    def _named(self, name: Any, fallback: Any) -> int | None:
        if isinstance(name, dict):
            name = name.get("content")
        if isinstance(name, str):
            token: int | None = self._parsing.token_to_id(name)
            if token is not None:
                return token
        return next(iter(_ids(fallback)), None)


def _tokenizer_json(folder: Path) -> str:
    """Return the text of tokenizer.json.

    If the checkpoint has only the older files, transformers converts them.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_text("utf-8")
    from mlx_lm.utils import load_tokenizer

    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": False})
        return str(wrapper._tokenizer.backend_tokenizer.to_str())
    except Exception as e:
        raise LoadError(
            f"{folder.name!r} has no tokenizer.json, and it could not be created from the "
            f"other tokenizer files: {e}"
        ) from e


def _tokenizers(source: str) -> tuple[Any, Any]:
    """Return a tokenizer that parses control tokens in text, and one that reads them as plain
    text."""
    from tokenizers import Tokenizer

    try:
        parsing = Tokenizer.from_str(source)
        literal = Tokenizer.from_str(source)
    except Exception as e:
        raise LoadError(f"tokenizer.json can't be read: {e}") from e
    for one in (parsing, literal):
        one.no_padding()
        one.no_truncation()
    literal.encode_special_tokens = True
    return parsing, literal


def _kind(decoder: Any) -> str:
    """Return how a token's text represents bytes, from the tokenizer's decoder."""
    decoder_text = json.dumps(decoder, ensure_ascii=False)
    if '"ByteLevel"' in decoder_text:
        return "bytelevel"
    if '"ByteFallback"' in decoder_text or '"Metaspace"' in decoder_text or _SPACE in decoder_text:
        return "sentencepiece"
    return "plain"


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the chat template: chat_template.jinja, chat_template.json, or the tokenizer_config's
    ("default")."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template") or settings.get(
        "chat_template"
    )
    if isinstance(template, list):
        named = {
            t["name"]: t["template"]
            for t in template
            if isinstance(t, dict) and {"name", "template"} <= t.keys()
        }
        template = named.get("default") or next(iter(named.values()), None)
    if isinstance(template, str) and template:
        return template
    return None


def _ids(value: Any) -> Iterable[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, list):
        return tuple(v for v in value if isinstance(v, int))
    return ()
