"""Images with the MLX backend: the logits after them equal mlx-vlm's, however the prompt was
assembled."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    ImagePixels,
    LoadError,
    LoadSpec,
    MediaPart,
    MediaRun,
    Placement,
)
from localllm_backends.mlx import backend_type
from models import tiny_mlx, tiny_mlx_vision
from support.pictures import needs_mlx_vlm, pixels

pytestmark = needs_mlx_vlm()
# Steps of other sizes add float32 numbers in another order.
NEAR = 2e-4
SIZES = ((64, 64), (300, 200), (20, 500))


@pytest.fixture(scope="module", params=list(tiny_mlx_vision.CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with vision of each family."""
    return tiny_mlx_vision.write(tmp_path_factory.mktemp("sees") / request.param, request.param)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[Any]:
    """The loaded checkpoint."""
    loaded = backend_type.load(spec_of(folder))
    yield loaded
    loaded.check_integrity()
    loaded.close()


def spec_of(folder: Path) -> LoadSpec:
    """Return the load settings of these tests."""
    placed = Placement(gpu_layers=0)
    spec = LoadSpec(str(folder), n_ctx=1024, n_seq_max=6, n_batch=256, placement=placed)
    return replace(spec, projector=str(folder))


def fill(
    backend: Any, sequence: int, runs: list[list[int] | MediaRun], piece: int = 256
) -> NDArray[np.float32]:
    """Append `runs` and return the last logits. Images are split into steps of `piece` tokens
    unless they must be in one step."""
    rows = None
    for run in runs:
        if isinstance(run, list):
            rows = backend.step([Chunk(sequence, run, 1)]).logits(0)[-1].copy()
            continue
        embeddings = backend.encode_media(run)
        most = run.n_tokens if backend.capabilities.images_in_one_step else piece
        for start in range(0, run.n_tokens, most):
            n = min(most, run.n_tokens - start)
            part = MediaPart(run, embeddings, start)
            step = backend.step([Chunk(sequence, [-1] * n, 1, media=part)])
            rows = step.logits(0)[-1].copy()
    assert rows is not None
    return rows


def theirs(folder: Path, text: str, pictures: list[ImagePixels]) -> NDArray[np.float32]:
    """Return the logits after `text`, in which [IMG] stands for each picture, computed by mlx-vlm
    alone: its loader, its processor, its language model and caches. If the tokens of an image
    attend to each other, use masks as in training: mlx-vlm 0.7.10 omits Gemma 3's masks, and
    applies Gemma 4's to all layers."""
    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, processor = load(str(folder))
    images = [Image.frombytes("RGB", (p.width, p.height), p.data) for p in pictures]
    marked = text.replace("[IMG]", tiny_mlx_vision.mark(folder.name))
    inputs = dict(processor(images=images, text=[marked], add_special_tokens=False))
    seen: list[Any] = []

    def keep(tokens: Any, logits: Any) -> Any:
        seen.append(np.array(logits.reshape(-1)))
        return logits

    ids, values, mask = (
        inputs.pop(name) for name in ("input_ids", "pixel_values", "attention_mask")
    )
    steps = generate_step(
        ids, model, values, mask, max_tokens=1, temperature=0.0, logits_processors=[keep], **inputs
    )
    with masked_as_trained(folder.name, np.array(ids[0]) == tiny_mlx_vision.IMAGE):
        next(steps)
    steps.close()
    return seen[0]


@contextmanager
def masked_as_trained(family: str, is_image: NDArray[np.bool_]) -> Iterator[None]:
    """Give mlx-vlm's language model masks in which the tokens of an image attend to each other: in
    every layer of Gemma 3, and in the layers with a window of Gemma 4 (transformers 5.24,
    `create_masks_for_vision_model` of both)."""
    if family not in ("gemma3", "gemma4-ahead"):
        yield
        return
    import mlx.core as mx

    language = importlib.import_module(f"mlx_vlm.models.{family.removesuffix('-ahead')}.language")
    right = language.create_attention_mask
    number = np.cumsum(np.diff(is_image, prepend=False) & is_image) * is_image

    def mask(h: Any, cache: Any = None, window_size: int | None = None, **named: Any) -> Any:
        n = int(h.shape[1])
        if n == 1:
            return right(h, cache, window_size=window_size, **named)
        queries, keys = np.arange(n)[:, None], np.arange(n)[None]
        same = (number[:n, None] == number[None, :n]) & is_image[:n, None]
        seen = keys <= queries
        if window_size is not None:
            seen = (seen | same) & (keys > queries - window_size)
        elif family == "gemma3":
            seen = seen | same
        return mx.array(seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "create_attention_mask", mask)
        if family == "gemma4-ahead":
            name = "_apply_blockwise_bidirectional_overlay"
            patch.setattr(language.Gemma4TextModel, name, lambda _, base, __: base)
        yield


