"""Write main.gguf: a random model that never ends its answer by itself.

    PYTHONPATH=tests python -m benchmarks.cpp_server.endless_model FILE

Several of llama.cpp's tests expect answers up to their limit. A random model ends some of them early,
and which ones depends on the processor. Here the first dimension of the hidden state is constant, and
the rows of the tokens that end an answer point against it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import gguf

from models import tiny_gguf

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ENDS = [2, tiny_gguf.VOCAB - 2, tiny_gguf.VOCAB - 1]  # eos and the two control tokens


class _EndlessWriter(gguf.GGUFWriter):
    def add_tensor(self, name: str, tensor: Any, *rest: Any, **more: Any) -> None:
        if name == "token_embd.weight":
            tensor[:, 0] = 8.0
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensor[0, :] = 0.0
        elif name == "output.weight":
            tensor[:, 0] = 0.0
            tensor[_ENDS, :] = 0.0
            tensor[_ENDS, 0] = -100.0
        super().add_tensor(name, tensor, *rest, **more)


if __name__ == "__main__":
    with mock.patch.object(gguf, "GGUFWriter", _EndlessWriter):
        tiny_gguf.write_llama(Path(sys.argv[1]), template=_TEMPLATE, seed=3)
