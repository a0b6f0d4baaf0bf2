"""Embedding models in a process of their own, one each: texts in, vectors out, JSON lines between.

    in   {"path": …} first, then {"op": "embed" | "tokenize" | "detokenize", "n": 1, …}; its end is the order to close
    out  {"ready": ModelInfo, …} | {"fatal": {…}}; then {"re": 1, "value": …} | {"re": 1, "error": {…}}

The host side looks like any other Engine, so lists, idle unloading and metrics treat these models as they treat all.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from localllm import errors
from localllm.engine.memory_guard import check_before_load
from localllm.engine.messages import Event, Failure, Request
from localllm.engine.pipe import JsonProcess
from localllm_backends.contract import BackendFailure, LoadError, ModelInfo, OutOfMemoryError

_STOP_GRACE_S = 3.0
_NO_TEXT = "an embedding model generates no text"
_NO_TEXT_HINT = "send it to /v1/embeddings, or name a chat model"


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """What to load. `n_ctx` is the longest input in tokens, 0 = the model's own, at most what the backend deems sane.
    The last two are for the memory guard."""

    path: str
    backend: str = "auto"
    n_ctx: int = 0
    n_threads: int = 0
    n_gpu_layers: int = -1
    log_path: Path | None = None
    planned_bytes: int = 0
    headroom_bytes: int | None = None


@runtime_checkable
class Embeds(Protocol):
    """The engines that make embeddings."""

    info: ModelInfo
    n_embd: int

    async def embed(self, inputs: Sequence[str | list[int]], *, truncate: bool = False) -> tuple[list[bytes], int]:
        """For each input its vector of length 1 as little-endian float32, and the tokens of all inputs.

        An input that is too long is a ContextLengthError, or cut with `truncate`."""
        ...


class EmbeddingEngine:
    """One embedding worker (implements localllm.engine.api.Engine, and Embeds)."""

    def __init__(self, process: JsonProcess, ready: dict[str, Any]) -> None:
        self._process = process
        facts = ready["ready"]
        self.info = ModelInfo(**{**facts, "eog_tokens": tuple(facts["eog_tokens"])})
        self.n_embd: int = ready["n_embd"]
        self.pooling: str = ready["pooling"]
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._requests = self._tokens = 0
        process.listen(self._hear, self._after_end)

    @classmethod
    async def start(cls, options: EmbeddingOptions) -> EmbeddingEngine:
        """Start the process and load the model; raises the LocalLLMError it names, or WorkerDiedError."""
        process, ready = await JsonProcess.start(
            (sys.executable, "-m", "localllm.engine.embedding"),
            {k: v for k, v in asdict(options).items() if k not in ("log_path", "planned_bytes", "headroom_bytes")},
            loads=Path(options.path).name,
            log_path=options.log_path,
        )
        return cls(process, ready)

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return not self._process.ended

    async def embed(self, inputs: Sequence[str | list[int]], *, truncate: bool = False) -> tuple[list[bytes], int]:
        """See Embeds."""
        value = await self._ask({"op": "embed", "inputs": list(inputs), "truncate": truncate})
        self._requests += 1
        self._tokens += value["tokens"]
        return [base64.b64decode(v) for v in value["vectors"]], value["tokens"]

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        """Refuse: there is no text to be had."""
        yield self._refusal(request)

    async def listen(self, request: Request, hear: Callable[[Event], None]) -> Failure:
        """Refuse."""
        return self._refusal(request)

    @staticmethod
    def _refusal(request: Request) -> Failure:
        return Failure(request.id, "unsupported_parameter", _NO_TEXT, _NO_TEXT_HINT)

    async def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`, with the marks the model wants around it."""
        tokens: list[int] = await self._ask({"op": "tokenize", "text": text})
        return tokens

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of `tokens`."""
        text: str = await self._ask({"op": "detokenize", "tokens": tokens})
        return text

    async def snapshot(self) -> dict[str, Any]:
        """How much was embedded."""
        return {"requests": self._requests, "prompt_tokens": self._tokens}

    async def close(self) -> None:
        """End the process."""
        self._process.hang_up()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _ask(self, message: dict[str, Any]) -> Any:
        self._next += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[self._next] = future
        if not self._process.send({**message, "n": self._next}):
            raise errors.WorkerDiedError("the engine's process has ended")
        return await future

    def _hear(self, message: dict[str, Any]) -> None:
        future = self._replies.pop(message["re"], None)
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(errors.by_code(**message["error"]))
        else:
            future.set_result(message["value"])

    def _after_end(self) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(errors.WorkerDiedError("the engine's process ended"))


class EmbeddingHost:
    """Loads an embedding model on first use and again after a crash (implements localllm.engine.api.Host)."""

    def __init__(self, options: EmbeddingOptions) -> None:
        self.options = options
        self._engine: EmbeddingEngine | None = None
        self._lock = asyncio.Lock()

    async def engine(self) -> EmbeddingEngine:
        """The loaded engine. Raises the LocalLLMError that loading ended in."""
        async with self._lock:
            if self._engine is not None and not self._engine.alive:
                await self._engine.close()
                self._engine = None
            if self._engine is None:
                options = self.options
                name = Path(options.path).name
                await asyncio.to_thread(check_before_load, name, options.planned_bytes, options.headroom_bytes)
                self._engine = await EmbeddingEngine.start(options)
            return self._engine

    async def close(self) -> None:
        """Stop the process; its memory is the system's again."""
        async with self._lock:
            if self._engine is not None:
                await self._engine.close()
                self._engine = None


