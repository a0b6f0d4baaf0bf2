"""One Variant on one Device as a Plan: which settings fit it, what they cost, and how fast that is.
Pure.

The settings that starting_settings.py makes are settled here and nowhere else, and travel whole:
memory, speed, and the loader read the same value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from localllm.device.types import Device
from localllm.memory.verdict import Fits
from localllm.planner import (
    decode_cost,
    drafting,
    kv_sizes,
    memory,
    needs,
    places,
    placing,
    prefill_cost,
    quality,
    speed,
)
from localllm.planner.kernel_facts import facts as kernel_facts
from localllm.planner.needs import SPLIT_COST, Need, score
from localllm.planner.placing import verdict
from localllm.planner.starting_settings import (
    NOTHING_FIXED,
    Overrides,
    context_for,
    drafts_at_hand,
    loses_turns,
    settings_for,
)
from localllm.planner.types import (
    DEFAULT_BATCH,
    USUAL,
    MemoryNeed,
    Plan,
    RunSettings,
    Workload,
    backend_of,
)
from localllm_catalog.types import Model, Variant

# Beyond a prompt of this length its own speed is predicted for the first token, not that of the
# published figure.
_PREFILL_PROMPT_TOKENS = 2048
# An answer that is this much slower at most is the price of reading prompts in larger steps beside
# system memory.
_AS_FAST = 0.97
# The least that a drafter nobody asked for must promise at best.
_DRAFTS_PAY = 1.1


_UNKNOWN = MemoryNeed(0, 0, 0, 0, 0, 0, 0)


class _Settled(NamedTuple):
    """A way to run a file: what it needs, and whether that fits."""

    settings: RunSettings
    memory: MemoryNeed
    fits: Fits


def max_context(device: Device, plan: Plan) -> int:
    """The longest context, in tokens, that fits the hard limit with this plan's settings (0 = not
    even 256)."""
    ways = [plan.settings]
    if plan.settings.placement.cards:  # a longer one would be given all cards
        ways.append(plan.settings.placed(cards=(), tensor_split=()))
    return max(_longest(device, plan.model, plan.variant, settings) for settings in ways)


def _longest(device: Device, model: Model, variant: Variant, settings: RunSettings) -> int:
    used = places.used(device, settings.placement)

    def is_too_long(steps: int) -> bool:
        longer = replace(settings, n_ctx=steps * kv_sizes.CONTEXT_STEP)
        divided = placing.over_cards(used, model, variant, longer)
        return verdict(used, memory.need(model, variant, divided, used)) == "no"

    most = (model.native_context or 131072) // kv_sizes.CONTEXT_STEP
    return bisect_left(range(1, most + 1), True, key=is_too_long) * kv_sizes.CONTEXT_STEP


class _Way(NamedTuple):
    """A way to run a file that is not settled yet: in the places of `top`, or divided with system
    memory. `most_rank`: its rank at best."""

    is_whole: bool
    most_rank: tuple[float, ...]
    top: Plan
    kv_type: str


# --- the plan -------------------------------------------------------------------------------------


def plan_for(
    device: Device,
    model: Model,
    variant: Variant,
    workload: Workload,
    *,
    overrides: Overrides = NOTHING_FIXED,
    rough: bool = False,
) -> Plan:
    """The best Plan for exactly this variant, whether or not it fits (`fits` says).

    Of all KV types, choices of cards and divisions with system memory that fit, the one with the
    best score; what is at hand to draft for it does where that pays and costs nothing else.
    `rough`: what that score depends on, for choosing between files: `decode_tok_s_full` is then
    that of an empty context, and steps are larger only where prompts cost points.
    """
    drafts = drafts_at_hand(device, model, variant, workload, overrides)
    if overrides.companion_found:
        overrides = replace(overrides, companion=None, companion_found=False)
    plan = _Run.of(device, model, variant, workload, overrides).rough_plan()
    if drafts is not None:
        drafted = _Run.of(device, model, variant, workload, drafts).rough_plan()
        if _drafting_pays(drafted, plan):
            plan = drafted
    if rough:
        return plan
    return finished(device, plan, workload, overrides)


def _drafting_pays(drafted: Plan, plain: Plan) -> bool:
    """Whether a drafter that nobody asked for is expected to pay, and takes nothing away: the first
    answers are its trial."""
    hoped = drafted.drafting is not None and drafted.drafting.high > _DRAFTS_PAY
    same = drafted.fits == plain.fits != "split"
    return hoped and same and drafted.score >= plain.score


def finished(
    device: Device, plan: Plan, workload: Workload, overrides: Overrides = NOTHING_FIXED
) -> Plan:
    """The plan that `plan_for` makes, of its rough one."""
    return _Run.of(device, plan.model, plan.variant, workload, overrides).finished(plan)


@dataclass(frozen=True, slots=True)
class _Run:
    """A file, the machine it is to run on, and what for: what every way of running it is planned
    from. `request_tokens`: the context of one request; `prompt_tokens`: of that its prompt."""

    device: Device
    model: Model
    variant: Variant
    workload: Workload
    overrides: Overrides
    purpose: Need
    request_tokens: int
    prompt_tokens: int

    @classmethod
    def of(
        cls,
        device: Device,
        model: Model,
        variant: Variant,
        workload: Workload,
        overrides: Overrides,
    ) -> _Run:
        purpose = needs.need_of(workload)
        tokens = context_for(model, workload) // max(1, workload.parallel)
        prompt = min(purpose.prompt_tokens, tokens)
        return cls(device, model, variant, workload, overrides, purpose, tokens, prompt)

    def rough_plan(self) -> Plan:
        """The best way to run it, rough; as it would be where none fits."""
        device = self.device
        model = self.model
        variant = self.variant
        wanted = settings_for(device, model, variant, self.workload, self.overrides)
        kv_types = self.kv_types()
        plan = self.best(wanted, kv_types)
        if plan is not None:
            return plan
        tried = self.overrides.offload.applied_to(wanted.with_kv_type(kv_types[0]))
        return self.planned(_Settled(tried, memory.need(model, variant, tried, device), "no"))

    def finished(self, plan: Plan) -> Plan:
        """`plan`, which is rough, with its speed in a full context, and in larger steps where those
        pay."""
        settled = _Settled(plan.settings, plan.memory, plan.fits)
        if plan.fits != "no" and plan.settings.n_batch == DEFAULT_BATCH:
            settled = self.larger(settled)
        return self.planned(settled, rough=False)

    def kv_types(self) -> tuple[str, ...]:
        """KV types to try in order, in the contract's words: for MLX they mean 8 and 4 bits in its
        own groups."""
        backend = backend_of(self.variant)
        types: tuple[str, ...] = (self.overrides.kv_type,)
        if not self.overrides.kv_type:
            mixed = backend.mixed_kv and self.device.accelerator == "cpu"
            types = quality.ladder(self.workload.purpose, self.overrides.kv_evidence, mixed=mixed)
        allowed = tuple(k for k in types if kv_sizes.kv_type_allowed(self.model, k, backend))
        return allowed or ("f16",)

    def best(self, wanted: RunSettings, kv_types: Sequence[str]) -> Plan | None:
        """Of all ways these settings fit, the plan that has the best score, of several cards the
        fastest that are free: with each KV type, whole on each choice of cards, or divided with
        system memory, each with the steps that its prompts are best read in. None where none fits.

        They are looked at in the order of what they could be at best: with room to spare, nothing
        in system memory, and prompts in steps that cost no points. What is behind the best so far
        is not looked at, nor all cards together where the fastest alone is free."""
        wanted = wanted.with_kv_type(kv_types[0])
        weights_bytes = self.variant.file_bytes - places.disk_bytes(self.model, self.variant, USUAL)
        best = None
        fastest = 0.0
        choices: Sequence[tuple[int, ...]] = ()
        if self.overrides.offload.tensor_split is None:
            choices = placing.choices(self.device)
        for cards in choices:
            settings = wanted.placed(cards=cards)
            if cards and weights_bytes <= places.used(self.device, settings.placement).room_bytes:
                top = self.planned(_Settled(settings, _UNKNOWN, "yes"))
                fastest = max(fastest, top.decode_tok_s.value)
                best = self.best_of([top], kv_types, best)
                if best is not None and self.rank(best) >= (True, fastest):
                    return best
        top = self.planned(_Settled(wanted, _UNKNOWN, "yes"))
        return self.best_of([top], kv_types, best)

    def rank(self, plan: Plan, cost: float = 0.0) -> tuple[float, ...]:
        """What a way to run the file goes by, with `cost` points less: of several cards those that
        are free and fast."""
        if len(self.device.cards) < 2:
            return plan.score - cost, plan.decode_tok_s.value
        return self.is_free(plan), plan.decode_tok_s.value, plan.score - cost

    def is_free(self, plan: Plan) -> bool:
        """Whether what the plan needs is free now. What is not yet settled needs nothing."""
        if plan.memory is _UNKNOWN:
            return True
        used = places.used(self.device, plan.settings.placement)
        parts = placing.needed_parts(used, plan.memory)
        return all(part.needs_bytes <= part.free_bytes for part in parts)

    def best_of(
        self, tops: Sequence[Plan], kv_types: Sequence[str], best: Plan | None
    ) -> Plan | None:
        """The best of `best` and of the ways to run the file in the places of each of `tops`."""
        ways = [way for top in tops for way in self.ways(top, kv_types)]
        ways.sort(key=attrgetter("is_whole", "most_rank"), reverse=True)
        for way in ways:
            if best is not None and way.most_rank <= self.rank(best):
                continue
            plan = self.taken(way)
            if plan is not None:
                best = max(best or plan, self.read(plan), key=self.rank)
        return best

    def ways(self, top: Plan, kv_types: Sequence[str]) -> Iterator[_Way]:
        """The ways to run the file in the places of `top`."""
        lost = 0.0
        if self.device.accelerator != "cpu":
            lost = needs.prompt_lost(top, self.purpose)
        costs = [quality.kv_cost(kv_type) - quality.kv_cost(kv_types[0]) for kv_type in kv_types]
        for kv_type, cost in zip(kv_types, costs, strict=True):
            yield _Way(True, self.rank(top, cost - lost), top, kv_type)
        has_host = self.device.kind == "discrete" and self.device.host is not None
        if has_host and backend_of(self.variant).splits:
            at = min(1, len(kv_types) - 1)
            most_rank = self.rank(top, costs[at] + SPLIT_COST - lost)
            yield _Way(False, most_rank, top, kv_types[at])

    def taken(self, way: _Way) -> Plan | None:
        """The plan of one way; None if it does not fit."""
        wanted = way.top.settings.with_kv_type(way.kv_type)
        settled = self.on_cards(wanted) if way.is_whole else self.divided(wanted)
        if settled is None or settled.fits == "no":
            return None
        if way.is_whole and settled.settings.placement == way.top.settings.placement:
            return self.held(way.top, settled)
        return self.planned(settled)

    def on_cards(self, settings: RunSettings) -> _Settled:
        """`settings` whole on their cards, and whether they fit there."""
        used = places.used(self.device, settings.placement)
        tried = placing.over_cards(
            used, self.model, self.variant, self.overrides.offload.applied_to(settings)
        )
        need = memory.need(self.model, self.variant, tried, used)
        is_split = tried.placement.is_split and self.device.kind == "discrete"
        return _Settled(tried, need, verdict(used, need, split=is_split))

    def divided(self, settings: RunSettings) -> _Settled | None:
        """`settings` divided with system memory as is fastest; None where nothing fits."""
        found = placing.best_split(
            self.device, self.model, self.variant, settings, self.overrides.offload
        )
        if found is None:
            return None
        need = memory.need(self.model, self.variant, found, self.device)
        return _Settled(found, need, "split")

    def held(self, top: Plan, settled: _Settled) -> Plan:
        """`top`, which lies in the same places and answers as fast, as it was `settled`."""
        settings, need, fits = settled
        cost = quality.kv_cost(settings.kv_type) - quality.kv_cost(top.settings.kv_type)
        plan = replace(top, settings=settings, memory=need, fits=fits, quality=top.quality - cost)
        if fits == "yes" and not cost and not need.cards_bytes:
            return plan
        return replace(plan, score=score(plan, self.purpose))

    def read(self, plan: Plan) -> Plan:
        """`plan`, or the better one with larger steps where waiting for its prompts costs
        points."""
        if self.device.accelerator == "cpu" or not needs.prompt_lost(plan, self.purpose):
            return plan
        settled = self.larger(_Settled(plan.settings, plan.memory, plan.fits))
        if settled.settings == plan.settings:
            return plan
        return max(plan, self.planned(settled), key=attrgetter("score"))

    def larger(self, settled: _Settled) -> _Settled:
        """What was `settled`, with a larger micro-batch where that pays for such a prompt and
        changes nothing else; of a mixture that is divided, experts may make room for it as long as
        an answer comes about as fast."""
        settings, _, fits = settled
        if fits == "yes":
            return self.in_larger_steps(settled)
        if fits != "split" or self.model.experts is None or not self.overrides.offload.is_free:
            return settled
        rate = self.decode_tok_s(settings)
        for size in self.micro_batches(settings):
            anew = settings.placed(experts_on_host=0, tensor_split=())
            found = self.divided(replace(anew, n_batch=size))
            if found is not None and self.decode_tok_s(found.settings) >= _AS_FAST * rate:
                return found
        return settled

    def decode_tok_s(self, settings: RunSettings) -> float:
        """What the laws alone say of it."""
        return speed.decode(self.device, self.model, self.variant, settings).value

    def in_larger_steps(self, settled: _Settled) -> _Settled:
        """What fits with room to spare, with the largest micro-batch that pays and takes little; as
        it is where none does."""
        settings, need, fits = settled
        used = places.used(self.device, settings.placement)
        sizes = [(n, _SHARE_OF_MEMORY) for n in self.micro_batches(settings)]
        if used.accelerator != "cpu" and backend_of(self.variant).buffers == "grown":
            most = min(self.prompt_tokens, int(settings.n_ctx * _SHARE_OF_CONTEXT))
            sizes += [(n, _NEXT_TO_NOTHING) for n in (2048, 1024) if settings.n_batch < n <= most]
        for size, share in sizes:
            tried = replace(settings, n_batch=size)
            taken = memory.need(self.model, self.variant, tried, used)
            more_bytes = taken.total_bytes - need.total_bytes
            if more_bytes <= share * need.limit_bytes and verdict(used, taken) == "yes":
                return _Settled(tried, taken, fits)
        return settled

    def micro_batches(self, settings: RunSettings) -> Sequence[int]:
        """Micro-batches larger than `settings` has that pay for such a prompt, the largest first.

        A micro-batch reads all weights once: the more tokens share that, the faster is prefill, and
        the larger are a step's buffers. A processor is bound by arithmetic long before."""
        device = places.used(self.device, settings.placement)
        if device.accelerator == "cpu":
            return ()
        hardware = decode_cost.hardware_of(device, backend_of(self.variant).name)
        most = min(
            self.prompt_tokens,
            settings.n_ctx * _SHARE_OF_CONTEXT,
            kernel_facts(hardware.keys).most_batch,
        )

        def token_s(size: int) -> float:
            return prefill_cost.prefill_terms(
                self.model, self.variant, hardware, prompt_tokens=self.prompt_tokens, n_batch=size
            ).total_s

        found: list[int] = []
        held = token_s(settings.n_batch)
        for size in MICRO_BATCHES:
            if settings.n_batch < size <= most:
                each = token_s(size)
                if held < each * _PAYS:
                    break
                found.insert(0, size)
                held = each
        return found

    def planned(self, settled: _Settled, *, rough: bool = True) -> Plan:
        """The Plan of what was `settled`, with its speeds and its score."""
        settings, need, fits = settled
        if fits == "split" and not rough:
            settings = placing.pinned(self.device, settings, need)
        plan = Plan(
            model=self.model,
            variant=self.variant,
            settings=settings,
            fits=fits,
            memory=need,
            load_s=speed.load_time(self.variant),
            **self.speeds(settings, rough=rough),
            **self._quality(settings),
            draft_gain=self._draft_gain(settings),
        )
        drafted = drafting.for_purpose(self.device, plan, self.workload)
        if drafted is not None:
            plan = replace(plan, drafting=drafted)
        return replace(plan, score=score(plan, self.purpose))

    def _quality(self, settings: RunSettings) -> dict[str, Any]:
        """The model's rating, reduced by the losses of its format and of the KV type."""
        rating = quality.rate(self.model, self.workload.purpose)
        lost = quality.format_cost(self.model, self.variant) + quality.kv_cost(settings.kv_type)
        evidence = self.overrides.kv_evidence
        return {
            "quality": round(rating.points - lost, 2),
            "quality_basis": rating.basis,
            "quality_spread": rating.spread,
            "is_rated": rating.is_evidence,
            "makers_own": rating.makers_own,
            "kv_bytes_per_1k": kv_sizes.kv_bytes_per_1k_tokens(self.model, settings.kv_type),
            "kv_why": quality.why(settings.kv_type, self.workload.purpose, evidence),
        }

    def _draft_gain(self, settings: RunSettings) -> float:
        """How many times as fast the settings' drafter makes decoding; 1 without a drafter."""
        second = settings.drafter.second
        if second is None:
            return 1.0
        return drafting.draft_gain(self.device, (self.model, self.variant), second)

    def speeds(self, settings: RunSettings, *, rough: bool) -> dict[str, Any]:
        """Decode with the context empty and full, prefill, and the wait for the first token with
        and without a cache."""
        run = (self.device, self.model, self.variant, settings)
        measured = self.overrides.measured
        decode = speed.decode(*run, measured=measured)
        full = decode
        if not rough:
            full = speed.decode(*run, depth=self.request_tokens, measured=measured)
        prompt = self.prompt_tokens
        shortened = min(_PREFILL_PROMPT_TOKENS, prompt)
        usual = speed.prefill(*run, prompt_tokens=shortened, measured=measured)
        over_prompt = usual
        if prompt > _PREFILL_PROMPT_TOKENS:
            over_prompt = speed.prefill(*run, prompt_tokens=prompt, measured=measured)
        ttft_cached = None
        cached = self.purpose.cached_tokens
        if cached and not loses_turns(self.model, settings):
            ttft_cached = speed.ttft(over_prompt, decode, prompt, cached_tokens=cached)
        return {
            "decode_tok_s": decode,
            "decode_tok_s_full": full,
            "prefill_tok_s": usual,
            "ttft_s": speed.ttft(over_prompt, decode, prompt),
            "ttft_cached_s": ttft_cached,
        }


MICRO_BATCHES = (DEFAULT_BATCH, 1024, 2048, 4096)
# A doubling that makes a prompt less than this faster is not worth its memory: it is less than the
# prediction is worth.
_PAYS = 1.05
# Share of what an accelerator may hold that larger steps may take of it, and of the context that
# one step may fill.
_SHARE_OF_MEMORY = 1 / 16
_SHARE_OF_CONTEXT = 1 / 4
# Where buffers grow as steps need them, what takes no more than this for a moment need not pay:
# each step costs a pause, which a small model on a fast device feels.
_NEXT_TO_NOTHING = 1 / 100
