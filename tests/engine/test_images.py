"""Images and sounds in the engine: encoded once, cached as tokens, and never split."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.drive import GREEDY, Outcome, advance, run, settle
from localllm.conversation.sounds import SAMPLES
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.media import MediaReader
from localllm.engine.messages import Generation, Request
from localllm_backends.contract import BackendFailure, Chunk, LoadSpec, MediaPart, Placement
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx_vision, tiny_mtp
from models.tiny_audio import write_hearing
from models.tiny_vision import VisionModel, write_vision
from support.pictures import needs_mlx_vlm, needs_mtmd, needs_pillow, png
from support.sounds import samples

pytestmark = needs_pillow()
IMAGES = {"{A}": png(64, 64, 1), "{B}": png(300, 200, 2), "{C}": png(60, 400, 3)}
SOUNDS = {"{A}": samples(0.6, 1), "{B}": samples(2, 2), "{C}": samples(1.5, 3)}
HEARING = ("gemma4ua", "both")
# The media files of the model under test, by placeholder.
FILES: dict[str, str] = {}


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(kind, marks=needs_mtmd())
            for kind in ("llava", "gemma3", "qwen2vl", *HEARING)
        ),
        *(
            pytest.param(f"mlx-{kind}", marks=needs_mlx_vlm())
            for kind in ("mistral3", "gemma3", "qwen3_vl", "qwen3_5")
        ),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    folder = tmp_path_factory.mktemp("vision")
    show_images()
    if request.param in HEARING:
        heard = ("{A}", "{B}") if request.param == "both" else tuple(SOUNDS)
        for mark in heard:
            FILES[mark] = SAMPLES + base64.b64encode(SOUNDS[mark].data).decode()
        return write_hearing(folder, request.param)
    if request.param.startswith("mlx-"):
        written = tiny_mlx_vision.write(folder / "mlx", request.param.removeprefix("mlx-"))
        return VisionModel(written, written)
    return write_vision(folder, request.param)


def show_images() -> None:
    for mark, data in IMAGES.items():
        FILES[mark] = base64.b64encode(data).decode()


def load(model: VisionModel, settings: EngineSettings | None = None, **spec: Any) -> Engine:
    shape = {
        "n_ctx": 1024,
        "n_seq_max": 4,
        "n_batch": 64,
        "placement": Placement(gpu_layers=0),
        **spec,
    }
    if model.text.is_file():
        shape["n_threads"] = 1
    backend_type = llamacpp if model.text.is_file() else mlx
    backend = backend_type.load(LoadSpec(str(model.text), projector=str(model.projector), **shape))
    return Engine(backend, settings or EngineSettings())


def ask(engine: Engine, *requests: Request, cancel: dict[str, int] | None = None) -> Outcome:
    """Submit all requests as the worker does and step until all have ended. `cancel` maps request
    ids to the number of steps after which they are cancelled."""
    outcome = Outcome()
    reader = MediaReader(engine.backend)  # type: ignore[arg-type]
    for request in requests:
        assert isinstance(request.prompt, str)
        tokens, images = reader.read(request.prompt, request.media, add_bos=True)
        outcome.take(engine.submit(request, tokens, images))
    for n in range(20_000):
        if not engine.has_work:
            break
        outcome.take(advance(engine))
        for request_id, after in (cancel or {}).items():
            if n == after:
                outcome.take(engine.cancel(request_id))
    engine.check_integrity()
    assert all(len(outcome.ends.get(r.id, [])) == 1 for r in requests)
    return outcome


def prompt(text: str, request_id: str = "r", most: int = 12) -> Request:
    """A request for `text`, in which A, B and C in braces stand for the model's media."""
    return Request(
        request_id, text, Generation(GREEDY, max_tokens=most, ignore_eos=True), media=dict(FILES)
    )


def plain(engine: Engine, request: Request, most: int = 12) -> list[int]:
    """Return the greedy tokens of the backend without the engine, ignoring the end of sequence."""
    backend: Any = engine.backend

    def best_of(chunk: Chunk) -> int:
        row = backend.step([chunk]).logits(0)[-1].copy()
        row[list(backend.info.eog_tokens)] = -np.inf
        return int(row.argmax())

    tokens, images = MediaReader(backend).read(str(request.prompt), request.media, add_bos=True)
    sequence = backend.new_sequence()
    at = 0
    for placed in images:
        while placed.start > at:
            backend.step([Chunk(sequence, tokens[at : min(placed.start, at + 64)], 0)])
            at = min(placed.start, at + 64)
        embeddings = backend.encode_media(placed.run)
        n = placed.run.n_tokens
        part = Chunk(
            sequence, tokens[placed.start : placed.stop], 1, media=MediaPart(placed.run, embeddings)
        )
        best = best_of(part)
        at = placed.start + n
    while len(tokens) - at > 64:
        backend.step([Chunk(sequence, tokens[at : at + 64], 0)])
        at += 64
    made = [best_of(Chunk(sequence, tokens[at:])) if tokens[at:] else best]
    while len(made) < most:
        made.append(best_of(Chunk(sequence, made[-1:])))
    backend.drop(sequence)
    return made


