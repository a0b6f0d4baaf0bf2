"""The worker process with a model: exact text, clear errors, and one clear message after a
crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from localllm.engine.messages import Event, Failure, Finish, Request, Sampling, Text
from localllm.engine.worker.client import (
    WorkerClient,
    WorkerOptions,
)
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import (
    BackendError,
    BusyError,
    ModelFileError,
    ModelNotFoundError,
    WorkerDiedError,
)
from localllm_backends.contract import LoadSpec
from models.tiny_bert import write_bert
from support.requests import events_of, request_for

PROMPT = "<|im_start|>user\nTell me a story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n"
GREEDY = Sampling(temperature=0.0)


def with_model(path: Path, use: Callable[[Supervisor, WorkerClient], Awaitable[None]]) -> None:
    async def main() -> None:
        supervisor = Supervisor(WorkerOptions(LoadSpec(str(path), n_ctx=2048)))
        try:
            await use(supervisor, await supervisor.engine())
        finally:
            await supervisor.close()

    asyncio.run(main())


async def generate(
    engine: WorkerClient, request: Request
) -> tuple[str, list[int], Finish | Failure]:
    text, tokens, end = "", [], None
    async for event in events_of(engine, request):
        if isinstance(event, Text):
            text += event.text
            tokens += event.tokens
        elif isinstance(event, Finish | Failure):
            assert end is None, "two ends"
            end = event
    assert end is not None
    return text, tokens, end


def bare_loop(path: Path, prompt: str, n: int) -> list[int]:
    """Return the greedy tokens of llama.cpp's own loop, called directly through the bindings."""
    import ctypes

    import llama_cpp
    import numpy as np

    from localllm_backends.llamacpp.native import start_native

    start_native()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 2048, 2, 2
    context = llama_cpp.llama_init_from_model(model, params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    data = prompt.encode()
    buffer = (llama_cpp.llama_token * 512)()
    count = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, 512, False, True)
    out: list[int] = []
    batch = llama_cpp.llama_batch_get_one(buffer, count)
    for _ in range(n):
        assert llama_cpp.llama_decode(context, batch) == 0
        row = llama_cpp.llama_get_logits_ith(context, -1)
        token = int(
            np.ctypeslib.as_array(
                ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (n_vocab,)
            ).argmax()
        )
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        out.append(token)
        one = (llama_cpp.llama_token * 1)(token)
        batch = llama_cpp.llama_batch_get_one(one, 1)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return out


@pytest.mark.parametrize("n", [64, pytest.param(200, marks=pytest.mark.long)])
def test_greedy_text_is_llamacpps_own_token_for_token(few_layers: Path, n: int) -> None:
    expected = bare_loop(few_layers, PROMPT, n)
    assert len(expected) >= min(n, 128)

    async def use(_: Supervisor, engine: WorkerClient) -> None:
        _, tokens, end = await generate(
            engine, request_for("a", PROMPT, max_tokens=n, sampling=GREEDY)
        )
        assert tokens == expected
        assert isinstance(end, Finish)
        again = (await generate(engine, request_for("b", PROMPT, max_tokens=n, sampling=GREEDY)))[1]
        assert again[:128] == expected[:128], "a cached prompt changes nothing"

    with_model(few_layers, use)


def test_killing_the_worker_fails_its_requests_at_once_and_the_next_is_answered(
    few_layers: Path,
) -> None:
    async def use(supervisor: Supervisor, engine: WorkerClient) -> None:
        ends: list[Finish | Failure] = []
        seen = 0
        async with asyncio.timeout(200):
            async for event in events_of(
                engine, request_for("a", PROMPT, max_tokens=1000, sampling=GREEDY, ignore_eos=True)
            ):
                seen += isinstance(event, Text)
                if isinstance(event, Text) and seen == 10:
                    os.kill(engine.pid, signal.SIGKILL)
                    killed = asyncio.get_running_loop().time()
                if isinstance(event, Finish | Failure):
                    ends.append(event)
                    assert asyncio.get_running_loop().time() - killed < 2.0
        (end,) = ends
        assert isinstance(end, Failure)
        assert end.code == "worker_died"
        assert "SIGKILL" in end.message
        with pytest.raises(WorkerDiedError):
            await engine.snapshot()
        revived = await supervisor.engine()
        assert revived.pid != engine.pid
        text, _, end = await generate(
            revived, request_for("a", PROMPT, max_tokens=5, sampling=GREEDY)
        )
        assert isinstance(end, Finish)
        assert text

    with_model(few_layers, use)


