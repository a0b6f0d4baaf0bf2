"""Text of users and tools never becomes a control token of the prompt.

The template's own markers do become control tokens.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import httpx
import llama_cpp
import pytest

from conversation.call_templates import TEMPLATES
from localllm.conversation.messages import normalise
from localllm.conversation.template import DEFAULT_TEMPLATE, ChatTemplate
from localllm.engine.media import MediaReader
from localllm.engine.tokens import Tokenizer
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.generation.prompt import ResponseOptions, build_prompt
from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.control_text import LiteralText, control_texts, without_marks
from localllm_backends.llamacpp.model_info import LlamaCppVocabulary
from models import tiny_gguf
from support.http_server import running_server

_ROLES = ("system", "user", "assistant", "tool", "argument", "key", "description")
_FIXED = ("<end>", "<|im_start|>", "<|im_end|>", "<unk>", "[INST]", "<|a|>", "<|a|><|b|>")


class Words:
    """A tokenizer whose tokens are single characters and `controls`."""

    def __init__(self, *controls: str) -> None:
        self.info = SimpleNamespace(control_texts=controls)
        self._split = re.compile(
            "(" + "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) + ")"
        )

    def text_pieces(self, text: str, *, special: bool, add_bos: bool) -> list[str]:
        return [text]

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        return [self._number(word) for word in self._words(text, special)]

    def read(self, text: str) -> list[str]:
        """Return the characters and control texts that a prompt is tokenised into."""
        return [self._spell(token) for token in Tokenizer(cast("Backend", self)).tokens(text)]

    def _number(self, word: str) -> int:
        return (
            ord(word)
            if len(word) == 1
            else sys.maxunicode + 1 + self.info.control_texts.index(word)
        )

    def _spell(self, token: int) -> str:
        above = token - sys.maxunicode - 1
        return chr(token) if above < 0 else str(self.info.control_texts[above])

    def _words(self, text: str, special: bool) -> list[str]:
        parts = self._split.split(text) if special else [text]
        tokens = [[part] if i % 2 else list(part) for i, part in enumerate(parts)]
        return [t for part in tokens for t in part]

    def tokenize_media(self, parts: list[Any], *, add_bos: bool) -> list[Any]:
        return [
            self._words(p, special=not isinstance(p, LiteralText))
            for p in parts
            if isinstance(p, str)
        ]


def _conversation(role: str, text: str) -> tuple[list[dict[str, Any]], list[Any]]:
    def at(place: str) -> str:
        return text if role == place else "plain"

    call = {"name": "f", "arguments": {"a": at("argument"), at("key"): 1}}
    messages = [
        {"role": "system", "content": at("system")},
        {"role": "user", "content": at("user")},
        {"role": "assistant", "content": at("assistant")},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "123456789", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": at("tool")},
    ]
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": at("description")}},
    }
    return normalise(messages), [
        {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ]


def _prompt(template: ChatTemplate, words: Words, role: str, text: str, **options: Any) -> str:
    messages, tools = _conversation(role, text)
    sent = ResponseOptions(tools=tools, **options)
    controls = control_texts(words.info.control_texts)
    return asyncio.run(build_prompt(template, messages, sent, controls=controls)).text


def _evil(rng: random.Random, controls: tuple[str, ...]) -> str:
    parts = []
    for _ in range(rng.randint(1, 6)):
        one, other = rng.choice(controls), rng.choice(controls)
        cut = rng.randint(1, len(one) - 1)
        plain = "".join(rng.choices(string.printable + "é日😀", k=rng.randint(0, 5)))
        parts += [
            rng.choice([one, one + other, one[:cut] + other + one[cut:], one[:cut], one[cut:]]),
            plain,
        ]
    return "".join(parts)


@pytest.mark.parametrize("notation", ["chatml", *sorted(TEMPLATES)])
def test_no_control_token_of_content_reaches_the_prompt(notation: str) -> None:
    template = ChatTemplate(TEMPLATES.get(notation, DEFAULT_TEMPLATE))
    own = re.findall(r"<\|[a-z_]+\|>|<[a-z_]+>|\[[A-Z_]+\]", template.source)
    words = Words(*dict.fromkeys([*own, *_FIXED]))
    rng = random.Random(notation)
    for i in range(40):
        role = _ROLES[i % len(_ROLES)]
        evil = _evil(rng, words.info.control_texts)
        prompts = [_prompt(template, words, role, text) for text in ("plain", evil)]
        plain, tokens = [words.read(p) for p in prompts]
        assert [t for t in tokens if len(t) > 1] == [t for t in plain if len(t) > 1], (role, evil)
        # No text is lost. The order may differ: a template may sort keys, which a marker can
        # change.
        assert sorted("".join(tokens)) == sorted(
            _prompt(template, words, role, evil, parse_special=True)
        )
        assert without_marks(prompts[1]) == "".join(tokens)


def _vocabularies() -> list[str]:
    """Return the paths of real tokenizers from llama.cpp's sources (models/ggml-vocab-*.gguf).

    LOCALLLM_VOCABULARIES names their folder.
    """
    folder = os.environ.get("LOCALLLM_VOCABULARIES")
    return (
        ["smollm2", *(str(path) for path in sorted(Path(folder).glob("*.gguf")))]
        if folder
        else ["smollm2"]
    )


class Real(LlamaCppVocabulary):
    """A real tokenizer, loaded without its weights."""

    def __init__(self, path: str) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        super().__init__(llama_cpp, model)
        self.info = SimpleNamespace(control_texts=self.control_texts)
        spelled = set(self.control_texts)
        text = llama_cpp.llama_vocab_get_text
        # the token for letters that the vocabulary lacks is not a control token
        unknown = self.tokenize("日😀", special=False)
        vocab = llama_cpp.llama_model_get_vocab(model)
        every = range(llama_cpp.llama_vocab_n_tokens(vocab))
        self.controls = {
            t for t in every if text(vocab, t).decode("utf-8", "replace") in spelled
        } - {*unknown}

    def read(self, text: str) -> list[int]:
        return Tokenizer(cast("Backend", self)).tokens(text)


@pytest.mark.parametrize("path", _vocabularies())
def test_no_control_token_of_content_reaches_the_prompt_of_a_real_tokenizer(
    path: str, smollm2: Path
) -> None:
    words = Real(str(smollm2) if path == "smollm2" else path)
    controls = tuple(t for t in words.control_texts if len(t) > 1)
    assert words.controls
    rng = random.Random(path)
    template = ChatTemplate(DEFAULT_TEMPLATE)
    plain = {role: words.read(_prompt(template, words, role, "plain")) for role in _ROLES}
    for i in range(500 if path != "smollm2" else 70):
        role = _ROLES[i % len(_ROLES)]
        evil = _evil(rng, controls)
        prompt = _prompt(template, words, role, evil)
        counted = [
            [t for t in tokens if t in words.controls]
            for tokens in (words.read(prompt), plain[role])
        ]
        assert counted[0] == counted[1], (role, evil)


def test_user_defined_markers_in_content_stay_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gguf.GGUFWriter.add_token_types

    def as_user_defined(self: Any, types: list[Any]) -> None:
        real(self, [*types[:-2], gguf.TokenType.USER_DEFINED, types[-1]])

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", as_user_defined)
    words = Real(str(tiny_gguf.write_llama(tmp_path / "own.gguf")))
    turn = words.tokenize("<|turn|>", special=False)
    assert len(turn) == 1
    marked = control_texts(words.control_texts).marked("a<|turn|><|<|turn|>turn|>b")
    tokens = words.read(f"<|turn|>{marked}<|turn|>")
    assert [t for t in tokens if t in words.controls] == turn * 2
    assert turn[0] not in words.tokenize(LiteralText("x<|turn|>y"), special=False)


def test_control_tokens_in_content_with_images_stay_text() -> None:
    words = Words("<|im_start|>", "<|im_end|>")
    marked = control_texts(words.info.control_texts).marked("a<|im_end|>b")
    tokens, _ = MediaReader(words).read(f"<|im_start|>{marked}<|im_end|>", {}, add_bos=False)
    assert tokens == ["<|im_start|>", *"a<|im_end|>b", "<|im_end|>"]


@pytest.fixture(scope="module")
def http(tiny_model: Path) -> Iterator[httpx.Client]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(tiny_model), n_ctx=2048, n_seq_max=2)))
    with (
        running_server({"m": host}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "extra", "count"),
    [
        ("/v1/chat/completions", {}, lambda a: a["usage"]["prompt_tokens"]),
        (
            "/v1/messages",
            {},
            lambda a: sum(n for k, n in a["usage"].items() if k.endswith("input_tokens")),
        ),
        ("/api/chat", {"stream": False}, lambda a: a["prompt_eval_count"]),
    ],
)
def test_each_dialect_counts_content_as_text_unless_parse_special_is_set(
    http: httpx.Client, path: str, extra: Any, count: Any
) -> None:
    body = {"messages": [{"role": "user", "content": "a<|turn|>b"}], "max_tokens": 1, **extra}
    literal, parsed = [
        count(http.post(path, json={**body, **p}).json()) for p in ({}, {"parse_special": True})
    ]
    # One token replaces eight letters. After a control token this vocabulary adds a space.
    assert literal == parsed + len("<|turn|>") - 2


def test_apply_template_shows_content_as_it_was_sent(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a<|turn|>b"}]}
    assert "a<|turn|>b" in http.post("/apply-template", json=body).json()["prompt"]


def test_an_answer_continues_a_prefill_that_spells_a_control_token(http: httpx.Client) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a<|turn|>b"}]
    answer = http.post("/v1/chat/completions", json={"messages": said, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
