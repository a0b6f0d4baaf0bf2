"""Images and sounds with the llama.cpp backend: the logits after them equal llama.cpp's own,
however the prompt was assembled."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

# Before our backend is loaded: this import redirects the library's log.
import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from localllm_backends.contract import (
    CannotRewindError,
    Chunk,
    ImagePixels,
    LoadError,
    LoadSpec,
    Media,
    MediaPart,
    MediaRun,
    Placement,
    SoundSamples,
)
from localllm_backends.llamacpp import backend_type, threads
from models.tiny_audio import write_hearing
from models.tiny_vision import VisionModel, write_vision
from support.pictures import needs_mtmd, pixels
from support.sounds import samples

pytestmark = needs_mtmd()
KINDS = ("llava", "gemma3", "qwen2vl")
HEARING = ("ultravox", "qwen2a", "gemma4ua", "both")
# Cells in another order are summed in another order, in half precision.
NEAR = 0.02
SIZES = ((64, 64), (300, 200), (20, 500))
LENGTHS_S = (0.5, 3, 31)
N_CTX = 8192


@pytest.fixture(scope="module", params=KINDS + HEARING)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    """A tiny model of each kind with vision or audio."""
    if request.param in HEARING:
        return write_hearing(tmp_path_factory.mktemp("audio"), request.param)
    return write_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def backend(model: VisionModel) -> Iterator[Any]:
    """The loaded model."""
    loaded = backend_type.load(spec_of(model))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def media(backend: Any) -> list[Media]:
    """Three media that the model reads: images, sounds, or both."""
    seen = [pixels(w, h, i) for i, (w, h) in enumerate(SIZES)]
    heard = [samples(seconds, i) for i, seconds in enumerate(LENGTHS_S)]
    if backend.capabilities.vision and backend.capabilities.audio:
        return [heard[0], seen[1], heard[2]]
    return list(seen if backend.capabilities.vision else heard)


def spec_of(model: VisionModel) -> LoadSpec:
    """Return the load settings of these tests."""
    return LoadSpec(
        str(model.text),
        n_ctx=N_CTX,
        n_seq_max=4,
        n_batch=256,
        n_threads=1,
        placement=Placement(gpu_layers=0),
        projector=str(model.projector),
    )


def fill(
    backend: Any, sequence: int, runs: list[list[int] | MediaRun], piece: int = 256
) -> NDArray[np.float32]:
    """Append `runs` and return the last logits. Images are split into steps of `piece` tokens if
    they may be split."""
    rows = None
    for run in runs:
        if isinstance(run, list):
            rows = backend.step([Chunk(sequence, run, 1)]).logits(0)[-1].copy()
            continue
        embeddings = backend.encode_media(run)
        whole = backend.capabilities.images_in_one_step and isinstance(run.media, ImagePixels)
        step = run.n_tokens if whole else piece
        for start in range(0, run.n_tokens, step):
            n = min(step, run.n_tokens - start)
            backend.step([Chunk(sequence, [-1] * n, 0, media=MediaPart(run, embeddings, start))])
    assert rows is not None
    return rows


@pytest.fixture(scope="module")
def native(model: VisionModel) -> Iterator[tuple[Any, Any]]:
    """The model and its projector, loaded by llama.cpp's own functions."""
    from llama_cpp import mtmd_cpp as mtmd

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    weights = llama_cpp.llama_model_load_from_file(str(model.text).encode(), params)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.warmup = False, 1, False
    eyes = mtmd.mtmd_init_from_file(str(model.projector).encode(), weights, options)
    yield weights, eyes
    mtmd.mtmd_free(eyes)
    llama_cpp.llama_model_free(weights)


