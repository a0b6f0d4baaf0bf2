"""An engine that says what it is told: for tests of everything above the engine's border.

Its vocabulary is the UTF-8 bytes (token = byte value) plus BOS 256 and EOS 257, so every text has
exact token counts. Steps of a script are texts (one Text event each), Gate objects (wait until the
test opens them), or Failures.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
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
from localllm.errors import LocalLLMError
from localllm_backends.contract import ModelInfo

BOS, EOS = 256, 257


class Gate:
    """A point in a script where the engine waits for the test, which may wait until it is
    `reached`; for any thread."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        """Let the script go on."""
        self._open = True
        for loop, event in self._waiters:
            loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Used by the engine."""
        event = asyncio.Event()
        self._waiters.append((asyncio.get_running_loop(), event))
        self.reached.set()
        if not self._open:
            await event.wait()


Step = str | Gate | Failure | tuple[str, str]
Script = Sequence[Step] | Callable[[Request], Sequence[Step]]


def model_info(**changes: Any) -> ModelInfo:
    """Facts of the scripted model; every field can be changed."""
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
    """Implements Engine and, for convenience, Host. `requests` and `cancelled` record what happened
    to it.

    `ends` gives the finish reason; max_tokens and stop strings are honoured on the script's text,
    so `usage` is exact.
    """

    def __init__(
        self, script: Script = ("Hello", " world", "!"), *, ends: FinishReason = "stop", **info: Any
    ) -> None:
        self.info = model_info(**info)
        self.script = script
        self.ends: FinishReason = ends
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
        """Itself, once the gate is open; or the scripted loading error."""
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self.loads += 1
        return self

    async def close(self) -> None:
        """Remember it."""
        self.closed = True

    # --- Engine -----------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        """Play the script."""
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

    async def listen(self, request: Request, hear: Callable[[Event], None]) -> Finish | Failure:
        """The same script, told."""
        async with aclosing(cast("AsyncGenerator[Event, None]", self.submit(request))) as events:
            async for event in events:
                if isinstance(event, Finish | Failure):
                    return event
                hear(event)
        raise AssertionError("a script without an end")

    async def _play(self, request: Request, n_prompt: int, room: int) -> AsyncIterator[Event]:
        most = request.generation.max_tokens
        limit = room if most is None else min(most, room)
        steps = self.script(request) if callable(self.script) else self.script
        if request.continues:
            steps = _behind(
                steps, encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
            )
        ends = JsonEnd() if request.grammar is not None and request.continues else None
        yield Queued(request.id, 0)
        yield Prefill(request.id, n_prompt, n_prompt, self.cached_tokens)
        said, held, reason, stop = 0, "", self.ends, None
        for step in steps:
            if isinstance(step, Gate):
                await step.wait()
                continue
            if isinstance(step, Failure):
                yield Failure(request.id, step.code, step.message, step.hint)
                return
            text = step if isinstance(step, str) else step[0]
            end = ends.feed(text) if ends is not None else -1
            whole = encode(text[:end] if end >= 0 else text)
            tokens = whole[: limit - said]
            end = end if tokens == whole else -1  # cut in front of its end
            said += len(tokens)
            held += decode(tokens)
            hit = _first_stop(held, request.generation.stop)
            if hit is not None:
                at, stop = hit
                # a token is a byte: those behind were never made
                said -= len(encode(held[at + len(stop) :]))
                text, held, reason = held[:at], "", "stop"
            else:
                keep = _partial(held, request.generation.stop)
                text, held = held[: len(held) - keep], held[len(held) - keep :]
            yield Text(
                request.id, text, tuple(tokens), _logprobs(tokens, request.generation.logprobs)
            )
            if stop is not None or end >= 0:
                break
            if said >= limit:
                reason = "length"
                break
        if held:
            yield Text(request.id, held)
        usage = Usage(n_prompt, said, self.cached_tokens, cache_miss=self.cache_miss)
        yield Finish(request.id, reason, usage, Timings(0.0, 0.01, 0.02, 0.01), stop)

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        images: dict[str, str] | None = None,
    ) -> list[int]:
        """Bytes; an image is as many as its mark."""
        return [BOS, *encode(text)] if add_bos and self.info.adds_bos else encode(text)

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of bytes."""
        return decode(tokens)

    async def snapshot(self) -> dict[str, Any]:
        """A few numbers."""
        return {
            "requests": len(self.requests),
            "generated_tokens": 1234567,
            "decode_tok_s": 12.5,
            "kv_type": "f16",
        }


def _behind(steps: Sequence[Step], prompt: Sequence[int]) -> Sequence[Step]:
    """What of `steps` comes behind a prompt that holds their beginning already, as a model would go
    on; space between does not count."""
    exact = decode(prompt)
    said = "".join(exact.split())
    script = "".join(
        s if isinstance(s, str) else s[0] for s in steps if isinstance(s, (str, tuple))
    )
    lengths = range(len(script), 0, -1)
    done = next((k for k in lengths if exact.endswith(script[:k])), 0)
    done = done or next((k for k in lengths if said.endswith("".join(script[:k].split()))), 0)
    left: list[Step] = []
    for step in steps:
        text = step if isinstance(step, str) else step[0] if isinstance(step, tuple) else ""
        if done < len(text) or not text:
            left.append(text[done:] if text else step)
        done = max(0, done - len(text))
    return left


def _partial(text: str, stops: Sequence[str]) -> int:
    longest = max((len(s) for s in stops), default=1) - 1
    return next(
        (
            n
            for n in range(min(longest, len(text)), 0, -1)
            if any(s.startswith(text[-n:]) for s in stops)
        ),
        0,
    )


def encode(text: str) -> list[int]:
    """Token ids of `text`."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """Text of `tokens`."""
    return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    hits = [(at, s) for s in stops if (at := text.find(s)) >= 0]
    return min(hits) if hits else None


def _logprobs(tokens: Sequence[int], top: int | None) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    others = tuple((chr(97 + i), 97 + i, math.log(0.1)) for i in range(top))
    return tuple(TokenLogprob(decode([t]), t, math.log(0.5), others) for t in tokens)
