"""Prefix cache: a radix tree over token ids whose nodes hold opaque blocks of exported KV.

Two shapes of memory, one tree. Where KV can be cut anywhere (`whole=False`), a node's block covers the node's own
tokens and a prefix is the chain of blocks from the root. Where it can't (sliding windows, recurrent state;
`whole=True`), a block covers everything from token 0 to the node's end and a prefix is the deepest such node.

    root ── "system prompt" ──┬── "chat A" ── "A's 2nd turn"
                              └── "chat B"

Ownership: a Match that is locked keeps every node on its path; eviction takes unlocked leaves only, least recently
used first, and among equals the one with the fewest tokens (cheapest to rebuild). Law: the bytes of live blocks are
exactly `held_bytes`, counted once per block however many nodes share it after a split.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Block(Protocol):
    """Exported KV of tokens [start, stop) of some line. `held_bytes` is what it occupies in memory now."""

    start: int
    stop: int

    def read(self) -> bytes | memoryview | None:
        """The exported bytes; None when they turned out to be lost or corrupt (a miss, never a wrong answer)."""
        ...

    def demote(self) -> bool:
        """Let go of the memory and keep a copy elsewhere; False where there is none."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes in memory (0 while only on disk)."""
        ...


@dataclass(slots=True)
class MemoryBlock:
    """A block in memory."""

    data: bytes
    start: int
    stop: int

    def read(self) -> bytes | None:
        """The data."""
        return self.data

    def demote(self) -> bool:
        """There is no other copy."""
        return False

    @property
    def held_bytes(self) -> int:
        """Length of the data."""
        return len(self.data)


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree: `tokens` from depth `start` to `stop`, and the block that covers them (or None)."""

    tokens: Tokens
    start: int
    parent: Node | None
    block: Block | None = None
    children: dict[int, Node] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0

    @property
    def stop(self) -> int:
        """Depth of the node's end, in tokens from the root."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache holds of a prompt: `length` tokens, to be imported as `parts` = (block, start, stop) in order.

    `diverged_at` is how far the prompt followed tokens the cache knows of, with or without KV.
    `node` is the deepest node used; lock it before reading any block.
    """

    length: int
    parts: tuple[tuple[Block, int, int], ...]
    diverged_at: int
    node: Node | None


def as_tokens(tokens: Seq[int] | Tokens) -> Tokens:
    """Token ids as the int32 array the tree compares."""
    return np.asarray(tokens, dtype=np.int32)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens `a` and `b` share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


class PrefixCache:
    """The tree. Pure: no backend, no clock (a use counter orders recency)."""

    def __init__(self, *, whole: bool, capacity_bytes: int) -> None:
        self.whole = whole
        self.capacity_bytes = capacity_bytes
        self._root = Node(np.empty(0, dtype=np.int32), 0, None)
        self._uses = 0
        self._users: dict[int, tuple[Block, int]] = {}
        self.held_bytes = 0
        self.evicted_tokens = 0

    # --- reading -------------------------------------------------------------------------------------------------

    def match(self, tokens: Seq[int] | Tokens) -> Match:
        """The longest prefix of `tokens` that can be restored. Changes nothing but recency."""
        line = as_tokens(tokens)
        self._uses += 1
        parts: list[tuple[Block, int, int]] = []
        snapshot: Node | None = None
        covered, node, depth = 0, self._root, 0
        deepest = self._root
        while depth < len(line):
            child = node.children.get(int(line[depth]))
            if child is None:
                break
            shared = common_prefix(child.tokens, line[depth:])
            depth += shared
            if self.whole:
                if shared == len(child.tokens) and child.block is not None:
                    snapshot = child
            elif child.block is not None and covered == child.start:
                if parts and parts[-1][0] is child.block:
                    parts[-1] = (child.block, parts[-1][1], child.start + shared)
                else:
                    parts.append((child.block, child.start, child.start + shared))
                covered = child.start + shared
                deepest = child
                child.last_used = self._uses
            if shared < len(child.tokens):
                break
            node = child
        if snapshot is not None:
            assert snapshot.block is not None
            snapshot.last_used = self._uses
            return Match(snapshot.stop, ((snapshot.block, 0, snapshot.stop),), depth, snapshot)
        if not covered:
            return Match(0, (), depth, None)
        return Match(covered, tuple(parts), depth, deepest)

    def lock(self, match: Match) -> None:
        """Keep the nodes of `match` until `unlock`."""
        for node in self._path(match.node):
            node.locks += 1

    def unlock(self, match: Match) -> None:
        """Let the nodes of `match` be evicted again."""
        for node in self._path(match.node):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1

    def covered(self, tokens: Seq[int] | Tokens) -> int:
        """How many leading tokens could be restored, without touching recency."""
        uses = self._uses
        length = self.match(tokens).length
        self._uses = uses
        return length

    def chain(self, tokens: Seq[int] | Tokens) -> list[Block]:
        """The blocks that restoring `tokens` would read, from the root down, without touching recency."""
        uses = self._uses
        parts = self.match(tokens).parts
        self._uses = uses
        return [block for block, _, _ in parts]

    # --- writing -------------------------------------------------------------------------------------------------

    def insert(self, tokens: Seq[int] | Tokens, block: Block) -> bool:
        """Store `block` for the end of the line `tokens` (its stop must be the line's length).

        Returns False, storing nothing, when the line up to block.start is not covered (its parent was evicted) or
        the place is already taken, or when what is held leaves no room for it.
        """
        line = as_tokens(tokens)
        assert block.stop == len(line), "a block must end where its line ends"
        if block.held_bytes > self.capacity_bytes:
            return False
        self._uses += 1
        if not self.whole and block.start and self.covered(line[: block.start]) < block.start:
            return False
        anchor = self._walk(line[: 0 if self.whole else block.start])
        if anchor is not None:
            anchor.locks += 1
        try:
            self.make_room(block.held_bytes)
        finally:
            if anchor is not None:
                anchor.locks -= 1
        if self.held_bytes + block.held_bytes > self.capacity_bytes:
            return False
        node = self._walk(line)
        assert node is not None
        if node is self._root or node.block is not None:
            return False
        if not self.whole and node.start != block.start:
            return self._fill(node, block)
        self._set_block(node, block)
        node.last_used = self._uses
        return True

    def make_room(self, need_bytes: int) -> int:
        """Evict until `need_bytes` more fit in the capacity; returns the bytes freed."""
        freed = 0
        while self.held_bytes + need_bytes > self.capacity_bytes:
            victim = self._victim()
            if victim is None:
                break
            before = self.held_bytes
            assert victim.block is not None
            if victim.block.demote():
                self.recount()
            elif victim.children and not self.whole:
                break
            else:
                self.evicted_tokens += len(victim.tokens)
                self.remove(victim)
            freed += before - self.held_bytes
        return freed

    def shrink(self, n_bytes: int) -> int:
        """Give back `n_bytes` of memory, or all that no lock holds; returns the bytes freed. Lines unused the longest
        go first, from their ends: a block with a copy on disk loses only its memory, another leaves with all that
        hangs on it."""
        before = self.held_bytes
        nodes = list(self._nodes())
        # A line is as recent as the most recent one that goes on from it.
        recency: dict[int, int] = {}
        for node in reversed(nodes):
            recency[id(node)] = max([node.last_used, *(recency[id(c)] for c in node.children.values())])
        for node in sorted(nodes, key=lambda n: (recency[id(n)], -n.start)):
            if before - self.held_bytes >= n_bytes:
                break
            block = node.block
            if block is None or node.locks or not block.held_bytes:
                continue
            held = block.held_bytes
            if block.demote():
                self.held_bytes -= held
            else:
                self._evict(node)
        return before - self.held_bytes

    def _evict(self, node: Node) -> None:
        """Remove an unlocked node's block and, where they can't do without it, all blocks behind it."""
        below = [] if self.whole else [n for c in node.children.values() for n in self._nodes(c) if n.block is not None]
        # From the ends: a node is removed before the one it hangs on, which then may be left without any.
        for gone in [*reversed(below), node]:
            self.evicted_tokens += len(gone.tokens)
            self.remove(gone)

    def remove(self, node: Node) -> None:
        """Forget an unlocked node's block, and the node itself if nothing hangs on it."""
        assert node.locks == 0, "a held node can't be evicted"
        self._set_block(node, None)
        while node.parent is not None and not node.children and node.block is None and node.locks == 0:
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            node = parent

    def forget(self, block: Block) -> None:
        """A block turned out to be lost: no node has it any more. Nodes stay where others hang on them."""
        for node in [n for n in self._nodes() if n.block is block]:
            self._set_block(node, None)
        for leaf in [n for n in self._nodes() if n is not self._root and not n.children and n.block is None]:
            if not leaf.locks:
                self.remove(leaf)

    def recount(self) -> None:
        """Bring `held_bytes` up to date after blocks moved between memory and disk."""
        self.held_bytes = sum(block.held_bytes for block, _ in self._users.values())

    def check_integrity(self) -> None:
        """The laws in the module docstring; AssertionError where one is broken."""
        users: dict[int, int] = {}
        for node in self._nodes():
            if node is self._root:
                continue
            assert len(node.tokens), "an empty edge"
            assert node.parent is not None
            assert node.start == node.parent.stop, "a gap between parent and child"
            assert node.parent.children[int(node.tokens[0])] is node, "a child under the wrong first token"
            assert node.children or node.block is not None or node.locks, "a dead leaf"
            assert node.locks >= max((c.locks for c in node.children.values()), default=0), "a lock without its path"
            if node.block is not None:
                users[id(node.block)] = users.get(id(node.block), 0) + 1
                assert node.block.start <= (0 if self.whole else node.start), "a block that begins after its node"
                assert node.block.stop >= node.stop, "a block that ends before its node"
        assert users == {key: n for key, (_, n) in self._users.items()}, "block users disagree with the tree"
        assert self.held_bytes == sum(b.held_bytes for b, _ in self._users.values()), "held_bytes is wrong"

    # --- the tree ------------------------------------------------------------------------------------------------

    def _walk(self, line: Tokens) -> Node:
        """The node that ends exactly at len(line), splitting and growing edges on the way."""
        node, depth = self._root, 0
        while depth < len(line):
            child = node.children.get(int(line[depth]))
            if child is None:
                child = Node(line[depth:].copy(), depth, node, last_used=self._uses)
                node.children[int(line[depth])] = child
                return child
            shared = common_prefix(child.tokens, line[depth:])
            if shared < len(child.tokens):
                child = self._split(child, shared)
            depth += shared
            node = child
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge: the upper part becomes a new node; both share the block (whole: only the lower keeps it)."""
        assert node.parent is not None
        upper = Node(node.tokens[:at].copy(), node.start, node.parent, locks=node.locks, last_used=node.last_used)
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[at:].copy(), node.start + at, upper
        upper.children[int(node.tokens[0])] = node
        if node.block is not None and not self.whole:
            self._set_block(upper, node.block)
        return upper

    def _fill(self, node: Node, block: Block) -> bool:
        """Give the block to the uncovered nodes on the way down to `node` that it covers."""
        filled = False
        for step in self._path(node):
            if step.start >= block.start and step.stop <= block.stop and step.block is None:
                self._set_block(step, block)
                step.last_used = self._uses
                filled = True
        return filled

    def _set_block(self, node: Node, block: Block | None) -> None:
        old, node.block = node.block, block
        if block is not None:
            _, users = self._users.get(id(block), (block, 0))
            self._users[id(block)] = (block, users + 1)
            if not users:
                self.held_bytes += block.held_bytes
        if old is not None:
            _, users = self._users[id(old)]
            if users == 1:
                del self._users[id(old)]
                self.held_bytes -= old.held_bytes
            else:
                self._users[id(old)] = (old, users - 1)

    def _victim(self) -> Node | None:
        """The unlocked node to evict next: a leaf, or any node of a whole-block tree, where none needs another."""
        best: Node | None = None
        for node in self._nodes():
            if node.block is None or node.locks or (node.children and not self.whole):
                continue
            if not node.block.held_bytes:
                continue
            if best is None or (node.last_used, len(node.tokens)) < (best.last_used, len(best.tokens)):
                best = node
        return best

    def _nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Every node from `top` (the root) down, each before its children."""
        stack = [top or self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _path(self, node: Node | None) -> list[Node]:
        path: list[Node] = []
        while node is not None and node is not self._root:
            path.append(node)
            node = node.parent
        path.reverse()
        return path