def theirs(
    native: tuple[Any, Any], text: list[str], pictures: Sequence[Media]
) -> NDArray[np.float32]:
    """Return the logits that llama.cpp's own helper computes for the prompt, in a separate
    context."""
    from llama_cpp import mtmd_cpp as mtmd

    weights, eyes = native
    shape = llama_cpp.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch, shape.n_threads, shape.n_threads_batch = (
        N_CTX,
        256,
        256,
        1,
        1,
    )
    context = llama_cpp.llama_init_from_model(weights, shape)
    bitmaps = []
    for picture in pictures:
        if isinstance(picture, SoundSamples):
            heard = ctypes.cast(ctypes.c_char_p(picture.data), ctypes.POINTER(ctypes.c_float))
            bitmaps.append(mtmd.mtmd_bitmap_init_from_audio(picture.n_samples, heard))
            continue
        data = ctypes.cast(ctypes.c_char_p(picture.data), ctypes.POINTER(ctypes.c_uint8))
        bitmaps.append(mtmd.mtmd_bitmap_init(picture.width, picture.height, data))
    prompt = mtmd.mtmd_default_marker().join(t.encode() for t in text)
    words = mtmd.mtmd_input_text(prompt, len(prompt), True, True)
    chunks = mtmd.mtmd_input_chunks_init()
    array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
    assert mtmd.mtmd_tokenize(eyes, chunks, ctypes.byref(words), array, len(bitmaps)) == 0
    past = llama_cpp.llama_pos(0)
    assert (
        mtmd.mtmd_helper_eval_chunks(eyes, context, chunks, 0, 0, 256, True, ctypes.byref(past))
        == 0
    )
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
    rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,)).copy()
    mtmd.mtmd_input_chunks_free(chunks)
    llama_cpp.llama_free(context)
    return rows


def test_image_logits_equal_those_of_llama_cpp(backend: Any, native: tuple[Any, Any]) -> None:
    for seed in range(20):
        if backend.capabilities.vision:
            picture: Media = pixels(16 + 37 * seed % 300, 16 + 61 * seed % 400, seed)
        elif seed % 4 == 0:
            picture = samples(0.01 + 1.7 * seed, seed)
        else:
            continue
        sequence = backend.new_sequence()
        ours = fill(
            backend,
            sequence,
            backend.tokenize_media(["look: ", picture, " what is it?"], add_bos=True),
        )
        backend.drop(sequence)
        most = NEAR if isinstance(picture, SoundSamples) else 2e-4
        assert np.abs(ours - theirs(native, ["look: ", " what is it?"], [picture])).max() < most
    backend.check_integrity()


@pytest.mark.usefixtures("all_threads")
def test_between_images_the_encoding_thread_has_no_helper_threads(
    model: VisionModel, media: list[Media]
) -> None:
    # Such helpers would let each barrier of each step sleep after the first image.
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    backend = backend_type.load(replace(spec_of(model), n_threads=n))
    if n == 1 or threads.libgomp() is None:
        pytest.skip("needs two processors, and a build with GNU's OpenMP")
    [run] = [r for r in backend.tokenize_media([media[0]]) if isinstance(r, MediaRun)]
    before, encoded, over = set(os.listdir("/proc/self/task")), threading.Event(), threading.Event()

    def encode() -> None:
        backend.encode_media(run)
        encoded.set()
        over.wait()

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    encoded.wait()
    assert set(os.listdir("/proc/self/task")) - before == {str(thread.native_id)}
    over.set()
    thread.join()
    backend.close()


def test_images_may_follow_each_other_and_are_read_in_pieces(
    backend: Any, native: tuple[Any, Any], media: list[Media]
) -> None:
    runs = backend.tokenize_media(["a ", media[0], media[1], " b ", media[2], " c"], add_bos=True)
    expected = theirs(native, ["a ", "", " b ", " c"], media)
    # Thousands of cells in half precision: their sums depend on the order of the cells.
    pieces = {256: 2e-4, 5: 2e-4} if backend.capabilities.vision else {256: NEAR, 70: NEAR}
    for piece, most in pieces.items():
        sequence = backend.new_sequence()
        assert np.abs(fill(backend, sequence, runs, piece) - expected).max() < most
        backend.drop(sequence)


