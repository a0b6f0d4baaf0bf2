"""How much of a prompt is known: what it has in common with sequences in the context and blocks in
the cache, which of those to restore, and why the rest is computed although it was known once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import Block, IdleSequence
from localllm.engine.cache.tree import CachedPart, Match, PrefixCache, as_tokens, common_prefix
from localllm.engine.tokens import Tokens

# --- what it has in common with sequences ---------------------------------------------------------


class TokenSequence(Protocol):
    """Tokens in the context: a running request's, or an idle sequence's. They may grow or be cut,
    but never change."""

    @property
    def tokens(self) -> Sequence[int] | Tokens:
        """All of them, computed or not."""

    def line(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens [start, stop) as the cache knows them (see `tokens.salted`)."""


class RunningSequence(TokenSequence, Protocol):
    """A running request as the cache sees it: `n_kv` of its tokens are in `sequence`."""

    sequence: int | None
    n_kv: int


class PromptMatch:
    """One waiting prompt's: compared once, then remembered. Requests wait for many steps, and what
    is O(context) must not be done in each of them."""

    def __init__(self, prompt: Sequence[int] | Tokens) -> None:
        self.tokens = as_tokens(prompt)
        # How many leading tokens are the same, and whether the next one is known to differ.
        self._shared: WeakKeyDictionary[TokenSequence, tuple[int, bool]] = WeakKeyDictionary()
        self._planned: tuple[Hashable, RestorePlan] | None = None

    def shared(self, other: TokenSequence) -> int:
        same, parted = self._shared.get(other, (0, False))
        n = min(len(other.tokens), len(self.tokens))
        if same < n and not parted:
            new = common_prefix(other.line(same, n), self.tokens[same:n])
            parted = new < n - same
            same += new
            self._shared[other] = same, parted
        return min(same, n)

    def plan(self, version: Hashable, make: Callable[[Tokens], RestorePlan]) -> RestorePlan:
        """What to restore from the cache: what `make` said when the cache was last of that
        `version`."""
        if self._planned is None or self._planned[0] != version:
            self._planned = version, make(self.tokens)
        return self._planned[1]


# --- what of the cache to restore -----------------------------------------------------------------

# Is reading this block quicker than computing so many of its tokens?
ShouldLoad = Callable[[Block, int], bool]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The `parts` of a prompt to import, in order: pieces of KV; or all that leads to a state, and
    as the last of them that state. `held`: what is to be locked for them, and where.
    `unread` tokens are held too, on disk, and quicker computed.
    `known`: how far the prompt followed any sequence."""

    held: tuple[tuple[PrefixCache, Match], ...] = ()
    parts: tuple[CachedPart, ...] = ()
    unread: int = 0
    known: int = 0

    @property
    def divisible(self) -> bool:
        """True where any of the parts can be imported behind what a sequence holds already."""
        return not self.parts or self.parts[-1].block.kind == "kv"

    @property
    def saved(self) -> int:
        return sum(part.n_tokens for part in self.parts)

    def saved_behind(self, held: int) -> int:
        """Tokens to import where a sequence in the context has the first `held` already."""
        if self.divisible:
            return sum(max(0, p.stop - max(p.start, held)) for p in self.parts)
        return 0

    def beyond(self, held: int) -> RestorePlan:
        """What is left of it for such a sequence."""
        parts = self.parts if self.divisible else ()
        left = [replace(p, start=max(p.start, held)) for p in parts if p.stop > held]
        return replace(self, parts=tuple(left), unread=0)


@dataclass(frozen=True)
class PrefixSource:
    """Where `length` of a prompt's tokens can come from, `held` of them from a `sequence` in the
    context (that of the `idle` one, if any, else a running request's) and the rest, by `plan`, from
    the cache.
    `known` is how far the prompt followed any known sequence.
    `state`: the state behind what is held, where the sequence that has it can't go back there by
    itself."""

    length: int = 0
    known: int = 0
    held: int = 0
    idle: IdleSequence | None = None
    sequence: int | None = None
    plan: RestorePlan = RestorePlan()
    state: Block | None = None


# For a request that takes nothing from others.
NO_SOURCE = PrefixSource()


def plan_restore(
    cache: PrefixCache,
    prompt: Tokens,
    should_load: ShouldLoad,
    states: PrefixCache | None = None,
    *,
    snapshots: bool = False,
) -> RestorePlan:
    """What to take of all that `cache` holds of `prompt`: all pieces that are worth it; or, where
    it can only be gone on from at one of its `states`, the longest beginning that has its state and
    all of its KV (`snapshots`: that is in the state), for gaps can't be computed there."""
    match = cache.peek(prompt)
    if states is None:
        parts = tuple(part for part in match.parts if should_load(part.block, part.n_tokens))
        unread = match.saved - sum(part.n_tokens for part in parts)
        return RestorePlan(((cache, match),), parts, unread, match.known)
    held = reached = len(prompt)
    if not snapshots:
        held = match.length
        reached = 0
        for part in match.parts:
            if part.start > reached or not should_load(part.block, part.n_tokens):
                break
            reached = part.stop
    unread = states.peek(prompt[:held]).saved
    state = longest(states, prompt[:reached], should_load)
    known = max(match.known, states.peek(prompt).known)
    match = cache.peek(prompt[: state.saved])
    # It brings what is behind the pieces: nothing, or all.
    last = [replace(part, start=match.length) for part in state.parts]
    return RestorePlan(
        ((cache, match), (states, state)), (*match.parts, *last), unread - state.saved, known
    )


def longest(tree: PrefixCache, prefix: Tokens, should_load: ShouldLoad) -> Match:
    """The longest beginning of `prefix` that `tree` holds whole, and is worth reading."""
    match = tree.peek(prefix)
    while match.parts and not should_load(match.parts[0].block, match.saved):
        match = tree.peek(prefix[: match.saved - 1])
    return match


# --- what was known once --------------------------------------------------------------------------


class PrefixHistory:
    """The most recent prefixes that had KV here, as hashes, long after it is gone: what is computed
    although it was known once must be countable, or nobody sees that a cache is too small. A
    collision costs a wrong count, nothing else."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def add(self, tokens: Tokens) -> None:
        for _, key in _prefixes(tokens):
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > tunables.HISTORY_PREFIXES:
            self._prefixes.popitem(last=False)

    def known(self, tokens: Tokens) -> int:
        """How many leading tokens had, rounded down to whole steps."""
        length = 0
        for length_there, key in _prefixes(tokens):
            if key not in self._prefixes:
                break
            length = length_there
        return length


def _prefixes(tokens: Tokens) -> Iterator[tuple[int, int]]:
    step = tunables.HISTORY_STEP_TOKENS
    key = 0
    for stop in range(step, len(tokens) + 1, step):
        key = hash((key, tokens[stop - step : stop].tobytes()))
        yield stop, key
