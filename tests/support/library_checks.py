"""What the backend does on the llama.cpp of this process, as one JSON object: the tests compare it
with the installed one's (tests/backends/test_release_libraries.py).

    python -m support.library_checks FOLDER MODEL.gguf      (FOLDER: for the tiny models)
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from localllm_backends.contract import Backend, Chunk, LoadError, LoadSpec, MediaPart, Placement
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.native import start_native
from localllm_backends.self_test import conformance
from models import tiny_drafters, tiny_gguf, tiny_mtp, tiny_vision
from support.pictures import pixels

PROMPTS = tuple(
    f"{subject} {verb}"
    for subject in ("The capital of France", "A computer", "My dog", "The first of May", "Water")
    for verb in ("is", "was made of", "and the sun", "can be")
)
N_TOKENS = 24
SHAPE: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, "n_batch": 64, "n_threads": 1}


def open_tiny(path: Path, **more: Any) -> Backend:
    placement = Placement(gpu_layers=0)
    return backend_type.load(LoadSpec(str(path), **{**SHAPE, "placement": placement, **more}))


def backend_texts(path: Path) -> list[str]:
    """The greedy text after each of the prompts."""
    backend = open_tiny(path)
    texts = []
    for prompt in PROMPTS:
        sequence = backend.new_sequence()
        tokens = backend.tokenize(prompt, add_bos=True)
        said: list[int] = []
        for _ in range(N_TOKENS):
            tokens = backend.step([Chunk(sequence, tokens)]).argmax(0)
            said += tokens
        backend.drop(sequence)
        texts.append(backend.detokenize(said))
    backend.close()
    return texts


def library_texts(path: Path) -> list[str]:
    """The same texts by llama.cpp's functions alone."""
    llama = start_native()
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    vocab = llama.llama_model_get_vocab(model)
    n_vocab = llama.llama_vocab_n_tokens(vocab)
    shape = llama.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch = SHAPE["n_ctx"], SHAPE["n_batch"], SHAPE["n_batch"]
    shape.n_threads = shape.n_threads_batch = 1
    shape.kv_unified = True
    texts = []
    for prompt in PROMPTS:
        context = llama.llama_init_from_model(model, shape)
        tokens = (llama.llama_token * 256)()
        data = prompt.encode()
        n = llama.llama_tokenize(vocab, data, len(data), tokens, 256, True, True)
        said = (llama.llama_token * N_TOKENS)()
        for i in range(N_TOKENS):
            assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, n)) == 0
            row = np.ctypeslib.as_array(llama.llama_get_logits(context), (n_vocab,))
            tokens[0] = said[i] = int(row.argmax())
            n = 1
        text = ctypes.create_string_buffer(4096)
        llama.llama_detokenize(vocab, said, N_TOKENS, text, 4096, False, True)
        texts.append(text.value.decode("utf-8", "replace"))
        llama.llama_free(context)
    llama.llama_model_free(model)
    return texts


def contract_failures(path: Path, **more: Any) -> dict[str, str]:
    """The outcome of each check of the contract, "" for those that pass or do not apply."""
    backend = open_tiny(path, **more)
    found = {}
    for told in conformance(backend):
        if "outcome" in told:
            found[told["check"]] = told["said"] if told["outcome"] == "failed" else ""
    backend.close()
    return found


def drafts_of_heads(path: Path, **more: Any) -> list[list[int]] | str:
    """Draft tokens after random texts, or why the heads are not used."""
    try:
        backend = open_tiny(path, n_batch=128, **more)
    except LoadError as e:
        return str(e)
    rng = random.Random(3)
    drafts = []
    for _ in range(8):
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, [rng.randrange(3, 500) for _ in range(40)])]).logits(0)
        drafts += backend.draft([(sequence, rng.randrange(3, 500), 4)])
        backend.drop(sequence)
    backend.close()
    return drafts


def image_logits(folder: Path) -> list[float] | str:
    """Logits after a picture, or why there are no images."""
    missing = start_native().missing("images")
    if missing:
        return missing
    model = tiny_vision.write_vision(folder, "qwen2vl")
    backend: Any = open_tiny(model.text, n_ctx=1024, n_batch=256, projector=str(model.projector))
    sequence = backend.new_sequence()
    row: list[float] = []
    for run in backend.tokenize_media(["See ", pixels(300, 200, 3), " it."]):
        if isinstance(run, list):
            row = backend.step([Chunk(sequence, run, 1)]).logits(0)[-1].tolist()
            continue
        image = MediaPart(run, backend.encode_media(run), 0)
        backend.step([Chunk(sequence, [-1] * run.n_tokens, 0, media=image)])
    backend.close()
    return row


def whole_report(folder: Path, model: Path) -> dict[str, Any]:
    target = tiny_drafters.write_target(folder / "target.gguf")
    return {
        "version": start_native().version(),
        "lacks": {name: why for name, why in start_native().capabilities().items() if why},
        "greedy": backend_texts(model),
        "bare": library_texts(model),
        "full attention": contract_failures(tiny_gguf.write_llama(folder / "llama.gguf")),
        "sliding windows": contract_failures(tiny_gguf.write_sliding(folder / "sliding.gguf")),
        "recurrent": contract_failures(tiny_gguf.write_hybrid(folder / "hybrid.gguf")),
        "mtp": drafts_of_heads(tiny_mtp.write_mtp(folder / "mtp.gguf"), mtp=True),
        "eagle3": drafts_of_heads(
            target, drafter=str(tiny_drafters.write_eagle3(folder / "eagle3.gguf"))
        ),
        "image": image_logits(folder),
    }


if __name__ == "__main__":
    print(json.dumps(whole_report(Path(sys.argv[1]), Path(sys.argv[2]))))