def test_closing_an_event_stream_early_cancels_the_request(few_layers: Path) -> None:
    async def use(_: Supervisor, engine: WorkerClient) -> None:
        stream = events_of(engine, request_for("a", PROMPT, sampling=GREEDY, ignore_eos=True))
        async for event in stream:
            if isinstance(event, Text):
                break
        await stream.aclose()
        snapshot = await engine.snapshot()
        assert snapshot["cancelled"] == 1
        assert snapshot["running"] == 0

    with_model(few_layers, use)


def test_a_listener_that_fails_or_leaves_cancels_its_request(few_layers: Path) -> None:
    async def use(_: Supervisor, engine: WorkerClient) -> None:
        began = asyncio.Event()

        def fail(event: Event) -> None:
            if isinstance(event, Text):
                raise ZeroDivisionError("a bug of the listener")

        def note(event: Event) -> None:
            if isinstance(event, Text):
                began.set()

        endless = request_for("a", PROMPT, sampling=GREEDY, ignore_eos=True)
        with pytest.raises(ZeroDivisionError):
            await engine.listen(replace(endless, id="f"), fail)
        task = asyncio.create_task(engine.listen(endless, note))
        await began.wait()
        twice = await engine.listen(endless, note)
        assert isinstance(twice, Failure)
        assert twice.code == "invalid_request"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        snapshot = await engine.snapshot()
        assert (snapshot["cancelled"], snapshot["running"]) == (2, 0)

    with_model(few_layers, use)


