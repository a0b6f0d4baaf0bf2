"""A model's own draft heads: however a sequence was built, they propose the same tokens as if they
had read it at once.

The expected drafts are computed here separately from the product: with two contexts, llama.cpp's
batches of tokens with hidden rows, and one pass over the complete history.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp

from localllm_backends.contract import Backend, BackendFailure, Chunk, LoadError, LoadSpec
from localllm_backends.llamacpp import backend_type, mtp
from localllm_backends.llamacpp.native import start_native
from localllm_backends.llamacpp.weights import load_model
from models import tiny_gguf, tiny_mtp

MOST = 4


class Reference:
    """A model's heads, run from scratch for every token."""

    def __init__(self, path: Path) -> None:
        self._model, _ = load_model(path, LoadSpec(str(path), mtp=True), None)
        self._llama = start_native()
        self._n_embd = llama_cpp.llama_model_n_embd_out(self._model)
        self._n_heads = llama_cpp.llama_model_n_layer_nextn(self._model)

    def _context(self, kind: int) -> int:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 512, 256, 256, 1
        params.ctx_type, params.n_threads, params.n_threads_batch = kind, 1, 1
        context = llama_cpp.llama_init_from_model(self._model, params)
        assert context
        return context  # type: ignore[no-any-return]

    def _hidden(self, context: int, n: int) -> np.ndarray:
        rows = self._llama.llama_get_embeddings_nextn(context)
        return np.ctypeslib.as_array(rows, (n, self._n_embd)).copy()

    def draft(self, history: list[int], most: int, unseen: tuple[int, ...] = ()) -> list[int]:
        """Return the heads' best guesses after `history`. `unseen`: positions before which the
        hidden row is unknown."""
        target = self._context(llama_cpp.LLAMA_CONTEXT_TYPE_DEFAULT)
        self._llama.llama_set_embeddings_nextn(target, True, False)
        array = (llama_cpp.llama_token * len(history))(*history)
        assert (
            llama_cpp.llama_decode(target, llama_cpp.llama_batch_get_one(array, len(history))) == 0
        )
        rows = np.concatenate(
            [np.zeros((1, self._n_embd), np.float32), self._hidden(target, len(history))]
        )
        rows[list(unseen)] = 0
        llama_cpp.llama_free(target)
        # When drafting, the model has not yet computed the newest token, so that token's hidden row
        # is not used.
        read, tail, tail_rows = history[:-1], [history[-1]], [rows[len(history) - 1]]
        for i in range(most):
            head = self._context(llama_cpp.LLAMA_CONTEXT_TYPE_MTP)
            self._llama.llama_set_embeddings_nextn(head, True, True)
            self._llama.llama_set_nextn_layer_offset(head, i if self._n_heads > 1 else 0)
            self._feed(head, read, rows, 0, outputs=False)
            self._feed(head, tail, np.stack(tail_rows), len(read), outputs=True)
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(head, i), shape=(tiny_gguf.VOCAB,)
            )
            tail.append(int(logits.argmax()))
            tail_rows.append(self._hidden(head, len(tail_rows))[-1])
            llama_cpp.llama_free(head)
        return tail[1:]

    def _feed(
        self, context: int, tokens: list[int], rows: np.ndarray, start: int, *, outputs: bool
    ) -> None:
        batch = llama_cpp.llama_batch_ext_init(context)
        kept = []
        for i, token in enumerate(tokens):
            at = llama_cpp.llama_batch_ext_add_token(batch, 0, token)
            row = np.ascontiguousarray(rows[i])
            kept.append(row)
            pointer = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            embd = llama_cpp.llama_embd(pointer, 1, self._n_embd)
            assert llama_cpp.llama_batch_ext_set_embd_token(batch, at, embd)
            llama_cpp.llama_batch_ext_set_pos(batch, at, ctypes.byref(ctypes.c_int32(start + i)))
            llama_cpp.llama_batch_ext_set_output_logits(batch, at, outputs)
        if tokens:
            assert llama_cpp.llama_process(context, llama_cpp.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
        llama_cpp.llama_batch_ext_free(batch)

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mtp.write_mtp(tmp_path_factory.mktemp("mtp") / "mtp.gguf")


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[Reference]:
    made = Reference(path)
    yield made
    made.close()


def load(path: Path, **more: object) -> Backend:
    spec = LoadSpec(
        str(path),
        **{"n_ctx": 512, "n_seq_max": 4, "n_batch": 128, "n_threads": 1, "mtp": True, **more},
    )  # type: ignore[arg-type]
    return backend_type.load(spec)


def draft(backend: Backend, sequence: int, newest: int) -> list[int]:
    (guessed,) = backend.draft([(sequence, newest, MOST)])
    return guessed


def agrees(guessed: list[int], expected: list[int]) -> bool:
    """Return whether the drafts agree. Heads may stop where they are unsure, but not before the
    first token, because the models are sure of all first tokens."""
    return bool(guessed) and guessed == expected[: len(guessed)]


def knows(
    backend: Backend,
    sequence: int,
    reference: Reference,
    line: list[int],
    unseen: tuple[int, ...] = (),
) -> bool:
    """Return whether the heads continue `line` as expected, for several next tokens. Only non-empty
    drafts are compared."""
    said = {newest: draft(backend, sequence, newest) for newest in (7, 40, 123, 200, 333)}
    expected = {
        newest: reference.draft([*line, newest], MOST, unseen)
        for newest, guessed in said.items()
        if guessed
    }
    return len(expected) > 2 and all(
        agrees(said[newest], best) for newest, best in expected.items()
    )


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(n)]


