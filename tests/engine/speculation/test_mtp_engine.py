"""Drafting with the model's own heads through the engine: answers equal those without drafting for
any acceptance rate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.crowds import NEAR_TIE, isolated
from engine.drive import GREEDY, Outcome, run, settle
from localllm.cli.main import run as localllm
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Sampling
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.engine.speculation.mtp import MtpDrafter
from localllm.errors import UnsupportedError
from localllm.load.load_plan import load_plan_named
from localllm.planner import kv_sizes, memory
from localllm.planner.types import RunSettings
from localllm.settings import Settings
from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.llamacpp.native import start_native
from localllm_catalog import gguf
from localllm_catalog.from_gguf import model_from_gguf
from models import tiny_drafters, tiny_mtp
from support.requests import events_of, request_for
from support.scripted_backend import ScriptedBackend


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are right about one time in three."""
    return tiny_mtp.write_mtp(tmp_path_factory.mktemp("mtp") / "mtp.gguf", likeness=0.35)


def drafting(
    path: Path,
    *,
    free: bool = True,
    cache_bytes: int = 2**28,
    disk: Path | None = None,
    n_rewind: int = 0,
    companion: Path | None = None,
) -> Engine:
    """Return an engine with draft heads. If `free`, it drafts whenever a draft has any chance."""
    backend = llamacpp.load(
        LoadSpec(
            str(path), n_ctx=1024, n_seq_max=4, n_batch=64, n_threads=1, n_rewind=n_rewind,
            mtp=companion is None, drafter=str(companion or ""),
        )
    )  # fmt: skip
    settings = EngineSettings(
        draft="mtp" if companion is None else "auto",
        make_matcher=GrammarCompiler(backend),
        cache_bytes=cache_bytes,
        disk_dir=str(disk) if disk else None,
        headroom_bytes=0,
    )
    engine = Engine(backend, settings)
    settle(engine)
    if free:
        engine.speculator.cost.set({1: 1.0, 32: 1.01})
        engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
        (drafter,) = engine.speculator.drafters.values()
        assert isinstance(drafter, MtpDrafter)
        assert drafter.token_s > 0, "measured while idle"
        # The clock stands still, so a drafted token costs almost nothing.
        drafter.clock = lambda: 0.0
        drafter.token_s = 1e-9
    return engine


def plain(path: Path) -> Backend:
    return llamacpp.load(LoadSpec(str(path), n_ctx=1024, n_seq_max=2, n_batch=64, n_threads=1))


def same(alone: Backend, prompt: list[int], got: list[int]) -> bool:
    """Return True if the answer equals the isolated run's and False if it diverges at a near tie;
    fail otherwise."""
    tokens, gaps = isolated(alone, prompt, len(got))
    if got == tokens:
        return True
    at = next(i for i, (a, b) in enumerate(zip(got, tokens, strict=True)) if a != b)
    assert gaps[at] <= NEAR_TIE, f"differs at {at}, where the choice was clear ({gaps[at]:.3f})"
    return False


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(n)]


