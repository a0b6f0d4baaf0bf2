"""A scripted model whose text must pass the server's grammars.

It replaces a real engine: prompt in, text out, one token per byte and one per control token of the
template. Under a grammar, the engine's own constraint checks every token of the script. If the
grammar allows only one token, this token is written. A text that the grammar can't express ends the
answer with an error that names it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.clients.notations import Notation
from localllm.engine.messages import (
    Event,
    Failure,
    Finish,
    FinishReason,
    Prefill,
    Queued,
    Reasoning,
    Request,
    Text,
    Timings,
    Usage,
)
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.engine.sampling.grammar import GrammarCompiler
from support.scripted_engine import BOS, EOS, ScriptedEngine

_FIRST_CONTROL = 258
# The limit of consecutive tokens that a grammar may insert. Beyond it, the text counts as
# different.
_MOST_COERCED = 3
_SPACE = (*b" \n",)
_CHUNK = 12  # tokens in one piece of text

Brain = Callable[[str], list[str]]
"""From a prompt to what the model wants to write: the whole reply first, then what it would write
where only a part of one is asked for (a forced call's JSON, its arguments)."""


class Vocabulary:
    """Bytes and control tokens, in the form that the grammar compiler needs from a backend."""

    def __init__(self, info: Any, control: tuple[str, ...]) -> None:
        self.info = info
        self._control = control
        self._split = re.compile("(" + "|".join(map(re.escape, control)) + ")") if control else None

    def is_control(self, token: int) -> bool:
        """Return True for BOS and all later ids."""
        return token >= BOS

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return a byte, or the spelling of a control token."""
        if token < BOS:
            return bytes([token])
        spelled = ("<s>", "</s>", *self._control)[token - BOS].encode()
        return spelled if special else b""

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Return the tokens of `text`."""
        pieces = self._split.split(text) if special and self._split else [text]
        out: list[int] = []
        for piece in pieces:
            out += (
                [_FIRST_CONTROL + self._control.index(piece)]
                if piece in self._control
                else list(piece.encode())
            )
        return out

    def text(self, tokens: list[int], *, special: bool = True) -> str:
        """Return the text of `tokens`."""
        return b"".join(self.token_bytes(t, special=special) for t in tokens).decode(
            "utf-8", "replace"
        )


class ScriptedModel(ScriptedEngine):
    """An engine whose answers come from `brain`. `refused` lists texts that grammars rejected, and
    `coerced` the tokens that they inserted. `left_s` lists the times (time.monotonic) at which
    cancelled answers stopped."""

    def __init__(
        self, notation: Notation, source: str, brain: Brain, *, n_ctx: int, pause_s: float = 0.0
    ) -> None:
        n_vocab = _FIRST_CONTROL + len(notation.control)
        facts = {"n_ctx": n_ctx, "n_ctx_train": n_ctx, "n_vocab": n_vocab, "chat_template": source}
        super().__init__(**facts)
        self.vocabulary = Vocabulary(self.info, notation.control)
        self.brain = brain
        self.pause_s = pause_s
        self.refused: list[str] = []
        self.coerced: list[str] = []
        self.left_s: list[float] = []
        self._compile = GrammarCompiler(self.vocabulary)  # type: ignore[arg-type]

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        """Return the answer of `brain`, and record if a client cancelled it."""
        self.requests.append(request)
        tokens = (
            request.prompt
            if isinstance(request.prompt, list)
            else self.vocabulary.tokenize(request.prompt)
        )
        room, most = self.info.n_ctx - len(tokens), request.generation.max_tokens
        if room <= 0:
            self.requests.pop()
            # its error states that the prompt does not fit
            async for event in super().submit(request):
                yield event
            return
        yield Queued(request.id, 0)
        yield Prefill(request.id, len(tokens), len(tokens), 0)
        self.running += 1
        done = False
        try:
            async for event in self._answer(
                request, tokens, room if most is None else min(most, room)
            ):
                done = isinstance(event, Finish | Failure)
                yield event
        finally:
            self.running -= 1
            if not done:
                self.left_s.append(time.monotonic())
                self.cancelled.append(request.id)

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        media: dict[str, str] | None = None,
    ) -> list[int]:
        """Return bytes and control tokens."""
        return self.vocabulary.tokenize(text, special=special)

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of the tokens."""
        return self.vocabulary.text(tokens)

    async def _answer(
        self, request: Request, tokens: list[int], limit: int
    ) -> AsyncIterator[Event]:
        try:
            writes, reason, stop = self._plan(request, self.vocabulary.text(tokens), limit)
        except _RefusedError as e:
            self.refused.append(str(e))
            yield Failure(request.id, "internal_error", str(e))
            return
        for at in range(0, len(writes), _CHUNK):
            piece = writes[at : at + _CHUNK]
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            yield Text(
                request.id,
                self.vocabulary.text(piece, special=request.render_control),
                tuple(piece),
            )
        usage = Usage(len(tokens), len(writes), 0)
        yield Finish(request.id, reason, usage, Timings(0.0, 0.01, 0.02, 0.01), stop)

    def _plan(
        self, request: Request, prompt: str, limit: int
    ) -> tuple[list[int], FinishReason, str | None]:
        """Return the tokens of the answer, the reason for its end, and the stop string that ended
        it."""
        wants = self.brain(prompt)
        if request.constraint is None:
            return self._free(request, wants[0], limit)
        options = wants[:1]
        if request.constraint.grammar is not None:
            options = _parts(wants, prompt, request.constraint.reasoning)
        failed: list[_RefusedError] = []
        for option in options:
            constraint = AnswerConstraint(
                request.constraint,
                partial(self.vocabulary.token_bytes, special=True),
                self.vocabulary.tokenize,
                self.info.eog_tokens,
            )
            try:
                made = self._held(constraint, self.vocabulary.tokenize(option))
            except _RefusedError as e:
                failed.append(e)
                continue
            return (made[:limit], "length", None) if len(made) > limit else (made, "stop", None)
        raise failed[0] if failed else _RefusedError(f"nothing to say behind {prompt[-60:]!r}")

    def _free(
        self, request: Request, text: str, limit: int
    ) -> tuple[list[int], FinishReason, str | None]:
        shown = self.vocabulary.text(self.vocabulary.tokenize(text), special=request.render_control)
        hits = [(at, s) for s in request.generation.stop if (at := shown.find(s)) >= 0]
        reason: FinishReason = "stop"
        stop = None
        if hits:
            at, stop = min(hits, key=lambda h: (h[0], -len(h[1])))
            text = shown[:at]
        tokens = self.vocabulary.tokenize(text)
        if len(tokens) > limit:
            tokens, reason, stop = tokens[:limit], "length", None
        return tokens, reason, stop

    def _held(self, constraint: AnswerConstraint, wanted: list[int]) -> list[int]:
        """Return the tokens of `wanted` under a constraint. Raises _RefusedError if this is
        impossible."""
        made: list[int] = []
        at = put = 0
        while not constraint.finished:
            if constraint.required_grammar is not None:
                constraint.use(
                    constraint.required_grammar, self._compile(constraint.required_grammar)
                )
            token = wanted[at] if at < len(wanted) else EOS
            if constraint.active:
                allowed = self._allowed(constraint)
                ends = EOS in allowed
                if ends and token in allowed and not _whole(constraint, wanted[at:]):
                    # In a real vocabulary a tag is one token, so its first letter alone must not
                    # continue the answer.
                    token = EOS
                if token not in allowed and ends:
                    token = EOS
                elif token == EOS and not ends:
                    raise _RefusedError(
                        f"the grammar wants more behind {self.vocabulary.text(made)[-80:]!r}"
                    )
                elif token not in allowed and token in _SPACE:
                    at += 1
                    continue
                elif token not in allowed:
                    put += 1
                    left = allowed if put <= _MOST_COERCED else set()
                    token = self._put(left, made, self.vocabulary.text(wanted[at:]))
                    constraint.accept(token)
                    made.append(token)
                    continue
            accepted = constraint.accept(token)
            if accepted is None:
                continue  # a call has ended, and the same token is wanted after it
            forced = [*constraint.forced]
            constraint.forced.clear()
            if accepted == EOS:
                return made
            if accepted == token:
                made.append(token)
                at, put = at + 1, 0
            else:
                forced.insert(0, accepted)
            made += forced
            at = _behind(wanted, at, forced)
        return made

    def _allowed(self, constraint: AnswerConstraint) -> set[int]:
        row = np.zeros(self.info.n_vocab, dtype=np.float32)
        constraint.apply(row)
        return {int(t) for t in np.flatnonzero(row > -np.inf)}

    def _put(self, allowed: set[int], made: list[int], wanted: str) -> int:
        """Return the token that a grammar inserts: the only allowed one, or a space. Raises
        _RefusedError."""
        forced = next(
            (t for t in (*b"\n ",) if t in allowed),
            next(iter(allowed)) if len(allowed) == 1 else None,
        )
        said = self.vocabulary.text(made)[-80:]
        if forced is None:
            raise _RefusedError(f"the grammar refuses {wanted[:40]!r} behind {said!r}")
        self.coerced.append(f"{self.vocabulary.text([forced])!r} before {wanted[:20]!r}")
        return forced


def _parts(wants: list[str], prompt: str, reasoning: Reasoning | None) -> list[str]:
    """Return the replies that a grammar of the whole answer may expect: without the part that ends
    the prompt, or after the reasoning that is still open."""
    if reasoning is None:
        return [want[_begun(prompt, want) :] for want in wants]
    thought, close, _ = wants[0].partition(reasoning.closing)
    return [wants[0], *(thought + close + want for want in wants[1:])]


class _RefusedError(Exception):
    """A grammar can't express the text of the model."""


def _whole(constraint: AnswerConstraint, wanted: list[int]) -> bool:
    """Return whether the grammar allows the wanted text up to the end of its first tag."""
    end = next(
        (i for i, t in enumerate(wanted[: _CHUNK * 4]) if t == ord(">")),
        len(wanted[: _CHUNK * 4]) - 1,
    )
    return constraint.acceptable(wanted[: end + 1]) == end + 1


def _behind(wanted: list[int], at: int, forced: list[int]) -> int:
    """Return the index in `wanted` after the forced tokens. Spaces between them do not count."""
    begun = at
    for token in forced:
        while at < len(wanted) and wanted[at] != token and wanted[at] in _SPACE:
            at += 1
        if at < len(wanted) and wanted[at] == token:
            at += 1
        elif token not in _SPACE:
            return begun
    return at


def _begun(prompt: str, part: str) -> int:
    """Return how many characters of `part` (at most 200) are at the end of the prompt."""
    most = min(len(part), 200)
    return next((k for k in range(most, 0, -1) if prompt.endswith(part[:k])), 0)
