"""An engine that plays a script, for tests of all layers above the engine's interface.

Its vocabulary is the UTF-8 bytes (token = byte value) plus BOS 256 and EOS 257, so every text has
exact token counts. Steps of a script are texts (one Text event each), Gate objects (wait until the
test opens them), or Failures.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from localllm.conversation.tools.readers import JsonEnd
from localllm.engine.messages import (
    Event,
    Failure,
    Finish,
    FinishReason,
    Prefill,
    Queued,
    Request,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.engine.sampling.grammar import GrammarMatcher
from localllm.engine.sampling.text_stream import TextStream
from localllm.errors import LocalLLMError
from localllm_backends.contract import ModelInfo

BOS, EOS = 256, 257


class Gate:
    """A point in a script where the engine waits for the test. Any thread may wait until it is
    `reached`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        """Let the script continue."""
        self._open = True
        for loop, event in self._waiters:
            loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Wait until the test opens the gate (called by the engine)."""
        event = asyncio.Event()
        self._waiters.append((asyncio.get_running_loop(), event))
        self.reached.set()
        if not self._open:
            await event.wait()


Step = str | Gate | Failure | tuple[str, str]
Script = Sequence[Step] | Callable[[Request], Sequence[Step]]


def model_info(**changes: Any) -> ModelInfo:
    """Return facts of the scripted model; every field can be changed."""
    facts: dict[str, Any] = {
        "architecture": "scripted", "description": "scripted", "fingerprint": "scripted",
        "n_vocab": 258, "n_ctx": 4096,
        "n_ctx_train": 8192, "n_seq_max": 8, "n_batch": 512, "n_outputs": 8, "n_params": 1000,
        "weights_bytes": 1000,
        "eog_tokens": (EOS,), "bos_token": BOS, "eos_token": EOS, "adds_bos": False,
        "bos_text": "<s>",
        "eos_text": "</s>", "chat_template": None, "kv_type_k": "f16", "kv_type_v": "f16",
    }  # fmt: skip
    return ModelInfo(**{**facts, **changes})


class ScriptedEngine:
    """Implements Engine and, for convenience, Host. `requests` and `cancelled` record the calls.

    `ends` gives the finish reason. max_tokens, stop strings and constraints apply to the script's
    text, so `usage` is exact. Any text passes a grammar. If it `holds_calls`, a tool call ends
    where its JSON does; otherwise no grammar can be made for calls.
    """

    def __init__(
        self, script: Script = ("Hello", " world", "!"), *, ends: FinishReason = "stop", **info: Any
    ) -> None:
        self.info = model_info(**info)
        self.script = script
        self.ends: FinishReason = ends
        self.holds_calls = True
        self.cached_tokens = 0
        self.cache_miss = ""
        self.load_gate: Gate | None = None
        self.load_error: LocalLLMError | None = None
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.running = 0
        self.loads = 0
        self.closed = False

    # --- Host -------------------------------------------------------------------------------------

    async def engine(self) -> ScriptedEngine:
        """Return itself once the gate is open, or raise the scripted loading error."""
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self.loads += 1
        return self

    async def close(self) -> None:
        """Record the call."""
        self.closed = True

    # --- Engine -----------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        """Play the script and yield its events."""
        self.requests.append(request)
        prompt = encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        n_prompt = len(prompt) + int(
            request.add_bos and self.info.adds_bos and isinstance(request.prompt, str)
        )
        room = self.info.n_ctx - n_prompt
        if room <= 0:
            said = f"the prompt has {n_prompt} tokens and the served context is {self.info.n_ctx}"
            counts = (n_prompt, self.info.n_ctx)
            yield Failure(request.id, "context_length_exceeded", said, counts=counts)
            return
        self.running += 1
        done = False
        try:
            async for event in self._play(request, n_prompt, room):
                done = isinstance(event, Finish | Failure)
                yield event
        finally:
            self.running -= 1
            if not done:
                self.cancelled.append(request.id)

    async def listen(self, request: Request, on_event: Callable[[Event], None]) -> Finish | Failure:
        """Play the same script and pass its events to `on_event`."""
        async with aclosing(cast("AsyncGenerator[Event, None]", self.submit(request))) as events:
            async for event in events:
                if isinstance(event, Finish | Failure):
                    return event
                on_event(event)
        raise AssertionError("a script without an end")

    async def _play(self, request: Request, n_prompt: int, room: int) -> AsyncIterator[Event]:
        most = request.generation.max_tokens
        limit = room if most is None else min(most, room)
        steps = self.script(request) if callable(self.script) else self.script
        yield Queued(request.id, 0)
        yield Prefill(request.id, n_prompt, n_prompt, self.cached_tokens)
        answer = _Answer(request, self.holds_calls)
        ended = False
        for step in steps:
            if isinstance(step, Gate):
                await step.wait()
                continue
            if isinstance(step, Failure):
                yield Failure(request.id, step.code, step.message, step.hint)
                return
            for piece in answer.pieces(encode(step if isinstance(step, str) else step[0])):
                text, tokens = "", []
                for token in piece:
                    tokens.append(token)
                    text += answer.text.push(token, answer.constraint)
                    answer.said += 1
                    ended = answer.over or answer.said >= limit
                    if ended:
                        break
                yield Text(
                    request.id, text, tuple(tokens), _logprobs(tokens, request.generation.logprobs)
                )
                if ended:
                    break
            if ended:
                break
        rest = answer.text.flush()
        if rest:
            yield Text(request.id, rest)
        reason = self.ends
        if ended:
            reason = "stop" if answer.over else "length"
        usage = Usage(n_prompt, answer.said, self.cached_tokens, cache_miss=self.cache_miss)
        timings = Timings(0.0, 0.01, 0.02, 0.01)
        yield Finish(request.id, reason, usage, timings, answer.text.stopped_by)

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        media: dict[str, str] | None = None,
    ) -> list[int]:
        """Return the text's bytes; an image counts as its placeholder text."""
        return [BOS, *encode(text)] if add_bos and self.info.adds_bos else encode(text)

    async def count_tokens(self, text: str, **options: Any) -> int:
        """Return the number of tokens that `tokenize` returns."""
        return len(await self.tokenize(text, **options))

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of these bytes."""
        return decode(tokens)

    async def snapshot(self) -> dict[str, Any]:
        """Return a few numbers."""
        return {
            "requests": len(self.requests),
            "generated_tokens": 1234567,
            "decode_tok_s": 12.5,
            "kv_type": "f16",
        }


def grammar_of(request: Request) -> tuple[str, str] | None:
    """Return the grammar of the complete answer, if it has one."""
    return request.constraint.grammar if request.constraint is not None else None


class _Answer:
    """The text that an engine would write from a script's tokens under the request's constraint.
    Tokens that the constraint forces are inserted, whether or not the script has them, too."""

    def __init__(self, request: Request, holds_calls: bool) -> None:
        self.text = TextStream(_spelled, request.generation.stop, hidden=request.hidden)
        self.said = 0
        self._holds_calls = holds_calls
        self._put: list[int] = []
        self.constraint: AnswerConstraint | None = None
        if request.constraint is not None:
            self.constraint = AnswerConstraint(request.constraint, _spelled, encode, (EOS,))

    @property
    def over(self) -> bool:
        """True after a stop text or the constraint has ended the answer."""
        finished = self.constraint is not None and self.constraint.finished
        return self.text.stopped_by is not None or finished

    def pieces(self, tokens: Sequence[int]) -> Iterator[Iterable[int]]:
        """Yield the pieces made from the script's next tokens; forced tokens are a piece of their
        own."""
        if self.constraint is None:
            yield tokens
            return
        left = list(tokens)
        while left:
            yield self._written(self.constraint, left)
            if self.constraint.forced:
                self._put = list(self.constraint.forced)
                yield self._forced(self.constraint)

    def _forced(self, constraint: AnswerConstraint) -> Iterator[int]:
        while constraint.forced:
            yield constraint.forced.pop(0)

    def _written(self, constraint: AnswerConstraint, left: list[int]) -> Iterator[int]:
        """Yield the accepted tokens of `left`, removing them from it, up to the next forced
        token."""
        while left:
            token = left.pop(0)
            if self._put[:1] == [token]:
                del self._put[0]
                continue
            self._put = []
            self._give_matcher(constraint)
            accepted = constraint.accept(token)
            assert accepted is not None
            yield accepted
            if constraint.forced:
                return

    def _give_matcher(self, constraint: AnswerConstraint) -> None:
        if constraint.required_grammar is None:
            return
        if constraint.in_call and not self._holds_calls:
            constraint.give_up()
        else:
            matcher = _ScriptedMatcher(ends=constraint.in_call)
            constraint.use(constraint.required_grammar, cast("GrammarMatcher", matcher))


class _ScriptedMatcher:
    """A grammar that allows everything. If it `ends`, it finishes where the JSON does."""

    stuck = False
    accepting = False

    def __init__(self, ends: bool) -> None:
        self._ends = ends
        self._json = JsonEnd()
        self.finished = False

    def copy(self) -> _ScriptedMatcher:
        """Return a copy in the initial state."""
        return _ScriptedMatcher(self._ends)

    def accept(self, token: int) -> None:
        """Accept a token."""
        self.finished = self._json.feed(_letter(token)) >= 0 and self._ends


def _letter(token: int) -> str:
    """Return a byte as a letter: JSON's closing characters are ASCII."""
    return chr(token)


def _spelled(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""


def encode(text: str) -> list[int]:
    """Return the token ids of `text`."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """Return the text of `tokens`."""
    return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")


def _logprobs(tokens: Sequence[int], top: int | None) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    others = tuple((chr(97 + i), 97 + i, math.log(0.1)) for i in range(top))
    return tuple(TokenLogprob(decode([t]), t, math.log(0.5), others) for t in tokens)
