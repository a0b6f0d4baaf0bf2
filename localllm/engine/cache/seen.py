"""Remembers which lines of tokens went through this engine, long after their KV is gone: what is computed although it
was known once must be countable, or nobody sees that a cache is too small."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from localllm.engine.tokens import Tokens

# A line is known by the hash of each of its prefixes that are a multiple of this long.
_STEP_TOKENS = 64
# 4 million tokens in some 6 MB.
_MOST = 65_536


class SeenLines:
    """The most recent prefixes, as hashes. A collision costs a wrong count, nothing else."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def add(self, tokens: Tokens) -> None:
        """`tokens` have KV now."""
        for _, key in _prefixes(tokens):
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > _MOST:
            self._prefixes.popitem(last=False)

    def known(self, tokens: Tokens) -> int:
        """How many leading tokens were seen, rounded down to whole steps."""
        length = 0
        for length_there, key in _prefixes(tokens):
            if key not in self._prefixes:
                break
            length = length_there
        return length


def _prefixes(tokens: Tokens) -> Iterator[tuple[int, int]]:
    key = 0
    for stop in range(_STEP_TOKENS, len(tokens) + 1, _STEP_TOKENS):
        key = hash((key, tokens[stop - _STEP_TOKENS : stop].tobytes()))
        yield stop, key
