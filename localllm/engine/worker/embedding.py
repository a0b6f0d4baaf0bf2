"""Embedding models and rerankers, each in a process of its own: texts in, vectors or scores out.

The module has both sides of the pipe. child_pipe.py describes the protocol. The questions are
embed | rank | tokenize | detokenize.

The host side has the interface of any other engine. So lists, unloading when idle, restarts and
metrics work the same for these models.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm import errors
from localllm.engine.messages import Event, Failure, Request
from localllm.engine.worker import pipe
from localllm.engine.worker.child_pipe import ChildPipe, Message
from localllm.engine.worker.pipe import JsonProcess
from localllm.engine.worker.supervisor import HANG_S, EngineClient
from localllm.memory.guard import Available, check_before_load
from localllm_backends.contract import LoadError

# Options that are not sent to the worker.
_NOT_SENT = ("log_path", "planned_bytes", "headroom_bytes", "hang_s")


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """The model to load.

    `n_ctx`: the longest input in tokens. 0 means the model's own, limited by the backend.
    `planned_bytes`, `headroom_bytes`: for the memory guard.
    `hang_s`: for the watchdog (0: unwatched).
    """

    path: str
    backend: str = "auto"
    n_ctx: int = 0
    n_threads: int = 0
    n_gpu_layers: int = -1
    log_path: Path | None = None
    planned_bytes: int = 0
    headroom_bytes: int | None = None
    hang_s: float = HANG_S

    def check_memory(self, available: Available | None = None) -> None:
        check_before_load(Path(self.path).name, self.planned_bytes, self.headroom_bytes, available)

    async def start(self, on_loading: Callable[[float], None] | None = None) -> EmbeddingEngine:
        """Start the process and load the model. It does not report progress.

        Raises the LocalLLMError that the worker reports, or WorkerDiedError.
        """
        process = await pipe.spawn("localllm.engine.worker.embedding", self.log_path)
        order = {k: v for k, v in asdict(self).items() if k not in _NOT_SENT}
        return EmbeddingEngine(process, await process.load(order, model_name=Path(self.path).name))


class EmbeddingEngine(EngineClient):
    """One embedding worker: embeddings, or scores of a reranker."""

    def __init__(self, process: JsonProcess, ready: dict[str, Any]) -> None:
        super().__init__(process, ready)
        self.n_embd: int = ready["n_embd"]
        self._tokens = 0

    async def embed(
        self, inputs: Sequence[str | list[int]], *, truncate: bool = False
    ) -> tuple[list[bytes], int]:
        """Return the vector of length 1 for each input as little-endian float32, and the number of
        tokens of all inputs.

        An input that is too long raises ContextLengthError, or is truncated with `truncate`.
        """
        value = await self._ask_worker(
            {"op": "embed", "inputs": list(inputs), "truncate": truncate}
        )
        return [base64.b64decode(v) for v in value["vectors"]], value["tokens"]

    async def rank(
        self, query: str, documents: Sequence[str], *, truncate: bool = False
    ) -> tuple[list[float], int]:
        """Return the model's score of each document for the query (higher is better), and the
        number of tokens of all pairs.

        A pair that is too long raises ContextLengthError, or its document is truncated with
        `truncate`.
        """
        value = await self._ask_worker(
            {"op": "rank", "query": query, "documents": list(documents), "truncate": truncate}
        )
        return value["scores"], value["tokens"]

    async def _ask_worker(self, question: Message) -> Any:
        value = await self.process.ask(question)
        self.finished += 1
        self._tokens += value["tokens"]
        return value

    async def listen(self, request: Request, on_event: Callable[[Event], None]) -> Failure:
        return Failure(
            request.id,
            "unsupported_parameter",
            "an embedding model can't generate text",
            "send the text to /v1/embeddings (rerankers: /v1/rerank), or use a chat model",
        )

    async def snapshot(self) -> dict[str, Any]:
        return {"requests": self.finished, "prompt_tokens": self._tokens}


# --- the worker's side ----------------------------------------------------------------------------


def serve(pipe: ChildPipe) -> None:
    """Load the model named on `pipe` and answer questions until the pipe ends."""
    embedder = pipe.load(_load)
    pipe.send({"ready": asdict(embedder.info), "n_embd": embedder.n_embd})

    def receive(message: Message) -> None:
        pipe.answer(message, _answer(embedder, message))

    pipe.read_messages(receive)
    embedder.close()


def _load(options: Message) -> Any:
    from localllm.engine.worker import backends

    backend = backends.for_path(options["path"], options.pop("backend"))
    try:
        return backend.load_embedder(**options)
    except LoadError as e:
        raise errors.ModelFileError(
            str(e), hint="serve an embedding model, such as nomic-embed"
        ) from e


def _answer(embedder: Any, message: Message) -> Any:
    match message["op"]:
        case "tokenize":
            return embedder.tokenize(message["text"])
        case "detokenize":
            _check_tokens(embedder, message["tokens"])
            return embedder.detokenize(message["tokens"])
        case "rank":
            return _rank(embedder, message["query"], message["documents"], message["truncate"])
        case _:
            return _embed(embedder, message["inputs"], message["truncate"])


def _embed(embedder: Any, inputs: list[str | list[int]], truncate: bool) -> dict[str, Any]:
    if embedder.pooling == "rank":
        raise errors.UnsupportedError(
            "this model is a reranker and can't make embeddings", hint="use an embedding model"
        )
    rows: list[list[int]] = []
    for i, sent in enumerate(inputs):
        if isinstance(sent, str):
            tokens = embedder.tokenize(sent)
        else:
            tokens = sent
        _check_tokens(embedder, tokens)
        if not tokens:
            raise errors.RequestError(f"input {i} is empty", param="input")
        rows.append(_fitting(embedder, tokens, truncate, f"input {i} has", "split the text"))
    vectors = embedder.embed(rows)
    return {
        "vectors": [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors],
        "tokens": sum(len(r) for r in rows),
    }


def _rank(embedder: Any, query: str, documents: list[str], truncate: bool) -> dict[str, Any]:
    if embedder.pooling != "rank":
        raise errors.UnsupportedError(
            "this is an embedding model and can't rank documents", hint="use a reranker"
        )
    rows = [
        _fitting(
            embedder,
            embedder.tokenize_pair(query, document),
            truncate,
            f"document {i} and the query have",
            "split the document",
        )
        for i, document in enumerate(documents)
    ]
    scores = embedder.embed(rows)
    return {"scores": [float(row[0]) for row in scores], "tokens": sum(len(r) for r in rows)}


def _fitting(
    embedder: Any, tokens: list[int], truncate: bool, subject: str, hint: str
) -> list[int]:
    """`tokens` if the model accepts that many.

    Otherwise raises ContextLengthError, or with `truncate` returns as many as the model accepts.
    The last token stays, because models pool over it or at it.
    """
    limit = embedder.info.n_ctx
    if len(tokens) <= limit:
        return tokens
    if not truncate:
        raise errors.ContextLengthError(
            f"{subject} {len(tokens)} tokens, which is too large; the model's limit is {limit}",
            hint=hint,
        )
    return [*tokens[: limit - 1], tokens[-1]]


def _check_tokens(embedder: Any, tokens: list[int]) -> None:
    bad = next((t for t in tokens if not 0 <= t < embedder.info.n_vocab), None)
    if bad is not None:
        raise errors.RequestError(f"token {bad} is outside the vocabulary", param="input")


if __name__ == "__main__":
    serve(ChildPipe.of_this_process())
