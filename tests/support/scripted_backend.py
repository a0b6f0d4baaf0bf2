"""A backend without weights for unit tests: its next token is a pure function of the earlier
tokens.

It passes the same conformance suite as the real ones. `rewind`, `segments` and `states` choose the
kind of memory that it imitates. Tokens 3..258 are bytes (token - 3), 0 unknown, 1 begin, 2 end of
text, 259 a control token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    Backend,
    BackendFailure,
    CannotRewindError,
    Capabilities,
    Chunk,
    MemoryReport,
    ModelInfo,
    NoCellsError,
    StepResult,
)

N_VOCAB = 260
END = 2
TURN = 259
_BYTE = 3


def row_after(tokens: Seq[int]) -> NDArray[np.float32]:
    """Return the logits after `tokens`: random, but the same for the same tokens."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    row = rng.standard_normal(N_VOCAB).astype(np.float32)
    # Printable text is likely, and sometimes an end.
    row[_BYTE + 32 : _BYTE + 127] += 3.0
    row[END] += 1.5
    return row


class ScriptedResult(StepResult):
    def __init__(self, rows: list[NDArray[np.float32]]) -> None:
        self.rows = rows

    def argmax(self, chunk: int) -> list[int]:
        return [int(r.argmax()) for r in self.rows[chunk]]

    def logits(self, chunk: int) -> NDArray[np.float32]:
        return self.rows[chunk]


