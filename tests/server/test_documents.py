"""Files in messages, in every dialect that has them.

Text is read, and so are PDFs if the extra is installed. Other files are refused, or named as
ignored.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.conversation import pdf as reading
from support.http_server import running_server
from support.pdfs import needs_pdf, pdf
from support.scripted_engine import ScriptedEngine

CHAT, RESP, ANTH = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NOTES = "three lines\nof ``` notes\nand a third: ä"
ABOUT = {"type": "text", "text": "what is it about?"}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(["yes"])


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"tiny": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        client.timeout = httpx.Timeout(60)
        yield client


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def doors(data: bytes, kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return requests that contain the file in every supported form."""
    sent = f"data:{kind};base64,{b64(data)}"
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": sent}}
    item = {"type": "input_file", "filename": "a.txt", "file_data": sent}
    plain = {"type": "input_file", "filename": "a.txt", "file_data": b64(data)}
    source = {"type": "base64", "media_type": kind, "data": b64(data)}
    block = {"type": "document", "title": "a.txt", "source": source}
    return {
        "chat": (CHAT, user(ABOUT, file)),
        "responses": (RESP, {"input": [{"role": "user", "content": [item]}]}),
        "responses, plain": (RESP, {"input": [{"role": "user", "content": [plain]}]}),
        "messages": (ANTH, user(ABOUT, block)),
        "a tool's result": (
            ANTH,
            user({"type": "tool_result", "tool_use_id": "t", "content": [block]}),
        ),
    }


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 5}


DOORS = list(doors(b"", ""))


@pytest.mark.parametrize("door", DOORS)
def test_a_file_of_text_is_text(door: str, http: httpx.Client, engine: ScriptedEngine) -> None:
    path, body = doors(NOTES.encode(), "text/plain")[door]
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert f"File a.txt:\n```\n{NOTES}\n```" in str(engine.requests[-1].prompt)
    assert "x-localllm-ignored" not in reply.headers


@pytest.mark.parametrize("door", DOORS)
@needs_pdf()
def test_a_pdf_is_its_text(door: str, http: httpx.Client, engine: ScriptedEngine) -> None:
    path, body = doors(pdf(["first page", "", "third page"]), "application/pdf")[door]
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    prompt = str(engine.requests[-1].prompt)
    assert (
        "Page 1:\nfirst page\n\nPage 2:\n[a page without text]\n\nPage 3:\nthird page\n"
    ) in prompt
    assert "\ue5c8" not in prompt


@pytest.mark.parametrize("door", DOORS)
def test_without_the_pdf_extra_the_error_names_what_to_install(
    door: str, http: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "installed", lambda: False)
    path, body = doors(pdf([door]), "application/pdf")[door]
    reply = http.post(path, json=body)
    if door == "a tool's result":
        assert reply.status_code == 200
        assert reply.headers["x-localllm-ignored"] == "messages.documents"
        assert "[file omitted: PDF support is not installed" in str(engine.requests[-1].prompt)
    else:
        assert reply.status_code == 400
        assert "pip install 'localllm[pdf]'" in reply.json()["error"]["message"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"\x00\x01\x02", "application/octet-stream", "is neither"),
        (b"PK\x03\x04\xff\xfe", "application/zip", "is neither"),
        (b"no PDF at all", "application/pdf", "is neither"),
    ],
)
def test_a_document_that_is_neither_text_nor_pdf_is_refused_or_a_note(
    door: str, http: httpx.Client, engine: ScriptedEngine, data: bytes, kind: str, said: str
) -> None:
    if door == "responses, plain":
        kind, data = "", b"\x00"
    path, body = doors(data, kind)[door]
    reply = http.post(path, json=body)
    if door == "a tool's result":
        assert reply.headers["x-localllm-ignored"] == "messages.documents"
        assert said in str(engine.requests[-1].prompt)
    else:
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]


@needs_pdf()
def test_a_damaged_pdf_is_a_400_and_in_an_earlier_turn_a_note(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    path, body = doors(b"%PDF-1.7 and nothing else", "application/pdf")["chat"]
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert "messages[0].content[1]: the PDF is damaged" in reply.json()["error"]["message"]
    later = [
        *body["messages"],
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "go on"},
    ]
    reply = http.post(path, json={"messages": later})
    assert reply.headers["x-localllm-ignored"] == "messages.files"
    assert "[file omitted: the PDF is damaged]" in str(engine.requests[-1].prompt)


@needs_pdf()
def test_a_later_turn_reads_no_pdf_again(
    http: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = doors(pdf(["only once"]), "application/pdf")["chat"]
    assert http.post(path, json=body).status_code == 200
    monkeypatch.setattr(reading, "read", lambda *_, **__: pytest.fail("it was read again"))
    later = [
        *body["messages"],
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go on"},
    ]
    assert http.post(path, json={"messages": later}).status_code == 200
    assert "only once" in str(engine.requests[-1].prompt)


@needs_pdf()
def test_a_model_with_image_input_gets_pages_without_text_as_pictures() -> None:
    engine = ScriptedEngine(["yes"], vision=True)
    path, body = doors(pdf(["words", ""]), "application/pdf")["chat"]
    with running_server({"tiny": engine}) as running:
        reply = httpx.post(running.url + path, json=body, trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    request = engine.requests[-1]
    (mark,) = request.media
    assert f"Page 2:\n{mark}\n" in str(request.prompt)
    assert base64.b64decode(request.media[mark]).startswith(b"\xff\xd8")


def test_files_by_address_or_id_are_refused_with_the_way_to_send_them(http: httpx.Client) -> None:
    for path, part in (
        (CHAT, {"type": "file", "file": {"file_id": "file-1"}}),
        (RESP, {"type": "input_file", "file_url": "https://cdn.example/a.pdf"}),
        (ANTH, {"type": "document", "source": {"type": "url", "url": "https://cdn.example/a.pdf"}}),
    ):
        body = {"input": [{"role": "user", "content": [part]}]} if path == RESP else user(part)
        reply = http.post(path, json=body)
        assert reply.status_code == 400
        assert "in base64" in reply.json()["error"]["message"]
