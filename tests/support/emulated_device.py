"""A device that computes asynchronously: a step is submitted at once and finishes later, in virtual
time that uses no processor.

For tests and benchmarks, never for the product. A step's cost by its number of tokens is a curve
that was measured on a real card. The first step of a size costs more, because kernels are loaded.
The device's rows are a real model's, extended to larger vocabularies. Its KV is in device memory,
so copying it costs a call and bytes, and every resident token makes a step longer. Time is virtual
(`HostClock`: this thread's CPU time plus its waits for the device), so that other programs don't
disturb it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.candidates import TopKChooser, TopRows
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

Rows = NDArray[np.float32]


class HostClock:
    """Seconds of this thread's own CPU time plus its waits for the device."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._began_s = time.thread_time()

    def now(self) -> float:
        return time.thread_time() - self._began_s + self.waited_s

    def until(self, moment_s: float) -> None:
        """Wait for the device."""
        self.waited_s += max(0.0, moment_s - self.now())


class DeviceClock(HostClock):
    """Seconds waited for the device only: the same on any machine."""

    def now(self) -> float:
        return self.waited_s


# (tokens, seconds) of a step of Llama 3.1 8B in Q4_K on an H200: decode steps up to 32 tokens,
# prefill steps from 64 tokens.
H200_8B = (
    (1, 3.5e-3), (8, 8.1e-3), (32, 9.4e-3), (64, 12.6e-3), (256, 33.7e-3), (1024, 107e-3),
)  # fmt: skip


@dataclass(frozen=True)
class Speeds:
    """The device's speeds. The duration of a step depends on its tokens by `curve` (linear between
    two points and after the last two; a single point: constant), plus `kv_token_bytes` of every
    resident token at `bytes_s`. The first step of each size, rounded up to a power of two, takes
    `first_use_s` more. A decode step whose shape differs from the last one takes `graph_s` more
    (`padded`: shapes are powers of two). A copy costs `copy_s` per run plus its bytes at
    `copy_bytes_s`; rows of logits are copied at that speed, too."""

    curve: tuple[tuple[int, float], ...] = H200_8B
    kv_token_bytes: int = 0
    bytes_s: float = 1e12
    first_use_s: float = 0.05
    graph_s: float = 5e-4
    padded: bool = False
    copy_s: float = 2e-5
    copy_bytes_s: float = 2.5e10

    @classmethod
    def flat(cls, step_s: float, **other: Any) -> Speeds:
        """Return speeds at which every step takes `step_s`, including the first ones."""
        return cls(((1, step_s),), first_use_s=0.0, graph_s=0.0, **other)

    def times(self, factor: float) -> Speeds:
        """Return the speeds of a device whose steps take `factor` times as long."""
        return replace(self, curve=tuple((n, factor * s) for n, s in self.curve))

    def step_s(self, n_tokens: int) -> float:
        """Return the seconds of a step of that many tokens without resident tokens."""
        if len(self.curve) == 1:
            return self.curve[0][1]
        above = next((i for i, (n, _) in enumerate(self.curve) if n >= n_tokens), -1)
        (n, s), (m, t) = self.curve[max(above - 1, 0) if above >= 0 else -2], self.curve[above]
        return t if n == m else s + (n_tokens - n) * (t - s) / (m - n)


