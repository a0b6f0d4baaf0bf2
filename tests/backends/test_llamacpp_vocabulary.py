"""Text to token ids: a text tokenized in pieces gives the same ids as in one call."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from localllm.engine.tokens import Tokenizer
from localllm_backends.contract import LoadSpec
from localllm_backends.control_text import control_texts
from localllm_backends.llamacpp import backend_type, model_info
from localllm_backends.llamacpp.native import start_native
from models.tiny_gguf import write_llama


def test_every_token_that_ends_an_answer_is_known(
    smollm2: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """These include ends that are ordinary words, if the header names them."""
    named = write_llama(tmp_path / "named.gguf", ends={"eot": 300, "eom": 301})
    for path in (smollm2, tiny_model, named):
        words = backend_type.load(LoadSpec(str(path), n_ctx=64))
        llama = start_native()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        vocab = llama.llama_model_get_vocab(model)
        asked = [t for t in range(words.info.n_vocab) if llama.llama_vocab_is_eog(vocab, t)]
        llama.llama_model_free(model)
        assert list(words.info.eog_tokens) == asked
        assert path != named or {300, 301} <= set(asked)
        words.close()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("which", ["bytes and merges", "SentencePiece"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    smollm2: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    special: bool,
    add_bos: bool,
) -> None:
    words = backend_type.load(
        LoadSpec(str(smollm2 if which == "bytes and merges" else tiny_model), n_ctx=64)
    )
    marks = [t for t in words.info.control_texts if t]
    assert marks
    rng = random.Random(which)
    for _ in range(60):
        parts = [
            rng.choice([*marks, "a", " ", "\n", " b", "word ", "é", "<|", "|>"])
            for _ in range(rng.randrange(60))
        ]
        text = "".join(parts)
        monkeypatch.setattr(model_info, "PIECE_CHARS", 10**9)
        whole = words.tokenize(text, special=special, add_bos=add_bos)
        monkeypatch.setattr(model_info, "PIECE_CHARS", rng.choice([1, 5, 20]))
        assert words.tokenize(text, special=special, add_bos=add_bos) == whole
    words.close()


def test_a_continued_conversation_tokenises_only_new_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only requests that share the KV save this time. For others, a check of a guessed prefix takes
    as long as for any text."""
    words = backend_type.load(LoadSpec(str(tiny_model), n_ctx=64))
    tokenizer, reads, read = Tokenizer(words), list[str](), words.tokenize

    def tokenize(text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        reads.append(text)
        return read(text, special=special, add_bos=add_bos)

    monkeypatch.setattr(words, "tokenize", tokenize)
    text, rng, controls = "", random.Random(1), control_texts(words.info.control_texts)
    turn = words.info.control_texts[-1]
    for _ in range(6):
        said = "".join(rng.choice("ab c\n") for _ in range(9000))
        text += turn + said + controls.marked(f"what is {turn}?")
        whole = Tokenizer(words).tokens(text, add_bos=True)
        reads.clear()
        assert tokenizer.tokens(text, add_bos=True, salt="a") == whole
        assert sum(map(len, reads)) < 20_000
        reads.clear()
        assert tokenizer.tokens(text, add_bos=True, salt="a") == whole
        assert not reads
    for other in ("b", None):
        reads.clear()
        assert tokenizer.tokens(text, add_bos=True, salt=other) == whole
        assert sum(map(len, reads)) > 54_000
    words.close()