# --- the worker's side -----------------------------------------------------------------------------------------------


def serve(source: BinaryIO, sink: BinaryIO) -> int:
    """Load what the first line names and answer the others; returns the exit code."""
    from localllm.engine import backends

    def write(message: dict[str, Any]) -> None:
        sink.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        sink.flush()

    order = json.loads(source.readline() or b"{}")
    try:
        backend = backends.for_path(order["path"], order.pop("backend"))
        load = getattr(backend, "load_embedder", None)
        if load is None:
            raise LoadError(f"the {backend.name} backend makes no embeddings")
        embedder = load(**order)
    except BackendFailure as e:
        code = "does_not_fit" if isinstance(e, OutOfMemoryError) else "bad_model_file"
        write({"fatal": {"code": code, "message": str(e), "hint": "serve an embedding model, such as nomic-embed"}})
        return 4
    except errors.LocalLLMError as e:
        write({"fatal": {"code": e.code, "message": e.message, "hint": e.hint}})
        return e.exit_code
    write({"ready": asdict(embedder.info), "n_embd": embedder.n_embd, "pooling": embedder.pooling})
    for line in source:
        message = json.loads(line)
        try:
            write({"re": message["n"], "value": _answer(embedder, message)})
        except errors.LocalLLMError as e:
            write({"re": message["n"], "error": {"code": e.code, "message": e.message, "hint": e.hint}})
        except BackendFailure as e:
            write({"re": message["n"], "error": {"code": "backend_error", "message": str(e)}})
    embedder.close()
    return 0


def _answer(embedder: Any, message: dict[str, Any]) -> Any:
    match message["op"]:
        case "tokenize":
            return embedder.tokenize(message["text"])
        case "detokenize":
            _check_tokens(embedder, message["tokens"])
            return embedder.detokenize(message["tokens"])
        case _:
            return _embed(embedder, message["inputs"], message["truncate"])


def _embed(embedder: Any, inputs: list[str | list[int]], truncate: bool) -> dict[str, Any]:
    limit = embedder.info.n_ctx
    rows: list[list[int]] = []
    for i, sent in enumerate(inputs):
        tokens = embedder.tokenize(sent) if isinstance(sent, str) else sent
        _check_tokens(embedder, tokens)
        if not tokens:
            raise errors.RequestError(f"input {i} is empty", param="input")
        if len(tokens) > limit:
            if not truncate:
                raise errors.ContextLengthError(
                    f"input {i} has {len(tokens)} tokens and the model takes {limit}", hint="split the text"
                )
            # The closing mark stays: models pool over it, or at it.
            tokens = [*tokens[: limit - 1], tokens[-1]]
        rows.append(tokens)
    vectors = embedder.embed(rows)
    return {
        "vectors": [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors],
        "tokens": sum(len(r) for r in rows),
    }


def _check_tokens(embedder: Any, tokens: list[int]) -> None:
    bad = next((t for t in tokens if not 0 <= t < embedder.info.n_vocab), None)
    if bad is not None:
        raise errors.RequestError(f"token {bad} is outside the vocabulary", param="input")


def main() -> int:
    """Entry point of `python -m localllm.engine.embedding`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # native code prints at times
    return serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    sys.exit(main())
