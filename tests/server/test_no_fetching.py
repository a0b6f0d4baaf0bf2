"""No content of a request makes the server fetch an address or read a file.

Each row is one way to ask for it.

While a request runs, Python's audit events record every connection, name lookup, process and
opened file of this process, also those below `open`. A listener on loopback detects connections
that audit events would miss. Rows are refused with a reason, or answered with the part skipped
and named.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.errors import UnsupportedError
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

CHAT, TEXT, RESP, ANTH = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OCHAT, OGEN, LCPP = "/api/chat", "/api/generate", "/completion"
SECRET = "a line nobody may read"

# {web} is replaced by the listener's address, {file} by a file with SECRET in it.
INSIDE = [
    "{web}/x.png", "https://cdn.example/x.png", "http://169.254.169.254/latest/meta-data/",
    "http://[::1]:22/",
    "http://10.0.0.1/", "http://localhost:6379/", "file://{file}", "FILE://{file}", "{file}",
    "../../{file}",
    "data:image/png;base64,aGk=", "data:text/plain,hi", "gopher://127.0.0.1:70/",
    "//cdn.example/x.png",
]  # fmt: skip


# --- recording ------------------------------------------------------------------------------------

_CODE = tuple(
    str(Path(p).resolve())
    for p in (
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("stdlib"),
        Path(__file__).resolve().parents[2],
    )
)
_WATCHED = {
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "subprocess.Popen", "os.system",
    "os.exec", "os.posix_spawn", "os.fork", "urllib.Request", "os.listdir", "os.scandir",
    "glob.glob",
}  # fmt: skip
# Reading the time and memory used by the process that renders templates is allowed.
_COUNTERS = re.compile(r"/proc/\d+/(stat|statm|status)")
_seen: list[tuple[str, str]] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _WATCHED:
        _seen.append((event, repr(args)[:200]))
    elif event == "open" and isinstance(args[0], (str, bytes, Path)):
        # Modules that are imported late and the source lines of a traceback are code, not users'
        # files.
        path = str(Path(args[0].decode() if isinstance(args[0], bytes) else args[0]).resolve())
        is_code = path.startswith(_CODE) and path.endswith(
            (".py", ".pyc", ".so", ".pyi", ".json", ".toml")
        )
        if not is_code and not _COUNTERS.fullmatch(path):
            _seen.append((event, path))


@pytest.fixture(scope="session")
def audited() -> None:
    """Install the audit hook, which stays until the process ends.

    It records only inside `watching`.
    """
    sys.addaudithook(_audit)


@contextmanager
def watching() -> Iterator[list[tuple[str, str]]]:
    """Record the files and connections that this process opens during the block."""
    global _seen
    _seen = seen = []
    try:
        yield seen
    finally:
        _seen = None


class Listener:
    """A server on a loopback port that counts its connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.callers = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            said = caller.recv(4)
            caller.close()
            if said == b"stop":
                return
            self.callers += 1

    def close(self) -> None:
        """Stop listening."""
        with socket.create_connection(self._socket.getsockname()) as last:
            last.sendall(b"stop")
        self._thread.join()
        self._socket.close()


