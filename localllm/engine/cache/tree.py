"""Prefix cache: a radix tree over token ids whose nodes hold opaque blocks of exported KV.

One tree serves two kinds of memory. If KV can be cut anywhere ("kv"), a node's block covers the
node's own tokens, and a prefix is restored from the blocks on its path. A node on the path may
have no block, because it was evicted or lost. Its tokens are computed, and the blocks after it are
still used. A state (sliding windows, recurrent layers; "state") can't be cut. Its block covers
everything from token 0 to the node's end, and a prefix is restored from the deepest such node.

    root ── "system prompt" ──┬── "chat A" ── "A's 2nd turn"
                              └── "chat B"

Invariants, checked by `check_integrity` and by random histories in the tests:

- `held_bytes` is exactly the bytes in memory of the tree's blocks. Each block is counted once,
  however many nodes share it.
- A sequence is as recent as the most recent sequence that continues it, so ends are evicted before
  beginnings. A block is evicted as a whole, and is as recent as its middle token: one hot token at
  its beginning does not keep hundreds of cold ones.
- A locked node is neither demoted nor evicted. The eviction order is in cache/eviction.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from localllm.engine.cache.eviction import (
    Block,
    CacheBudget,
    Candidate,
    Kind,
    depth,
    surplus_states,
)
from localllm.engine.tokens import Tokens

TOKEN_BYTES = np.dtype(np.int32).itemsize


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree: the tokens from depth `start` to `stop`, and the block that covers them
    (or None).

    `edge` holds the tokens' bytes. A walk compares bytes, which is one operation for each node.
    `children` have the bytes of their first token as keys.
    """

    edge: bytes
    start: int
    parent: Node | None
    block: Block | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    last_used_ns: int = 0
    stop: int = 0

    def __post_init__(self) -> None:
        self.stop = self.start + len(self.edge) // TOKEN_BYTES
        if self.parent is not None:
            self.parent.children[self.first_token] = self

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> Tokens:
        return np.frombuffer(self.edge, dtype=np.int32)

    @property
    def first_token(self) -> bytes:
        """Its first token."""
        return self.edge[:TOKEN_BYTES]

    @property
    def is_attached(self) -> bool:
        """Is it still its parent's child? The root is."""
        return self.parent is None or self.parent.children.get(self.first_token) is self

    def split(self, at: int) -> Node:
        """Give its first `at` tokens to a new parent, which is returned."""
        upper = Node(
            self.edge[: at * TOKEN_BYTES],
            self.start,
            self.parent,
            locks=self.locks,
            last_used_ns=self.last_used_ns,
        )
        self.edge = self.edge[at * TOKEN_BYTES :]
        self.start = upper.stop
        self.parent = upper
        upper.children[self.first_token] = self
        return upper