def test_guesses_of_heads_do_not_depend_on_chunk_sizes(path: Path, reference: Reference) -> None:
    backend, rng = load(path), random.Random(1)
    assert backend.capabilities.drafts == 16
    sequence = backend.new_sequence()
    line: list[int] = []
    good = lengths = 0
    for n in (1, 40, 1, 1, 3, 70, 1, 33, 1, 2, 1):
        chunk = words(rng, n)
        backend.step([Chunk(sequence, chunk, min(1, n % 2))])
        line += chunk
        newest = rng.randrange(3, 500)
        guessed = draft(backend, sequence, newest)
        good += agrees(guessed, reference.draft([*line, newest], MOST))
        lengths += len(guessed)
        assert backend.length(sequence) == len(line)
    assert good >= 10, "at most one near-tie"
    assert lengths > 22, "drafts go on after their first token"
    backend.close()


SHAPES: dict[str, tuple[Callable[[Path], Path], int]] = {
    "full": (tiny_mtp.write_mtp, 0),
    "sliding": (tiny_mtp.write_sliding_mtp, 0),
    "recurrent": (tiny_mtp.write_hybrid_mtp, MOST),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rejected_drafts_restore_the_state_of_the_accepted_tokens(
    shape: str, tmp_path: Path
) -> None:
    write, n_rewind = SHAPES[shape]
    path = write(tmp_path / "m.gguf")
    backend, reference, rng = load(path, n_rewind=n_rewind), Reference(path), random.Random(2)
    lines = {backend.new_sequence(): words(rng, rng.randrange(5, 40)) for _ in range(3)}
    backend.step([Chunk(s, line, 0) for s, line in lines.items()])
    good = steps = lengths = 0
    for _ in range(20):
        newest = {s: rng.randrange(3, 500) for s in lines}
        drafts = dict(zip(lines, backend.draft([(s, newest[s], MOST) for s in lines]), strict=True))
        for s, line in lines.items():
            good += agrees(drafts[s], reference.draft([*line, newest[s]], MOST))
            lengths += len(drafts[s])
            steps += 1
        backend.step([Chunk(s, [newest[s], *drafts[s]], 1 + len(drafts[s])) for s in lines])
        for s, line in lines.items():
            kept = rng.randrange(0, len(drafts[s]) + 1)
            line += [newest[s], *drafts[s][:kept]]
            backend.truncate(s, len(line))
    assert good >= steps - 3
    assert lengths > 2 * steps
    backend.close()
    reference.close()


def test_forks_and_cuts_before_unprocessed_tokens_lose_only_one_hidden_row(
    path: Path, reference: Reference
) -> None:
    backend, rng = load(path), random.Random(3)
    source, line = backend.new_sequence(), words(rng, 90)
    backend.step([Chunk(source, line[:80])])
    # A draft lets the heads catch up, so only the last ten tokens are unread.
    draft(backend, source, 5)
    backend.step([Chunk(source, line[80:])])
    # A fork within those tokens or at their end loses no row. A fork before them loses only the
    # hidden row at its end.
    cuts: tuple[tuple[int, tuple[int, ...]], ...] = ((90, ()), (85, ()), (50, (50,)))
    for at, unseen in cuts:
        copy = backend.fork(source, at)
        assert knows(backend, copy, reference, [*line[:at]], unseen)
        more = words(rng, 5)
        backend.step([Chunk(copy, more)])
        assert knows(backend, copy, reference, [*line[:at], *more], unseen)
        backend.drop(copy)
    assert knows(backend, source, reference, [*line])
    backend.truncate(source, 30)
    assert knows(backend, source, reference, [*line[:30]], (30,))
    backend.step([Chunk(source, [11, 12])])
    assert knows(backend, source, reference, [*line[:30], 11, 12], (30,))
    backend.close()


def test_exported_blocks_contain_the_kv_of_the_heads(path: Path, reference: Reference) -> None:
    backend, rng = load(path), random.Random(4)
    source, line = backend.new_sequence(), words(rng, 80)
    backend.step([Chunk(source, line)])
    blocks = [
        (0, 48, backend.export_range(source, 0, 48)),
        (48, 80, backend.export_range(source, 48, 80)),
    ]
    other = load(path)
    copy = other.new_sequence()
    for start, stop, data in blocks:
        other.import_range(copy, data, start, stop)
    assert knows(other, copy, reference, [*line], (80,))
    other.step([Chunk(copy, [20, 21])])
    assert knows(other, copy, reference, [*line, 20, 21], (80,))
    # Blocks with and without the heads' KV are distinguished by fingerprint and by content.
    plain = load_plain(path)
    assert plain.info.fingerprint != other.info.fingerprint
    sequence = plain.new_sequence()
    with pytest.raises(BackendFailure, match="not an exported KV block"):
        plain.import_range(sequence, blocks[0][2], 0, 48)
    plain.step([Chunk(sequence, line)])
    with pytest.raises(BackendFailure, match="not an exported KV block"):
        other.import_range(other.new_sequence(), plain.export_range(sequence, 0, 48), 0, 48)
    for b in (backend, other, plain):
        b.close()


@pytest.mark.parametrize("shape", ["sliding", "recurrent"])
def test_complete_exports_contain_the_kv_of_heads_if_memory_cannot_be_truncated(
    shape: str, tmp_path: Path
) -> None:
    write, n_rewind = SHAPES[shape]
    path = write(tmp_path / "m.gguf")
    backend, reference, rng = load(path, n_rewind=n_rewind), Reference(path), random.Random(8)
    source, line = backend.new_sequence(), words(rng, 70)
    backend.step([Chunk(source, line)])
    copy = backend.new_sequence()
    backend.import_range(copy, backend.export_range(source, 0, 70), 0, 70)
    assert knows(backend, copy, reference, [*line], (70,))
    backend.step([Chunk(copy, [20, 21])])
    assert knows(backend, copy, reference, [*line, 20, 21], (70,))
    # A fork of such a memory at its end has the hidden row.
    fork = backend.fork(source, 70)
    assert knows(backend, fork, reference, [*line])
    backend.step([Chunk(fork, [23])])
    assert knows(backend, fork, reference, [*line, 23])
    backend.close()
    reference.close()


def load_plain(path: Path) -> Backend:
    return backend_type.load(LoadSpec(str(path), n_ctx=512, n_seq_max=4, n_batch=128, n_threads=1))


def test_heads_that_lose_their_place_recover_and_change_no_result(
    path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, plain, rng = load(path), load_plain(path), random.Random(5)
    sequence, line = backend.new_sequence(), words(rng, 40)
    with monkeypatch.context() as patch:
        patch.setattr(mtp.MtpHeads, "decode", lambda _heads, head: False)
        backend.step([Chunk(sequence, line)])
        assert draft(backend, sequence, 5) == []
    more = words(rng, 50)
    got = backend.step([Chunk(sequence, more, 3)]).logits(0).copy()
    check = plain.new_sequence()
    plain.step([Chunk(check, line)])
    expected = plain.step([Chunk(check, more, 3)]).logits(0)
    np.testing.assert_allclose(got, expected, atol=0.02 * float(expected.std()))
    assert draft(backend, sequence, 5), "what was read since is enough to guess from"
    for b in (backend, plain):
        b.close()


def test_several_heads_guess_one_token_each(tmp_path: Path) -> None:
    path = tiny_mtp.write_mtp(tmp_path / "two.gguf", heads=2)
    backend, rng = load(path), random.Random(6)
    assert backend.capabilities.drafts == 2
    reference = Reference(path)
    lines = {backend.new_sequence(): words(rng, rng.randrange(5, 40)) for _ in range(3)}
    backend.step([Chunk(s, line, 0) for s, line in lines.items()])
    good = steps = 0
    for _ in range(12):
        drafts = dict(zip(lines, backend.draft([(s, 77, MOST) for s in lines]), strict=True))
        for s, line in lines.items():
            good += agrees(drafts[s], reference.draft([*line, 77], 2))
            steps += 1
        assert all(len(d) <= 2 for d in drafts.values())
        backend.step([Chunk(s, [77, *drafts[s]], 1) for s in lines])
        for s, line in lines.items():
            line += [77, *drafts[s][: rng.randrange(0, len(drafts[s]) + 1)]]
            backend.truncate(s, len(line))
    assert good >= steps - 2
    backend.close()
    reference.close()


def test_memory_counts_the_heads_context(path: Path) -> None:
    on, off = load(path), load_plain(path)
    assert off.capabilities.drafts == 0
    with pytest.raises(BackendFailure, match="without its draft heads"):
        off.draft([(0, 1, 1)])
    # The trunk has two layers and the heads one layer with a few more cells.
    trunk, added = off.memory().kv_bytes, on.memory().kv_bytes - off.memory().kv_bytes
    assert trunk * 0.5 <= added <= trunk * 0.8
    assert on.memory().compute_bytes > off.memory().compute_bytes
    on.close()
    off.close()


def rewritten(path: Path, to: Path, *, architecture: str = "hy_v3", without: str = "") -> Path:
    """Write `path` with another architecture's name, or without some tensors."""
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(str(to), architecture)
    writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
    writer.add_uint32(f"{architecture}.block_count", 3)
    for tensor in reader.tensors:
        if not without or without not in tensor.name:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    return tiny_gguf.finish(writer, to)


def test_models_whose_heads_cannot_run_are_refused_with_the_reason(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: Path, reason: str) -> None:
        with pytest.raises(LoadError, match=reason):
            backend_type.load(LoadSpec(str(file), n_ctx=256, mtp=True))

    refused(tiny_gguf.write_llama(tmp_path / "llama.gguf"), "lists no draft heads")
    refused(
        rewritten(path, tmp_path / "a.gguf", architecture="exaone4"),
        "does not support draft heads of 'exaone4'",
    )
    refused(rewritten(path, tmp_path / "b.gguf", without="nextn"), "does not contain their weights")
    refused(tmp_path / "absent.gguf", "no file")
    monkeypatch.setattr(start_native(), "missing", lambda name: f"no {name} in this library")
    refused(path, "no mtp in this library")