def test_too_many_ids_for_the_context_are_refused_without_the_worker(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying a million ids would block the server's event loop."""

    async def use(_: Supervisor, engine: WorkerClient) -> None:
        sent: list[object] = []
        monkeypatch.setattr(engine.process, "send", sent.append)
        end = await engine.listen(request_for("a", [5] * 999_000), lambda _: None)
        assert isinstance(end, Failure)
        assert (end.code, end.counts) == ("context_length_exceeded", (999_000, engine.info.n_ctx))
        assert sent == []
        monkeypatch.undo()

    with_model(few_layers, use)


def test_a_listener_gets_a_failure_if_the_worker_dies(few_layers: Path) -> None:
    async def use(_: Supervisor, engine: WorkerClient) -> None:
        def kill(event: Event) -> None:
            if isinstance(event, Text):
                os.kill(engine.pid, signal.SIGKILL)

        async with asyncio.timeout(60):
            end = await engine.listen(
                request_for("a", PROMPT, sampling=GREEDY, ignore_eos=True), kill
            )
            assert isinstance(end, Failure)
            assert end.code == "worker_died"
            late = await engine.listen(request_for("b", PROMPT), kill)
            assert isinstance(late, Failure)
            assert late.code == "worker_died"

    with_model(few_layers, use)


def test_tokens_and_text_round_trip(few_layers: Path) -> None:
    async def use(_: Supervisor, engine: WorkerClient) -> None:
        tokens = await engine.tokenize("Grüße, 世界!")
        assert await engine.detokenize(tokens) == "Grüße, 世界!"

    with_model(few_layers, use)


def test_closing_frees_the_memory(few_layers: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor(WorkerOptions(LoadSpec(str(few_layers), n_ctx=256)))
        engine = await supervisor.engine()
        await supervisor.close()
        assert not engine.alive
        with pytest.raises(ProcessLookupError):
            os.kill(engine.pid, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "kind",
    ["not gguf", "truncated", "header only", "missing", "a folder", "garbage behind a magic"],
)
def test_bad_files_get_one_clear_message(kind: str, smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind == "not gguf":
        path.write_bytes(b"hello, I am a text file\n" * 100)
    elif kind == "truncated":
        path.write_bytes(smollm2.read_bytes()[:5_000_000])
    elif kind == "header only":
        path.write_bytes(smollm2.read_bytes()[:64])
    elif kind == "garbage behind a magic":
        path.write_bytes(b"GGUF" + bytes(range(256)) * 64)
    elif kind == "a folder":
        path.mkdir()

    async def main() -> None:
        await Supervisor(WorkerOptions(LoadSpec(str(path), n_ctx=256))).engine()

    expected = ModelNotFoundError if kind == "missing" else ModelFileError
    with pytest.raises(expected) as caught:
        asyncio.run(main())
    assert "Traceback" not in caught.value.message
    assert "model.gguf" in caught.value.message
    assert caught.value.hint


def test_a_model_that_crashes_again_and_again_is_refused_for_a_while(few_layers: Path) -> None:
    """The supervisor waits out short pauses. For a long pause it refuses the client with the
    remaining time."""

    async def use(supervisor: Supervisor, client: WorkerClient) -> None:
        for _ in range(3):
            os.kill(client.pid, signal.SIGKILL)
            await client.process.wait()
            client = await supervisor.engine()
        os.kill(client.pid, signal.SIGKILL)
        await client.process.wait()
        with pytest.raises(
            BusyError, match=r"4 times in a row; it will be loaded again in \d+ s"
        ) as refused:
            await asyncio.wait_for(supervisor.engine(), 5)
        assert refused.value.retry_after_s is not None
        assert 1 <= refused.value.retry_after_s <= 8

    with_model(few_layers, use)


def test_an_invalid_request_to_a_worker_gets_an_error(few_layers: Path) -> None:
    """The caller of an invalid question gets an error, and the worker continues to serve."""

    async def use(_supervisor: Supervisor, client: WorkerClient) -> None:
        with pytest.raises(BackendError, match=r"TypeError|AttributeError"):
            await asyncio.wait_for(client.tokenize(None), 30)  # type: ignore[arg-type]
        assert await client.detokenize(await client.tokenize("still here")) == "still here"

    with_model(few_layers, use)


def test_a_worker_that_answered_is_loaded_again_at_once(few_layers: Path) -> None:
    """A model may crash again and again without being refused, if each worker answers a request
    before it crashes."""

    async def use(supervisor: Supervisor, client: WorkerClient) -> None:
        for i in range(6):
            async for event in events_of(client, request_for(f"r{i}", PROMPT, 1, GREEDY)):
                last = event
            assert isinstance(last, Finish)
            os.kill(client.pid, signal.SIGKILL)
            await client.process.wait()
            client = await supervisor.engine()

    with_model(few_layers, use)


_WORDS = {"text": "hello", "special": True, "add_bos": False, "n": 1}
_REQUEST = {"id": "a", "prompt": "hello", "max_tokens": 5}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("worker", {"op": "tokenize", **_WORDS}),
        ("worker", {"op": "submit", "request": _REQUEST}),
        ("embedding", {"op": "tokenize", **_WORDS}),
    ],
)
def test_a_worker_with_closed_output_ends(
    module: str, message: dict[str, object], few_layers: Path, tmp_path: Path
) -> None:
    """Its output is closed and its input is open: the worker would hold a model without a
    client."""
    if module == "worker":
        order: dict[str, object] = {"spec": asdict(LoadSpec(str(few_layers), n_ctx=256))}
    else:
        order = {"path": str(write_bert(tmp_path / "bert.gguf")), "backend": "auto"}
    command = [sys.executable, "-m", f"localllm.engine.worker.{module}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        print(json.dumps(order), file=child.stdin, flush=True)
        assert any("ready" in json.loads(line) for line in child.stdout)
        child.stdout.close()
        print(json.dumps(message), file=child.stdin, flush=True)
        assert child.wait(60) == 0


def test_counting_tokens_sends_no_ids_over_the_pipe(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(_: Supervisor, engine: WorkerClient) -> None:
        received: list[int] = []
        deliver = engine.process.pipe_data_received

        def hear(fd: int, data: bytes) -> None:
            received.append(len(data))
            deliver(fd, data)

        monkeypatch.setattr(engine.process, "pipe_data_received", hear)
        text = "a long text that goes on " * 4_000
        n_tokens = await engine.count_tokens(text, add_bos=True)
        assert sum(received) < 200
        assert n_tokens == len(await engine.tokenize(text, add_bos=True))
        assert await engine.count_tokens("") == 0

    with_model(few_layers, use)


def test_others_are_answered_before_a_long_text_is_tokenised(few_layers: Path) -> None:
    async def use(_: Supervisor, engine: WorkerClient) -> None:
        done: list[str] = []

        async def asked(name: str, text: str) -> list[int]:
            tokens = await engine.tokenize(text)
            done.append(name)
            return tokens

        message = "<|im_start|>user\nhi<|im_end|>\n"
        long = asyncio.create_task(asked("long", message * 40_000))
        await asyncio.sleep(0)
        short = await asked("short", message)
        assert await long == short * 40_000
        assert done == ["short", "long"]
        _, _, end = await generate(
            engine, request_for("a", message * 40_000, max_tokens=4, sampling=GREEDY)
        )
        assert isinstance(end, Failure)
        assert end.counts is not None
        n_tokens, window = end.counts
        assert window == 2048
        assert n_tokens == pytest.approx(40_000 * len(short), rel=0.01)  # the rest is not tokenized

    with_model(few_layers, use)
