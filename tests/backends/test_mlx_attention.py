"""MLX's KV memory exposes to every new token exactly the tokens that it may attend to, after any
writes, cuts and moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm_backends.mlx import backend_type
from support.examples import examples

if TYPE_CHECKING:
    from localllm_backends.mlx.sequence_cache import SequenceCache

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]

HEADS, WIDTH, SLACK = 2, 32, 8


@dataclass
class Model:
    """The expected content of a sequence: one number per token, without repeats."""

    tokens: list[float] = field(default_factory=list)


def planes(tokens: list[float]) -> object:
    """Return keys [1, heads, n, width] whose elements all equal the token's number."""
    import mlx.core as mx

    return mx.array(
        np.broadcast_to(
            np.array(tokens, np.float32)[None, None, :, None], (1, HEADS, len(tokens), WIDTH)
        )
    )


def seen_by(keys: object, mask: object, n: int) -> list[list[float]]:
    """Return the tokens that each of the last `n` queries may attend to, read from one row's keys
    and its mask."""
    import mlx.core as mx

    held = np.array(keys)[0, 0, :, 0]
    if mask is None:
        assert n == 1
        return [held.tolist()]
    if isinstance(mask, str):
        allowed = np.tril(np.ones((n, len(held)), dtype=bool), k=len(held) - n)
    else:
        assert isinstance(mask, mx.array)
        allowed = np.array(mask).reshape(n, len(held))
    return [held[row].tolist() for row in allowed]


def expected(tokens: list[float], n: int, window: int | None) -> list[list[float]]:
    """Return the same by definition: all tokens up to the query itself, or the last `window` of
    them."""
    lines = [tokens[: len(tokens) - n + i + 1] for i in range(n)]
    return lines if window is None else [line[-window:] for line in lines]


def line_of(window: int | None = None, n_layers: int = 1) -> SequenceCache:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    from localllm_backends.mlx.kv_format import KvFormat
    from localllm_backends.mlx.layout import Layout
    from localllm_backends.mlx.sequence_cache import SequenceCache

    caches = [KVCache() if window is None else RotatingKVCache(window) for _ in range(n_layers)]
    return SequenceCache(0, Layout(caches, KvFormat(), SLACK))


def append(line: SequenceCache, keys: Any, values: Any) -> Any:
    """Append these keys and return the first layer's keys and values that their tokens attend
    to."""
    n = keys.shape[2]
    line.batch.make_room(n)
    seen = [leaf.update_and_fetch(keys, values) for leaf in line.leaves]
    line.batch.advance([n])
    line.length += n
    return seen[0]


def write(line: SequenceCache, numbers: list[float], window: int | None) -> list[list[float]]:
    mask = line.leaves[0].make_mask(len(numbers), window_size=window)
    keys, values = append(line, planes(numbers), planes(numbers))
    assert np.array_equal(np.array(keys), np.array(values))
    return seen_by(keys, mask, len(numbers))


def fork(line: SequenceCache) -> SequenceCache:
    other = line_of()
    line.fork_into(other, line.length)
    return other


@settings(max_examples=examples(60))
@given(
    window=st.sampled_from([None, 5, 40]),
    moves=st.lists(
        st.tuples(st.sampled_from(["write", "cut", "fork"]), st.integers(1, 90)), max_size=25
    ),
)
def test_attention_of_a_sequence_sees_exactly_its_tokens(
    window: int | None, moves: list[tuple[str, int]]
) -> None:
    line, tokens = line_of(window), list[float]()
    forks: list[tuple[SequenceCache, list[float]]] = []
    number = 0.0
    for what, n in moves:
        if what == "write":
            new = [number + i + 1 for i in range(n)]
            number += n
            tokens = [*tokens, *new]
            assert write(line, new, window) == expected(tokens, n, window)
        elif what == "cut" and tokens:
            keep = max(0, len(tokens) - n % (SLACK + 1))
            assert line.holds(keep)
            tokens = tokens[:keep]
            line.length = keep
            line.place(keep)
        elif what == "fork":
            forks.append((fork(line), list(tokens)))
    for other, held in forks:
        assert write(other, [-1.0, -2.0], window) == expected([*held, -1.0, -2.0], 2, window)
    assert write(line, [-3.0], window) == expected([*tokens, -3.0], 1, window)


@settings(max_examples=examples(40))
@given(
    window=st.sampled_from([None, 5, 40]),
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    steps=st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=12),
)
def test_rows_of_a_batch_grow_and_shrink_independently(
    window: int | None, lengths: list[int], steps: list[list[int]]
) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    from localllm_backends.mlx.kv_format import KvFormat
    from localllm_backends.mlx.layout import Layout
    from localllm_backends.mlx.sequence_cache import SequenceBatch, SequenceCache

    layout = Layout([KVCache() if window is None else RotatingKVCache(window)], KvFormat(), SLACK)
    lines = [SequenceCache(i, layout) for i in range(len(lengths))]
    held: list[list[float]] = []
    for i, (line, n) in enumerate(zip(lines, lengths, strict=True)):
        held.append([1000.0 * (i + 1) + t for t in range(n)])
        write(line, held[i], window)
    batch = SequenceBatch(layout)
    batch.hold(lines)
    number = 0.0
    for counts in steps:
        # All rows have the width of the longest; entries after a row's own end are padding.
        accepted = [min(c, 3) for c in counts[: len(lines)]]
        width = max(1, *accepted)
        batch.make_room(width)
        attention = batch.leaves[0]
        assert attention.offset.tolist() == [len(h) for h in held]
        new = [[number + 100.0 * i + t for t in range(width)] for i in range(len(lines))]
        number -= 1000.0
        mask = attention.make_mask(width, window_size=window)
        stacked = mx.concatenate([planes(row) for row in new], axis=0)
        keys, _ = attention.update_and_fetch(stacked, stacked)
        for i in range(len(lines)):
            row_mask = None if mask is None else mask[i : i + 1]
            got = seen_by(keys[i : i + 1], row_mask, width)
            assert got == expected([*held[i], *new[i]], width, window)
            held[i] = [*held[i], *new[i][: accepted[i]]]
        batch.advance(accepted)
    lines[0].leave_batch()
    assert write(lines[0], [-1.0], window) == expected([*held[0], -1.0], 1, window)


