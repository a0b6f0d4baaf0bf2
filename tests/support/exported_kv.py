"""Export the KV of prompts with the llama.cpp of this process, one file for each, and print the
identity of the KV as JSON (tests/backends/test_release_libraries.py).

python -m support.exported_kv FOLDER MODEL.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from localllm.engine.cache.identity import KvIdentity, identity_of
from localllm_backends.contract import Backend, Chunk
from support.library_checks import PROMPTS, open_tiny

# Tokens per step of a prompt.
STEP_TOKENS = 64


def prompts(backend: Backend) -> list[list[int]]:
    """Return 20 prompts of about 120 tokens with different beginnings."""
    found = []
    for i in range(len(PROMPTS)):
        text = ". ".join([*PROMPTS[i:], *PROMPTS[:i]])
        found.append(backend.tokenize(text, add_bos=True))
    return found


def read_prompt(backend: Backend, prompt: list[int], step_tokens: int = STEP_TOKENS) -> int:
    """Return a sequence with the KV of a prompt, except its last token."""
    sequence = backend.new_sequence()
    for at in range(0, len(prompt) - 1, step_tokens):
        backend.step([Chunk(sequence, prompt[at : min(at + step_tokens, len(prompt) - 1)], 0)])
    return sequence


def kv_file(folder: Path, i: int) -> Path:
    return folder / f"prompt-{i}.kv"


def export_prompts(folder: Path, model: Path) -> KvIdentity:
    """Write the KV of each prompt into `folder`."""
    backend = open_tiny(model)
    for i, prompt in enumerate(prompts(backend)):
        sequence = read_prompt(backend, prompt)
        data = backend.export_range(sequence, 0, len(prompt) - 1)
        kv_file(folder, i).write_bytes(data)
        backend.drop(sequence)
    identity = identity_of(backend)
    backend.close()
    return identity


if __name__ == "__main__":
    print(json.dumps(export_prompts(Path(sys.argv[1]), Path(sys.argv[2])).to_json()))