SHAPES: dict[str, tuple[Callable[..., Path], int]] = {
    "full": (tiny_mtp.write_mtp, 0),
    "sliding": (tiny_mtp.write_sliding_mtp, 0),
    "recurrent": (tiny_mtp.write_hybrid_mtp, 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("together", [1, 3])
def test_draft_heads_do_not_change_answers(shape: str, together: int, tmp_path: Path) -> None:
    write, n_rewind = SHAPES[shape]
    path = write(tmp_path / "m.gguf", likeness=0.35)
    engine, alone, rng = drafting(path, n_rewind=n_rewind), plain(path), random.Random(together)
    prompts = {f"p{i}": words(rng, rng.randrange(4, 120)) for i in range(9)}
    requests = [
        request_for(k, p, 40, GREEDY, ignore_eos=True, cache_prompt=False)
        for k, p in prompts.items()
    ]
    got: dict[str, list[int]] = {}
    steps = engine.metrics.steps
    for start in range(0, len(requests), together):
        got |= run(engine, *requests[start : start + together]).tokens
    assert sum(same(alone, prompts[k], got[k]) for k in prompts) >= len(prompts) - 1
    snapshot = engine.snapshot()
    assert snapshot["accepted_mtp_tokens"] > 20
    assert snapshot["drafted_mtp_tokens"] > snapshot["accepted_mtp_tokens"], "some were rejected"
    assert engine.metrics.steps - steps < len(prompts) * 40 / together
    engine.close()
    alone.close()


def test_cancelled_forked_cached_and_stored_conversations_change_nothing(
    path: Path, tmp_path: Path
) -> None:
    alone, rng = plain(path), random.Random(7)
    histories = [words(rng, 70) for _ in range(2)]
    parted = answers = drafted = 0
    # The second engine finds the first one's prefixes on disk, together with the heads' KV.
    for _ in range(2):
        engine = drafting(path, cache_bytes=400_000, disk=tmp_path)
        for mix in range(6):
            asked: dict[str, list[int]] = {}
            outcome = Outcome()
            for i in range(rng.randint(1, 4)):
                key, history = f"m{mix}r{i}", rng.choice(histories)
                asked[key] = [*history[: rng.choice([30, 70, 200])], *words(rng, 5)]
                outcome.take(
                    engine.submit(
                        request_for(key, asked[key], 24, GREEDY, ignore_eos=True), asked[key]
                    )
                )
            cancelled = rng.choice(list(asked)) if len(asked) > 2 else None
            steps = 0
            while engine.has_work:
                outcome.take(engine.step())
                steps += 1
                if steps == 4 and cancelled is not None:
                    outcome.take(engine.cancel(cancelled))
            settle(engine)
            for key, prompt in asked.items():
                if key != cancelled:
                    parted += not same(alone, prompt, outcome.tokens[key])
                    answers += 1
                    histories.append([*prompt, *outcome.tokens[key]])
        snapshot = engine.snapshot()
        drafted += int(snapshot["accepted_mtp_tokens"])
        assert engine.metrics.cached_tokens > 100, "prefixes were shared"
        restored = snapshot["restored_tokens"]
        engine.close()
    assert drafted > 50
    assert int(restored) > 0
    assert parted <= answers // 20
    alone.close()


def test_draft_heads_do_not_change_answers_with_grammar_or_temperature(path: Path) -> None:
    engine, without = drafting(path), drafting(path)
    without.speculator.off_because = "switched off"
    prompt = words(random.Random(3), 40)
    grammar = ("regex", "[a-z0-9 ]{1,40}")
    for key, more in {"greedy": GREEDY, "sampled": Sampling(temperature=0.8, seed=11)}.items():
        for rule in (None, grammar):
            request = request_for(
                key, prompt, 30, more, ignore_eos=True, grammar=rule, cache_prompt=False
            )
            # The heads' guesses consume no random numbers, so the same uniforms choose the same
            # tokens.
            assert run(engine, request).tokens == run(without, request).tokens
    assert engine.snapshot()["drafted_mtp_tokens"] > 0
    assert without.snapshot()["drafted_mtp_tokens"] == 0
    engine.close()
    without.close()


def test_heads_that_are_always_wrong_soon_stop_drafting(tmp_path: Path) -> None:
    engine = drafting(tiny_mtp.write_mtp(tmp_path / "random.gguf"), free=False)
    engine.speculator.cost.set({1: 1.0, 2: 1.7, 32: 20.0})
    engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
    run(engine, request_for("a", words(random.Random(9), 30), 400, GREEDY, ignore_eos=True))
    drafted = engine.snapshot()["drafted_mtp_tokens"]
    # It is tried at the beginning and then after 48, 96, 192 … tokens, two tokens at a time.
    assert 0 < int(drafted) <= 40
    engine.close()


class Unsure(ScriptedBackend):
    """Heads that never propose a token."""

    def __init__(self) -> None:
        super().__init__(n_ctx=1024)
        object.__setattr__(self.capabilities, "drafts", 4)
        self.asked = 0

    def draft(self, wanted: list[tuple[int, int, int]]) -> list[list[int]]:
        self.asked += 1
        return [[] for _ in wanted]


def test_heads_that_are_never_sure_count_as_wrong() -> None:
    backend = Unsure()
    assert backend.capabilities.drafts
    engine = Engine(backend, EngineSettings(draft="mtp"))
    settle(engine)
    engine.speculator.cost.set({1: 1.0, 2: 1.7, 32: 20.0})
    engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
    before = backend.asked
    run(engine, request_for("a", "say it", 400, GREEDY, ignore_eos=True))
    assert 0 < backend.asked - before <= 20
    assert engine.snapshot()["drafted_mtp_tokens"] == 0


def test_heads_draft_only_when_they_are_asked_for(path: Path) -> None:
    backend = llamacpp.load(LoadSpec(str(path), n_ctx=1024, n_seq_max=4, mtp=True))
    engine = Engine(backend, EngineSettings(draft="auto"))
    settle(engine)
    engine.speculator.cost.set({1: 1.0, 32: 1.01})
    run(engine, request_for("a", words(random.Random(1), 30), 40, GREEDY, ignore_eos=True))
    assert engine.snapshot()["drafted_mtp_tokens"] == 0
    engine.close()


def test_the_setting_loads_the_heads_and_plans_their_memory(path: Path) -> None:
    load, usual = (
        load_plan_named(str(path), Settings({"draft": "mtp", "context": 1024})),
        load_plan_named(str(path), Settings({"draft": "ngram"})),
    )
    assert load.options.spec.mtp
    assert not usual.options.spec.mtp
    assert load.plan is not None
    assert usual.plan is not None
    assert load.plan.memory.draft_bytes > 0
    assert usual.plan.memory.draft_bytes == 0

    async def ask() -> Finish:
        client = await load.options.start()
        try:
            # An idle worker measures what drafting costs; the first answer does not wait for that.
            async for event in events_of(
                client, request_for("a", words(random.Random(2), 40), 30, GREEDY, ignore_eos=True)
            ):
                if isinstance(event, Finish):
                    return event
        finally:
            await client.close()
        raise AssertionError("no end")

    assert asyncio.run(ask()).usage.completion_tokens == 30


def test_recurrent_models_are_loaded_with_support_for_rejecting_drafts(tmp_path: Path) -> None:
    path = tiny_mtp.write_hybrid_mtp(tmp_path / "m.gguf")
    load, usual = (
        load_plan_named(str(path), Settings({"draft": "mtp"})),
        load_plan_named(str(path), Settings()),
    )
    rewind = load.options.spec.n_rewind
    assert rewind > 0
    assert usual.options.spec.n_rewind == 0
    assert load.plan is not None
    assert usual.plan is not None
    # Without heads the backend reserves one extra sequence for itself.
    one = usual.plan.memory.recurrent_bytes // usual.plan.settings.n_sequences
    assert load.plan.memory.recurrent_bytes == one * load.plan.settings.n_sequences * (1 + rewind)


def test_the_planned_memory_of_draft_heads_equals_their_use(path: Path) -> None:
    model = model_from_gguf(gguf.read(path))
    (variant,) = model.variants
    planned = memory.mtp_bytes(model, variant, RunSettings(4096, slots=4, n_batch=64))
    reports = []
    for mtp in (False, True):
        backend = llamacpp.load(
            LoadSpec(str(path), n_ctx=4096, n_seq_max=4, n_batch=64, n_outputs=4, mtp=mtp)
        )
        reports.append(backend.memory())
        backend.close()
    off, on = reports
    # llama.cpp counts the heads' weights in both. Its spare sequence is one more than the slots.
    real = variant.mtp_bytes + on.total_bytes - off.total_bytes
    assert real * 0.9 <= planned <= real * 1.25 + 2**20
    kv = kv_sizes.kv_bytes(model, RunSettings(4096)) // 2
    assert kv <= on.kv_bytes - off.kv_bytes <= kv * 1.1


def test_a_model_without_heads_is_refused_before_anything_is_loaded(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedError, match="has no MTP heads"):
        load_plan_named(str(tiny_model), Settings({"draft": "mtp"}))
    with pytest.raises(SystemExit) as ended:
        localllm(["serve", "--port", "0", str(tiny_model), "--draft", "mtp"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "has no MTP heads" in said
    assert "use --draft auto" in said


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "assistant"])
@pytest.mark.parametrize("together", [1, 3])
def test_a_companion_drafter_does_not_change_answers(
    kind: str, together: int, tmp_path: Path
) -> None:
    """An EAGLE-3 head whose predictions follow the model's, a DSpark block whose Markov head does,
    and a Gemma 4 assistant."""
    path = tiny_drafters.write_target(tmp_path / "m.gguf", likeness=0.3)
    drafter = tmp_path / "d.gguf"
    if kind == "assistant":
        path = tiny_drafters.write_gemma4(tmp_path / "m.gguf", likeness=0.9)
        tiny_drafters.write_assistant(drafter, knowing=True)
    elif kind == "eagle3":
        tiny_drafters.write_eagle3(drafter, own=False, knowing=True)
    else:
        tiny_drafters.write_dflash(drafter, block=8, markov=True, knowing=0.3)
    engine, alone, rng = drafting(path, companion=drafter), plain(path), random.Random(together)
    assert list(engine.speculator.drafters) == [kind]
    prompts = {f"p{i}": words(rng, rng.randrange(4, 120)) for i in range(6)}
    requests = [request_for(k, p, 40, GREEDY, ignore_eos=True) for k, p in prompts.items()]
    got: dict[str, list[int]] = {}
    for start in range(0, len(requests), together):
        got |= run(engine, *requests[start : start + together]).tokens
    # The same again with prefixes that are forked and truncated: their drafter is useful at once.
    before = engine.snapshot()
    longer = {k: [*p, *got[k][:20], *words(rng, 3)] for k, p in prompts.items()}
    for k, p in longer.items():
        got[f"{k} longer"] = run(
            engine, request_for(f"{k} longer", p, 40, GREEDY, ignore_eos=True)
        ).tokens[f"{k} longer"]
    asked = prompts | {f"{k} longer": p for k, p in longer.items()}
    assert sum(same(alone, asked[k], got[k]) for k in asked) >= len(asked) - 1
    after = engine.snapshot()
    assert int(before[f"accepted_{kind}_tokens"]) > 20
    assert int(after[f"accepted_{kind}_tokens"]) > int(before[f"accepted_{kind}_tokens"]) + 10
    assert int(after[f"drafted_{kind}_tokens"]) > int(after[f"accepted_{kind}_tokens"]), (
        "some were rejected"
    )
    sampled = request_for(
        "s",
        prompts["p0"],
        40,
        Sampling(temperature=0.8, seed=3),
        ignore_eos=True,
        cache_prompt=False,
    )
    first = run(engine, sampled).tokens["s"]
    engine.speculator.off_because = "switched off"
    assert run(engine, sampled).tokens["s"] == first, "the same uniforms choose the same tokens"
    engine.close()
    alone.close()


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_companion_drafter_is_ready_immediately_after_a_restart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's KV is read from disk together with the model's. The drafter prefills only new
    tokens and at most one block more."""
    path = tiny_drafters.write_target(tmp_path / "m.gguf", likeness=0.3)
    drafter = tmp_path / "d.gguf"
    if kind == "eagle3":
        tiny_drafters.write_eagle3(drafter, own=False, knowing=True)
    else:
        tiny_drafters.write_dflash(drafter, block=8, markov=True, knowing=0.3)
    rng = random.Random(2)
    history, question = words(rng, 600), words(rng, 6)
    engine = drafting(path, companion=drafter, disk=tmp_path / "kept")
    said = run(engine, request_for("a", history, 24, GREEDY, ignore_eos=True)).tokens["a"]
    settle(engine)
    engine.close()
    read: list[int] = []
    llama = start_native()
    decode = llama.llama_decode

    def counted(context: int, batch: Any) -> int:
        # The drafter has one or two layers, the model three.
        if llama.llama_model_n_layer(llama.llama_get_model(context)) < 3:
            read.append(int(batch.n_tokens))
        return int(decode(context, batch))

    accepted = {}
    asked = [*history, *said, *question]
    for restarted in (True, False):
        engine = drafting(path, companion=drafter, disk=tmp_path / "kept" if restarted else None)
        with monkeypatch.context() as patch:
            patch.setattr(llama, "llama_decode", counted)
            read.clear()
            answer = run(engine, request_for("b", asked, 1, GREEDY, ignore_eos=True))
            assert (answer.finish("b").usage.cached_tokens >= 512) is restarted
            prefill = sum(read)
        new = len(asked) - answer.finish("b").usage.cached_tokens
        assert prefill <= new + 64
        before = int(engine.snapshot()[f"accepted_{kind}_tokens"])
        run(engine, request_for("c", asked, 160, GREEDY, ignore_eos=True))
        accepted[restarted] = int(engine.snapshot()[f"accepted_{kind}_tokens"]) - before
        engine.close()
    assert accepted[True] > 5
    assert abs(accepted[True] - accepted[False]) <= 3, "its KV is that of one that has read it all"
