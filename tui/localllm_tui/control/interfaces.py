"""Interfaces between the command line and the chat: an engine, a model service, tool hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from localllm.errors import LocalLLMError

PURPOSE_WORDS = {
    "chat": "chat",
    "coding": "coding, agents",
    "autocomplete": "autocomplete",
    "long": "long documents",
}
# Tokens; 0 means the purpose's default.
CONTEXTS = (0, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
# GB; 0 means the machine's memory.
MEMORIES_GB = (0, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
# Seconds until an answer starts; 0 means no limit.
WAITS_S = (0, 1, 2, 5, 10, 30, 60)
# Machines offered in addition to this one; any other can be typed.
MACHINES = ("M4 Pro 24GB", "M4 Max 128GB", "RTX 4090", "RTX 5090", "Strix Halo 128GB", "DGX Spark")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for plans: `machine` "" is this one, and "A --with B --link L" is B, with prompts
    read by A. `memory_gb` 0 is all its memory, `longest_wait_s` 0 is no limit."""

    purpose: str = "chat"
    context: int = 0
    machine: str = ""
    memory_gb: float = 0.0
    longest_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan that can be pulled: `plan` as `localllm recommend --json` prints it
    (localllm/planner/recommend.schema.json).

    `wait_s` until an answer begins, thoughts included; `installed` the name of its files on this
    disk ("": not there). `note`: a sentence about the machines, if several are joined.
    """

    plan: Mapping[str, Any]
    wait_s: float
    installed: str = ""
    note: str = ""

    @property
    def ref(self) -> str:
        return f"{self.plan['model']}:{self.plan['variant']['quant']}"

    @property
    def title(self) -> str:
        return f"{self.plan['name']} {self.plan['variant']['quant']}"


@dataclass(frozen=True, slots=True)
class PlanList:
    """The plans that fit, best first: `machine` in a line; `too_slow` fit but answer too late.
    `left_out`: the number of other models by the reason ("too large"). `accounts`: the memory left
    for a model, a line for each memory. `guessed`: the speed of the memory is assumed. `complete`:
    all models are planned."""

    machine: str
    choices: tuple[PlanChoice, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    too_slow: tuple[PlanChoice, ...] = ()
    accounts: tuple[str, ...] = ()
    guessed: bool = False
    complete: bool = True


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """Files of a model on this disk: `owner` in words; `ours` may be removed here; `fault` is why
    they can't be loaded."""

    name: str
    quant: str
    size_bytes: int
    owner: str
    path: str
    ours: bool
    fault: str = ""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """The state of a download: `phase` in a word, bytes, bytes per second and seconds left (None:
    not known)."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    speed_bytes_s: float = 0.0
    left_s: float | None = None


def ignore_part(_: object) -> None:
    """Ignore the parts of an answer: a callback of callers that wait for all of it."""


class ModelService(Protocol):
    """Plans, downloads and removes models. Methods may take long and are called from a thread; all
    raise LocalLLMError."""

    def plan(
        self, request: PlanRequest, on_choice: Callable[[PlanChoice], object] = ignore_part
    ) -> PlanList:
        """Return all models that fit. `on_choice` receives each planned model before the
        ranking."""

    def explain(self, request: PlanRequest, ref: str, columns: int) -> Sequence[str]:
        """The arithmetic of one plan, line by line."""

    def on_disk(self) -> Sequence[InstalledModel]:
        """Return all installed models, including those of other programs and those with a
        fault."""

    def fit(self, model: InstalledModel) -> str:
        """Memory and speed of loading it here, in a sentence."""

    def remove(self, model: InstalledModel) -> int:
        """Remove the model's files. Returns the freed bytes."""

    def pull(self, ref: str, on_progress: Callable[[PullProgress], None]) -> str:
        """Download a model, resuming an earlier try; returns its name here. An exception of `on_progress`
        ends it."""


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How far the first model is loaded: `share` from 0 to 1. After `failed` with `error`, a
    request for this or another model may still work unless the engine is `down`."""

    state: Literal["loading", "ready", "failed"] = "ready"
    share: float = 1.0
    error: LocalLLMError | None = None
    down: bool = False

    def words(self, model: str) -> str:
        """The state in a few words; "" unless the model is being loaded."""
        if self.state != "loading":
            return ""
        if self.share > 0:
            return f"loading {model} {self.share:.0%}"
        return f"loading {model}"


class ChatEngine(Protocol):
    """An OpenAI-compatible server, and the model to use first.

    `base_url` ends in /v1. With `unix_socket`, the server listens on that socket.
    """

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def api_key(self) -> str | None: ...

    @property
    def unix_socket(self) -> str: ...

    @property
    def where(self) -> str:
        """Its address in short form, for display; "" for the chat's own engine."""

    @property
    def ours(self) -> bool:
        """True if it is the user's own `localllm serve`, or the chat's own engine."""

    def start(self) -> None:
        """Begin to load, in a thread; once is enough."""

    def progress(self) -> EngineProgress: ...


def is_local(engine: ChatEngine) -> bool:
    """True if the engine runs on this machine."""
    host = urlsplit(engine.base_url).hostname or ""
    return bool(engine.unix_socket) or host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a program offers it; `schema` is the JSON Schema of its arguments, `host` whose it
    is."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""


class ToolHost(Protocol):
    """A program that offers tools, `name`d in config.toml. All raise LocalLLMError."""

    name: str

    async def open(self) -> Sequence[ToolSpec]: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str: ...

    async def close(self) -> None: ...