class ScriptedBackend(Backend):
    """See the module docstring."""

    def __init__(
        self,
        *,
        n_ctx: int = 256,
        n_seq_max: int = 4,
        n_batch: int = 32,
        rewind: Literal["any", "bounded", "none"] = "any",
        rewind_tokens: int = 0,
        segments: bool = True,
        states: bool = False,
    ) -> None:
        self._n_ctx = n_ctx
        self.lines: dict[int, list[int]] = {}
        self.shared: dict[int, list[object]] = {}
        self._next = 0
        self._window_steps: dict[int, int] = {}
        self.fail_next_step: str | None = None
        self.steps: list[list[tuple[int, int]]] = []
        self.computed_tokens = 0
        # Sequences with imported KV and no state yet.
        self._stateless: set[int] = set()
        self.capabilities = Capabilities(
            rewind=rewind,
            rewind_tokens=rewind_tokens,
            shares_cells=True,
            unified=True,
            segments=segments,
            states=states,
        )
        self.info = ModelInfo(
            architecture="scripted",
            description="scripted",
            fingerprint="scripted-1",
            n_vocab=N_VOCAB,
            n_ctx=n_ctx,
            n_ctx_train=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            n_outputs=n_batch,
            n_params=0,
            weights_bytes=0,
            eog_tokens=(END,),
            bos_token=1,
            eos_token=END,
            adds_bos=False,
            bos_text="<s>",
            eos_text="</s>",
            chat_template=None,
            control_texts=("<|turn|>",),
            kv_type_k="f16",
            kv_type_v="f16",
        )

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        out: list[int] = []
        for i, part in enumerate(text.split("<|turn|>") if special else [text]):
            out += [TURN] if i else []
            out += [_BYTE + b for b in part.encode()]
        return out

    def detokenize(self, tokens: Seq[int]) -> str:
        return b"".join(self.token_bytes(t, special=True) for t in tokens).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < N_VOCAB:
            raise BackendFailure(f"token {token} is outside the vocabulary")
        if _BYTE <= token < _BYTE + 256:
            return bytes([token - _BYTE])
        return {0: b"<unk>", 1: b"<s>", 2: b"</s>", TURN: b"<|turn|>"}[token] if special else b""

    def is_control(self, token: int) -> bool:
        return token in (1, END, TURN)

    def new_sequence(self) -> int:
        if len(self.lines) >= self.info.n_seq_max:
            raise NoCellsError("all sequences are in use")
        self._next += 1
        self.lines[self._next], self.shared[self._next] = [], []
        return self._next

    def fork(self, source: int, n_tokens: int) -> int:
        if not 0 <= n_tokens <= len(self.lines[source]):
            raise BackendFailure("can't fork there")
        if n_tokens and not self.can_rewind(source, n_tokens):
            raise CannotRewindError("can't split there")
        target = self.new_sequence()
        self.lines[target] = self.lines[source][:n_tokens]
        self.shared[target] = self.shared[source][:n_tokens]
        return target

    def truncate(self, sequence: int, n_tokens: int) -> None:
        if n_tokens >= len(self.lines[sequence]):
            return
        if n_tokens and not self.can_rewind(sequence, n_tokens):
            raise CannotRewindError("can't go back there")
        self._stateless -= set() if n_tokens else {sequence}
        del self.lines[sequence][n_tokens:]
        del self.shared[sequence][n_tokens:]
        self._window_steps[sequence] = min(self._window_steps.get(sequence, 0), n_tokens)

    def can_rewind(self, sequence: int, n_tokens: int) -> bool:
        length = len(self.lines[sequence])
        if sequence in self._stateless and n_tokens:
            return False
        if n_tokens == length or not n_tokens or self.capabilities.rewind == "any":
            return True
        return (
            self.capabilities.rewind == "bounded"
            and length - n_tokens <= self.capabilities.rewind_tokens
        )

    def drop(self, sequence: int) -> None:
        del self.lines[sequence], self.shared[sequence]
        self._stateless.discard(sequence)

    def length(self, sequence: int) -> int:
        return len(self.lines[sequence])

    def cells_free(self) -> int:
        return self._n_ctx - len({id(c) for line in self.shared.values() for c in line})

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        if self.fail_next_step is not None:
            message, self.fail_next_step = self.fail_next_step, None
            raise BackendFailure(message)
        total = sum(len(c.tokens) for c in chunks)
        if not total or total > self.info.n_batch:
            raise BackendFailure(
                f"a step of {total} tokens does not fit the batch of {self.info.n_batch}"
            )
        if sum(min(c.outputs, len(c.tokens)) for c in chunks) > self.info.n_outputs:
            raise BackendFailure("more outputs than reserved")
        if total > self.cells_free():
            raise NoCellsError("no cells")
        assert not self._stateless & {c.sequence for c in chunks}, (
            "a sequence without its state was stepped"
        )
        self.steps.append([(c.sequence, len(c.tokens)) for c in chunks])
        self.computed_tokens += total
        results = []
        for chunk in chunks:
            line = self.lines[chunk.sequence]
            rows = []
            for i, token in enumerate(chunk.tokens):
                line.append(token)
                self.shared[chunk.sequence].append(object())
                if i >= len(chunk.tokens) - chunk.outputs:
                    rows.append(row_after(line))
            results.append(np.array(rows, dtype=np.float32).reshape(len(rows), N_VOCAB))
        return ScriptedResult(results)

    def export_range(self, sequence: int, start: int, stop: int) -> bytes:
        line = self.lines[sequence]
        if not 0 <= start < stop <= len(line):
            raise BackendFailure("can't export that range")
        if not self.capabilities.segments and (start, stop) != (0, len(line)):
            raise CannotRewindError("only whole")
        return json.dumps({"start": start, "tokens": line[start:stop]}).encode()

    def import_range(self, sequence: int, data: bytes | memoryview, start: int, stop: int) -> None:
        try:
            blob: dict[str, Any] = json.loads(bytes(data))
            first, tokens = blob["start"], blob["tokens"]
        except (ValueError, KeyError, TypeError) as e:
            raise BackendFailure("not an exported block") from e
        if not first <= start < stop <= first + len(tokens) or len(self.lines[sequence]) != start:
            raise BackendFailure("these tokens don't follow")
        if not self.capabilities.segments and (start, stop, first) != (0, len(tokens), 0):
            raise CannotRewindError("only whole")
        if stop - start > self.cells_free():
            raise NoCellsError("no cells")
        part = tokens[start - first : stop - first]
        self.lines[sequence] += part
        self.shared[sequence] += [object() for _ in part]
        if self.capabilities.states:
            self._stateless.add(sequence)

    def state_bytes(self, sequence: int) -> int:
        return len(self.export_state(sequence))

    def export_state(self, sequence: int) -> bytes:
        assert sequence not in self._stateless
        return json.dumps({"state": row_after(self.lines[sequence])[:4].tolist()}).encode()

    def import_state(self, sequence: int, data: bytes | memoryview, n_tokens: int) -> None:
        line = self.lines[sequence]
        try:
            right = json.loads(bytes(data))["state"] == row_after(line[:n_tokens])[:4].tolist()
        except (ValueError, KeyError, TypeError):
            right = False
        if not right or not 0 < n_tokens <= len(line):
            self._stateless.add(sequence)
            raise BackendFailure("not the state behind these tokens")
        self._stateless.discard(sequence)
        del line[n_tokens:], self.shared[sequence][n_tokens:]

    def fork_state(self, source: int, data: bytes | memoryview, n_tokens: int) -> int:
        target = self.new_sequence()
        self.lines[target] = self.lines[source][:n_tokens]
        self.shared[target] = self.shared[source][:n_tokens]
        try:
            self.import_state(target, data, n_tokens)
        except BackendFailure:
            self.drop(target)
            raise
        return target

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 0, 0, 0, 0)

    def check_integrity(self) -> None:
        held = {id(c) for line in self.shared.values() for c in line}
        assert len(held) + self.cells_free() == self._n_ctx
        assert {k: len(v) for k, v in self.lines.items()} == {
            k: len(v) for k, v in self.shared.items()
        }

    def close(self) -> None:
        self.lines.clear()
        self.shared.clear()
