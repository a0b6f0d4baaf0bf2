"""The worker process: one loaded model, one loop, JSON lines in and out.

A native crash, an abort or an out-of-memory kill ends this process and nothing else. The main thread owns the engine;
a reader thread takes messages (and tokenises, which needs no model state). It dies with its parent: stdin's end is
the order to close.

    in   {"op": "load", ...} first, then submit | cancel | tokenize | detokenize | snapshot | close
    out  {"loading": 0.4} … {"ready": ModelInfo} | {"fatal": {...}}; then {"ev": [...]} per step, {"re": n, ...} replies
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict
from typing import Any, BinaryIO

from localllm.engine.constraint import GrammarCompiler
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.messages import Event, Failure, event_text, request_from_json
from localllm.errors import LocalLLMError, UnsupportedError
from localllm_backends.contract import Backend, BackendFailure, BackendType, LoadSpec
from localllm_backends.contract import OutOfMemoryError as NativeOutOfMemory

_PROGRESS_STEP = 0.02
# An idle worker looks this often whether others need the memory of its prefix cache.
_LOOK_S = 2.0
# One that can go on exporting once something is written looks this often.
_WRITING_S = 0.02


class Worker:
    """Reads `source`, writes `sink`, until told to close or the source ends."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    def run(self) -> int:
        """Serve; returns the exit code."""
        first = self._source.readline()
        if not first:
            return 0
        try:
            self._engine = self._load(json.loads(first))
        except BackendFailure as e:
            code = "does_not_fit" if isinstance(e, NativeOutOfMemory) else "bad_model_file"
            self._write({"fatal": {"code": code, "message": str(e)}})
            return 4
        except LocalLLMError as e:
            self._write({"fatal": {"code": e.code, "message": e.message, "hint": e.hint}})
            return e.exit_code
        self._write({"ready": asdict(self._engine.backend.info), "memory": asdict(self._engine.backend.memory())})
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._loop(self._engine)
        self._engine.close()
        return 0

    def _load(self, options: dict[str, Any]) -> Engine:
        from localllm.engine import backends

        spec = LoadSpec(**options["spec"])
        backend_type = backends.for_path(spec.path, options.get("backend", "auto"))
        said = -1.0

        def progress(value: float) -> None:
            nonlocal said
            if value - said >= _PROGRESS_STEP or value >= 1.0:
                said = value
                self._write({"loading": value})

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
        while True:
            try:
                while True:
                    wait = not engine.has_work and not housekeeping
                    look_s = _WRITING_S if engine.awaits_disk else _LOOK_S
                    message = self._inbox.get(block=wait, timeout=look_s if wait else None)
                    if message["op"] == "close":
                        return
                    self._send(self._handle(engine, message))
                    housekeeping = True
            except queue.Empty:
                pass
            if engine.has_work:
                self._send(engine.step(self._send))
            else:
                housekeeping = engine.idle()

    def _handle(self, engine: Engine, message: dict[str, Any]) -> list[Event]:
        op = message["op"]
        if op == "submit":
            return engine.submit(message["request"], message["tokens"])
        if op == "cancel":
            return engine.cancel(message["id"])
        if op == "snapshot":
            self._write({"re": message["n"], "value": engine.snapshot()})
        return []

    # --- the reader thread ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        for line in self._source:
            message: dict[str, Any] = {}
            try:
                message = json.loads(line)
                self._receive(message)
            except Exception as e:
                self._refuse(message, f"{type(e).__name__}: {e}")
        self._inbox.put({"op": "close"})

    def _refuse(self, message: dict[str, Any], why: str) -> None:
        """A message that can't be understood is answered, never dropped: somebody waits for it."""
        if "n" in message:
            self._write({"re": message["n"], "error": why})
        elif "request" in message:
            self._send([Failure(str(message["request"].get("id", "")), "invalid_request", why)])

    def _receive(self, message: dict[str, Any]) -> None:
        assert self._engine is not None
        backend = self._engine.backend
        match message["op"]:
            case "submit":
                request = request_from_json(message["request"])
                try:
                    prompt = request.prompt
                    tokens = backend.tokenize(prompt, add_bos=request.add_bos) if isinstance(prompt, str) else prompt
                    bad = next((t for t in tokens if not 0 <= t < backend.info.n_vocab), None)
                    if bad is not None:
                        raise BackendFailure(f"token {bad} is outside the vocabulary")
                except BackendFailure as e:
                    self._send([Failure(request.id, "invalid_request", str(e))])
                    return
                self._inbox.put({"op": "submit", "request": request, "tokens": tokens})
            case "tokenize":
                tokens = backend.tokenize(message["text"], special=message["special"], add_bos=message["add_bos"])
                self._write({"re": message["n"], "value": tokens})
            case "detokenize":
                self._write({"re": message["n"], "value": backend.detokenize(message["tokens"])})
            case _:
                self._inbox.put(message)

    def _send(self, events: list[Event]) -> None:
        if events:
            self._write_line(f'{{"ev":[{",".join([event_text(e) for e in events])}]}}\n')

    def _write(self, message: dict[str, Any]) -> None:
        self._write_line(json.dumps(message, separators=(",", ":")) + "\n")

    def _write_line(self, line: str) -> None:
        data = line.encode()
        with self._lock:
            try:
                self._sink.write(data)
                self._sink.flush()
            except (BrokenPipeError, ValueError):
                # The parent is gone; stdin's end will close us.
                self._inbox.put({"op": "close"})


def main() -> int:
    """Entry point of `python -m localllm.engine.worker`."""
    # Ctrl-C in the terminal reaches the whole process group; the parent decides when we stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Native code prints to stdout at times: keep the protocol on a private descriptor.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return Worker(sys.stdin.buffer, sink).run()


if __name__ == "__main__":
    sys.exit(main())