def widened(rows: Rows, n_vocab: int, seed: int = 0) -> Rows:
    """Extend a real model's rows to a larger vocabulary. Added logits are drawn from the lower
    three quarters of each row, so that its largest logits remain the largest."""
    rng = np.random.default_rng(seed)
    out = np.empty((len(rows), n_vocab), dtype=np.float32)
    for row, wide in zip(rows, out, strict=True):
        low = np.sort(row)[: 3 * len(row) // 4]
        wide[: len(row)] = row[:n_vocab]
        wide[len(row) :] = rng.choice(low, max(0, n_vocab - len(row)))
    return out


class EmulatedDevice(Backend):
    """See the module docstring. `top`: number of largest logits that the device selects per row (0:
    complete rows are copied)."""

    def __init__(
        self,
        rows: Rows,
        speeds: Speeds | None = None,
        *,
        n_ctx: int = 65_536,
        n_seq_max: int = 32,
        n_batch: int = 2048,
        top: int = 128,
        asynchronous: bool = True,
        clock: HostClock | None = None,
        spell: Callable[[int], bytes] = lambda _: b"and ",
    ) -> None:
        self.speeds = speeds if speeds is not None else Speeds()
        self.clock = clock if clock is not None else HostClock()
        self.rows, self._top, self._spell = rows, top, spell
        order = np.argpartition(rows, -max(top, 1), axis=1)[:, -max(top, 1) :].astype(np.int32)
        totals = np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.float64)
        self._tops = TopRows(order, np.take_along_axis(rows, order, axis=1), totals)
        self._lengths: dict[int, int] = {}
        self._next = 0
        self.done_s = self.computed_s = 0.0
        self.steps = self.copied_bytes = self.graphs = 0
        self._used: set[int] = set()
        self._shape = 0
        self.chunks: list[list[int]] = []
        self.capabilities = Capabilities(
            rewind="any", rewind_tokens=0, shares_cells=True, unified=True, segments=True,
            kv_on_device=True, slow_first_steps=True, asynchronous=asynchronous, samples=top > 0,
        )  # fmt: skip
        self.info = ModelInfo(
            architecture="emulated", description="emulated", fingerprint="emulated-1",
            n_vocab=rows.shape[1], n_ctx=n_ctx,
            n_ctx_train=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch, n_outputs=64, n_params=0,
            weights_bytes=0,
            eog_tokens=(rows.shape[1] - 1,), bos_token=1, eos_token=2, adds_bos=False, bos_text="",
            eos_text="", chat_template=None,
            kv_type_k="f16", kv_type_v="f16",
        )  # fmt: skip

    # --- text -------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        return [3 + b for b in text.encode()]

    def detokenize(self, tokens: Seq[int]) -> str:
        return b"".join(map(self._spell, tokens)).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return self._spell(token)

    def is_control(self, token: int) -> bool:
        return token in (1, 2)

    # --- sequences --------------------------------------------------------------------------------

    def new_sequence(self) -> int:
        if len(self._lengths) >= self.info.n_seq_max:
            raise NoCellsError("all sequences are in use")
        self._next += 1
        self._lengths[self._next] = 0
        return self._next

    def fork(self, source: int, n_tokens: int) -> int:
        target = self.new_sequence()
        self._lengths[target] = n_tokens
        return target

    def truncate(self, sequence: int, n_tokens: int) -> None:
        self._lengths[sequence] = min(n_tokens, self._lengths[sequence])

    def can_rewind(self, sequence: int, n_tokens: int) -> bool:
        return True

    def drop(self, sequence: int) -> None:
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def cells_free(self) -> int:
        return self.info.n_ctx - sum(self._lengths.values())

    # --- compute ----------------------------------------------------------------------------------

    def step(self, chunks: Seq[Chunk]) -> EmulatedResult:
        if sum(len(c.tokens) for c in chunks) > self.cells_free():
            raise NoCellsError("no cells")
        resident = sum(self._lengths.values())
        seconds = (
            self._step_s([len(c.tokens) for c in chunks])
            + resident * self.speeds.kv_token_bytes / self.speeds.bytes_s
        )
        self.done_s = max(self.clock.now(), self.done_s) + seconds
        if not self.capabilities.asynchronous:
            self.clock.until(self.done_s)
        self.computed_s += seconds
        self.steps += 1
        self.chunks.append([len(c.tokens) for c in chunks])
        for chunk in chunks:
            self._lengths[chunk.sequence] += len(chunk.tokens)
        # Each sequence reads the recorded rows from its own start position.
        n = len(self.rows)
        numbers = [
            (7 * c.sequence + self._lengths[c.sequence]) % n if c.outputs else -1 for c in chunks
        ]
        return EmulatedResult(self, list(chunks), numbers, self.done_s)

    def _step_s(self, lengths: list[int]) -> float:
        speeds, n_tokens = self.speeds, sum(lengths)
        seconds = speeds.step_s(n_tokens)
        size = n_tokens.bit_length()
        if size not in self._used:
            self._used.add(size)
            seconds += speeds.first_use_s
        if max(lengths) == 1:
            shape = 1 << (len(lengths) - 1).bit_length() if speeds.padded else len(lengths)
            if shape != self._shape:
                self._shape, self.graphs = shape, self.graphs + 1
                seconds += speeds.graph_s
        return seconds

    def top_of(self, numbers: list[int]) -> TopRows:
        assert self._tops.totals is not None
        return TopRows(
            self._tops.ids[numbers], self._tops.logits[numbers], self._tops.totals[numbers]
        )

    def copied(self, n_bytes: int, runs: int = 1) -> None:
        """Copy bytes from the device after all submitted work is done."""
        self.clock.until(self.done_s)
        self.clock.until(
            self.clock.now() + runs * self.speeds.copy_s + n_bytes / self.speeds.copy_bytes_s
        )
        self.copied_bytes += n_bytes

    # --- KV ---------------------------------------------------------------------------------------

    def export_range(self, sequence: int, start: int, stop: int) -> bytes:
        if not 0 <= start < stop <= self._lengths[sequence]:
            raise BackendFailure("can't export that range")
        self.copied(
            (stop - start) * self.speeds.kv_token_bytes, self.export_runs(sequence, start, stop)
        )
        return f"{start} {stop}".encode().ljust(stop - start)

    def import_range(self, sequence: int, data: bytes | memoryview, start: int, stop: int) -> None:
        self.copied((stop - start) * self.speeds.kv_token_bytes)
        self._lengths[sequence] = stop

    def memory(self) -> MemoryReport:
        weights_bytes = round(self.speeds.step_s(1) * self.speeds.bytes_s)
        return MemoryReport(weights_bytes, self.info.n_ctx * self.speeds.kv_token_bytes, 0, 0, 0)

    def check_integrity(self) -> None:
        assert self.cells_free() >= 0

    def close(self) -> None:
        self._lengths.clear()


