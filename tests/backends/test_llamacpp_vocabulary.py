"""Text to token ids: what is read in pieces is read as in one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type, model_info


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
