"""Images over HTTP in every dialect, with the dialects' own clients.

The server uses a real worker and a tiny vision model.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec, Placement
from models.tiny_vision import write_vision
from support.http_server import Running, running_server
from support.pictures import needs_mtmd, needs_pillow, png

pytestmark = [needs_mtmd(), needs_pillow()]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


SMALL, WIDE = b64(png(64, 64, 1)), b64(png(300, 200, 2))
FORMS = {kind: b64(png(48, 40, 3, kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF")}


def url(file: str, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{file}"


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Supervisor:
    model = write_vision(tmp_path_factory.mktemp("vision"), "qwen2vl")
    spec = LoadSpec(
        str(model.text),
        n_ctx=2048,
        n_seq_max=4,
        placement=Placement(gpu_layers=0),
        projector=str(model.projector),
    )
    return Supervisor(WorkerOptions(spec))


@pytest.fixture(scope="module")
def server(supervisor: Supervisor):
    with running_server({"tiny": supervisor}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        yield client


def chat(http: httpx.Client, *parts: Any, **more: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }
    return http.post("/v1/chat/completions", json=body)


def image(file: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(file), **more}}


def tokens(http: httpx.Client, *parts: Any) -> int:
    reply = chat(http, *parts)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens"])


TEXT = {"type": "text", "text": "what is it?"}


def test_openais_client_sends_images(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        parts: Any = [TEXT, image(WIDE)]
        messages: Any = [{"role": "user", "content": parts}]
        plain = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, temperature=0
        )
        said = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, temperature=0, stream=True
        )
        assert (
            "".join(c.choices[0].delta.content or "" for c in said if c.choices)
            == plain.choices[0].message.content
        )
        assert plain.usage is not None
        assert plain.usage.prompt_tokens > 20
        item: Any = [{"role": "user", "content": [{"type": "input_text", "text": "what is it?"},
                                                  {"type": "input_image",
                                                  "image_url": url(WIDE)}]}]  # fmt: skip
        answer = client.responses.create(model="tiny", input=item, max_output_tokens=16)
        assert answer.usage is not None
        assert answer.usage.input_tokens == plain.usage.prompt_tokens


def test_anthropics_client_sends_images_in_tool_results_too(server: Running) -> None:
    block: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": WIDE},
    }
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, block]}]
        plain = client.messages.create(model="tiny", max_tokens=4, messages=asked)
        counted = client.messages.count_tokens(model="tiny", messages=asked)
        read = plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == read > 20
        shot: Any = [
            {"role": "user", "content": "take a screenshot"},
            {"role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "shot", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [
                {"type": "text", "text": "here"}, block]}]},
        ]  # fmt: skip
        with_image = client.messages.count_tokens(model="tiny", messages=shot).input_tokens
        shot[2]["content"][0]["content"].pop()
        assert (
            with_image - client.messages.count_tokens(model="tiny", messages=shot).input_tokens
            >= 20
        )
        assert client.messages.create(model="tiny", max_tokens=4, messages=asked + shot[1:]).content


def test_images_are_accepted_from_ollamas_client_and_in_llama_cpps_form(
    server: Running, http: httpx.Client
) -> None:
    client = ollama.Client(host=server.url)
    said = client.chat(model="tiny",
        messages=[{"role": "user", "content": "what is it?", "images": [WIDE]}],
                       options={"num_predict": 4, "temperature": 0})  # fmt: skip
    assert (said.prompt_eval_count or 0) > 20
    made = client.generate(
        model="tiny", prompt="what is it?", images=[WIDE], options={"num_predict": 4}
    )
    assert (made.prompt_eval_count or 0) > 20
    assert "vision" in (client.show("tiny").capabilities or [])
    client.close()
    body = {
        "prompt": {"prompt_string": "see <__media__> now", "multimodal_data": [WIDE]},
        "n_predict": 4,
    }
    reply = http.post("/completion", json=body)
    assert reply.json()["tokens_evaluated"] > 20
    body["prompt"]["multimodal_data"].append(WIDE)  # type: ignore[index,attr-defined]
    assert http.post("/completion", json=body).status_code == 400
    assert http.get("/props").json()["modalities"]["vision"] is True


@pytest.mark.parametrize("kind", FORMS)
def test_every_format_is_read(http: httpx.Client, kind: str) -> None:
    assert chat(http, TEXT, image(FORMS[kind])).status_code == 200


def test_a_jpeg_in_plain_base64_is_no_path_though_it_begins_like_one(http: httpx.Client) -> None:
    """Every JPEG in base64 begins with `/9j/`, which is not a path.

    Anthropic's and Ollama's clients send it without a scheme.
    """
    file = FORMS["JPEG"]
    assert file.startswith("/9j/")
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/jpeg", "data": file},
    }
    asked = {"messages": [{"role": "user", "content": [TEXT, block]}], "max_tokens": 4}
    assert http.post("/v1/messages", json=asked).status_code == 200
    body = {"messages": [{"role": "user", "content": "x", "images": [file]}], "stream": False}
    assert http.post("/api/chat", json={**body, "options": {"num_predict": 4}}).status_code == 200


def test_a_second_turn_encodes_nothing_and_takes_the_image_from_the_cache(
    http: httpx.Client,
) -> None:
    first = chat(http, TEXT, image(b64(png(200, 300, 9)))).json()

    def encodes() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if "image_encodes" in line and not line.startswith("#")
        )

    before = encodes()
    assert before >= 1
    turn = [
        {"role": "user", "content": [TEXT, image(b64(png(200, 300, 9)))]},
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "and now?"},
    ]
    reply = http.post("/v1/chat/completions", json={"messages": turn, "max_tokens": 4}).json()
    assert encodes() == before
    assert (
        reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= first["usage"]["prompt_tokens"] - 4
    )


def test_an_unreadable_image_is_a_400_with_the_reason(http: httpx.Client) -> None:
    svg = b64(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    for sent, said in (
        ({"url": "https://example.org/x.png"}, "does not download"),
        ({"url": "data:image/svg+xml;base64," + svg}, "svg"),
        ({"url": url(svg)}, "SVG"),
        ({"url": url("%%%")}, "base64"),
        ({"url": url(b64(png(64, 64, 1)[:200]))}, "damaged"),
        ({"url": "data:image/png,abc"}, "base64"),
        ({"url": ""}, "image is missing"),
    ):
        reply = chat(http, TEXT, {"type": "image_url", "image_url": sent})
        assert reply.status_code == 400, (sent["url"][:40], reply.text)
        assert said.lower() in reply.json()["error"]["message"].lower()
    assert tokens(http, TEXT) < 60


def test_the_detail_field_is_named_and_image_markers_in_text_stay_text(http: httpx.Client) -> None:
    reply = chat(http, TEXT, image(SMALL, detail="low"))
    assert reply.headers["x-localllm-ignored"] == "messages.content.image_url.detail"
    assert "x-localllm-ignored" not in chat(http, TEXT, image(SMALL, detail="auto")).headers
    assert (
        chat(http, {"type": "text", "text": "\ue5c8image 00\uf2a9 <__media__>"}).status_code == 200
    )


def test_images_beyond_the_context_are_refused_with_the_counts(http: httpx.Client) -> None:
    large = b64(png(1400, 1400, 4, "JPEG"))
    reply = chat(http, TEXT, *[image(large)] * 4)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]


def test_a_grammar_tools_and_many_images_go_together(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    reply = chat(http, image(SMALL), TEXT, image(WIDE), max_tokens=60,
                 response_format={"type": "json_schema",
                 "json_schema": {"name": "x", "schema": schema}})  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"].startswith("{")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    forced = chat(http, image(SMALL), TEXT, max_tokens=60, tools=[tool], tool_choice="required")
    assert forced.status_code == 200, forced.text
    assert forced.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"


def test_images_with_transparency_orientation_or_odd_sizes_are_read(http: httpx.Client) -> None:
    from PIL import Image

    def saved(picture: Image.Image, kind: str, **more: Any) -> str:
        made = io.BytesIO()
        picture.save(made, kind, **more)
        return b64(made.getvalue())

    exif = Image.Exif()
    exif[0x0112] = 6
    turned = saved(Image.new("RGB", (400, 100), "red"), "JPEG", exif=exif)
    assert tokens(http, TEXT, image(turned)) == tokens(
        http, TEXT, image(saved(Image.new("RGB", (100, 400)), "PNG"))
    )
    for picture in (
        Image.new("RGBA", (70, 50), (0, 0, 0, 0)),
        Image.new("P", (60, 60)),
        Image.new("I;16", (64, 64)),
        Image.new("1", (64, 64)),
        Image.new("LA", (64, 64)),
        Image.new("RGB", (1, 1)),
        Image.new("RGB", (2000, 3)),
    ):
        reply = chat(http, TEXT, image(saved(picture, "PNG")))
        assert reply.status_code == 200 or "image" in reply.json()["error"]["message"], reply.text
    huge = chat(http, TEXT, image(saved(Image.new("1", (30_000, 30_000)), "PNG")))
    assert huge.status_code == 400
    assert "too large" in huge.json()["error"]["message"]
