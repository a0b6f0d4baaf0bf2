"""Errors of a hub, or of a proxy in between: each message names the cause and a solution."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from library.hub import Hub, Seen
from localllm.errors import DownloadError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.library.catalog import load_catalog
from localllm.library.describe import describe
from localllm.library.hub import HubUnreachableError, Patience, list_files
from localllm.library.pull import pull
from models import tiny_gguf
from support.safetensors import safetensors

REPO = "org/Tiny-GGUF"
Answer = tuple[int, bytes, dict[str, str]]


@pytest.fixture
def stocked(hub: Hub) -> Hub:
    hub.add(REPO, {"Tiny-Q4_K_M.gguf": random.Random(1).randbytes(30_000)})
    return hub


REFUSALS = [
    {"X-Error-Message": "Invalid credentials in Authorization header"},
    {"X-Error-Message": "User Access Token is expired"},
    {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
    {},
]


@pytest.mark.parametrize("headers", REFUSALS)
@pytest.mark.parametrize("refuses", ["api", "resolve", "everything"])
def test_a_refused_token_does_not_block_public_files(
    stocked: Hub,
    patience: Patience,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    headers: dict[str, str],
    refuses: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")

    def refuse(seen: Seen) -> Answer | None:
        return (
            (401, b"{}", dict(headers))
            if seen.authorization and refuses in (seen.kind, "everything")
            else None
        )

    stocked.scripted = refuse
    assert (
        pull(REPO, patience=patience).path.read_bytes()
        == stocked.repos[REPO].files["Tiny-Q4_K_M.gguf"]
    )
    if refuses != "resolve":
        assert "HF_TOKEN" in caplog.text
        assert "expired" in caplog.text


def test_a_refused_token_is_named_if_the_repository_is_not_public(
    stocked: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    stocked.scripted = lambda _: (401, b"{}", {"X-Error-Message": "Invalid credentials"})
    with pytest.raises(ModelNotFoundError, match=r"rejects HF_TOKEN: it has expired") as e:
        list_files(REPO, patience=patience)
    assert "renew" in e.value.hint
    assert "set HF_TOKEN" not in e.value.hint


HTML = b"<!doctype html><html><title>Access denied</title>"
FORBIDDEN: list[tuple[Answer, str, str]] = [
    ((403, b"{}", {"X-Error-Code": "DisabledRepo",
    "X-Error-Message": "Access to this resource is disabled."}), "is disabled", "gated"),
    ((403, b"{}",
    {"X-Error-Message": "Please enable access to it in your fine-grained token settings"}),
    "fine-grained token", "is gated"),
    ((403, b"{}", {"X-Error-Message": "no\x1b[2J entry"}), r"no\?\[2J entry", "gated"),
    ((403, HTML, {"Content-Type": "text/html"}), "blocked before", "gated"),
    ((403, b"", {}), "blocked before", "gated"),
    ((403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted."}),
    "is gated", "blocked"),
    ((451, b"{}", {"X-Error-Message": "Unavailable For Legal Reasons"}), "451", "gated"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "said", "unsaid"), FORBIDDEN)
def test_a_refusal_gives_the_hubs_reason_or_names_another_sender(
    stocked: Hub, patience: Patience, answer: Answer, said: str, unsaid: str
) -> None:
    stocked.scripted = lambda _: (answer[0], answer[1], dict(answer[2]))
    with pytest.raises(DownloadError, match=said) as e:
        pull(REPO, patience=patience)
    assert unsaid not in e.value.message
    assert e.value.hint or answer[0] == 451


@pytest.mark.parametrize("answer", [FORBIDDEN[0], FORBIDDEN[3]])
def test_a_refused_file_gives_the_same_reason_as_a_refused_listing(
    stocked: Hub, patience: Patience, answer: tuple[Answer, str, str]
) -> None:
    status, body, headers = answer[0]
    stocked.scripted = lambda seen: (
        (status, body, dict(headers)) if seen.kind == "resolve" else None
    )
    with pytest.raises(DownloadError, match=answer[1]):
        pull(REPO, patience=patience)


@pytest.mark.parametrize(
    "body", [HTML, b"\n  <html>Welcome to the hotel</html>", b"<?xml version='1.0'?><x/>"]
)
@pytest.mark.parametrize("via", ["200", "302"])
def test_a_web_page_instead_of_the_hubs_answer_is_reported_as_such(
    stocked: Hub, patience: Patience, waits: list[float], body: bytes, via: str
) -> None:
    def page(seen: Seen) -> Answer:
        moved = via == "302" and seen.kind == "api"
        return (
            (302, b"", {"Location": f"{stocked.url}/login"})
            if moved
            else (200, body, {"Content-Type": "text/html"})
        )

    stocked.scripted = page
    with pytest.raises(HubUnreachableError, match="answered with a web page") as e:
        pull(REPO, patience=patience)
    assert "captive portal" in e.value.message
    assert len(waits) == patience.listing_failures - 1, "it may pass"


def test_an_error_of_the_cache_or_offline_mode_names_the_reason_or_variable(
    hub: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {"x-Q8_0.gguf": b"GGUF"})
    monkeypatch.setenv("HF_HUB_CACHE", "/proc/nope")
    with pytest.raises(DownloadError, match="can't be written"):
        pull(REPO, patience=patience)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError) as e:
        pull(REPO, patience=patience)
    assert e.value.hint == "unset HF_HUB_OFFLINE"


def test_a_proxy_that_does_not_answer_is_named_without_its_password(
    hub: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HubUnreachableError) as e:
        pull(REPO, patience=patience)
    assert "the proxy 127.0.0.1:9 (HTTP_PROXY)" in e.value.hint
    assert "secret" not in e.value.hint + e.value.message


@pytest.mark.parametrize("spoilt", [
    {"rfilename": "x-Q8_0.gguf"}, {"rfilename": "x-Q8_0.gguf", "size": "5"}, {"rfilename": "x-Q8_0.gguf", "size": 5, "lfs": {}},
    {"rfilename": "x-Q8_0.gguf", "size": 5, "blobId": "a" * 40, "lfs": {"size": 5}}, {}, {"rfilename": None},
])  # fmt: skip
def test_an_unusable_listing_of_a_mirror_is_an_error_that_names_the_mirror(
    stocked: Hub, patience: Patience, spoilt: dict[str, object]
) -> None:
    stocked.api_override = {"siblings": [spoilt]}
    with pytest.raises(DownloadError, match="unusable answer") as e:
        pull(REPO, patience=patience)
    assert "HF_ENDPOINT" in e.value.hint
    assert "Traceback" not in e.value.message


@pytest.mark.parametrize("token", ["hf_ü", "hf_模型", "hf_\x07", "“hf_x”"])
def test_a_malformed_token_is_refused_before_any_request(
    stocked: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match="HF_TOKEN holds") as e:
        pull(REPO, patience=patience)
    assert token not in e.value.message, "a token is never printed whole"
    assert not stocked.seen


@pytest.mark.parametrize("name", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_file_in_place_of_a_folder_is_named(
    stocked: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(name, str(tmp_path / "file"))
    with pytest.raises(UsageError, match=f"{name} is .*not a folder"):
        pull(REPO, patience=patience)


ODD = (
    "模型-Q4_K_M.gguf", "Model, v2 [Q5_K_M].gguf", "Modèle-Q6_K.gguf", "model@Q8_0.gguf",
    "model'Q3_K_M.gguf", "#1-Q2_K.gguf",
    "a/b/c/d/e/deep-IQ4_XS.gguf", "CAPS-F16.GGUF", 'quo"te-BF16.gguf', "Ελληνικά-IQ2_M.gguf",
    "हिन्दी-Q5_0.gguf",
    "per%20cent-Q4_0.gguf",
)  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_file_names_in_any_script_are_downloaded_and_found(
    hub: Hub, patience: Patience, tmp_path: Path, name: str
) -> None:
    from localllm.library.names import quant_of
    from localllm.library.resolve import resolve

    model = tiny_gguf.write_llama(tmp_path / "m.gguf").read_bytes()
    hub.add(REPO, {name: model, "README.md": b"x"})
    brought = pull(f"{REPO}:{quant_of(name)}", patience=patience)
    assert brought.path.read_bytes() == model
    assert resolve(f"{REPO}:{quant_of(name)}").path == brought.path
    assert resolve(brought.name).path == brought.path


@pytest.mark.parametrize(
    "name", ["bad\x1b[2J-Q8_0.gguf", "rl\u202eo-Q8_0.gguf", f"{'x' * 260}.gguf", "-rf-Q8_0.gguf"]
)
def test_a_name_that_is_not_valid_for_a_file_is_refused(
    hub: Hub, patience: Patience, name: str
) -> None:
    hub.add(REPO, {name: b"GGUF" * 4000})
    with pytest.raises(DownloadError, match=r"its name can't be used for a file") as e:
        pull(REPO, patience=patience)
    assert e.value.message.isprintable()


@pytest.mark.parametrize("ending", [
    ("-split-a", "-split-b"), (".part1of2", ".part2of2"), ("-part-a", "-part-b"), (".part-00001", ".part-00002"), (".001", ".002"),
])  # fmt: skip
def test_raw_parts_of_a_file_are_refused_because_they_must_be_joined(
    hub: Hub, patience: Patience, tmp_path: Path, ending: tuple[str, str]
) -> None:
    from localllm.library import store
    from localllm.library.resolve import resolve

    parts = {f"Big.Q4_K_M.gguf{end}": b"GGUF" + bytes(20) for end in ending}
    hub.add(REPO, parts)
    for name, content in parts.items():
        (tmp_path / name).write_bytes(content)
    asked = [lambda: pull(REPO, patience=patience), lambda: store.adopt(tmp_path)]
    asked += [
        lambda: pull(f"{REPO}:Q4_K_M", patience=patience),
        lambda: resolve(str(tmp_path / next(iter(parts)))),
    ]
    for ask in asked:
        with pytest.raises(LocalLLMError, match=r"Big\.Q4_K_M\.gguf") as e:
            ask()
        assert "join" in e.value.hint
    hub.add(REPO, {**parts, "Big.Q2_K.gguf": json.dumps("x" * 20_000).encode()})
    with pytest.raises(DownloadError, match="raw parts"):
        pull(f"{REPO}:Q4_K_M", patience=patience)
    assert pull(REPO, patience=patience).quant == "Q2_K"


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes"])
def test_weights_in_an_unsupported_format_are_not_downloaded(
    hub: Hub, patience: Patience, method: str
) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}}
    hub.add(
        "org/Other",
        {"config.json": json.dumps(config).encode(), "model.safetensors": bytes(40_000)},
    )
    with pytest.raises(DownloadError, match="that neither MLX nor") as e:
        pull("org/Other", patience=patience)
    assert "GGUF" in e.value.hint
    with pytest.raises(DownloadError, match="MLX can't run") as e:
        describe("org/Other", load_catalog())
    assert "GGUF" in e.value.hint
    assert not hub.contents(), "the weights stayed where they are"


def test_the_same_weights_in_two_forms_are_fetched_once(hub: Hub, patience: Patience) -> None:
    from localllm.library import store

    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "consolidated.safetensors": safetensors(bytes(50_000)),
    }
    shards = {
        f"model-{n:05d}-of-00002.safetensors": safetensors(bytes([n]) * 20_000) for n in (1, 2)
    }
    hub.add("mistralai/Both", {**files, **shards, "tokenizer.json": b"{}"})
    brought = pull("mistralai/Both", patience=patience)
    n_bytes = sum(map(len, shards.values()))
    assert brought.size_bytes == n_bytes
    assert [f.name for f in brought.files] == list(shards)
    assert [(m.name, m.size_bytes) for m in store.scan() if m.origin != "starter"] == [
        ("Both", n_bytes)
    ]
    assert len(hub.contents()) == 2
