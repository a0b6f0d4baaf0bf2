"""Find out how much of a prompt is known.

This module compares the prompt with sequences in the context and blocks in the cache, plans which
blocks to restore, and records why tokens are recomputed although they were known before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import Block, IdleSequence
from localllm.engine.cache.tree import (
    CachedPart,
    Match,
    Node,
    PrefixCache,
    as_tokens,
    common_prefix,
    path_to,
    uses_block,
)
from localllm.engine.tokens import Tokens

# --- shared prefixes with sequences ---------------------------------------------------------------


class TokenSequence(Protocol):
    """Tokens in the context, of a running request or an idle sequence.

    The sequence may grow or be truncated, but its tokens never change.
    """

    @property
    def tokens(self) -> Sequence[int] | Tokens:
        """All tokens, computed or not."""

    def cache_tokens(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens [start, stop) as the cache knows them (see `tokens.salted`)."""


class RunningSequence(TokenSequence, Protocol):
    """A running request as the cache sees it: `n_kv` of its tokens are in `sequence`."""

    sequence: int | None
    n_kv: int


class PromptMatch:
    """Comparisons of one waiting prompt, each made once and remembered.

    A request may wait for many steps, and work of O(context) must not be repeated in each of them.
    """

    def __init__(self, prompt: Sequence[int] | Tokens) -> None:
        self.tokens = as_tokens(prompt)
        # Per sequence: the number of equal leading tokens, and whether the next one is known to
        # differ.
        self._shared: WeakKeyDictionary[TokenSequence, tuple[int, bool]] = WeakKeyDictionary()
        self._planned: tuple[Hashable, RestorePlan] | None = None

    def shared(self, other: TokenSequence) -> int:
        n_equal, differs = self._shared.get(other, (0, False))
        n = min(len(other.tokens), len(self.tokens))
        if n_equal < n and not differs:
            n_more = common_prefix(other.cache_tokens(n_equal, n), self.tokens[n_equal:n])
            differs = n_more < n - n_equal
            n_equal += n_more
            self._shared[other] = n_equal, differs
        return min(n_equal, n)

    def plan(self, version: Hashable, make: Callable[[Tokens], RestorePlan]) -> RestorePlan:
        """Return what to restore from the cache: the result of `make` for this `version` of the
        cache.
        """
        if self._planned is None or self._planned[0] != version:
            self._planned = version, make(self.tokens)
        return self._planned[1]


class FollowedTree:
    """How far each sequence in the context follows a tree of KV, remembered."""

    def __init__(self, tree: PrefixCache) -> None:
        self._tree = tree
        # The deepest node whose tokens all belong to the sequence, as last seen.
        self._reached: WeakKeyDictionary[TokenSequence, Node] = WeakKeyDictionary()

    def copies(self, sequence: TokenSequence, n_tokens: int) -> Iterator[tuple[PrefixCache, Block]]:
        """The blocks that end within the first `n_tokens` of `sequence`, in order, and their tree.

        They are those of `PrefixCache.on_path`, but only new tokens are compared.
        """
        n_tokens = min(n_tokens, len(sequence.tokens))
        node = self._reached.get(sequence, self._tree.root)
        # The node may have been removed since, or the sequence truncated.
        while node.parent is not None and (node.stop > n_tokens or not node.is_attached):
            node = node.parent
        known = node.stop
        last: Node | None = node
        while last is not None and known == last.stop:
            node = last
            last = node.children.get(sequence.cache_tokens(known, known + 1).tobytes())
            if last is not None:
                known += common_prefix(
                    last.tokens, sequence.cache_tokens(known, min(last.stop, n_tokens))
                )
        self._reached[sequence] = node
        path = [n for n in path_to(last or node) if uses_block(n, min(n.stop, known))]
        blocks = dict.fromkeys(n.block for n in path if n.block is not None)
        return ((self._tree, block) for block in blocks if block.stop <= n_tokens)


# --- planning the restoration ---------------------------------------------------------------------