def test_two_sequences_share_buffers_until_one_of_them_writes() -> None:
    import mlx.core as mx

    line = line_of()
    big = mx.ones((1, 8, 4096, 64))
    append(line, big, big)
    mx.eval(line.leaves[0].planes)
    del big
    before = mx.get_active_memory()
    other = fork(line)
    mx.eval(other.leaves[0].planes)
    assert mx.get_active_memory() - before < line.leaves[0].nbytes // 100
    one = mx.ones((1, 8, 1, 64))
    other.place(4095)
    append(other, 2 * one, 2 * one)
    mx.eval(other.leaves[0].planes)
    assert mx.get_active_memory() - before >= line.leaves[0].nbytes
    assert float(line.leaves[0].planes[0][0, 0, 4095, 0]) == 1.0
    assert float(other.leaves[0].planes[0][0, 0, 4095, 0]) == 2.0


def test_growing_writes_in_place_between_blocks() -> None:
    """A step must not copy the complete KV memory: the peak of active memory stays near the memory
    held."""
    import mlx.core as mx

    line = line_of()
    big = mx.ones((1, 8, 4000, 64))
    append(line, big, big)
    mx.eval(line.leaves[0].planes)
    del big
    one = mx.ones((1, 8, 1, 64))
    mx.eval(one)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(20):
        mx.eval(append(line, one, one))
    assert mx.get_peak_memory() - held < line.leaves[0].nbytes // 2


def test_layers_grow_in_different_steps() -> None:
    """Growing copies a buffer. If all layers grew in one step, decoding streams would stall."""
    from mlx_lm.models.cache import KVCache

    from localllm_backends.mlx.kv_format import KvFormat
    from localllm_backends.mlx.layout import Layout
    from localllm_backends.mlx.sequence_cache import SequenceBatch, SequenceCache

    layout = Layout([KVCache() for _ in range(8)], KvFormat(), SLACK)
    lines = [SequenceCache(i, layout) for i in range(2)]
    most, grown = 0, 0
    for _ in range(30):
        before = [leaf.slots for leaf in lines[0].leaves]
        for line in lines:
            append(line, planes([1.0] * 32), planes([1.0] * 32))
        now = [
            a != b for a, b in zip(before, [leaf.slots for leaf in lines[0].leaves], strict=True)
        ]
        if before[0]:
            most, grown = max(most, sum(now)), grown + sum(now)
    assert most == 2
    assert grown >= 16
    batch = SequenceBatch(layout)
    batch.hold(lines)
    most, grown = 0, 0
    for _ in range(16):
        before = [leaf.slots for leaf in batch.leaves]
        batch.make_room(32)
        batch.advance([32, 32])
        now = [a != b for a, b in zip(before, [leaf.slots for leaf in batch.leaves], strict=True)]
        most, grown = max(most, sum(now)), grown + sum(now)
    assert most == 2
    assert grown >= 8


@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "step", "cut", "fork"]), st.integers(1, 300)),
        max_size=8,
    )
)
@settings(max_examples=examples(30))
def test_written_blocks_are_present_after_any_operations(actions: list[tuple[str, int]]) -> None:
    """Blocks are copied into the buffers late, but never after a cut, a fork or a step that needs
    them."""
    import mlx.core as mx

    line, held, token = line_of(), list[float](), 0.0
    for action, n in actions:
        new = [token + i for i in range(n)]
        if action == "write":
            token += n
            block = mx.array(new)[None, None, :, None]
            line.leaves[0].write([block, -block], len(held))
            held += new
            line.continue_at(len(held))
        elif action == "step":
            token += 1
            append(line, mx.full((1, 1, 1, 1), token), mx.full((1, 1, 1, 1), -token))
            held.append(token)
        elif action == "cut":
            held = held[: max(0, len(held) - n)]
            line.continue_at(len(held))
        else:
            line = fork(line)
        assert line.leaves[0].offset == len(held)
    if held:
        keys, values = line.leaves[0].row(0)
        assert keys.flatten().tolist() == held
        assert (-values).flatten().tolist() == held


def test_many_written_blocks_are_copied_in_one_pass() -> None:
    """A stored prefix arrives in blocks. Growing the buffers for each block would copy the first
    blocks again and again."""
    import mlx.core as mx

    line = line_of()
    [leaf] = line.leaves
    blocks = [mx.ones((1, 8, 512, 64)) for _ in range(4)]
    mx.eval(blocks)
    before = mx.get_active_memory()
    for i, block in enumerate(blocks):
        leaf.write([block, block], 512 * i)
        line.continue_at(512 * (i + 1))
        assert mx.get_active_memory() - before < block.nbytes // 100
        assert leaf.nbytes == 2 * sum(b.nbytes for b in blocks[: i + 1])
    one = mx.ones((1, 8, 1, 64))
    mx.eval(append(line, one, one))
    assert leaf.slots < 2048 + 512
