"""The worker process: one loaded model, one loop, JSON lines in and out.

A native crash, an abort or an out-of-memory kill ends only this process. The main thread owns the
engine. A reader thread takes messages and tokenises, which needs no model state. Another thread
prepares images and long texts. The process ends with its parent: the end of stdin tells it to
close.

Messages on the pipe, in addition to those in child_pipe.py:

    in   submit | cancel | more, and the questions tokenize | detokenize | snapshot | pulse
    out  {"ev": [...]} per step; {"kv": id} with data, and without data after each frame of KV;
         {"notice": text} for the owner of the server
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imported objects stay. To search them for garbage takes a tenth of the time.
    gc.disable()

import queue
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.engine import EngineSettings
from localllm.engine.adapters import kv_salt, unknown_adapters
from localllm.engine.cache.identity import identity_of
from localllm.engine.core import Engine
from localllm.engine.media import MediaReader
from localllm.engine.messages import Event, Failure, event_text, request_from_json
from localllm.engine.sampling.grammar import GrammarCompiler, trials
from localllm.engine.speculation import registered
from localllm.engine.speculation.draft_model import vocabulary_difference
from localllm.engine.tokens import MediaSpan, Tokenizer
from localllm.engine.transfer.shared_prefix import tokenised
from localllm.engine.worker import backends
from localllm.engine.worker.child_pipe import ChildPipe, Message, Pulse, reason
from localllm.engine.worker.kv_outlet import KvOutlet
from localllm.errors import ContextLengthError, LocalLLMError, UnsupportedError
from localllm_backends.contract import Backend, BackendFailure, LoadSpec, Placement
from localllm_backends.registry import read_code
from localllm_backends.token_estimate import estimated_tokens

if TYPE_CHECKING:
    from localllm_backends.backend_type import BackendType

_PROGRESS_STEP = 0.02
# seconds. Python's default is as long as one step of a small model.
_TURN_S = 0.001
# characters. Tokenising more takes about ten milliseconds.
_LONG_TEXT = 2**16
# Limit for a text in a "tokenize" question, or the context length if that is more.
_MAX_TOKENS = 2**18


class Worker:
    """Loads the model named on `pipe`, and serves it until the pipe ends."""

    def __init__(self, pipe: ChildPipe) -> None:
        self._pipe = pipe
        self._outlet = KvOutlet(pipe)
        # None: the pipe has ended.
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        # When the engine's thread began its current call; None while it waits for messages.
        self._busy_since_s: float | None = None
        # Media and long texts take as long as many steps, so they must not delay other requests.
        self._preparer = ThreadPoolExecutor(1, "preparer")
        self._preparing: set[str] = set()
        self._media_reader: MediaReader | None = None

    def run(self) -> None:
        engine = self._pipe.load(self._load, _prepare)
        self._pipe.send(
            {
                "ready": asdict(engine.backend.info),
                "memory": asdict(engine.backend.memory()),
                "kv_identity": identity_of(engine.backend).to_json(),
            }
        )
        self._tokenizer = Tokenizer(engine.backend)
        capabilities = engine.backend.capabilities
        if capabilities.vision or capabilities.audio:
            self._media_reader = MediaReader(engine.backend)
        threading.Thread(target=self._read, args=[engine], name="reader", daemon=True).start()
        self._loop(engine)
        self._preparer.shutdown(cancel_futures=True)
        # The KV of cancelled requests is worth keeping too.
        for request_id in [*engine.jobs.running]:
            engine.cancel(request_id)
        engine.close()

    def _load(self, options: Message) -> Engine:
        spec = LoadSpec.from_json(options["spec"])
        backend_type = backends.for_path(spec.path, options.get("backend", "auto"))
        reported = -1.0

        def progress(value: float) -> None:
            nonlocal reported
            if value - reported >= _PROGRESS_STEP or value >= 1.0:
                reported = value
                self._pipe.send({"loading": value})

        draft = self._load_draft(options.get("draft_path"), spec, backend_type)
        backend = backend_type.load(spec, progress)
        compiler = GrammarCompiler(backend)
        settings = EngineSettings(
            **options.get("engine", {}),
            make_matcher=compiler,
            grammar_trials=trials(compiler),
            say=self._notify,
        )
        engine = Engine(backend, settings, draft_backend=draft, outlet=self._outlet.frame)
        if settings.prefill_from or settings.kv_from:
            # The engine waits up to this long for its turn while another thread receives KV.
            sys.setswitchinterval(_TURN_S)
        # The loaded objects stay. So the garbage collector need not scan them in the middle of a
        # stream.
        gc.freeze()
        gc.enable()
        return engine

    def _notify(self, text: str) -> None:
        self._pipe.send({"notice": text})

    def _load_draft(
        self, path: str | None, spec: LoadSpec, backend_type: BackendType
    ) -> Backend | None:
        """Load the draft model, after a check that its vocabulary is the model's.

        The check needs neither model's weights.
        """
        if path is None:
            return None
        draft_type = backends.for_path(path, "auto")
        difference = vocabulary_difference(
            backend_type.vocabulary(spec.path), draft_type.vocabulary(path)
        )
        if difference is not None:
            raise UnsupportedError(
                f"the draft model does not fit this model: {difference}",
                hint="use a draft model of the same family, or use --draft ngram",
            )
        placement = Placement(gpu_layers=spec.n_gpu_layers, cards=spec.placement.cards)
        return draft_type.load(
            LoadSpec(
                path, spec.n_ctx, spec.n_seq_max, spec.n_batch, spec.n_threads, placement=placement
            )
        )

    def _loop(self, engine: Engine) -> None:
        while not self._pipe.gone and self._answer_messages(engine):
            self._busy_since_s = time.monotonic()
            if engine.can_step:
                self._send(engine.step(self._send))
                continue
            try:
                engine.idle()
            except BackendFailure as e:
                # No request waits for housekeeping, so an error there fails no request.
                print(f"housekeeping failed: {reason(e)}", file=sys.stderr, flush=True)

    def _answer_messages(self, engine: Engine) -> bool:
        """Pass all waiting messages to the engine. If the engine has no work, wait for a message.

        Returns False once the parent has closed its end.
        """
        while True:
            idle_wait_s = engine.idle_wait_s
            self._busy_since_s = None
            try:
                message = self._inbox.get(block=idle_wait_s > 0, timeout=idle_wait_s or None)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._busy_since_s = time.monotonic()
            self._send(self._handle(engine, message))

    def _handle(self, engine: Engine, message: Message) -> list[Event]:
        op = message["op"]
        if op == "more":
            engine.sender.more(message["id"])
        if op == "submit":
            if message["request"].sends_from is not None:
                self._outlet.ids.add(message["request"].id)
            return engine.submit(message["request"], message["tokens"], message.get("media", ()))
        if op == "cancel":
            return engine.cancel(message["id"])
        if op == "snapshot":
            self._pipe.answer(
                message,
                {
                    **engine.snapshot(),
                    "jobs": engine.jobs.overview(),
                    "pace": engine.pace.snapshot(),
                },
            )
        return []

    # --- the reader thread ------------------------------------------------------------------------

    def _read(self, engine: Engine) -> None:
        self._pipe.read_messages(partial(self._receive, engine))
        self._inbox.put(None)
        self._pipe.exit_soon()

    def _receive(self, engine: Engine, message: Message) -> None:
        backend = engine.backend
        match message["op"]:
            case "submit":
                self._prepare(backend, message["request"])
            case "tokenize":
                self._tokenize(backend, message)
            case "detokenize":
                self._detokenize(backend, message)
            case "pulse":
                self._answer_pulse(engine, message)
            case "cancel":
                self._cancel(engine, message)
            case _:
                self._inbox.put(message)

    def _prepare(self, backend: Backend, sent: dict[str, Any]) -> None:
        """Make a request's tokens, in the background if that takes long."""
        if _takes_long(sent, "prompt"):
            self._preparing.add(sent["id"])
            self._preparer.submit(self._submit, backend, sent)
        else:
            self._submit(backend, sent)

    def _tokenize(self, backend: Backend, message: Message) -> None:
        if _takes_long(message, "text"):
            find = partial(self._tokens_or_count, backend, message)
            self._preparer.submit(self._pipe.reply, message, find)
        else:
            self._pipe.answer(message, self._tokens_or_count(backend, message))

    def _detokenize(self, backend: Backend, message: Message) -> None:
        data = b"".join(backend.token_bytes(t, special=True) for t in message["tokens"])
        self._pipe.answer(message, data.decode("utf-8", "surrogateescape"))

    def _answer_pulse(self, engine: Engine, message: Message) -> None:
        since_s = self._busy_since_s
        busy_s = 0.0
        if since_s is not None:
            busy_s = time.monotonic() - since_s
        pulse = Pulse(busy_s, engine.metrics.steps, engine.metrics.longest_step_s)
        self._pipe.answer(message, asdict(pulse))

    def _cancel(self, engine: Engine, message: Message) -> None:
        self._inbox.put(message)
        # A request that is being prepared arrives first, and is cancelled at once.
        if message["id"] in self._preparing:
            self._preparer.submit(self._inbox.put, message)
        engine.interrupt(message["id"])

    def _submit(self, backend: Backend, sent: dict[str, Any]) -> None:
        """Pass a request to the engine, with its tokens and its prepared media.

        If the request is invalid, a failure is sent as its answer.
        """
        media: tuple[MediaSpan, ...] = ()
        try:
            request = request_from_json(sent)
            prompt = request.prompt
            add_bos = request.add_bos
            salt = request.generation.salt
            _check_length(backend, prompt, backend.info.n_ctx)
            unknown = unknown_adapters(backend.info, request.generation.adapters)
            if unknown:
                raise BackendFailure(unknown)
            if not sent.get("media"):
                if isinstance(prompt, str):
                    read = partial(self._tokenizer.tokens, add_bos=add_bos, salt=salt)
                    request, prompt = tokenised(request, read)
                elif prompt and not 0 <= min(prompt) <= max(prompt) < backend.info.n_vocab:
                    raise BackendFailure("a token is outside the vocabulary")
                tokens = prompt
            elif isinstance(prompt, str) and self._media_reader is not None:
                salt = kv_salt(backend.info, request.generation.adapters, salt)
                tokens, media = self._media_reader.read(
                    prompt, request.media, add_bos=add_bos, salt=salt
                )
                # The files are no longer needed.
                request = replace(request, media={})
            else:
                raise BackendFailure("images and sounds need a text prompt, not token ids")
        except Exception as e:
            self._send([_failure(str(sent.get("id", "")), e)])
        else:
            self._inbox.put({"op": "submit", "request": request, "tokens": tokens, "media": media})
        self._preparing.discard(str(sent.get("id", "")))

    def _tokens_or_count(self, backend: Backend, sent: Message) -> list[int] | int:
        """The answer to a "tokenize" question, which may ask for the number of tokens only."""
        tokens = self._tokens(backend, sent)
        if sent.get("counts"):
            return len(tokens)
        return tokens

    def _tokens(self, backend: Backend, sent: Message) -> list[int]:
        """The tokens of the text in a "tokenize" question, with those of its media."""
        text = sent["text"]
        add_bos = sent["add_bos"]
        _check_length(backend, text, max(_MAX_TOKENS, backend.info.n_ctx))
        if self._media_reader is not None and sent.get("media"):
            return self._media_reader.read(text, sent["media"], add_bos=add_bos)[0]
        return self._tokenizer.tokens(text, special=sent["special"], add_bos=add_bos)

    def _send(self, events: list[Event]) -> None:
        events = self._outlet.send_kv_events(events)
        if events:
            self._pipe.send_line(f'{{"ev":[{",".join([event_text(e) for e in events])}]}}\n')


