"""Streams continue while the disk is slow. Its data is read in parallel with steps, and if the disk
hangs, the KV is computed instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, advance, run, settle
from localllm.engine import EngineSettings
from localllm.engine.cache.disk import DiskTier
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.kv_file import Readable, ReadAhead
from localllm.engine.cache.tree import PrefixCache, as_tokens
from localllm.engine.core import Engine
from localllm.engine.messages import Request
from support.emulated_device import EmulatedDevice
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import TURN, ScriptedBackend

LONG = [TURN, *(40 + i % 97 for i in range(1999))]
SHAPES: dict[str, Callable[[], ScriptedBackend]] = {
    "plain": lambda: ScriptedBackend(n_ctx=8192, n_batch=64),
    "states": lambda: ScriptedBackend(n_ctx=8192, n_batch=64, rewind="none", states=True),
    "whole": lambda: ScriptedBackend(n_ctx=8192, n_batch=64, rewind="none", segments=False),
}


@dataclass
class SlowDisk:
    """A disk that reads files only after the test sets `let`, and records the threads that read."""

    let: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    threads: set[str] = field(default_factory=set)
    spoil: bool = False

    def __call__(self, path: Path) -> Readable:
        self.threads.add(threading.current_thread().name)
        self.asked.set()
        self.let.wait()
        raw = path.read_bytes()
        return BytesIO(raw[:-40] + bytes(40) if self.spoil else raw)


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    slow = SlowDisk()
    yield slow
    slow.let.set()


def ask(key: str, prompt: list[int], n: int = 6) -> Request:
    return request_for(key, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True)


def alone(prompt: list[int], n: int = 6) -> list[int]:
    return run(Engine(SHAPES["plain"]()), ask("a", prompt, n)).tokens["a"]


def started(
    folder: Path, shape: str, disk: SlowDisk, clock: Callable[[], float] = lambda: 0.0
) -> Engine:
    """Return an engine that finds LONG on a slow disk and has a running stream."""
    options = EngineSettings(disk_dir=str(folder), disk_bytes=10**9, headroom_bytes=0)
    first = Engine(SHAPES[shape](), options)
    run(first, ask("earlier", LONG))
    settle(first)
    first.close()
    engine = Engine(SHAPES[shape](), options)
    tier = engine.pool.kv.disk
    assert tier is not None
    tier.open_file = disk
    tier.reads = ReadAhead(tier.load, clock)
    engine.submit(ask("stream", [7, 8, 9], 400), [7, 8, 9])
    for _ in range(5):
        engine.step()
    return engine


def path_of(block: Block) -> Path:
    return block.path


def reads_of(engine: Engine) -> ReadAhead:
    assert engine.pool.kv.disk is not None
    return engine.pool.kv.disk.reads


def finish(engine: Engine, outcome: Outcome) -> None:
    while engine.has_work:
        outcome.take(advance(engine))
    engine.check_integrity()
    assert reads_of(engine).wanted_bytes == 0, "what is not wanted any more is not kept"
    engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_gets_every_token_during_a_disk_read(
    tmp_path: Path, shape: str, disk: SlowDisk
) -> None:
    engine = started(tmp_path, shape, disk)
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    for _ in range(40):
        outcome.take(advance(engine))
    assert disk.asked.wait(60)
    assert len(outcome.tokens["stream"]) == 40
    assert "again" not in outcome.tokens
    disk.let.set()
    finish(engine, outcome)
    assert outcome.tokens["again"] == alone(prompt)
    assert outcome.finish("again").usage.cached_tokens >= len(LONG) - 4, (
        "a state is kept a few tokens before the end"
    )
    assert disk.threads == {"kv-reader"}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_hanging_disk_delays_a_prompt_no_longer_than_computing_it(
    tmp_path: Path, shape: str, disk: SlowDisk
) -> None:
    now = [0.0]
    engine = started(tmp_path, shape, disk, lambda: now[0])
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    engine.step()
    assert disk.asked.wait(60)
    now[0] = 1000.0
    finish(engine, outcome)
    assert outcome.tokens["again"] == alone(prompt)
    assert outcome.finish("again").usage.cached_tokens == 0
    assert engine.snapshot()["recomputed_unread_tokens"] >= len(LONG) - 4  # type: ignore[operator]
    assert engine.snapshot()["lost_blocks"] == 0, "slow is not lost"


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_a_damaged_file_are_computed(tmp_path: Path, shape: str, disk: SlowDisk) -> None:
    disk.spoil = True
    disk.let.set()
    engine = started(tmp_path, shape, disk)
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    finish(engine, outcome)
    assert outcome.tokens["again"] == alone(prompt)
    assert outcome.finish("again").usage.cached_tokens == 0
    snapshot = engine.snapshot()
    assert snapshot["lost_blocks"] > 0  # type: ignore[operator]
    assert disk.threads == {"kv-reader"}


def test_a_cancelled_request_withdraws_its_disk_reads(tmp_path: Path, disk: SlowDisk) -> None:
    engine = started(tmp_path, "plain", disk)
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    outcome.take(advance(engine))
    assert reads_of(engine).wanted_bytes > 0
    outcome.take(engine.cancel("again"))
    assert reads_of(engine).wanted_bytes == 0
    engine.pool.cache.budget.shrink(10**12)
    engine.check_integrity()
    disk.let.set()
    finish(engine, outcome)


def test_a_branch_off_a_running_sequence_continues_after_its_state_is_read(
    tmp_path: Path, disk: SlowDisk
) -> None:
    """Two requests branch off a running sequence at a point whose state is only on disk."""
    engine = started(tmp_path, "states", disk)
    prompt = [*LONG, 5, 6]
    disk.let.set()
    outcome = Outcome()
    outcome.take(engine.submit(ask("runs", prompt, 300), prompt))
    while "runs" not in outcome.tokens:
        outcome.take(engine.step())
    assert engine.pool.kv.disk is not None
    engine.pool.kv.disk.flush()
    engine.pool.kv.disk.sync(engine.pool.kv.trees)
    # Memory drops the blocks that are on disk.
    engine.pool.kv.budget.shrink(10**12)
    disk.let.clear()
    disk.asked.clear()
    other = [*LONG[:-1], 9, 9, 9]
    outcome.take(engine.submit(ask("parts", other), other))
    said = len(outcome.tokens["runs"])
    for _ in range(20):
        outcome.take(advance(engine))
    assert disk.asked.wait(60)
    assert len(outcome.tokens["runs"]) == said + 20
    assert "parts" not in outcome.tokens
    disk.let.set()
    finish(engine, outcome)
    assert outcome.tokens["parts"] == alone(other)
    assert outcome.finish("parts").usage.cached_tokens > 1000
    assert disk.threads == {"kv-reader"}


def test_read_ahead_stays_within_its_byte_limit(tmp_path: Path, disk: SlowDisk) -> None:
    blocks = [Block(None, 0, 8, 100, path=tmp_path / str(i), written=True) for i in range(9)]
    reads = ReadAhead(lambda block, _: memoryview(disk(path_of(block)).read()), ahead_bytes=250)
    assert [reads.want(b, due=False) for b in blocks[:4]] == [True, True, False, False]
    assert reads.want(blocks[4], due=True), "what is needed next is always read"
    assert reads.wanted_bytes == 300
    disk.let.set()
    reads.close()


def test_several_threads_read_a_file_where_a_device_computes(tmp_path: Path) -> None:
    """One thread reads and checks a file more slowly than a card computes its KV."""
    engine = Engine(
        EmulatedDevice(np.zeros((1, 300), dtype=np.float32)),
        EngineSettings(disk_dir=str(tmp_path), disk_bytes=10**9, headroom_bytes=0),
    )
    tier = engine.pool.kv.disk
    assert tier is not None
    data = np.random.default_rng(1).bytes(15 * 2**19)
    tokens = as_tokens(np.arange(32, dtype=np.int32))
    block = tier.make_block(tokens, data, 0)
    tier.write(block, tokens, block.file_time_ns)
    tier.flush()
    block.data = None
    together = threading.Barrier(8, timeout=60)
    opened: list[Path] = []

    def open_file(path: Path) -> Readable:
        opened.append(path)
        if len(opened) > 1:  # the file's header is read first
            together.wait()
        return path.open("rb", buffering=0)

    tier.open_file = open_file
    assert bytes(tier.load(block) or b"") == data
    assert len(opened) == 9
    tier.open_file = lambda path: path.open("rb", buffering=0)
    damaged = bytearray(block.path.read_bytes())
    damaged[-2 * 2**20] ^= 1
    block.path.write_bytes(damaged)
    assert tier.load(block) is None
    engine.close()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["want", "due", "release", "wait"]), st.integers(0, 4)), max_size=40
)


@settings(max_examples=examples(60))
@given(operations=OPERATIONS)
def test_whatever_is_wanted_and_released_the_bytes_are_counted_and_the_data_is_right(
    operations: list[tuple[str, int]],
) -> None:
    blocks = [Block(None, 0, 8, 100 + i, path=Path(str(i)), written=True) for i in range(5)]
    reads = ReadAhead(lambda block, _: memoryview(str(path_of(block)).encode()), ahead_bytes=220)
    users = [0] * 5
    for what, i in operations:
        block = blocks[i]
        if what in ("want", "due"):
            users[i] += reads.want(block, due=what == "due")
            assert what == "want" or users[i]
        elif what == "release" and users[i]:
            reads.release(block)
            users[i] -= 1
        while what == "wait" and users[i] and not reads.ready(block):
            reads.wait(1.0)
        if reads.ready(block):
            assert users[i]
            assert bytes(reads.get(block) or b"") == str(i).encode()
        assert reads.wanted_bytes == sum(
            b.size_bytes for b, n in zip(blocks, users, strict=True) if n
        )
    reads.close()
    assert reads.wanted_bytes == 0


def test_the_reader_rests_between_the_pieces_of_a_file(tmp_path: Path) -> None:
    """A thread that reads and hashes without a pause would take a core from the computation."""
    tier = DiskTier(tmp_path, "model", 10**9)
    tier.open(PrefixCache(capacity_bytes=10**9))
    data = bytes(range(256)) * (4 * 2**12)
    tokens = as_tokens(np.arange(32, dtype=np.int32))
    block = tier.make_block(tokens, data, 0)
    tier.write(block, tokens, block.file_time_ns)
    tier.flush()
    block.data = None
    rests: list[float] = []
    tier.reads.rest = rests.append  # type: ignore[method-assign]
    assert tier.reads.want(block, due=True)
    while not tier.reads.ready(block):
        tier.reads.wait(1.0)
    assert bytes(tier.reads.get(block) or b"") == data
    tier.reads.release(block)
    assert len(rests) >= len(data) // 2**20, "no piece is longer than a megabyte takes"
    assert all(took_s > 0 for took_s in rests)
    tier.close()
