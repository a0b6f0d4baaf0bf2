"""Plan one Variant on one Device: settings that fit, their memory, and the predicted speed. Pure.

Only this module settles the settings that starting_settings.py proposes. Memory, speed and the
loader all read the same RunSettings value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from localllm.device.types import Device
from localllm.memory.verdict import Fits
from localllm.planner import (
    decode_cost,
    drafting,
    kv_sizes,
    layer_bytes,
    memory,
    placement_search,
    prefill_cost,
    quality,
    scoring,
    speed,
)
from localllm.planner.kernel_facts import facts as kernel_facts
from localllm.planner.placement_search import verdict
from localllm.planner.scoring import SPLIT_COST, Need, score
from localllm.planner.starting_settings import (
    NO_OVERRIDES,
    Overrides,
    available_drafts,
    context_for,
    rereads_turns,
    settings_for,
)
from localllm.planner.types import (
    DEFAULT_BATCH,
    MemoryNeed,
    Plan,
    RunSettings,
    Workload,
    backend_of,
)
from localllm_catalog.types import Model, Variant

# Prompts longer than this get a prefill speed of their own for the time to the first token. The
# published prefill figure is for at most this length.
_PREFILL_PROMPT_TOKENS = 2048
# If weights are in system memory, larger prefill steps may slow decoding to this share of its speed
# at least.
_EQUALLY_FAST_SHARE = 0.97
# A drafter that was not requested must promise this gain at the upper end of its range.
_MIN_DRAFT_GAIN = 1.1


_UNKNOWN = MemoryNeed(0, 0, 0, 0, 0, 0, 0)


class FittedSettings(NamedTuple):
    """A way to run a file: its settings, its memory need, and whether that fits."""

    settings: RunSettings
    memory: MemoryNeed
    fits: Fits


def max_context(device: Device, plan: Plan) -> int:
    """Return the longest context, in tokens, that fits the hard limit with this plan's settings (0
    if not even 256 fit)."""
    options = [plan.settings]
    if plan.settings.placement.cards:  # a longer context may use all cards
        options.append(plan.settings.placed(cards=(), tensor_split=()))
    return max(_longest(device, plan.model, plan.variant, settings) for settings in options)


def _longest(device: Device, model: Model, variant: Variant, settings: RunSettings) -> int:
    used = layer_bytes.with_used_cards(device, settings.placement)

    def is_too_long(steps: int) -> bool:
        longer = replace(settings, n_ctx=steps * kv_sizes.CONTEXT_STEP)
        divided = placement_search.over_cards(used, model, variant, longer)
        return verdict(used, memory.need(model, variant, divided, used)) == "no"

    most = (model.native_context or 131072) // kv_sizes.CONTEXT_STEP
    return bisect_left(range(1, most + 1), True, key=is_too_long) * kv_sizes.CONTEXT_STEP


class PlacementOption(NamedTuple):
    """A placement to try: all on the cards of `top`, or split with system memory.

    `best_rank` is the best rank that it could reach.
    """

    is_complete: bool
    best_rank: tuple[float, ...]
    top: Plan
    kv_type: str


def plan_for(
    device: Device,
    model: Model,
    variant: Variant,
    workload: Workload,
    *,
    overrides: Overrides = NO_OVERRIDES,
    rough: bool = False,
) -> Plan:
    """Return the best Plan for exactly this variant, whether or not it fits (see `fits`).

    Compares the KV types, choices of cards and splits with system memory that fit, and takes the
    one with the best score. An available drafter is used if it pays and has no other cost. `rough`
    plans only what the score depends on, to choose between files: `decode_tok_s_full` is then the
    speed with an empty context, and steps are larger only if prompts cost points.
    """
    drafts = available_drafts(device, model, variant, workload, overrides)
    if overrides.companion_found:
        overrides = replace(overrides, companion=None, companion_found=False)
    plan = _Run.of(device, model, variant, workload, overrides).rough_plan()
    if drafts is not None:
        drafted = _Run.of(device, model, variant, workload, drafts).rough_plan()
        if _drafting_pays(drafted, plan, scoring.need_of(workload)):
            plan = drafted
    if rough:
        return plan
    return finished(device, plan, workload, overrides)


def _drafting_pays(drafted: Plan, plain: Plan, need: Need) -> bool:
    """Return whether a drafter that the user did not ask for is expected to pay without any loss,
    or makes the file fast enough for the purpose. The engine tries it on the first answers."""
    hoped = drafted.drafting is not None and drafted.drafting.high > _MIN_DRAFT_GAIN
    if not hoped or drafted.fits != plain.fits or plain.fits == "split":
        return False
    if scoring.too_slow(plain, need) != scoring.too_slow(drafted, need):
        return scoring.too_slow(plain, need)
    return drafted.score >= plain.score


def finished(
    device: Device, plan: Plan, workload: Workload, overrides: Overrides = NO_OVERRIDES
) -> Plan:
    """Return the plan that `plan_for` would return, given its rough plan."""
    return _Run.of(device, plan.model, plan.variant, workload, overrides).finished(plan)


class _Run(NamedTuple):
    """A file, its machine and its workload: the input to planning each way of running the file.

    `request_tokens` is the context of one request, and `prompt_tokens` the prompt's part of it.
    """

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
        purpose = scoring.need_of(workload)
        tokens = context_for(model, workload) // max(1, workload.parallel)
        prompt = min(purpose.prompt_tokens, tokens)
        return cls(device, model, variant, workload, overrides, purpose, tokens, prompt)

    def rough_plan(self) -> Plan:
        """Return the best rough plan. If no way fits, return a plan that does not fit."""
        device = self.device
        model = self.model
        variant = self.variant
        wanted = settings_for(device, model, variant, self.workload, self.overrides)
        kv_types = self.kv_types()
        plan = self.best(wanted, kv_types)
        if plan is not None:
            return plan
        tried = self.overrides.offload.applied_to(wanted.with_kv_type(kv_types[0]))
        return self.planned(FittedSettings(tried, memory.need(model, variant, tried, device), "no"))

    def finished(self, plan: Plan) -> Plan:
        """Complete a rough plan: add its speed at full context, and use larger steps if they pay."""
        fitted = FittedSettings(plan.settings, plan.memory, plan.fits)
        if plan.fits != "no" and plan.settings.n_batch == DEFAULT_BATCH:
            fitted = self.with_larger_batch(fitted, _MIN_PREFILL_GAIN)
        return self.planned(fitted, of=plan)

    def kv_types(self) -> tuple[str, ...]:
        """Return the KV types to try, in order, by the names of the backend contract. MLX takes
        them as 8 and 4 bits in its own groups."""
        backend = backend_of(self.variant)
        types: tuple[str, ...] = (self.overrides.kv_type,)
        if not self.overrides.kv_type:
            mixed = backend.mixed_kv and self.device.accelerator == "cpu"
            types = quality.ladder(self.workload.purpose, self.overrides.kv_evidence, mixed=mixed)
        allowed = tuple(k for k in types if kv_sizes.kv_type_allowed(self.model, k, backend))
        return allowed or ("f16",)

    def best(self, wanted: RunSettings, kv_types: Sequence[str]) -> Plan | None:
        """Return the plan with the best score among all ways to fit these settings, or None if no
        way fits.

        The ways are each KV type, on each choice of cards or split with system memory. Each uses
        the prefill step size that suits its prompts. With several cards, plans whose memory is free
        now come first, then the fastest.

        Ways are tried in order of their upper bound. The bound assumes that the model fits without
        loss, that system memory holds no part of it, and that prompts cost no points. A way is
        skipped if its bound is not above the best plan so far. Using all cards together is skipped
        if the fastest choice of cards is free.
        """
        wanted = wanted.with_kv_type(kv_types[0])
        best = None
        fastest = 0.0
        some: Sequence[RunSettings] = ()
        if self.overrides.offload.tensor_split is None:
            some = placement_search.on_some_cards(self.device, self.model, self.variant, wanted)
        for settings in some:
            top = self.with_room(settings)
            fastest = max(fastest, top.decode_tok_s.value)
            best = self.best_of([top], kv_types, best)
            if best is not None and self.rank(best) >= (True, fastest):
                return best
        return self.best_of([self.with_room(wanted)], kv_types, best)

    def with_room(self, settings: RunSettings) -> Plan:
        """Return the plan for these settings as if all of it fitted."""
        return self.planned(FittedSettings(settings, _UNKNOWN, "yes"))

    def rank(self, plan: Plan, cost: float = 0.0) -> tuple[float, ...]:
        """Return the sort key of a plan, with `cost` points less. With several cards, plans that
        are free now and fast come first."""
        if len(self.device.cards) < 2:
            return plan.score - cost, plan.decode_tok_s.value
        return self.is_free(plan), plan.decode_tok_s.value, plan.score - cost

    def is_free(self, plan: Plan) -> bool:
        """Return whether the memory that the plan needs is free now. A plan that is not settled
        needs no memory."""
        if plan.memory is _UNKNOWN:
            return True
        used = layer_bytes.with_used_cards(self.device, plan.settings.placement)
        parts = placement_search.needed_parts(used, plan.memory)
        return all(part.needs_bytes <= part.free_bytes for part in parts)

    def best_of(
        self, tops: Sequence[Plan], kv_types: Sequence[str], best: Plan | None
    ) -> Plan | None:
        """Return the best of `best` and of the ways to run the file on the cards of each plan in
        `tops`."""
        options = [option for top in tops for option in self.options(top, kv_types)]
        options.sort(key=attrgetter("is_complete", "best_rank"), reverse=True)
        for option in options:
            if best is not None and option.best_rank <= self.rank(best):
                continue
            plan = self.plan_of(option)
            if plan is not None:
                best = max(best or plan, self.with_best_batch(plan), key=self.rank)
        return best

    def options(self, top: Plan, kv_types: Sequence[str]) -> Iterator[PlacementOption]:
        """Yield the ways to run the file on the cards of `top`."""
        lost = 0.0
        if self.device.accelerator != "cpu":
            lost = scoring.prompt_lost(top, self.purpose)
        costs = [quality.kv_cost(kv_type) - quality.kv_cost(kv_types[0]) for kv_type in kv_types]
        for kv_type, cost in zip(kv_types, costs, strict=True):
            yield PlacementOption(True, self.rank(top, cost - lost), top, kv_type)
        has_host = self.device.kind == "discrete" and self.device.host is not None
        if has_host and backend_of(self.variant).splits:
            at = min(1, len(kv_types) - 1)
            best_rank = self.rank(top, costs[at] + SPLIT_COST - lost)
            yield PlacementOption(False, best_rank, top, kv_types[at])

    def plan_of(self, option: PlacementOption) -> Plan | None:
        """Return the plan of one way, or None if it does not fit."""
        wanted = option.top.settings.with_kv_type(option.kv_type)
        fitted = self.on_cards(wanted) if option.is_complete else self.divided(wanted)
        if fitted is None or fitted.fits == "no":
            return None
        if option.is_complete and fitted.settings.placement == option.top.settings.placement:
            return self.with_fit(option.top, fitted)
        return self.planned(fitted)

    def on_cards(self, settings: RunSettings) -> FittedSettings:
        """Place all of the model on the cards of `settings`, and judge whether it fits."""
        used = layer_bytes.with_used_cards(self.device, settings.placement)
        tried = placement_search.over_cards(
            used, self.model, self.variant, self.overrides.offload.applied_to(settings)
        )
        need = memory.need(self.model, self.variant, tried, used)
        is_split = tried.placement.is_split and self.device.kind == "discrete"
        return FittedSettings(tried, need, verdict(used, need, split=is_split))

    def divided(self, settings: RunSettings) -> FittedSettings | None:
        """Split `settings` with system memory for the fastest decoding. Returns None if no split
        fits."""
        found = placement_search.best_split(
            self.device, self.model, self.variant, settings, self.overrides.offload
        )
        if found is None:
            return None
        need = memory.need(self.model, self.variant, found, self.device)
        return FittedSettings(found, need, "split")

    def with_fit(self, top: Plan, fitted: FittedSettings) -> Plan:
        """Return `top` with the settings, memory and fit of `fitted`. Both have the same placement
        and decode speed."""
        settings, need, fits = fitted
        cost = quality.kv_cost(settings.kv_type) - quality.kv_cost(top.settings.kv_type)
        plan = top._replace(settings=settings, memory=need, fits=fits, quality=top.quality - cost)
        if fits == "yes" and not cost and not need.cards_bytes:
            return plan
        return plan._replace(score=score(plan, self.purpose))

    def with_best_batch(self, plan: Plan) -> Plan:
        """Return `plan`, or the same with larger prefill steps if prompts cost points and the score
        improves."""
        if self.device.accelerator == "cpu" or not scoring.prompt_lost(plan, self.purpose):
            return plan
        fitted = FittedSettings(plan.settings, plan.memory, plan.fits)
        fitted = self.with_larger_batch(fitted, _MIN_SCORED_GAIN)
        if fitted.settings == plan.settings:
            return plan
        return max(plan, self.planned(fitted), key=attrgetter("score"))

    def with_larger_batch(self, fitted: FittedSettings, least_gain: float) -> FittedSettings:
        """Return `fitted` with a larger micro-batch if that pays for such a prompt and has no
        other effect.

        For a mixture split with system memory, more experts may move there to make room. Decoding
        must stay about as fast.
        """
        settings, _, fits = fitted
        if fits == "yes":
            return self.in_larger_steps(fitted, least_gain)
        if fits != "split" or self.model.experts is None or not self.overrides.offload.is_free:
            return fitted
        rate = self.decode_tok_s(settings)
        for size in self.micro_batches(settings, least_gain):
            anew = settings.placed(experts_on_host=0, tensor_split=())
            found = self.divided(replace(anew, n_batch=size))
            if found is None or (found.memory.fills_host and not fitted.memory.fills_host):
                continue
            if self.decode_tok_s(found.settings) >= _EQUALLY_FAST_SHARE * rate:
                return found
        return fitted

    def decode_tok_s(self, settings: RunSettings) -> float:
        """Return the decode speed that the cost model alone predicts, without measurements."""
        return speed.decode(self.device, self.model, self.variant, settings).value

    def in_larger_steps(self, fitted: FittedSettings, least_gain: float) -> FittedSettings:
        """Take the largest micro-batch that pays and needs little memory, for settings that fit
        ("yes"). Returns `fitted` itself if no size qualifies."""
        settings, need, fits = fitted
        used = layer_bytes.with_used_cards(self.device, settings.placement)
        sizes = [(n, _SHARE_OF_MEMORY) for n in self.micro_batches(settings, least_gain)]
        if used.accelerator != "cpu" and backend_of(self.variant).buffers == "grown":
            most = min(self.prompt_tokens, int(settings.n_ctx * _SHARE_OF_CONTEXT))
            sizes += [(n, _NEGLIGIBLE_SHARE) for n in (2048, 1024) if settings.n_batch < n <= most]
        for size, share in sizes:
            tried = replace(settings, n_batch=size)
            taken = memory.need(self.model, self.variant, tried, used)
            more_bytes = taken.total_bytes - need.total_bytes
            if more_bytes <= share * need.limit_bytes and verdict(used, taken) == "yes":
                return FittedSettings(tried, taken, fits)
        return fitted

    def micro_batches(self, settings: RunSettings, least_gain: float) -> Sequence[int]:
        """Return the micro-batches above that of `settings` that pay for such a prompt, largest
        first. Each doubling makes the prompt faster by the factor `least_gain`.

        A micro-batch reads all weights once. With more tokens per read, prefill is faster and a
        step's buffers are larger. A CPU is limited by arithmetic long before that, so the result is
        empty.
        """
        device = layer_bytes.with_used_cards(self.device, settings.placement)
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
        best_s = token_s(settings.n_batch)
        for size in MICRO_BATCHES:
            if settings.n_batch < size <= most:
                each = token_s(size)
                if best_s < each * least_gain:
                    break
                found.insert(0, size)
                best_s = each
        return found

    def planned(self, fitted: FittedSettings, *, of: Plan | None = None) -> Plan:
        """Return the Plan for `fitted`, with its speeds and its score. It completes `of`, if given."""
        settings, need, fits = fitted
        if fits == "split" and of is not None:
            settings = placement_search.pinned(self.device, settings, need)
        plan = Plan(
            model=self.model,
            variant=self.variant,
            settings=settings,
            fits=fits,
            memory=need,
            load_s=speed.load_time(self.variant),
            **self.speeds(settings, of),
            **self._quality(settings),
            draft_gain=drafting.draft_gain(
                self.device, (self.model, self.variant), settings.drafter.second
            ),
        )
        drafted = drafting.for_purpose(self.device, plan, self.workload)
        if drafted is not None:
            plan = plan._replace(drafting=drafted)
        return plan._replace(score=score(plan, self.purpose))

    def _quality(self, settings: RunSettings) -> dict[str, Any]:
        """The model's rating, reduced by the losses of its format and of the KV type."""
        rating = quality.rate(self.model, self.workload.purpose)
        lost = quality.format_cost(self.model, self.variant) + quality.kv_cost(settings.kv_type)
        evidence = self.overrides.kv_evidence
        bases = [rating.basis, quality.format_basis(self.variant)]
        return {
            "quality": round(rating.points - lost, 2),
            "quality_basis": "; ".join(basis for basis in bases if basis),
            "quality_spread": rating.spread,
            "is_rated": rating.is_evidence,
            "makers_own": rating.makers_own,
            "kv_bytes_per_1k": kv_sizes.kv_bytes_per_1k_tokens(self.model, settings.kv_type),
            "kv_why": quality.why(settings.kv_type, self.workload.purpose, evidence),
        }

    def speeds(self, settings: RunSettings, of: Plan | None) -> dict[str, Any]:
        """Return the decode speed with an empty and a full context, the prefill speed, and the time
        to the first token. That time is given with and without a cache."""
        run = (self.device, self.model, self.variant, settings)
        measured = self.overrides.measured
        if of is not None and of.settings.placement == settings.placement:
            decode = of.decode_tok_s
        else:
            decode = speed.decode(*run, measured=measured)
        full = decode
        if of is not None:
            full = speed.decode(*run, depth=self.request_tokens, measured=measured)
        prompt = self.prompt_tokens
        shortened = min(_PREFILL_PROMPT_TOKENS, prompt)
        usual = speed.prefill(*run, prompt_tokens=shortened, measured=measured)
        over_prompt = usual
        if prompt > _PREFILL_PROMPT_TOKENS:
            over_prompt = speed.prefill(*run, prompt_tokens=prompt, measured=measured)
        ttft_cached = None
        cached = self.purpose.cached_tokens
        if cached and not rereads_turns(self.model, self.variant, settings):
            ttft_cached = speed.ttft(over_prompt, decode, prompt, cached_tokens=cached)
        return {
            "decode_tok_s": decode,
            "decode_tok_s_full": full,
            "prefill_tok_s": usual,
            "ttft_s": speed.ttft(over_prompt, decode, prompt),
            "ttft_cached_s": ttft_cached,
        }


MICRO_BATCHES = (DEFAULT_BATCH, 1024, 2048, 4096)
# A doubling that speeds up a prompt by less than this is not worth its memory. The prediction is no
# more accurate than that.
_MIN_PREFILL_GAIN = 1.05
# The same if the wait costs points. With a larger limit, more bandwidth could make the prompt
# slower: the step reads weights sooner, so a doubling gains less.
_MIN_SCORED_GAIN = 1.003
# Larger steps may take this share of the accelerator's memory limit. One step may fill this share
# of the context.
_SHARE_OF_MEMORY = 1 / 16
_SHARE_OF_CONTEXT = 1 / 4
# If buffers grow on demand, a size that needs no more than this share for a moment need not pay.
# Each step costs a pause, which matters for a small model on a fast device.
_NEGLIGIBLE_SHARE = 1 / 100