def test_image_logits_equal_those_of_mlx_vlm(folder: Path, backend: Any) -> None:
    pictures = [pixels(w, h, i) for i, (w, h) in enumerate(SIZES)]
    for picture in pictures:
        sequence = backend.new_sequence()
        ours = fill(backend, sequence, backend.tokenize_media(["look: ", picture, " what is it?"]))
        backend.drop(sequence)
        assert np.abs(ours - theirs(folder, "look: [IMG] what is it?", [picture])).max() < NEAR
    several = backend.tokenize_media(["a ", pictures[0], pictures[1], " b ", pictures[2], " c"])
    sequence = backend.new_sequence()
    ours = fill(backend, sequence, several)
    backend.drop(sequence)
    assert np.abs(ours - theirs(folder, "a [IMG][IMG] b [IMG] c", pictures)).max() < NEAR


def test_a_different_image_changes_the_answer(backend: Any) -> None:
    rows = []
    for seed in (1, 2):
        sequence = backend.new_sequence()
        rows.append(fill(backend, sequence, backend.tokenize_media([pixels(60, 40, seed), " so"])))
        backend.drop(sequence)
    assert np.abs(rows[0] - rows[1]).max() > 100 * NEAR


def test_images_can_be_computed_in_pieces_truncated_forked_and_moved(backend: Any) -> None:
    runs = backend.tokenize_media(["a ", pixels(300, 200, 1), " b ", pixels(60, 400, 2), " c"])
    tail = backend.tokenize(" and then")
    whole, first = backend.new_sequence(), backend.new_sequence()
    expected = fill(backend, whole, [*runs, tail])
    assert np.abs(fill(backend, first, [*runs, tail], piece=5) - expected).max() < NEAR
    cuts = [
        0,
        *itertools.accumulate(r.n_tokens if isinstance(r, MediaRun) else len(r) for r in runs),
    ]
    last, edge = [*runs[-1], *tail], cuts[-2]
    source, moved = backend.new_sequence(), backend.new_sequence()
    fill(backend, source, runs[:-1])
    state = backend.export_state(source) if backend.capabilities.states else b""
    assert np.abs(fill(backend, source, [last]) - expected).max() < NEAR
    if backend.capabilities.rewind == "none":
        forked = backend.fork_state(source, state, edge)
        backend.import_state(first, state, edge)
    else:
        forked = backend.fork(source, edge)
        backend.truncate(first, edge)
    assert np.abs(fill(backend, forked, [last]) - expected).max() < NEAR
    assert np.abs(fill(backend, first, [last]) - expected).max() < NEAR
    for start, stop in itertools.pairwise(cuts[:-1]):
        backend.import_range(moved, backend.export_range(first, start, stop), start, stop)
    if state:
        backend.import_state(moved, state, edge)
    assert np.abs(fill(backend, moved, [last]) - expected).max() < NEAR
    for sequence in (whole, first, forked, source, moved):
        backend.drop(sequence)
    backend.check_integrity()


def test_streams_after_images_of_different_sizes_decode_in_one_batch_as_alone(backend: Any) -> None:
    prompts = ([pixels(300, 200, 1), " so"], ["a ", pixels(60, 400, 2), " b"], ["no picture"])
    sequences = [backend.new_sequence() for _ in range(6)]
    for i, parts in enumerate([*prompts, *prompts]):
        fill(backend, sequences[i], backend.tokenize_media(parts))
    for token in (5, 6, 7):
        alone = [backend.step([Chunk(s, [token], 1)]).logits(0)[-1].copy() for s in sequences[:3]]
        step = backend.step([Chunk(s, [token], 1) for s in sequences[3:]])
        for i, row in enumerate(alone):
            assert np.abs(step.logits(i)[-1] - row).max() < NEAR
    for sequence in sequences:
        backend.drop(sequence)


def test_an_image_is_encoded_in_another_thread_while_streams_decode(backend: Any) -> None:
    [run, *_] = [
        r for r in backend.tokenize_media([pixels(300, 200, 3)]) if not isinstance(r, list)
    ]
    sequences = [backend.new_sequence() for _ in range(2)]
    for sequence in sequences:
        backend.step([Chunk(sequence, [1, 2, 3], 1)])
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(backend.encode_media(run) for _ in range(5))
    )
    thread.start()
    while thread.is_alive():
        backend.step([Chunk(sequence, [7], 1) for sequence in sequences])
        if backend.cells_free() < 10:
            thread.join()
    alone = backend.encode_media(run)
    for each in found:
        assert np.array_equal(each, alone)
    assert len(found) == 5
    for sequence in sequences:
        backend.drop(sequence)


