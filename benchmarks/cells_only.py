"""A backend without computation for the engine of the traces. It counts cells and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    Backend,
    BackendFailure,
    Capabilities,
    Chunk,
    MemoryReport,
    ModelInfo,
    NoCellsError,
    StepResult,
)

SCALED_TOKEN_BYTES = 2_048


class _Same(StepResult):
    def __init__(self, n_rows: Sequence[int]) -> None:
        row = np.zeros(260, dtype=np.float32)
        row[7] = 1.0
        self._rows = [np.repeat(row[None], n, 0) for n in n_rows]

    def argmax(self, chunk: int) -> list[int]:
        """Return the same token for each row."""
        return [7] * len(self._rows[chunk])

    def logits(self, chunk: int) -> NDArray[np.float32]:
        """Return the same row for each chunk."""
        return self._rows[chunk]


class CellsOnly(Backend):
    """A backend without computation. It counts cells, and exports each token with a fixed number of
    bytes."""

    def __init__(self, n_ctx: int) -> None:
        self.capabilities = Capabilities("any", 0, shares_cells=True, segments=True, unified=True)
        self.info = ModelInfo(
            architecture="cells", description="cells", fingerprint="cells", n_vocab=260,
            n_ctx=n_ctx, n_ctx_train=n_ctx,
            n_seq_max=16, n_batch=1024, n_outputs=64, n_params=0, weights_bytes=0, eog_tokens=(2,),
            bos_token=1, eos_token=2,
            adds_bos=False, bos_text="", eos_text="", chat_template=None, kv_type_k="f16",
            kv_type_v="f16",
        )  # fmt: skip
        self._lines: dict[int, list[int]] = {}
        self._cells: dict[int, list[int]] = {}
        self._users: dict[int, int] = {}
        self._next = 0
        self.computed_tokens = 0

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Return the text's bytes as tokens."""
        return list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return an empty text."""
        return ""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the same byte for every token."""
        return b"a"

    def is_control(self, token: int) -> bool:
        """Return False for every token."""
        return False

    def new_sequence(self) -> int:
        """Add a sequence. Raises NoCellsError if all are in use."""
        if len(self._lines) >= self.info.n_seq_max:
            raise NoCellsError("all sequences are in use")
        self._next += 1
        self._lines[self._next], self._cells[self._next] = [], []
        return self._next

    def fork(self, source: int, n_tokens: int) -> int:
        """Add a sequence that shares the first `n_tokens` cells."""
        target = self.new_sequence()
        self._lines[target] = self._lines[source][:n_tokens]
        self._cells[target] = self._cells[source][:n_tokens]
        for cell in self._cells[target]:
            self._users[cell] += 1
        return target

    def truncate(self, sequence: int, n_tokens: int) -> None:
        """Release the cells after `n_tokens`."""
        for cell in self._cells[sequence][n_tokens:]:
            self._users[cell] -= 1
            if not self._users[cell]:
                del self._users[cell]
        del self._lines[sequence][n_tokens:], self._cells[sequence][n_tokens:]

    def can_rewind(self, sequence: int, n_tokens: int) -> bool:
        """Return True: every position is possible."""
        return True

    def drop(self, sequence: int) -> None:
        """Release the sequence and all its cells."""
        self.truncate(sequence, 0)
        del self._lines[sequence], self._cells[sequence]

    def length(self, sequence: int) -> int:
        """Return the number of stored tokens."""
        return len(self._lines[sequence])

    def cells_free(self) -> int:
        """Return the number of cells that no sequence uses."""
        return self.info.n_ctx - len(self._users)

    def _take(self, sequence: int, tokens: Sequence[int]) -> None:
        if len(tokens) > self.cells_free():
            raise NoCellsError("no cells")
        self._lines[sequence] += tokens
        cells = range(self._next, self._next + len(tokens))
        self._next += len(tokens)
        self._cells[sequence] += cells
        self._users.update(dict.fromkeys(cells, 1))

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        """Store the tokens without computing."""
        for chunk in chunks:
            self._take(chunk.sequence, list(chunk.tokens))
            self.computed_tokens += len(chunk.tokens)
        return _Same([min(chunk.outputs, len(chunk.tokens)) for chunk in chunks])

    def export_range(self, sequence: int, start: int, stop: int) -> bytes:
        """Export the start position and the tokens."""
        line = self._lines[sequence]
        if not 0 <= start < stop <= len(line):
            raise BackendFailure("can't export that range")
        rows = np.zeros((stop - start, SCALED_TOKEN_BYTES // 4), dtype=np.int32)
        rows[:, 0] = line[start:stop]
        rows[0, 1] = start
        return rows.tobytes()

    def import_range(self, sequence: int, data: bytes | memoryview, start: int, stop: int) -> None:
        """Import tokens, which must continue the stored ones."""
        rows = np.frombuffer(data, dtype=np.int32).reshape(-1, SCALED_TOKEN_BYTES // 4)
        first = int(rows[0, 1])
        if not first <= start < stop <= first + len(rows) or len(self._lines[sequence]) != start:
            raise BackendFailure("these tokens don't follow")
        self._take(sequence, rows[start - first : stop - first, 0].tolist())

    def memory(self) -> MemoryReport:
        """Return a report without memory."""
        return MemoryReport(0, 0, 0, 0, 0)

    def check_integrity(self) -> None:
        """Check that every cell has a user."""
        held = {cell for cells in self._cells.values() for cell in cells}
        assert held == set(self._users)

    def close(self) -> None:
        """Remove all sequences."""
        self._lines.clear()
        self._cells.clear()