def _takes_long(sent: Mapping[str, Any], text: str) -> bool:
    """Does the message have media, or more text than can be tokenised in a few milliseconds?"""
    return bool(sent.get("media")) or len(sent.get(text) or "") > _LONG_TEXT


def _failure(request_id: str, error: Exception) -> Failure:
    """The failure of a request that can't be passed on."""
    counts = getattr(error, "counts", None)
    code = "context_length_exceeded"
    if counts is None:
        code = "invalid_request"
    return Failure(request_id, code, reason(error), counts=counts)


def _check_length(backend: Backend, text: str | list[int], max_tokens: int) -> None:
    """Raise ContextLengthError if a text certainly has more than `max_tokens` tokens."""
    n_tokens = None
    if isinstance(text, str):
        n_tokens = estimated_tokens(backend, text, max_tokens)
    if n_tokens is not None:
        message = f"the text has about {n_tokens} tokens, but the limit is {max_tokens}"
        raise ContextLengthError(message, counts=(n_tokens, max_tokens))


def _prepare(message: Message) -> None:
    """Initialise the backend of a model whose load options are still being planned.

    Its errors are reported by the load, which meets them again.
    """
    with suppress(LocalLLMError, BackendFailure):
        backends.for_path(message["prepare"], message.get("backend", "auto")).prepare()


if __name__ == "__main__":
    own_pipe = ChildPipe.of_this_process()
    # The process may be started before it gets its model (pipe.py). It imports its code meanwhile.
    read_code()
    registered()
    Worker(own_pipe).run()
