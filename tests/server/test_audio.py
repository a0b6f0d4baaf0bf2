"""Audio over HTTP, through a real worker.

The requests come from the clients' own libraries. The tiny models include some without audio
input.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import openai
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.http.form_body import KIND
from localllm_backends.contract import LoadSpec, Placement
from models.tiny_audio import write_hearing
from support.http_server import Running, running_server
from support.pictures import needs_mtmd
from support.sounds import FLAC, MP3, needs_miniaudio, wav

pytestmark = [needs_mtmd(), needs_miniaudio()]
TEXT = {"type": "text", "text": "what is said?"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_hearing(tmp_path_factory.mktemp("audio"), "ultravox")
    spec = LoadSpec(
        str(model.text), n_ctx=512, n_seq_max=4, n_threads=1, placement=Placement(gpu_layers=0)
    )
    deaf = Supervisor(WorkerOptions(spec))
    spec = replace(spec, projector=str(model.projector))
    with running_server({"tiny": Supervisor(WorkerOptions(spec)), "deaf": deaf}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        yield client


def sound(data: bytes | str, **more: Any) -> dict[str, Any]:
    text = data if isinstance(data, str) else b64(data)
    return {"type": "input_audio", "input_audio": {"data": text, "format": "wav", **more}}


def chat(http: httpx.Client, *parts: Any, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}
    return http.post("/v1/chat/completions", json={"temperature": 0, "model": "tiny"} | body | more)


def test_openai_s_client_in_chat_and_responses(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": [TEXT, sound(wav(2.0, 1))]}]
        plain = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, temperature=0
        )
        said = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, temperature=0, stream=True
        )
        streamed = "".join(c.choices[0].delta.content or "" for c in said if c.choices)
        assert streamed == plain.choices[0].message.content
        assert plain.usage is not None
        assert plain.usage.prompt_tokens > 40
        part = {"type": "input_text", "text": "what is said?"}
        item: Any = [{"role": "user", "content": [part, sound(wav(2.0, 1))]}]
        answer = client.responses.create(model="tiny", input=item, max_output_tokens=16)
        assert answer.usage is not None
        assert answer.usage.input_tokens == plain.usage.prompt_tokens


def test_openai_s_client_transcribes_and_translates(server: Running, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        file = ("talk.wav", wav(2.0, 1))
        spoken = client.audio.transcriptions
        plain = spoken.create(model="tiny", file=file)
        assert plain.usage.total_tokens > 50  # type: ignore[union-attr]
        events = list(spoken.create(model="tiny", file=file, stream=True))
        deltas = [e.delta for e in events if e.type == "transcript.text.delta"]
        assert "".join(deltas).strip() == plain.text
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == plain.text
        full = spoken.create(
            model="tiny", file=file, response_format="verbose_json", language="en", prompt="Ada"
        )
        assert (full.duration, full.language) == (2.0, "en")
    sent = {"files": {"file": file}, "data": {"response_format": "text", "model": "tiny"}}
    reply = http.post("/v1/audio/transcriptions", **sent)  # type: ignore[arg-type]
    assert reply.headers["content-type"].startswith("text/plain")
    assert reply.text == plain.text + "\n"
    # The newest client marks this method as deprecated, so the test uses plain HTTP.
    reply = http.post("/v1/audio/translations", files={"file": file}, data={"model": "tiny"})
    assert reply.json()["text"] != plain.text


def test_forms_are_refused_with_the_reason(http: httpx.Client) -> None:
    path = "/v1/audio/transcriptions"
    file = {"file": ("talk.wav", wav(1.0))}
    for more, status, reason in (
        ({"files": file, "data": {"response_format": "srt"}}, 400, "text without times"),
        ({"files": file, "data": {"timestamp_granularities[]": "word"}}, 400, "without times"),
        ({"files": file, "data": {"model": "deaf"}}, 400, "deaf does not support audio"),
        ({"files": file, "data": {"temperature": "7"}}, 400, "temperature"),
        ({"files": file, "data": {"prompt": "x" * 70_000}}, 400, "65536 bytes"),
        ({"files": {"file": ("a", b"text")}}, 400, "WAV, MP3 or FLAC"),
        ({"files": {"sound": ("a", b"text")}}, 400, "file is missing"),
        ({"files": [("f", ("a", b"x"))] * 65}, 400, "more than 64 parts"),
        ({"json": {"model": "tiny"}}, 415, "multipart/form-data"),
    ):
        reply = http.post(path, **more)  # type: ignore[arg-type]
        assert reply.status_code == status, (reason, reply.text)
        assert reason in reply.json()["error"]["message"]
    kind = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\n", b"--y\r\n\r\n", b"\0" * 9):
        assert http.post(path, content=body, headers=kind).status_code == 400
    assert http.post(path, content=b"", headers={"content-type": KIND}).status_code == 400


def test_every_format_is_read_whatever_its_name(http: httpx.Client) -> None:
    counts = []
    for data in (wav(1.0, 1), wav(1.0, 1, 44_100, 2), MP3, FLAC):
        reply = chat(http, TEXT, sound(data, format="mp3"))
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]
    url = {"type": "audio_url", "audio_url": {"url": "data:audio/mpeg;base64," + b64(MP3)}}
    assert chat(http, TEXT, url).json()["usage"]["prompt_tokens"] == counts[2]


def test_ollama_s_client_sends_sounds_as_images(server: Running) -> None:
    client = ollama.Client(host=server.url)
    options = {"num_predict": 4, "temperature": 0}
    for data in (wav(1.0, 1), MP3, FLAC):
        message = {"role": "user", "content": "what is said?", "images": [b64(data)]}
        said = client.chat(model="tiny", messages=[message], options=options)
        assert (said.prompt_eval_count or 0) > 40
    made = client.generate(
        model="tiny", prompt="what is said?", images=[b64(MP3)], options={"num_predict": 4}
    )
    assert (made.prompt_eval_count or 0) > 40
    assert "audio" in (client.show("tiny").capabilities or [])
    client.close()


def test_a_second_turn_encodes_nothing(http: httpx.Client) -> None:
    asked = [TEXT, sound(wav(3.0, 7))]
    first = chat(http, *asked).json()["choices"][0]["message"]["content"]

    def encodes() -> float:
        lines = http.get("/metrics").text.splitlines()
        named = [line for line in lines if "sound_encodes" in line and not line.startswith("#")]
        return sum(float(line.split()[-1]) for line in named)

    before = encodes()
    turn = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and now?"},
    ]
    reply = http.post("/v1/chat/completions", json={"messages": turn, "max_tokens": 4}).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
    assert encodes() == before >= 1


def false_header(channels: int = 1, rate_hz: int = 16_000) -> bytes:
    """Return a WAV of one second whose header claims 4 GB."""
    body = wav(1.0, 1)[44:]
    form = struct.pack("<HHIIHH", 1, channels, rate_hz, 32_000, 2, 16)
    head = b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", 2**32 - 1) + body


def test_each_refusal_gives_its_reason_and_a_false_length_is_ignored(http: httpx.Client) -> None:
    for data, reason in (
        ("", "is missing"),
        ("https://example.com/a.wav", "does not download"),
        ("data:audio/wav,abc", "must be in base64"),
        ("???", "not valid base64"),
        (b"just a text, no sound", "not supported: send WAV, MP3 or FLAC"),
        (b"RIFF\0\0\0\0WAVE", "no complete WAV"),
        (MP3[:40], "no complete MP3"),
        (FLAC[:30], "no complete FLAC"),
        (wav(0.0), "is empty"),
        (false_header(channels=100), "100 channels"),
        (false_header(rate_hz=1_000), "1000 samples per second"),
    ):
        reply = chat(http, TEXT, sound(data))
        assert reply.status_code == 400, (reason, reply.text)
        error = reply.json()["error"]
        assert reason in error["message"]
        assert error["param"] == "messages[0].content[1]"
    assert chat(http, TEXT, sound(false_header())).status_code == 200


def test_a_model_without_audio_names_itself_and_leaves_notes_in_earlier_turns(
    http: httpx.Client,
) -> None:
    reply = chat(http, TEXT, sound(wav(1.0)), model="deaf")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert "deaf does not support audio" in error["message"]
    assert error["hint"] == "tiny is installed here and supports audio"
    turn = [
        {"role": "user", "content": [TEXT, sound(wav(1.0))]},
        {"role": "assistant", "content": "a tone"},
        {"role": "user", "content": "and now?"},
    ]
    body = {"messages": turn, "max_tokens": 4, "model": "deaf"}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.headers["x-localllm-ignored"] == "messages.audio"
    shown = {m["id"]: m["capabilities"] for m in http.get("/v1/models").json()["data"]}
    assert ("audio" in shown["tiny"], "audio" in shown["deaf"]) == (True, False)
