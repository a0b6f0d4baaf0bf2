"""The parts of a cached prefix: each block is judged separately, gaps are computed, and KV of other
content is never read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.drive import GREEDY, run, settle
from localllm.engine import EngineSettings
from localllm.engine.cache import identity, tunables
from localllm.engine.core import Engine
from localllm.engine.step_costs import PrefillCost
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for
from support.scripted_backend import TURN, ScriptedBackend

FIRST_LINE = [TURN, *range(60, 82), TURN]
SYSTEM = [40 + i % 91 for i in range(1400)]
FILE = [50 + i % 77 for i in range(1500)]


def engine_on(
    folder: Path, backend: ScriptedBackend | None = None, cache_bytes: int = 10**8
) -> Engine:
    backend = backend or ScriptedBackend(n_ctx=8192, n_batch=64)
    settings = EngineSettings(
        disk_dir=str(folder), disk_bytes=10**9, cache_bytes=cache_bytes, headroom_bytes=0
    )
    engine = Engine(backend, settings)
    # A scripted token takes no time to compute. Here it costs 1 ms, and a read from disk costs what
    # a token of real size would.
    engine.pool.kv.speed = PrefillCost(1e-3)
    assert engine.pool.kv.disk is not None
    engine.pool.kv.disk.reads.learn(20_000, 1.0)
    return engine


def ask(engine: Engine, key: str, prompt: list[int]) -> tuple[list[int], int]:
    outcome = run(engine, request_for(key, prompt, max_tokens=4, sampling=GREEDY, ignore_eos=True))
    settle(engine)
    return outcome.tokens[key], outcome.finish(key).usage.cached_tokens


def test_a_first_line_stored_in_a_wide_block_is_computed_and_the_rest_is_reused(
    tmp_path: Path,
) -> None:
    first = engine_on(tmp_path)
    edit, chat = FIRST_LINE + FILE, FIRST_LINE + SYSTEM + [TURN, 9]
    ask(first, "edit", edit)
    answer, cached = ask(first, "chat", chat)
    assert cached == len(FIRST_LINE)
    first.close()

    backend = ScriptedBackend(n_ctx=8192, n_batch=64)
    second = engine_on(tmp_path, backend)
    again, cached = ask(second, "chat", chat)
    assert again == answer
    assert cached == len(chat) - 1 - len(FIRST_LINE)
    assert second.snapshot()["recomputed_unread_tokens"] == len(FIRST_LINE)
    assert second.snapshot()["recomputed_evicted_tokens"] == 0
    # Once computed, the first line has a block of its own. It is never computed again, even after
    # another restart.
    _, cached = ask(second, "other", FIRST_LINE + SYSTEM + [TURN, 8, 8])
    assert cached == len(FIRST_LINE + SYSTEM) + 1
    second.close()
    third = engine_on(tmp_path)
    _, cached = ask(third, "chat", chat)
    assert cached == len(chat) - 1
    assert third.pool.kv.disk is not None
    assert third.pool.kv.disk.read_blocks == 4, (
        "the large block of the other conversation is not read for its first line"
    )
    third.close()


def test_blocks_read_from_disk_are_in_memory_for_the_next_request(tmp_path: Path) -> None:
    first = engine_on(tmp_path)
    ask(first, "chat", SYSTEM)
    first.close()
    second = engine_on(tmp_path)
    ask(second, "a", [*SYSTEM, TURN, 1])
    assert second.pool.kv.disk is not None
    read = second.pool.kv.disk.read_blocks
    ask(second, "between", [TURN, *range(20, 60)])
    _, cached = ask(second, "b", [*SYSTEM, TURN, 2])
    assert cached >= len(SYSTEM)
    assert second.pool.kv.disk.read_blocks == read
    assert second.pool.cache.held_bytes > 1000
    second.close()


def test_a_full_memory_still_accepts_new_blocks(tmp_path: Path) -> None:
    """In each round, blocks that are on disk give up their memory, at any place in the tree."""
    engine = engine_on(tmp_path, cache_bytes=6000)
    for n in range(12):
        line = [TURN, 100 + n, *SYSTEM[:700]]
        _, cached = ask(engine, f"a{n}", line)
        assert cached < 16
        assert engine.pool.kv.disk is not None
        engine.pool.kv.disk.flush()
        settle(engine)
        ask(engine, f"between{n}", [TURN, 9, *range(20, 60)])
        _, cached = ask(engine, f"b{n}", [*line, TURN, 5])
        assert cached >= len(line), f"round {n}"
        assert engine.pool.cache.held_bytes <= 6000
    engine.close()


@pytest.mark.parametrize("disk", [True, False])
def test_a_sequence_larger_than_the_cache_stays_in_the_context_if_there_are_cells(
    tmp_path: Path, disk: bool
) -> None:
    settings = EngineSettings(
        disk_dir=str(tmp_path) if disk else None,
        disk_bytes=10**9,
        cache_bytes=8_000,
        headroom_bytes=0,
    )
    engine = Engine(ScriptedBackend(n_ctx=20_000, n_batch=64), settings)
    big = [TURN, *[40 + i % 83 for i in range(5000)]]
    ask(engine, "big", big)
    ask(engine, "short", [TURN, *range(20, 90)])
    _, cached = ask(engine, "next", [*big, TURN, 5])
    assert cached >= len(big)
    engine.close()


def test_a_sequence_evicted_from_memory_stays_in_the_context_if_there_are_cells() -> None:
    engine = Engine(
        ScriptedBackend(n_ctx=4000, n_batch=64), EngineSettings(cache_bytes=10**6, headroom_bytes=0)
    )
    line = [TURN, *SYSTEM[:500]]
    ask(engine, "first", line)
    assert engine.pool.cache.budget.shrink(10**6) > 0
    engine.pool.cache.budget.resize(0)
    ask(engine, "beside", [TURN, 7, *range(20, 60)])
    _, cached = ask(engine, "next", [*line, TURN, 5])
    assert cached >= len(line)


def test_tokens_computed_again_are_counted_by_their_reason() -> None:
    engine = Engine(
        ScriptedBackend(n_ctx=600, n_batch=64), EngineSettings(cache_bytes=3000, headroom_bytes=0)
    )
    lines = [[TURN, 100 + n, *SYSTEM[:500]] for n in range(3)]
    for n, line in enumerate(lines):
        ask(engine, f"a{n}", line)
    _, cached = ask(engine, "again", lines[0])
    snapshot = engine.snapshot()
    assert cached < 16
    assert 500 - 64 <= snapshot["recomputed_evicted_tokens"] <= 502  # type: ignore[operator]
    assert (
        sum(v for k, v in snapshot.items() if k.startswith("recomputed_"))
        == snapshot["recomputed_evicted_tokens"]
    )  # type: ignore[misc]
    usage = (
        run(engine, request_for("why", lines[1], max_tokens=2, sampling=GREEDY)).finish("why").usage
    )
    assert "evicted" in usage.cache_miss


def test_a_parked_request_counts_recomputed_tokens() -> None:
    engine = Engine(
        ScriptedBackend(n_ctx=512, n_batch=64), EngineSettings(cache_bytes=0, headroom_bytes=0)
    )
    asked = [
        request_for(
            f"r{i}", [TURN, 9 + i, *[40] * 30], max_tokens=300, sampling=GREEDY, ignore_eos=True
        )
        for i in range(3)
    ]
    run(engine, *asked)
    assert engine.metrics.parked > 0
    assert engine.snapshot()["recomputed_parked_tokens"] > 0  # type: ignore[operator]


def test_new_prompt_tokens_after_parking_do_not_count_as_recomputed() -> None:
    """A request is parked in the middle of its prompt. The rest of the prompt is new, so it does
    not count as recomputed."""
    engine = Engine(
        ScriptedBackend(n_ctx=1024, n_batch=64), EngineSettings(cache_bytes=0, headroom_bytes=0)
    )
    asked = request_for("a", [TURN, *[40] * 500], max_tokens=1, sampling=GREEDY, ignore_eos=True)
    engine.submit(asked, list(asked.prompt))  # type: ignore[arg-type]
    for _ in range(3):
        engine.step()
    job = engine.jobs.running["a"]
    read = job.n_kv
    assert 0 < read < 400
    engine.jobs.park(job)
    while engine.has_work:
        engine.step()
    snapshot = engine.snapshot()
    assert snapshot["prefilled_tokens"] == 501 + read
    assert snapshot["recomputed_parked_tokens"] == read


# --- identity of stored KV ------------------------------------------------------------------------


def age(folder: Path) -> None:
    """Give a folder the time stamp of one that no server has used for more than a day."""
    old_s = folder.stat().st_mtime - 1.1 * tunables.FOLDER_UNUSED_S
    os.utime(folder, (old_s, old_s))


def test_kv_of_another_layout_is_never_read_and_is_deleted_when_old(tmp_path: Path) -> None:
    first = engine_on(tmp_path)
    answer, _ = ask(first, "a", SYSTEM)
    first.close()
    (tmp_path / "another-model").mkdir()
    other = ScriptedBackend(n_ctx=8192, n_batch=64)
    object.__setattr__(other.info, "kv_layout", "another layout")
    (written,) = (path for path in tmp_path.iterdir() if path.name != "another-model")
    age(written)
    second = engine_on(tmp_path, other)
    again, cached = ask(second, "a", SYSTEM)
    assert (again, cached) == (answer, 0)
    second.close()
    assert len(list(tmp_path.iterdir())) == 2, (
        "what the other layout wrote is gone, another model's is not"
    )
    _, cached = ask(engine_on(tmp_path), "a", SYSTEM)
    assert cached == 0


def test_servers_of_two_file_formats_keep_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine_on(tmp_path)
    answer, _ = ask(first, "a", SYSTEM)
    first.close()
    with monkeypatch.context() as newer:
        newer.setattr(identity, "FILE_FORMAT", identity.FILE_FORMAT + 1)
        second = engine_on(tmp_path)
        assert ask(second, "a", SYSTEM) == (answer, 0)
        second.close()
    third = engine_on(tmp_path)
    assert ask(third, "a", SYSTEM) == (answer, len(SYSTEM) - 1)


def test_another_build_with_the_same_layout_reads_the_files(tmp_path: Path) -> None:
    first = engine_on(tmp_path)
    answer, _ = ask(first, "a", SYSTEM)
    first.close()
    other = ScriptedBackend(n_ctx=8192, n_batch=64)
    object.__setattr__(other.info, "kv_meaning", "another build")
    again, cached = ask(engine_on(tmp_path, other), "a", SYSTEM)
    assert (again, cached) == (answer, len(SYSTEM) - 1)


def test_rotated_kv_is_not_read_as_unrotated_and_vice_versa(
    few_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp rotates quantised KV unless an environment variable disables it. Reading rotated KV
    as unrotated, or the reverse, gives garbage."""
    prompt = (
        "<|im_start|>user\nThe capital of France is Paris, of Italy Rome, of Spain Madrid. "
        "What is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n"
    )
    spec = LoadSpec(str(few_layers), n_ctx=512, n_seq_max=1, kv_type_k="q8_0", kv_type_v="q8_0")
    said: list[tuple[str, int]] = []
    for value, disk in (("1", True), (None, True), (None, False)):
        if value is None:
            monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE", raising=False)
        else:
            monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", value)
        backend = llamacpp.load(spec)
        engine = Engine(
            backend, EngineSettings(disk_dir=str(tmp_path) if disk else None, headroom_bytes=0)
        )
        outcome = run(
            engine, request_for("a", prompt, max_tokens=12, sampling=GREEDY, ignore_eos=True)
        )
        said.append((outcome.text["a"], outcome.finish("a").usage.cached_tokens))
        settle(engine)
        blocks = [p.block for p in engine.pool.cache.peek(backend.tokenize(prompt)).parts]
        assert not disk or all(block.written or block.pending for block in blocks)
        engine.close()
    assert said[1] == said[2] == (said[2][0], 0)
    assert len(list(tmp_path.iterdir())) == 2, "a folder for each layout"


def test_the_kv_identity_names_the_library_version_and_the_file_layout(few_layers: Path) -> None:
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=128))
    import llama_cpp

    assert llama_cpp.__version__ in backend.info.kv_meaning
    assert "libllama" in backend.info.kv_meaning or "llama" in backend.info.kv_meaning
    assert backend.info.kv_layout.startswith(
        f"llama.cpp sequence {llama_cpp.LLAMA_STATE_SEQ_VERSION};"
    )
    assert llama_cpp.__version__ not in backend.info.kv_layout
    backend.close()