def test_an_image_goes_into_a_step_of_its_own(backend: Any) -> None:
    [run] = [r for r in backend.tokenize_media([pixels(30, 20, 3)]) if not isinstance(r, list)]
    part = MediaPart(run, backend.encode_media(run))
    one, other = backend.new_sequence(), backend.new_sequence()
    with pytest.raises(BackendFailure, match="a step without other chunks"):
        backend.step([Chunk(one, [-1] * run.n_tokens, 0, media=part), Chunk(other, [1], 1)])
    assert (backend.length(one), backend.length(other)) == (0, 0)
    backend.drop(one)
    backend.drop(other)


def test_the_same_pixels_have_the_same_key_and_others_another(backend: Any) -> None:
    made = [backend.tokenize_media(["", pixels(64, 64, seed)]) for seed in (1, 1, 2)]
    keys = [next(r.key for r in runs if isinstance(r, MediaRun)) for runs in made]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("family", ["pixtral", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl"])
def test_a_large_image_is_scaled_down_and_takes_the_planned_memory(
    family: str, tmp_path: Path
) -> None:
    import mlx.core as mx

    # No text model here has three heads, so the plan can't confuse them with the tower's. Qwen's
    # two layers differ. For the others, one layer has the same peak as several.
    layers = 2 if family.startswith("qwen") else 1
    folder = tiny_mlx_vision.write(tmp_path / "large", family, side_px=256, heads=3, layers=layers)
    unloaded = mx.get_active_memory()
    backend = backend_type.load(spec_of(folder))
    laid_out = backend.tokenize_media([pixels(900, 900, 1)])
    [run] = [r for r in laid_out if isinstance(r, MediaRun)]
    assert 400 < run.n_tokens < 1060
    if family == "pixtral":
        # There is also a mark at the end of each of 32 rows except the last.
        assert run.n_tokens == 1024 + 31
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    backend.encode_media(run)
    taken = mx.get_peak_memory() - before
    planned = backend_type.image_bytes(str(folder))
    report = backend.memory()
    backend.close()
    assert mx.get_active_memory() - unloaded < report.projector_bytes
    assert 0.95 * planned <= taken <= 1.05 * planned
    # The text model and the tower together make up the file, except for its header.
    size = (folder / "model.safetensors").stat().st_size
    assert 0.95 * size < report.weights_bytes + report.projector_bytes < size


def test_other_families_and_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_mlx_vision.write(tmp_path / "sees", "pixtral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "idefics3"}))
    with pytest.raises(BackendFailure, match=r"'idefics3' models.*mistral3, pixtral.*GGUF"):
        backend_type.image_bytes(str(folder))
    text = tiny_mlx.write_llama(tmp_path / "text")
    assert backend_type.image_bytes(str(text)) == 0
    with pytest.raises(LoadError, match="images are not supported"):
        backend_type.load(spec_of(text))
    # A conversion whose config describes a tower that the conversion omitted.
    stated = json.loads((text / "config.json").read_text())
    (text / "config.json").write_text(json.dumps({**stated, "vision_config": {"patch_size": 4}}))
    assert backend_type.image_bytes(str(text)) == 0


def test_a_checkpoint_without_image_processor_files_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    folder = tiny_mlx_vision.write(tmp_path / "sees", "mistral3")
    (folder / "preprocessor_config.json").write_text("no JSON")
    with pytest.raises(LoadError, match="image processor") as refused:
        backend_type.load(spec_of(folder))
    assert "--images off" in refused.value.hint


def test_mlx_vlm_is_not_imported_without_image_input(tmp_path: Path) -> None:
    folder = tiny_mlx_vision.write(tmp_path / "sees", "mistral3")
    script = (
        "import sys\n"
        "from localllm_backends.contract import LoadSpec, Placement\n"
        "from localllm_backends.mlx import backend_type\n"
        f"spec = LoadSpec({str(folder)!r}, n_ctx=64, placement=Placement(gpu_layers=0))\n"
        "backend_type.image_bytes(spec.path)\n"
        "backend_type.load(spec).close()\n"
        "print('mlx_vlm' in sys.modules, 'localllm_backends.mlx.vision' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "False False"