def encodes(engine: Engine) -> int:
    snapshot = engine.snapshot()
    return int(snapshot["image_encodes"]) + int(snapshot["sound_encodes"])


def test_an_image_answer_is_exact_and_a_second_turn_encodes_no_image(
    model: VisionModel, tmp_path: Path
) -> None:
    settings = EngineSettings(disk_dir=str(tmp_path / "kv"), disk_free_bytes=0)
    engine = load(model, settings)
    first = prompt("look: {A} and {B} what do they show")
    expected = plain(engine, first)
    outcome = ask(engine, first)
    assert outcome.tokens["r"] == expected
    assert encodes(engine) == 2
    settle(engine)
    # The next turn: the same images and more text.
    second = prompt("look: {A} and {B} what do they show" + outcome.text["r"] + " go on please")
    again = ask(engine, second)
    usage = again.finish("r").usage
    assert encodes(engine) == 2
    # A model that can't rewind continues from the last checkpoint.
    slack = 0 if engine.backend.capabilities.rewind == "any" or model.text.is_file() else 12
    assert usage.cached_tokens >= outcome.finish("r").usage.prompt_tokens - 8 - slack
    assert again.tokens["r"] == plain(engine, second)
    engine.close()
    # After a restart the KV comes from disk.
    engine = load(model, settings)
    third = ask(engine, second)
    assert third.tokens["r"] == again.tokens["r"]
    assert encodes(engine) == 0
    assert third.finish("r").usage.cached_tokens >= usage.prompt_tokens - 20 - slack
    # A prompt that was never computed takes the images' embeddings from disk, too.
    ask(engine, prompt("something else entirely {B} then {A} and so"))
    assert encodes(engine) == 0
    engine.close()


def test_reordered_images_and_edits_recompute_only_later_tokens(model: VisionModel) -> None:
    engine = load(model)
    ask(engine, prompt("one {A} two {B} three {C} four"))
    settle(engine)
    before = encodes(engine)
    for text, shared in (
        ("one {A} two {C} three {B} four", "one {A} two "),
        ("one {A} two {B} thirty {C} four", "one {A} two {B} "),
        ("won {A} two {B} three {C} four", ""),
        ("{C} {B} {A} x", ""),
    ):
        outcome = ask(engine, prompt(text))
        settle(engine)
        usage = outcome.finish("r").usage
        assert outcome.tokens["r"] == plain(engine, prompt(text)), text
        reader = MediaReader(engine.backend)  # type: ignore[arg-type]
        common = (
            len(reader.read(str(prompt(shared or "q").prompt), prompt("").media, add_bos=False)[0])
            if shared
            else 0
        )
        rewinds = engine.backend.capabilities.rewind == "any"
        assert usage.cached_tokens >= (common - 2 if rewinds else 0), text
        assert usage.cached_tokens <= usage.prompt_tokens - 10
    assert encodes(engine) == before == 3
    engine.close()


def test_many_requests_with_and_without_images_answer_as_each_alone(model: VisionModel) -> None:
    engine = load(model)
    texts = [
        "see {A} now",
        "only text here and more of it",
        "{B} and {C} are two",
        "see {A} then {C} so",
    ]
    expected = {f"r{i}": plain(engine, prompt(t)) for i, t in enumerate(texts)}
    outcome = ask(engine, *[prompt(t, f"r{i}") for i, t in enumerate(texts)])
    assert outcome.tokens == expected
    engine.close()


def test_a_request_cancelled_within_an_image_leaves_no_partial_image(model: VisionModel) -> None:
    engine = load(model, n_batch=64)
    expected = plain(engine, prompt("see {B} and {C} now"))
    stream = prompt("a stream of words", "stream", most=30)
    for after in range(1, 12):
        outcome = ask(engine, stream, prompt("see {B} and {C} now", "x"), cancel={"x": after})
        assert len(outcome.tokens["stream"]) == 30
        settle(engine)
    assert ask(engine, prompt("see {B} and {C} now")).tokens["r"] == expected
    engine.close()