# Is reading this block faster than computing this many of its tokens?
ShouldLoad = Callable[[Block, int], bool]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The `parts` of a prompt to import, in order.

    The parts are either pieces of KV, or all the KV up to a state followed by that state.

        `to_lock`: the trees and matches that must be locked for the parts.
        `unread`: tokens that are held on disk, but are faster to compute.
        `known`: how far the prompt matched any sequence.
    """

    to_lock: tuple[tuple[PrefixCache, Match], ...] = ()
    parts: tuple[CachedPart, ...] = ()
    unread: int = 0
    known: int = 0

    @property
    def divisible(self) -> bool:
        """True if each part can be imported after the tokens that a sequence already holds."""
        return not self.parts or self.parts[-1].block.kind == "kv"

    @property
    def saved(self) -> int:
        return sum(part.n_tokens for part in self.parts)

    def saved_after(self, n_present: int) -> int:
        """Tokens to import if a sequence in the context already has the first `n_present`
        tokens."""
        if self.divisible:
            return sum(max(0, p.stop - max(p.start, n_present)) for p in self.parts)
        return 0

    def rest_after(self, n_present: int) -> RestorePlan:
        """The rest of the plan for a sequence that already has the first `n_present` tokens."""
        parts = self.parts if self.divisible else ()
        left = [replace(p, start=max(p.start, n_present)) for p in parts if p.stop > n_present]
        return replace(self, parts=tuple(left), unread=0)


@dataclass(frozen=True)
class PrefixSource:
    """The source of the first `length` tokens of a prompt.

    `reused` of them come from a `sequence` in the context: that of the `idle` one if it is set,
    else that of a running request. The rest comes from the cache, by `plan`.

        `known`: how far the prompt matched any known sequence.
        `state`: the state after the `reused` tokens, if the sequence can't rewind to them by
        itself.
    """

    length: int = 0
    known: int = 0
    reused: int = 0
    idle: IdleSequence | None = None
    sequence: int | None = None
    plan: RestorePlan = RestorePlan()
    state: Block | None = None


# The source of a request that takes no tokens from other sequences.
NO_SOURCE = PrefixSource()


def plan_restore(
    cache: PrefixCache,
    prompt: Tokens,
    should_load: ShouldLoad,
    states: PrefixCache | None = None,
    *,
    snapshots: bool = False,
) -> RestorePlan:
    """Plan which of the blocks that `cache` holds for `prompt` to import.

    Without `states`, the plan takes every piece that is worth reading. With `states`, a sequence
    can only continue at a state, and gaps can't be computed. The plan then takes the longest
    prefix with a state and all of its KV. If `snapshots` is set, the state contains the KV.
    """
    match = cache.peek(prompt)
    if states is None:
        parts = tuple(part for part in match.parts if should_load(part.block, part.n_tokens))
        unread = match.saved - sum(part.n_tokens for part in parts)
        return RestorePlan(((cache, match),), parts, unread, match.known)
    length = usable = len(prompt)
    if not snapshots:
        length = match.length
        usable = 0
        for part in match.parts:
            if part.start > usable or not should_load(part.block, part.n_tokens):
                break
            usable = part.stop
    unread = states.peek(prompt[:length]).saved
    state = longest(states, prompt[:usable], should_load)
    known = max(match.known, states.peek(prompt).known)
    match = cache.peek(prompt[: state.saved])
    # The state covers the tokens after the pieces: 0 tokens, or all of them for a snapshot.
    state_part = [replace(part, start=match.length) for part in state.parts]
    return RestorePlan(
        ((cache, match), (states, state)), (*match.parts, *state_part), unread - state.saved, known
    )


def longest(tree: PrefixCache, prefix: Tokens, should_load: ShouldLoad) -> Match:
    """The longest prefix of `prefix` that `tree` holds completely and that is worth reading."""
    match = tree.peek(prefix)
    while match.parts and not should_load(match.parts[0].block, match.saved):
        match = tree.peek(prefix[: match.saved - 1])
    return match


# --- prefixes that were known before --------------------------------------------------------------


class PrefixHistory:
    """Hashes of the most recent prefixes that had KV here, kept long after the KV is gone.

    They make it possible to count tokens that are recomputed although they were known before.
    Without this count a cache that is too small would go unnoticed. A collision only makes a count
    wrong.
    """

    def __init__(self) -> None:
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def add(self, tokens: Tokens) -> None:
        for _, key in _prefixes(tokens):
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > tunables.HISTORY_PREFIXES:
            self._prefixes.popitem(last=False)

    def known(self, tokens: Tokens) -> int:
        """The number of leading tokens that had KV, rounded down to whole history steps."""
        length = 0
        for stop, key in _prefixes(tokens):
            if key not in self._prefixes:
                break
            length = stop
        return length


def _prefixes(tokens: Tokens) -> Iterator[tuple[int, int]]:
    step = tunables.HISTORY_STEP_TOKENS
    key = 0
    for stop in range(step, len(tokens) + 1, step):
        key = hash((key, tokens[stop - step : stop].tobytes()))
        yield stop, key