def test_a_sequence_with_images_can_be_forked_cut_and_moved_at_image_edges(
    backend: Any, media: list[Media]
) -> None:
    runs = backend.tokenize_media(["a ", media[1], " b ", media[2], " c"])
    tail = backend.tokenize(" and then")
    first = backend.new_sequence()
    fill(backend, first, runs)
    length = backend.length(first)
    expected = backend.step([Chunk(first, tail, 1)]).logits(0)[-1].copy()
    edge = length - len(runs[-1])
    if backend.capabilities.rewind == "any":
        forked = backend.fork(first, length)
        assert np.abs(backend.step([Chunk(forked, tail, 1)]).logits(0)[-1] - expected).max() < NEAR
        backend.truncate(forked, edge)
        assert np.abs(fill(backend, forked, [[*runs[-1], *tail]]) - expected).max() < NEAR
        backend.drop(forked)
    state = backend.export_state(first) if backend.capabilities.states else None
    cuts = [
        0,
        *np.cumsum([r.n_tokens if isinstance(r, MediaRun) else len(r) for r in runs]),
        length + len(tail),
    ]
    blobs = [backend.export_range(first, a, b) for a, b in itertools.pairwise(cuts)]
    whole = backend.export_range(first, 0, length + len(tail))
    for pieces in (
        list(zip(blobs, cuts, cuts[1:], strict=False)),
        [(whole, 0, cuts[2]), (whole, cuts[2], cuts[-1])],
    ):
        other = backend.new_sequence()
        for blob, start, stop in pieces:
            backend.import_range(other, blob, start, stop)
        if state is not None:
            backend.import_state(other, state, length + len(tail))
        ours = backend.step([Chunk(other, tail, 1)]).logits(0)[-1].copy()
        again = backend.fork(first, length + len(tail))
        assert np.abs(ours - backend.step([Chunk(again, tail, 1)]).logits(0)[-1]).max() < NEAR
        backend.drop(other)
        backend.drop(again)
    backend.drop(first)
    backend.check_integrity()


def test_an_image_with_all_tokens_at_one_position_is_never_truncated(backend: Any) -> None:
    if backend.info.architecture != "qwen2vl" or not backend.capabilities.vision:
        pytest.skip("its tokens stand one behind the other")
    sequence = backend.new_sequence()
    fill(backend, sequence, backend.tokenize_media(["a ", pixels(300, 200, 1), " b"]))
    with pytest.raises(CannotRewindError, match="truncated inside an image"):
        backend.truncate(sequence, backend.length(sequence) - 20)
    backend.drop(sequence)


def test_the_same_pixels_have_the_same_key_and_others_another(
    backend: Any, media: list[Media]
) -> None:
    a, b, c = (backend.tokenize_media(["", media[i]]) for i in (0, 0, 1))
    keys = [next(r for r in runs if isinstance(r, MediaRun)).key for runs in (a, b, c)]
    assert keys[0] == keys[1] != keys[2]


def test_a_repeated_sound_is_tokenised_quickly(backend: Any) -> None:
    if not backend.capabilities.audio:
        pytest.skip("it hears nothing")
    took_s = []
    layouts = []
    first = samples(60, 1)
    for sound in (first, first, SoundSamples(bytes(len(first.data)), b"silence")):
        before_s = process_time()
        runs = backend.tokenize_media(["hear: ", sound, " so?"], add_bos=True)
        took_s.append(process_time() - before_s)
        layouts.append([run if isinstance(run, list) else (run.part, run.n_tokens) for run in runs])
    assert layouts[0] == layouts[1] == layouts[2]
    assert max(took_s[1:]) < took_s[0] / 3


def test_a_file_that_is_no_projector_is_refused_with_the_reason(
    model: VisionModel, tmp_path: Path
) -> None:
    broken = tmp_path / "mmproj-broken.gguf"
    broken.write_bytes(model.projector.read_bytes()[:5000])
    for path, said in (
        (broken, "can't be loaded"),
        (model.text, "can't be loaded"),
        (tmp_path / "none.gguf", "no file"),
    ):
        with pytest.raises(LoadError, match=said):
            backend_type.load(LoadSpec(str(model.text), n_ctx=256, projector=str(path)))