@pytest.fixture(scope="module")
def web() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret.json"
    path.write_text(json.dumps({"const": SECRET}))
    return path


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine, audited: None) -> Iterator[httpx.Client]:
    with (
        running_server({"tiny": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=20) as client,
    ):
        # This request starts the process that renders templates before the recording.
        client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
        yield client


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A request and the text of its refusal.

    With `skips`, the request is answered, and `skips` is named as ignored.
    """

    name: str
    path: str
    body: Any
    says: str = ""
    skips: str = ""
    method: str = "POST"
    statuses: tuple[int, ...] = field(default=(400, 404, 405, 422))


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 5}


def item(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def _pictures() -> Iterator[Row]:
    for url in INSIDE:
        yield Row(
            f"chat image {url}",
            CHAT,
            user({"type": "image_url", "image_url": {"url": url}}),
            "images",
        )
        yield Row(
            f"responses image {url}",
            RESP,
            item({"type": "input_image", "image_url": url}),
            "images",
        )
        yield Row(
            f"responses file {url}", RESP, item({"type": "input_file", "file_url": url}), "files"
        )
        source = {"type": "url", "url": url}
        yield Row(
            f"messages image {url}", ANTH, user({"type": "image", "source": source}), "images"
        )
        yield Row(
            f"messages document {url}",
            ANTH,
            user({"type": "document", "source": source}),
            "documents",
        )
        ollama = {"messages": [{"role": "user", "content": "x", "images": [url]}], "stream": False}
        yield Row(f"ollama chat image {url}", OCHAT, ollama, "does not support images")
        yield Row(
            f"ollama generate image {url}",
            OGEN,
            {"prompt": "x", "images": [url], "stream": False},
            "images",
        )


def _names() -> Iterator[Row]:
    hello = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": hello}, TEXT: {"prompt": "x"}, RESP: {"input": "x"},
        OCHAT: {"messages": hello},
        ANTH: {"messages": hello, "max_tokens": 5}, OGEN: {"prompt": "x"}, LCPP: {"prompt": "x"},
        "/api/show": {},
        "/v1/embeddings": {"input": "x"}, "/api/embed": {"input": "x"},
        "/tokenize": {"content": "x"},
        "/infill": {"input_prefix": "a", "input_suffix": "b"},
        "/v1/fim/completions": {"prompt": "x"},
    }  # fmt: skip
    for path, body in bodies.items():
        for name in (
            "{web}/m.gguf",
            "file://{file}",
            "{file}",
            "../../{file}",
            "hf.co/org/name:Q4_K_M",
            "\\\\host\\m",
        ):
            yield Row(f"{path} model {name}", path, {**body, "model": name}, "no model")
    for name in ("{file}", "..%2f..%2f{file}", "file:%2f%2f{file}"):
        yield Row(f"GET /v1/models/{name}", "/v1/models/" + name, None, "", method="GET")


ROWS = [
    *_pictures(),
    *_names(),
    # --- Ollama's model management ---
    Row("pull a name", "/api/pull", {"model": "org/name"}, "command line"),
    Row("pull an address", "/api/pull", {"model": "{web}/org/name", "insecure": True},
    "command line"),
    Row("create FROM an address", "/api/create", {"model": "m", "modelfile": "FROM {web}/m.gguf"},
    "command line"),
    Row("create from a file", "/api/create", {"model": "m", "from": "{file}"}, "command line"),
    Row("create with files", "/api/create",
    {"model": "m", "files": {"{file}": "sha256:" + "0" * 64}}, "command line"),
    Row("push", "/api/push", {"model": "{web}/org/name", "insecure": True}, "command line"),
    Row("copy", "/api/copy", {"source": "{file}", "destination": "m"}, "command line"),
    Row("delete", "/api/delete", {"model": "{file}"}, "command line", method="DELETE"),
    Row("a blob", "/api/blobs/sha256:" + "0" * 64, None, method="HEAD"),
    # --- other parts of a message ---
    Row("audio", CHAT, user({"type": "input_audio", "input_audio": {"data": "{web}/a.wav"}}),
    "audio"),
    Row("a file", CHAT, user({"type": "file", "file": {"file_id": "{file}", "file_data": "{web}"}}),
    "files"),
    Row("video", CHAT, user({"type": "video_url", "video_url": {"url": "{web}/v.mp4"}}), "video"),
    Row("an unknown part", CHAT, user({"type": "web_page", "url": "{web}"}), "web_page"),
    Row("a responses file by data", RESP, item({"type": "input_file", "file_data": "data:,x"}),
    "files"),
    Row("a responses file by id", RESP, item({"type": "input_file", "file_id": "{file}"}), "files"),
    Row("a stored item", RESP, {"input": [{"type": "item_reference", "id": "{file}"}]},
    "does not store"),
    Row("a stored response", RESP, {"input": "x", "previous_response_id": "{file}"},
    "previous_response_id"),
    Row("a stored prompt", RESP, {"input": "x", "prompt": {"id": "{file}"}}, "prompt"),
    Row("an Anthropic file", ANTH,
    user({"type": "document", "source": {"type": "file", "file_id": "x"}}), "documents"),
    Row("an image in a tool's result", ANTH,
    user({"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "image", "source": {"type": "url", "url": "{web}"}}]}), skips="messages.images"),
    Row("an upload", ANTH, user({"type": "container_upload", "file_id": "{file}"}),
    "container_upload"),
    # --- tools that would need a connection ---
    *(
        Row(f"tool {tool['type']}", RESP, {"input": "x", "tools": [tool]},
        skips=f"tools.{tool['type']}")
        for tool in (
            {"type": "mcp", "server_label": "a", "server_url": "{web}/sse",
            "require_approval": "never"},
            {"type": "mcp", "server_label": "a", "connector_id": "connector_gmail"},
            {"type": "file_search", "vector_store_ids": ["{file}"]},
            {"type": "web_search", "filters": {"allowed_domains": ["127.0.0.1"]}},
            {"type": "web_search_preview"},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "image_generation", "input_image_mask": {"image_url": "{web}"}},
            {"type": "local_shell"},
            {"type": "computer_use_preview", "environment": "browser"},
        )
    ),
    Row("an item of an mcp server", RESP, {"input": [
        {"role": "user", "content": "x"},
        {"type": "mcp_call", "server_label": "a", "name": "f", "arguments": "{}"},
    ]}, skips="input.mcp_call"),
    Row("Anthropic's fetching tool", ANTH, {
        "messages": [{"role": "user", "content": "{web}"}], "max_tokens": 5,
        "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}, skips="tools.web_fetch"),
    Row("Anthropic's mcp", ANTH, {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 5,
        "mcp_servers": [{"type": "url", "url": "{web}/sse", "name": "a"}]}, "mcp_servers"),
    Row("a chat tool with an address", CHAT, {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "mcp", "server_url": "{web}"}]}, skips="tools.mcp"),
    # --- llama.cpp's ways to name files ---
    Row("a slot's file", "/slots/0?action=save", {"filename": "../../{file}"}),
    Row("adapters", "/lora-adapters", [{"id": 0, "path": "{file}", "scale": 1}]),
    Row("loading a path", "/models/load", {"model": "{file}"}),
    Row("an image beside a prompt", LCPP,
    {"prompt": {"prompt_string": "x", "multimodal_data": ["{web}"]}}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_request_fetches_no_address_and_reads_no_file(
    row: Row, client: httpx.Client, web: Listener, secret: Path, engine: ScriptedEngine
) -> None:
    def filled(value: Any) -> Any:
        return json.loads(
            json.dumps(value).replace("{web}", web.url).replace("{file}", str(secret))
        )

    client.get("/health")  # opens the connection before the recording
    requests = len(engine.requests)
    with watching() as seen:
        body = {} if row.body is None else {"json": filled(row.body)}
        reply = client.request(row.method, filled(row.path), **body)
    assert seen == []
    assert web.callers == 0
    assert SECRET not in reply.text
    if row.skips:
        assert reply.status_code == 200, reply.text
        assert row.skips in reply.headers["x-localllm-ignored"].split(", ")
        return
    assert reply.status_code in row.statuses, reply.text
    assert len(engine.requests) == requests
    if row.method != "HEAD":
        assert row.says in reply.text
        assert reply.json()["error"]


# --- the recording itself -------------------------------------------------------------------------


def test_the_audit_hook_sees_files_and_connections(audited: None, secret: Path) -> None:
    with watching() as seen:
        secret.read_text()
        with socket.socket() as connection:
            connection.connect_ex(("127.0.0.1", 9))
        socket.getaddrinfo("127.0.0.1", 80)
    assert {event for event, _ in seen} == {"open", "socket.connect", "socket.getaddrinfo"}


# --- schemas and grammars, which can also name addresses and files --------------------------------


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> Iterator[GrammarCompiler]:
    backend = llamacpp.load(LoadSpec(path=str(tiny_model), n_ctx=256, n_seq_max=1))
    compile_ = GrammarCompiler(backend)
    compile_(("regex", "a"))  # the vocabulary is made on first use
    yield compile_
    backend.close()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"$ref": "{web}/schema.json"}'),
        ("json_schema", '{"$ref": "file://{file}"}'),
        ("json_schema", '{"$ref": "{file}"}'),
        ("json_schema", '{"$ref": "../../../../../../../..{file}"}'),
        ("json_schema", '{"$id": "{web}/root.json", "$ref": "other.json"}'),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"$dynamicRef": "{web}/schema.json"}}}',
        ),
        ("json_schema", '{"$schema": "{web}/meta.json", "$ref": "#/missing"}'),
        ("lark", 'start: %json {"$ref": "{web}/schema.json"}'),
        ("lark", "%import {file}\nstart: X"),
        ("lark", "%import common.{file}\nstart: X"),
        ("lark", '%import "{web}/g.lark"\nstart: X'),
        ("gbnf", 'root ::= {"$ref": "{web}"}'),
    ],
)
def test_a_grammar_fetches_no_address_and_reads_no_file(
    compiler: GrammarCompiler, audited: None, web: Listener, secret: Path, kind: str, source: str
) -> None:
    filled = source.replace("{web}", web.url).replace("{file}", str(secret))
    with watching() as seen, pytest.raises(UnsupportedError) as e:
        compiler((kind, filled))
    assert seen == []
    assert web.callers == 0
    assert SECRET not in str(e.value)