class EmulatedResult(StepResult):
    """The result of a step that finishes at `done_s`; reading it earlier waits."""

    def __init__(
        self, device: EmulatedDevice, chunks: list[Chunk], numbers: list[int], done_s: float
    ) -> None:
        self._device, self._chunks, self._numbers, self._done_s = device, chunks, numbers, done_s
        self._few: list[int | None] | None = None

    def argmax(self, chunk: int) -> list[int]:
        token = self._of_few(chunk) if self._chunks[chunk].sample is None else None
        return [int(row.argmax()) for row in self.logits(chunk)] if token is None else [token]

    def sampled(self, chunk: int) -> int | None:
        return self._of_few(chunk) if self._chunks[chunk].sample is not None else None

    def logits(self, chunk: int) -> Rows:
        n = min(self._chunks[chunk].outputs, len(self._chunks[chunk].tokens))
        row = self._device.rows[self._numbers[chunk]]
        self._device.clock.until(self._done_s)
        self._device.copied(n * row.nbytes, 0)
        return np.broadcast_to(row, (n, len(row)))

    def _of_few(self, chunk: int) -> int | None:
        if self._few is None:
            where = [i for i, c in enumerate(self._chunks) if c.top_k_suffices]
            chooser = TopKChooser(self._chunks, where)
            self._device.clock.until(self._done_s)
            self._few = chooser.of(self._device.top_of([self._numbers[i] for i in where]))
        return self._few[chunk]
