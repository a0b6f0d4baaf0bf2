"""The worker process: one loaded model, one loop, JSON lines in and out.

A native crash, an abort or an out-of-memory kill ends this process and nothing else. The main thread owns the engine;
a reader thread takes messages (and tokenises, which needs no model state). It dies with its parent: stdin's end is
the order to close.

What is on the pipe, besides what child_pipe.py says:

    in   submit | cancel, and the questions tokenize | detokenize | snapshot
    out  {"ev": [...]} per step
"""

from __future__ import annotations

import gc
import queue
import threading
from dataclasses import asdict
from typing import Any

from localllm.engine.child_pipe import ChildPipe, Message, reason
from localllm.engine.constraint import GrammarCompiler
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.messages import Event, Failure, event_text, request_from_json
from localllm.errors import UnsupportedError
from localllm_backends.contract import Backend, BackendFailure, BackendType, LoadSpec

_PROGRESS_STEP = 0.02
# An idle worker looks this often whether others need the memory of its prefix cache.
_LOOK_S = 2.0
# One that can go on exporting once something is written looks this often.
_WRITING_S = 0.02


class Worker:
    """Loads what `pipe` names, and serves it until the pipe ends."""

    def __init__(self, pipe: ChildPipe) -> None:
        self._pipe = pipe
        # None: the pipe has ended.
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve."""
        engine = self._pipe.load(self._load)
        self._pipe.say({"ready": asdict(engine.backend.info), "memory": asdict(engine.backend.memory())})
        threading.Thread(target=self._read, args=[engine.backend], name="reader", daemon=True).start()
        self._loop(engine)
        engine.close()

    def _load(self, options: Message) -> Engine:
        from localllm.engine import backends

        spec = LoadSpec(**options["spec"])
        backend_type = backends.for_path(spec.path, options.get("backend", "auto"))
        said = -1.0

        def progress(value: float) -> None:
            nonlocal said
            if value - said >= _PROGRESS_STEP or value >= 1.0:
                said = value
                self._pipe.say({"loading": value})

        draft = self._load_draft(options.get("draft_path"), spec, backend_type)
        backend = backend_type.load(spec, progress)
        settings = EngineSettings(**options.get("engine", {}), make_constraint=GrammarCompiler(backend))
        engine = Engine(backend, settings, draft_backend=draft)
        # What is loaded stays: no collection looks through it in the middle of a stream.
        gc.freeze()
        return engine

    def _load_draft(self, path: str | None, spec: LoadSpec, backend_type: BackendType) -> Backend | None:
        """The draft model, once its vocabulary is known to be the model's; the weights of neither are read before."""
        from localllm.engine import backends
        from localllm.engine.speculation.draft_model import vocabulary_difference

        if path is None:
            return None
        draft_type = backends.for_path(path, "auto")
        difference = vocabulary_difference(backend_type.vocabulary(spec.path), draft_type.vocabulary(path))
        if difference is not None:
            raise UnsupportedError(
                f"the draft model can't draft for this model: {difference}",
                hint="name a draft model of the same family, or use --draft ngram",
            )
        return draft_type.load(
            LoadSpec(path, spec.n_ctx, spec.n_seq_max, spec.n_batch, spec.n_threads, n_gpu_layers=spec.n_gpu_layers)
        )

    def _loop(self, engine: Engine) -> None:
        housekeeping = True
        while not self._pipe.gone:
            try:
                while True:
                    wait = not engine.has_work and not housekeeping
                    look_s = _WRITING_S if engine.awaits_disk else _LOOK_S
                    message = self._inbox.get(block=wait, timeout=look_s if wait else None)
                    if message is None:
                        return
                    self._send(self._handle(engine, message))
                    housekeeping = True
            except queue.Empty:
                pass
            if engine.has_work:
                self._send(engine.step(self._send))
            else:
                housekeeping = engine.idle()

    def _handle(self, engine: Engine, message: Message) -> list[Event]:
        op = message["op"]
        if op == "submit":
            return engine.submit(message["request"], message["tokens"])
        if op == "cancel":
            return engine.cancel(message["id"])
        if op == "snapshot":
            self._pipe.answer(message, engine.snapshot())
        return []

    # --- the reader thread ---------------------------------------------------------------------------------------

    def _read(self, backend: Backend) -> None:
        self._pipe.hear(lambda message: self._receive(backend, message))
        self._inbox.put(None)

    def _receive(self, backend: Backend, message: Message) -> None:
        match message["op"]:
            case "submit":
                self._submit(backend, message["request"])
            case "tokenize":
                tokens = backend.tokenize(message["text"], special=message["special"], add_bos=message["add_bos"])
                self._pipe.answer(message, tokens)
            case "detokenize":
                self._pipe.answer(message, backend.detokenize(message["tokens"]))
            case _:
                self._inbox.put(message)

    def _submit(self, backend: Backend, sent: dict[str, Any]) -> None:
        """Hand the engine a request and its tokens. One that can't be understood is answered, never dropped."""
        try:
            request = request_from_json(sent)
            prompt = request.prompt
            tokens = backend.tokenize(prompt, add_bos=request.add_bos) if isinstance(prompt, str) else prompt
            bad = next((t for t in tokens if not 0 <= t < backend.info.n_vocab), None)
            if bad is not None:
                raise BackendFailure(f"token {bad} is outside the vocabulary")
        except Exception as e:
            self._send([Failure(str(sent.get("id", "")), "invalid_request", reason(e))])
        else:
            self._inbox.put({"op": "submit", "request": request, "tokens": tokens})

    def _send(self, events: list[Event]) -> None:
        if events:
            self._pipe.say_line(f'{{"ev":[{",".join([event_text(e) for e in events])}]}}\n')


if __name__ == "__main__":
    Worker(ChildPipe.of_this_process()).run()