@dataclass(frozen=True, slots=True)
class CachedPart:
    """Tokens [start, stop) of a prompt, to be imported from `block`."""

    block: Block
    start: int
    stop: int

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Match:
    """The parts of a prompt that the cache holds, in order, possibly with gaps between them.

    The first `length` tokens are held without a gap. `known` is how far the prompt matched tokens
    in the tree, with or without KV. `node` is the deepest node used; lock it before reading any
    block.
    """

    parts: tuple[CachedPart, ...]
    length: int
    known: int
    node: Node | None

    @property
    def saved(self) -> int:
        return sum(part.n_tokens for part in self.parts)


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token ids as the int32 array that the tree compares."""
    return np.asarray(tokens, dtype=np.int32)


def common_prefix(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()[0]
    if different.size:
        return int(different[0])
    return n


def path_to(node: Node | None) -> list[Node]:
    """The nodes from below the root to `node`."""
    path: list[Node] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def walk(root: Node, prefix: Tokens) -> Iterator[tuple[Node, int]]:
    """The nodes along `prefix`, each with the number of its tokens that match."""
    tokens = prefix.tobytes()
    at = 0
    node = root.children.get(tokens[:TOKEN_BYTES])
    while node is not None:
        stop = at + len(node.edge)
        if not tokens.startswith(node.edge, at):
            yield node, common_prefix(node.tokens, np.frombuffer(tokens[at:stop], dtype=np.int32))
            return
        yield node, node.n_tokens
        at = stop
        node = node.children.get(tokens[at : at + TOKEN_BYTES])


class PrefixCache:
    """The tree. It uses no backend; the time of a use comes from the `budget`.

    It has a budget of `capacity_bytes` of its own, unless it shares a `budget`.
    """

    def __init__(
        self, kind: Kind = "kv", *, capacity_bytes: int = 0, budget: CacheBudget | None = None
    ) -> None:
        self.kind = kind
        # A block is only useful as a whole, at its end.
        self.indivisible = kind != "kv"
        if budget is not None:
            self.budget = budget
        else:
            self.budget = CacheBudget(capacity_bytes)
        self.budget.pools.append(self)
        self.root = Node(b"", 0, None)
        self._nodes_of: dict[Block, list[Node]] = {}
        self.held_bytes = self.evicted_tokens = 0

    # --- reading ----------------------------------------------------------------------------------

    def peek(self, tokens: Sequence[int] | Tokens) -> Match:
        """The parts of `tokens` that can be restored. Changes nothing."""
        prefix = as_tokens(tokens)
        parts: list[CachedPart] = []
        deepest: Node | None = None
        length = known = 0
        for node, shared in walk(self.root, prefix):
            known = node.start + shared
            if node.block is None or (self.indivisible and shared < node.n_tokens):
                continue
            deepest = node
            if self.indivisible:
                parts = [CachedPart(node.block, 0, node.stop)]
            elif parts and parts[-1].block is node.block and parts[-1].stop == node.start:
                parts[-1] = CachedPart(node.block, parts[-1].start, known)
            else:
                parts.append(CachedPart(node.block, node.start, known))
            if parts[-1].start <= length:
                length = parts[-1].stop
        return Match(tuple(parts), length, known, deepest)

    def match(self, tokens: Sequence[int] | Tokens) -> Match:
        """The parts of `tokens` that can be restored. Counts as a use of them."""
        match = self.peek(tokens)
        now_ns = self.budget.use()
        node = match.node
        if node is not None and not uses_block(node, match.known):
            node = node.parent
        self._use(node, now_ns)
        return match

    def mark_surplus(self, prefix: Tokens, interval: int) -> None:
        """Mark the states along `prefix` as used now, except those that can be spared.

        The spared states (see `eviction.surplus_states`) become the first to be evicted.
        """
        nodes = [
            n
            for n, shared in walk(self.root, prefix)
            if n.block is not None and shared == n.n_tokens
        ]
        surplus = surplus_states([(n.stop, len(n.children) > 1) for n in nodes], interval)
        for node in nodes:
            if node.stop in surplus:
                node.last_used_ns = 0
            else:
                self._use_node(node, self.budget.last_use_ns)

    def lock(self, match: Match) -> None:
        """Keep the nodes of `match` until `unlock`."""
        for node in path_to(match.node):
            node.locks += 1

    def unlock(self, match: Match) -> None:
        """Allow the nodes of `match` to be demoted and evicted again."""
        for node in path_to(match.node):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
        if match.node is not None:
            # Its block may have been lost while it was locked.
            self._remove_empty(match.node)
        self.budget.changes += 1

    def gap(self, tokens: Sequence[int] | Tokens, start: int = 0) -> tuple[int, int] | None:
        """The first range [start, stop) of `tokens` without KV here, from `start` on; None if all
        have KV.
        """
        reached = start
        for part in self.peek(tokens).parts:
            if part.start > reached:
                return reached, part.start
            reached = max(reached, part.stop)
        if reached < len(tokens):
            return reached, len(tokens)
        return None

    # --- writing ----------------------------------------------------------------------------------

    def insert(
        self, tokens: Sequence[int] | Tokens, block: Block, used_ns: int | None = None
    ) -> bool:
        """Store `block` for the end of the sequence `tokens`; the block's stop must be the
        sequence's length.

        `used_ns` is the time of its last use (None: now). A wide block that is only on disk hands
        its tokens over to a narrower block, which is read sooner.

        Returns False, with no effect, if all its tokens have KV already, or there is no room
        now.
        """
        prefix = as_tokens(tokens)
        assert block.stop == len(prefix), "a block must end where its prefix ends"
        if (
            not self._is_useful(prefix, block)
            or self.budget.make_room(block.held_bytes, prefix=prefix, used_ns=used_ns) != "free"
        ):
            return False
        at_ns = self.budget.use() if used_ns is None else used_ns
        if not self.indivisible:
            self._node_at(prefix[: block.start])
        end = self._node_at(prefix)
        nodes = [end]
        if not self.indivisible:
            nodes = [node for node in path_to(end) if node.start >= block.start]
        for node in nodes:
            if _is_better(node.block, block):
                self._set_block(node, block)
        self._use(end, at_ns)
        self.budget.changes += 1
        return True

    def promote(self, block: Block, data: bytes | memoryview) -> None:
        """Keep data just read from disk in memory, if no recently used block must be evicted for
        it.
        """
        if block not in self._nodes_of or block.held_bytes:
            return
        if self.budget.make_room(len(data), used_ns=self.budget.stale_before_ns) == "free":
            block.data = data
            self.held_bytes += block.held_bytes

    def forget(self, block: Block) -> None:
        """Remove a lost or evicted block from all its nodes. Their children stay, after a gap."""
        for node in list(self._nodes_of.get(block, [])):
            self._set_block(node, None)
            self._remove_empty(node)
        self.budget.changes += 1

    def check_integrity(self) -> None:
        """Check the invariants in the module docstring. Raises AssertionError if one fails."""
        users: dict[Block, int] = {}
        for node in self._nodes():
            if node is self.root:
                continue
            assert node.parent is not None
            below = node.children.values()
            assert node.n_tokens > 0, "an empty edge"
            assert node.start == node.parent.stop, "there is a gap between parent and child"
            assert node.is_attached, "a child has the wrong first token"
            assert below or node.block or node.locks, "a dead leaf"
            assert all(child.locks <= node.locks for child in below), (
                "a node is locked, but not the path to it"
            )
            if not self.indivisible:
                recent = all(child.last_used_ns <= node.last_used_ns for child in below)
                assert recent, "a node was used less recently than its child"
            if node.block is not None:
                users[node.block] = users.get(node.block, 0) + 1
                begins = 0 if self.indivisible else node.start
                covers = node.block.start <= begins and node.block.stop >= node.stop
                assert covers, "a block belongs to other tokens"
        assert users == {block: len(nodes) for block, nodes in self._nodes_of.items()}, (
            "the recorded users of a block differ from the tree"
        )
        assert self.held_bytes == sum(block.held_bytes for block in self._nodes_of), (
            "held_bytes is wrong"
        )

    # --- eviction ---------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        for block, nodes in self._nodes_of.items():
            if block.held_bytes and not any(n.locks for n in nodes):
                node = nodes[0]
                if len(nodes) > 1:
                    middle = (block.start + block.stop) // 2
                    # The middle token may have another block now; the first node is used then.
                    node = next((n for n in nodes if n.start <= middle < n.stop), node)
                deep = depth(block.start, block.stop, self.kind)
                yield Candidate(node.last_used_ns, deep, block, self)

    def on_path(self, prefix: Tokens) -> list[Block]:
        """The blocks along `prefix`, in order; of states only the longest.

        They are not evicted to make room for `prefix`.
        """
        on_prefix = [
            (n, n.block, shared) for n, shared in walk(self.root, prefix) if n.block is not None
        ]
        if self.indivisible:
            return [block for n, block, shared in on_prefix if shared == n.n_tokens][-1:]
        return [*dict.fromkeys(b for n, b, shared in on_prefix if uses_block(n, n.start + shared))]

    def demote(self, block: Block) -> int:
        freed_bytes = block.held_bytes
        if not block.demote():
            return 0
        self.held_bytes -= freed_bytes
        return freed_bytes

    def tokens_of(self, block: Block) -> Tokens | None:
        """The tokens from the root to the end of `block`; None if the end has another block now."""
        end = max(self._nodes_of[block], key=attrgetter("stop"))
        if end.stop == block.stop:
            return np.frombuffer(b"".join(node.edge for node in path_to(end)), dtype=np.int32)
        return None

    def evict(self, block: Block) -> None:
        nodes = self._nodes_of[block]
        assert not any(node.locks for node in nodes), "a locked node can't be evicted"
        self.evicted_tokens += sum(node.n_tokens for node in nodes)
        self.forget(block)

    # --- the tree ---------------------------------------------------------------------------------

    def _use(self, node: Node | None, used_ns: int) -> None:
        """Mark the path to `node` as used. In a tree of states only `node` itself is marked."""
        path = path_to(node)
        if self.indivisible:
            path = path[-1:]
        for path_node in path:
            self._use_node(path_node, used_ns)

    def _use_node(self, node: Node, used_ns: int) -> None:
        node.last_used_ns = max(node.last_used_ns, used_ns)
        if node.block is not None and uses_block(node, node.stop):
            node.block.touch(used_ns)

    def _is_useful(self, prefix: Tokens, block: Block) -> bool:
        """Does this block serve some of its tokens better than their current block?"""
        at = 0
        node = self.root
        for node, shared in walk(self.root, prefix):
            at = node.start + shared
            if not self.indivisible and at > block.start and _is_better(node.block, block):
                return True
        return at < len(prefix) or (self.indivisible and (node.stop > at or node.block is None))

    def _node_at(self, prefix: Tokens) -> Node:
        """The node that ends exactly at len(prefix). Splits and adds edges if necessary."""
        end = self.root
        for node, shared in walk(self.root, prefix):
            if shared == node.n_tokens:
                end = node
            else:
                end = self._split(node, shared)
        if end.stop < len(prefix):
            return Node(prefix[end.stop :].tobytes(), end.stop, end)
        return end

    def _split(self, node: Node, at: int) -> Node:
        """Split an edge: its upper part becomes a new node.

        Both nodes share the block. In a tree of states only the lower node keeps it.
        """
        upper = node.split(at)
        if node.block is not None and not self.indivisible:
            self._set_block(upper, node.block)
        return upper

    def _set_block(self, node: Node, block: Block | None) -> None:
        old = node.block
        node.block = block
        if block is not None:
            nodes = self._nodes_of.setdefault(block, [])
            self.held_bytes += 0 if nodes else block.held_bytes
            nodes.append(node)
        if old is not None:
            self._nodes_of[old].remove(node)
            if not self._nodes_of[old]:
                del self._nodes_of[old]
                self.held_bytes -= old.held_bytes
                # If the block is queued to be written, the write is cancelled.
                old.data = None

    def _remove_empty(self, node: Node) -> None:
        """Remove a node that has no block, children or locks, and each ancestor that this leaves
        empty.
        """
        while (
            node.parent is not None and not node.children and node.block is None and node.locks == 0
        ):
            parent = node.parent
            if node.is_attached:
                del parent.children[node.first_token]
            node = parent

    def _nodes(self) -> Iterator[Node]:
        """Every node from the root down, each before its children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def uses_block(node: Node, depth: int) -> bool:
    """Does a sequence that follows `node` to `depth` use its block, and not only the block's
    beginning?
    """
    return node.block is None or depth > (node.block.start + node.block.stop) // 2


def _is_better(old: Block | None, new: Block) -> bool:
    """Should the tokens of `old` get `new` instead? A narrow block replaces a wide one that is
    only on disk.
    """
    return old is None or (not old.held_bytes and new.stop - new.start < old.stop - old.start)
