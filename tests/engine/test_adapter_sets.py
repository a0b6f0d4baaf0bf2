"""Several sets of LoRA adapters over one copy of the weights. Each request gets the answer of its
own set, in any order of turns, and a cached prefix of one set never serves another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.crowds import NEAR_TIE, isolated
from engine.drive import GREEDY, Outcome, advance, run, settle
from engine.test_adapters import FAMILIES, Family, family_of
from localllm.engine import EngineSettings
from localllm.engine.adapters import AdapterSet, AdapterTurns
from localllm.engine.cache.identity import identity_of
from localllm.engine.core import Engine
from localllm.engine.messages import Request
from localllm_backends.contract import Backend, Chunk, LoadSpec, LoraAdapter, Placement
from localllm_backends.llamacpp import backend_type as llamacpp
from models import tiny_gguf, tiny_lora
from support.requests import request_for

Chosen = tuple[tuple[int, float], ...] | None
# The base model, each adapter alone, one at another scale, both: as `Generation.adapters` of
# adapters 0 and 1.
SETS: list[Chosen] = [(), ((0, 1.0),), ((1, 1.0),), ((0, 0.5),), ((0, 1.0), (1, 0.5))]
N_TOKENS = 8


def words(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(n)]


def asked(key: str, prompt: list[int], chosen: Chosen, **more: Any) -> Request:
    kept = {"sampling": GREEDY, "ignore_eos": True, "adapters": chosen, **more}
    return request_for(key, prompt, max_tokens=N_TOKENS, **kept)


@pytest.mark.parametrize("kind", FAMILIES)
def test_many_adapter_sets_in_one_engine_answer_like_one_engine_per_set(
    kind: str, tmp_path: Path
) -> None:
    family = family_of(kind, tmp_path)
    prompt = words(1, 90)
    files = [str(family.first), str(family.second)]
    expected = []
    for chosen in SETS:
        scaled = tuple(LoraAdapter(files[number], scale) for number, scale in chosen or ())
        engine = Engine(family.load(family.spec(*scaled)))
        expected.append(run(engine, asked("alone", prompt, None)).tokens["alone"])
        engine.close()
    assert len(set(map(tuple, expected))) == len(SETS), "equal answers would prove nothing"

    spec = replace(family.spec(*(LoraAdapter(file, 0.0) for file in files)), n_seq_max=8)
    backend = family.load(spec)
    used = stepped_sets(backend)
    engine = Engine(backend)
    outcome = run(engine, *(asked(str(i), prompt, chosen) for i, chosen in enumerate(SETS)))
    assert [outcome.tokens[str(i)] for i in range(len(SETS))] == expected
    assert len(set(used)) == len(SETS)
    engine.close()


def stepped_sets(backend: Backend) -> list[AdapterSet]:
    """Record the adapter set of each later step of `backend`."""
    used: list[AdapterSet] = []
    now: list[AdapterSet] = [()]
    step, use = backend.step, backend.use_adapters

    def use_adapters(scales: Sequence[float]) -> None:
        now[0] = tuple(scales)
        use(scales)

    def counted(chunks: Sequence[Chunk]) -> Any:
        used.append(now[0])
        return step(chunks)

    backend.use_adapters = use_adapters  # type: ignore[method-assign]
    backend.step = counted  # type: ignore[method-assign]
    return used


@pytest.mark.parametrize("seed", range(2))
def test_no_history_lets_a_prefix_of_one_set_serve_another(seed: int, tmp_path: Path) -> None:
    """The history mixes shared prefixes, forks, parking, cancels, and restarts with other adapters
    and defaults. The size of a step depends on its measured time, and rounding on its size, so the
    requests are those whose every token is a clear choice."""
    family = family_of("llamacpp", tmp_path)
    rng = random.Random(seed)
    heads = [words(i, 120) for i in range(2)]
    alone = family.load(both(family, swapped=False))
    expected: dict[tuple[tuple[int, ...], Chosen], list[int]] = {}
    cached = 0

    def draw() -> tuple[tuple[int, ...], Chosen]:
        """Return a random prompt and set. All its tokens have clear margins over their rivals."""
        while True:
            tail = words(rng.randrange(4), 20)
            prompt = (*rng.choice(heads)[: rng.choice([60, 120])], *tail)
            chosen = rng.choice(SETS)
            if (prompt, chosen) not in expected:
                scales = dict(chosen or ())
                alone.use_adapters([scales.get(number, 0.0) for number in range(2)])
                tokens, margins = isolated(alone, [*prompt], N_TOKENS)
                expected[prompt, chosen] = tokens if min(margins) > NEAR_TIE else []
            if expected[prompt, chosen]:
                return prompt, chosen

    for life in range(3):
        # Adapter 0 is `first` in one engine's lifetime and `second` in the next.
        swapped = bool(life % 2)
        settings = EngineSettings(
            cache_bytes=rng.choice([10**5, 10**6]), disk_dir=str(tmp_path / "kv"), disk_bytes=10**8
        )
        engine = Engine(family.load(both(family, swapped=swapped)), settings)
        outcome = Outcome()
        sent: dict[str, tuple[tuple[int, ...], Chosen]] = {}
        for turn in range(14):
            key = f"{life}-{turn}"
            sent[key] = draw()
            prompt, chosen = [*sent[key][0]], sent[key][1]
            outcome.take(engine.submit(asked(key, prompt, renumbered(chosen, swapped)), prompt))
            for _ in range(rng.choice([0, 3, 30])):
                if engine.has_work:
                    outcome.take(advance(engine))
            if rng.random() < 0.2:
                outcome.take(engine.cancel(rng.choice([*sent])))
        while engine.has_work:
            outcome.take(advance(engine))
        engine.check_integrity()
        settle(engine)
        engine.close()
        for key, asked_for in sent.items():
            end = outcome.finish(key)
            n = len(outcome.tokens.get(key, []))
            assert outcome.tokens.get(key, []) == expected[asked_for][:n], (key, asked_for[1])
            assert n == N_TOKENS or end.reason == "cancelled"
            cached += end.usage.cached_tokens
    assert cached > 500, "nothing was served from the cache: this would show nothing"
    alone.close()


def both(family: Family, *, swapped: bool) -> LoadSpec:
    """Return a spec with both adapters in one of two orders. The first one applies by default."""
    files = [str(family.first), str(family.second)]
    if swapped:
        files.reverse()
    return family.spec(LoraAdapter(files[0]), LoraAdapter(files[1], 0.0))


def renumbered(chosen: Chosen, swapped: bool) -> Chosen:
    """Return the same adapters with the numbers of the other order."""
    if not swapped:
        return chosen
    return tuple((1 - number, scale) for number, scale in chosen or ())


def test_the_loaded_scales_are_a_set_like_any_other(tmp_path: Path) -> None:
    """KV computed with the default scales serves requests that select the same set, also after a
    restart."""
    family = family_of("llamacpp", tmp_path)
    prompt = words(5, 100)
    settings = EngineSettings(disk_dir=str(tmp_path / "kv"), disk_bytes=10**8)
    found = []
    for spec, chosen in (
        (family.spec(LoraAdapter(str(family.first), 0.5)), None),
        (both(family, swapped=True), ((1, 0.5), (0, 0.0))),
        (both(family, swapped=False), None),
        (family.spec(), None),
        (both(family, swapped=False), ()),
    ):
        engine = Engine(family.load(spec), settings)
        outcome = run(engine, asked("a", prompt, chosen))
        settle(engine)
        engine.close()
        found.append((outcome.tokens["a"], outcome.finish("a").usage.cached_tokens))
    (first, none), (same, all_of_it), (other, nothing), (base, no), (bare, whole) = found
    assert (none, all_of_it, nothing, no, whole) == (0, 99, 0, 0, 99)
    assert first == same
    assert base == bare
    assert len({tuple(tokens) for tokens in (first, other, base)}) == 3


def test_a_long_prompt_in_slices_is_computed_with_its_own_set(tmp_path: Path) -> None:
    family = family_of("llamacpp", tmp_path)
    prompt = words(7, 400)
    settings = EngineSettings(sliced_prefill_tokens=100)
    answers = []
    for companion in (None, ((1, 1.0),)):
        engine = Engine(family.load(both(family, swapped=False)), settings)
        requests = [asked("long", prompt, ((0, 0.5),))]
        if companion is not None:
            beside = {"sampling": GREEDY, "ignore_eos": True, "adapters": companion}
            requests.insert(0, request_for("short", [510, 7, 8], max_tokens=200, **beside))
        outcome = run(engine, *requests)
        answers.append(outcome.tokens["long"])
        sliced = engine.snapshot()["sliced_prefill_tokens"]
        assert bool(sliced) == (companion is not None)
        engine.close()
    assert answers[0] == answers[1]


def test_adapters_that_are_not_loaded_are_refused(tmp_path: Path) -> None:
    family = family_of("llamacpp", tmp_path)
    for spec, why in (
        (both(family, swapped=False), "there is no adapter 2: the model's adapters are 0 to 1"),
        (family.spec(), "there is no adapter 2: the model was loaded without adapters"),
    ):
        engine = Engine(family.load(spec))
        outcome = run(engine, asked("a", [5, 6, 7], ((2, 1.0),)))
        assert outcome.failure("a").code == "invalid_request"
        assert outcome.failure("a").message == why
        engine.close()


def test_eight_adapters_take_a_tenth_more_memory_than_one(tmp_path: Path) -> None:
    base = tiny_gguf.write_llama(tmp_path / "base.gguf", e=512, layers=4)
    laid = [
        tiny_lora.write(tmp_path / f"{i}.gguf", base, rank=1, seed=i, targets=("attn_q",))
        for i in range(8)
    ]
    taken = []
    for n in (1, 8):
        adapters = tuple(LoraAdapter(str(path)) for path in laid[:n])
        spec = LoadSpec(str(base), n_ctx=512, placement=Placement(gpu_layers=0), adapters=adapters)
        backend = llamacpp.load(spec)
        taken.append(backend.memory().total_bytes)
        backend.close()
    assert taken[0] < taken[1] < 1.1 * taken[0]


def test_kv_of_an_adapter_set_has_its_own_identity(tmp_path: Path) -> None:
    family = family_of("llamacpp", tmp_path)
    backend = family.load(family.spec())
    plain = identity_of(backend)
    assert plain.with_adapters("") == plain
    assert plain.with_adapters("abc:1.0").difference(plain) == (
        "the model's weights or applied adapters"
    )
    backend.close()


# --- turns ----------------------------------------------------------------------------------------

NAMES = [(float(i), 0.0) for i in range(5)]
STEPS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(NAMES), min_size=1),
        st.floats(0.0, 10.0),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(STEPS)
def test_no_adapter_set_gets_two_turns_during_the_wait_of_another(
    steps: list[tuple[set[AdapterSet], float, int]],
) -> None:
    turns = AdapterTurns((0.0, 0.0))
    begun: dict[AdapterSet, list[AdapterSet]] = {}
    before = turns.active
    for ready, seconds, n_tokens in steps:
        active = turns.choose([*ready])
        assert active in ready
        begun = {waiting: begun.get(waiting, []) for waiting in ready - {active}}
        if active != before:
            for sets in begun.values():
                sets.append(active)
        for sets in begun.values():
            assert len(set(sets)) == len(sets)
        before = active
        if n_tokens:
            turns.stepped(n_tokens, seconds)
        else:
            turns.end()


def test_turns_last_long_compared_with_their_switches() -> None:
    """A turn lasts as long as 24 switches, for any cost of a switch, or two steps if a switch is
    free."""
    for step_s, switch_s, n_steps in ((1.0, 0.0, 2), (1.0, 3.0, 69), (10.0, 3.0, 7)):
        turns = AdapterTurns(NAMES[0])
        lengths = []
        last = NAMES[0]
        for _ in range(1000):
            active = turns.choose(NAMES[:2])
            if active != last:
                lengths.append(0)
            lengths[-1:] = [n + 1 for n in lengths[-1:]]
            turns.stepped(4, step_s + switch_s * (active != last))
            last = active
        assert set(lengths[2:-1]) == {n_steps}
