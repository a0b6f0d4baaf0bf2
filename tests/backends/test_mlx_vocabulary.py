"""Token ids to exact bytes and back, end tokens and templates, from the several formats of
checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm_backends.contract import LoadError
from localllm_backends.control_text import LiteralText
from localllm_backends.mlx import backend_type
from models import tiny_mlx
from support.examples import examples

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]


def vocabulary(
    folder: Path, config: dict[str, Any] | None = None, n_vocab: int = tiny_mlx.VOCAB
) -> Any:
    from localllm_backends.mlx.vocabulary import MlxVocabulary

    return MlxVocabulary(folder, config or {"eos_token_id": tiny_mlx.END}, n_vocab)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    tiny_mlx.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE over characters with byte fallback, like converted Llama-2 and Gemma tokenizers."""
    folder = tmp_path_factory.mktemp("pieces")
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "é",
    ]
    vocab = {w: i for i, w in enumerate(words)}
    added = [
        {
            "id": vocab[w], "content": w, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for w in ("<unk>", "<s>", "</s>")
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab, "merges": [["▁", "a"], ["a", "b"], ["▁a", "b"]],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    said = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    return folder


@settings(max_examples=examples(150))
@given(text=st.text(max_size=40), spaces=st.booleans())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    byte_level: Path, text: str, spaces: bool
) -> None:
    words = vocabulary(byte_level)
    text = f" {text} " if spaces else text
    tokens = words.tokenize(text, special=False, add_bos=False)
    wanted = text.encode("utf-8", "replace")
    assert b"".join(words.token_bytes(t) for t in tokens) == wanted
    assert words.detokenize(tokens) == wanted.decode()


@settings(max_examples=examples(150))
@given(text=st.text(max_size=40))
def test_byte_fallback_gives_the_bytes_too(sentencepiece: Path, text: str) -> None:
    words = vocabulary(sentencepiece, {}, 270)
    text = text.replace("▁", "_")
    tokens = words.tokenize(text, special=False, add_bos=False)
    assert b"".join(words.token_bytes(t) for t in tokens) == text.encode("utf-8", "replace")


def test_control_tokens_written_in_text_are_parsed_only_when_asked(byte_level: Path) -> None:
    words = vocabulary(byte_level)
    text = "<|turn|>user"
    assert words.tokenize(text, special=True, add_bos=False)[0] == tiny_mlx.TURN
    literal = words.tokenize(text, special=False, add_bos=False)
    assert tiny_mlx.TURN not in literal
    assert words.detokenize(literal) == text
    assert words.is_control(tiny_mlx.TURN)
    assert not words.is_control(5)
    assert words.token_bytes(tiny_mlx.TURN) == b""
    assert words.token_bytes(tiny_mlx.TURN, special=True) == b"<|turn|>"


def test_a_control_mark_in_literal_text_is_split(byte_level: Path, tmp_path: Path) -> None:
    for file in byte_level.iterdir():
        said = file.read_text("utf-8") if file.suffix == ".json" else ""
        (tmp_path / file.name).write_text(
            said.replace('"special": true', '"special": false'), "utf-8"
        )
    words = vocabulary(tmp_path)
    assert tiny_mlx.TURN in words.tokenize("a<|turn|>b", special=False, add_bos=False)
    literal = words.tokenize(
        LiteralText("a<|turn|><|<|turn|>turn|>b"), special=False, add_bos=False
    )
    assert tiny_mlx.TURN not in literal
    assert words.detokenize(literal) == "a<|turn|><|<|turn|>turn|>b"
    assert "<|turn|>" in words.control_texts


def test_bos_is_added_exactly_as_by_the_tokenizer(sentencepiece: Path, byte_level: Path) -> None:
    words = vocabulary(sentencepiece, {}, 270)
    assert (words.bos_token, words.eos_token, words.adds_bos) == (1, 2, True)
    assert words.tokenize("ab", special=True, add_bos=True) == [
        1,
        *words.tokenize("ab", special=True, add_bos=False),
    ]
    plain = vocabulary(byte_level)
    assert (plain.bos_token, plain.adds_bos) == (None, False)
    assert plain.tokenize("ab", special=True, add_bos=True) == plain.tokenize(
        "ab", special=True, add_bos=False
    )


def test_logits_beyond_the_vocabulary_are_never_chosen(byte_level: Path) -> None:
    assert vocabulary(byte_level, n_vocab=640).token_bytes(600) == b""


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 511}, {}, (511,)),
        ({"eos_token_id": [510, 511]}, {}, (510, 511)),
        ({"eos_token_id": 511}, {"eos_token_id": [509, 510]}, (509, 510, 511)),
        ({"text_config": {"eos_token_id": 510}}, {}, (510, 511)),
        ({"eos_token_id": None}, {}, (511,)),
        ({"eos_token_id": 10**6}, {}, (511,)),
    ],
)
def test_every_end_token_of_the_checkpoint_ends_an_answer(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], ends: tuple[int, ...]
) -> None:
    tiny_mlx.write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert set(vocabulary(tmp_path, config).eog_tokens) == set(ends)


def test_the_chat_template_is_found_in_every_supported_file(tmp_path: Path) -> None:
    tiny_mlx.write_tokenizer(tmp_path)
    assert vocabulary(tmp_path).chat_template == tiny_mlx.TEMPLATE
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": named}))
    assert vocabulary(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert vocabulary(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert vocabulary(tmp_path).chat_template == "F"


def test_a_checkpoint_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(LoadError):
        vocabulary(tmp_path)


def test_older_tokenizer_files_are_read_as_the_newer_one(byte_level: Path, tmp_path: Path) -> None:
    """vocab.json and merges.txt, the format of checkpoints before tokenizer.json."""
    model = json.loads((byte_level / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    text = "hello w1 and w2"
    assert vocabulary(tmp_path).tokenize(text) == vocabulary(byte_level).tokenize(text)