def test_images_larger_than_the_context_are_refused_before_encoding(model: VisionModel) -> None:
    engine = load(model, n_ctx=256)
    outcome = ask(engine, prompt("{A}{B}{C}" * 8))
    failure = outcome.failure("r")
    assert failure.code == "context_length_exceeded"
    assert encodes(engine) == 0
    # In a tight context, requests are parked and continue later.
    texts = ["{A} see {B} x", "y {B} and {C}", "{C} z {A} w"]
    expected = {f"r{i}": plain(engine, prompt(t)) for i, t in enumerate(texts)}
    assert ask(engine, *[prompt(t, f"r{i}") for i, t in enumerate(texts)]).tokens == expected
    engine.close()


def test_penalties_and_drafts_skip_image_tokens(model: VisionModel) -> None:
    from dataclasses import replace

    engine = load(model, EngineSettings(draft="ngram"))
    request = prompt("{A} w270 w271 w272 {A} w270 w271", most=30)
    sampling = replace(
        GREEDY, repeat_penalty=1.3, repeat_last_n=-1, dry_multiplier=0.8, dry_penalty_last_n=-1
    )
    outcome = ask(
        engine, replace(request, generation=replace(request.generation, sampling=sampling))
    )
    assert len(outcome.tokens["r"]) == 30
    assert ask(engine, request).tokens["r"] == plain(engine, request, 30)
    assert run(engine, Request("t", "plain text", Generation(GREEDY, max_tokens=3))).finish("t")
    engine.close()


@needs_mtmd()
@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_heads_draft_after_images_without_changing_answers(kind: str, tmp_path: Path) -> None:
    """Once with positions in one dimension, once with two-dimensional positions and a recurrent
    state: heads start anew after an image and draft the text after it."""
    show_images()
    write, n_rewind = (tiny_mtp.write_mtp, 0) if kind == "llava" else (tiny_mtp.write_hybrid_mtp, 4)
    text = write(tmp_path / "heads.gguf", likeness=0.35)
    seeing = VisionModel(text, write_vision(tmp_path / kind, kind).projector)
    engine = load(seeing, EngineSettings(draft="mtp"), mtp=True, n_rewind=n_rewind)
    settle(engine)
    (drafter,) = engine.speculator.drafters.values()
    engine.speculator.cost.set({1: 1.0, 32: 1.01})
    engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
    drafter.record = lambda seconds: None  # type: ignore[method-assign]
    drafter.token_s = 1e-9
    for i, words in enumerate(
        ("{A} see {B} x", "{A} see {B} x and y {C}", "no picture", "w270 {C} {A}")
    ):
        request = prompt(words, f"r{i}", most=40)
        before = int(engine.snapshot()["accepted_mtp_tokens"])
        assert ask(engine, request).tokens[f"r{i}"] == plain(engine, request, 40)
        assert int(engine.snapshot()["accepted_mtp_tokens"]) > before
    engine.close()


def test_an_image_that_can_t_be_encoded_fails_its_request_alone(model: VisionModel) -> None:
    engine = load(model)
    backend: Any = engine.backend
    right = backend.encode_media

    def fails(run: Any) -> Any:
        if len(run.media.data) > 100_000:
            raise BackendFailure("no memory for it")
        return right(run)

    backend.encode_media = fails
    outcome = ask(
        engine, prompt("see {A} now", "good"), prompt("see {B} now", "bad"), prompt("words", "text")
    )
    assert (outcome.failure("bad").code, outcome.failure("bad").message) == (
        "invalid_request",
        "no memory for it",
    )
    assert len(outcome.tokens["good"]) == len(outcome.tokens["text"]) == 12
    backend.encode_media = right
    assert len(ask(engine, prompt("see {B} now")).tokens["r"]) == 12
    engine.close()


def test_a_damaged_file_of_embeddings_is_encoded_again(model: VisionModel, tmp_path: Path) -> None:
    settings = EngineSettings(disk_dir=str(tmp_path), disk_free_bytes=0)
    engine = load(model, settings)
    expected = ask(engine, prompt("see {A} now")).tokens["r"]
    engine.close()
    (file,) = (tmp_path / "images").glob("*.image")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    engine = load(model, settings)
    outcome = ask(engine, prompt("other words and then {A} now"))
    assert outcome.finish("r").reason == "length"
    assert encodes(engine) == 1
    assert ask(engine, prompt("see {A} now")).tokens["r"] == expected
    engine.close()
