"""A real worker prefills no token twice: after restarts and kills, with a full cache, and next to a
sequence larger than the cache."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from localllm.bench.token_counts import common_prefix_length
from localllm.engine.messages import Finish, Sampling, Text
from localllm.engine.worker.client import WorkerClient, WorkerOptions
from localllm_backends.contract import LoadSpec
from models.gemma import gemma_path
from support.requests import events_of, request_for

# Limit per process or round. Copying fewer than 16 tokens is no faster than computing them, and
# neither is reading a large block for a template's first line (24 tokens). Each may happen once.
MOST_TWICE = 50
ANSWER_TOKENS = 8
RULES = "Rule: answer shortly, plainly and only about what was asked, whoever asks it. "


@dataclass(frozen=True)
class Model:
    """A model's file and the format of its turns. `round_bytes` is the cache size of one round of
    three chats. `small_bytes` is less than a sequence of 1,500 tokens takes. `whole` means that the
    model's state can't be truncated (sliding windows)."""

    path: Path
    round_bytes: int
    small_bytes: int
    first_line: str
    begins: str
    ends: str
    bot: str
    whole: bool = False

    def turn(self, role: str, text: str) -> str:
        """Return one message in the model's format."""
        return f"{self.begins}{role}\n{text}{self.ends}"

    @property
    def opening(self) -> str:
        """The text before the answer."""
        return f"{self.begins}{self.bot}\n"


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Gemma 3 270M, assembled once for all tests; None if its packages are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE_DIR", str(tmp_path_factory.mktemp("gemma")))
        return gemma_path()


@pytest.fixture(params=["few layers", pytest.param("smollm2", marks=pytest.mark.long), "gemma"])
def model(
    request: pytest.FixtureRequest, smollm2: Path, few_layers: Path, gemma: Path | None
) -> Model:
    if request.param != "gemma":
        path, most = (
            (smollm2, 19_000_000) if request.param == "smollm2" else (few_layers, 1_900_000)
        )
        first = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
            "Hugging "
            "Face<|im_end|>\n"
        )
        return Model(path, most, most, first, "<|im_start|>", "<|im_end|>\n", "assistant")
    if gemma is None:
        pytest.skip("gemma-3-270m is not installed")
    return Model(
        gemma,
        247_000_000,
        10_000_000,
        "",
        "<start_of_turn>",
        "<end_of_turn>\n",
        "model",
        whole=True,
    )


@dataclass
class Known:
    """Everything that this worker and earlier ones with the same folder have computed. `places` are
    the positions where a sequence may be resumed (None: anywhere). For a model whose state can't be
    truncated, these are the last two turns of its prompt and its end."""

    model: Model
    lines: list[tuple[list[int], set[int] | None]] = field(default_factory=list)
    n: int = 0

    def add(self, prompt: list[int], answer: list[int], opening: int) -> None:
        """Record a finished request. The last token of an answer is sampled and never computed."""
        line = prompt + answer[:-1]
        turns = [i for i, token in enumerate(prompt) if token == opening]
        self.lines.append((line, {*turns[-2:], len(line)} if self.model.whole else None))

    def reusable(self, prompt: list[int]) -> int:
        """Return how many tokens of `prompt` need not be computed again. The last one always is."""
        most = 0
        for line, places in self.lines:
            shared = min(common_prefix_length(prompt, line), len(prompt) - 1)
            most = max(
                most,
                shared if places is None else max((p for p in places if p <= shared), default=0),
            )
        return most


@dataclass
class Life:
    """One worker from its start to its end, and the number of tokens that it computed although they
    were known."""

    client: WorkerClient
    known: Known
    twice: int = 0

    async def tokens(self, text: str, *, first: bool = False) -> list[int]:
        """Return token ids; with `first`, those of the beginning of a prompt."""
        return await self.client.tokenize(text, add_bos=first)

    async def ask(self, prompt: list[int], n: int = ANSWER_TOKENS) -> tuple[list[int], int]:
        """Return (prompt and answer, number of cached prompt tokens)."""
        self.known.n += 1
        request = request_for(
            f"r{self.known.n}", prompt, n, Sampling(temperature=0.0), ignore_eos=True
        )
        answer: list[int] = []
        reusable = self.known.reusable(prompt)
        async for event in events_of(self.client, request):
            if isinstance(event, Text):
                answer += event.tokens
        assert isinstance(event, Finish), event
        self.twice += max(0, reusable - event.usage.cached_tokens)
        (opening, *_) = await self.tokens(self.known.model.begins)
        self.known.add(prompt, answer, opening)
        return prompt + answer, event.usage.cached_tokens

    async def chats(self, head: list[int], greetings: Sequence[str], turns: int) -> None:
        """Run several chats with one system prompt in turns."""
        model = self.known.model
        lines = [list(head) for _ in greetings]
        for turn in range(turns):
            for i, greeting in enumerate(greetings):
                said = model.turn("user", f"And then, number {turn}?" if turn else greeting)
                said = (model.ends if turn else "") + said + model.opening
                lines[i], _ = await self.ask(lines[i] + await self.tokens(said))

    async def system(self, text: str, n: int) -> list[int]:
        """Return a system prompt of about `n` tokens that begins with `text`."""
        model = self.known.model
        rules = (await self.tokens(text + RULES * (n // 10)))[:n]
        begin = await self.tokens(f"{model.begins}system\n", first=True)
        return begin + rules + await self.tokens(model.ends)

    async def edit(self, name: str, n: int) -> None:
        """Send a request with a new file of `n` tokens. The prompt begins with the template's first
        line."""
        model = self.known.model
        file = (await self.tokens("".join(f"{name}_{i} = {i * 7919 % 997}\n" for i in range(n))))[
            :n
        ]
        begin = await self.tokens(
            f"{model.first_line}{model.begins}user\nRename one of these:\n", first=True
        )
        await self.ask(begin + file + await self.tokens(f"{model.ends}{model.opening}"))

    async def written(self) -> None:
        """Return when the disk tier has written everything: no bytes for one second."""
        before = -1
        while before != (now := (await self.client.snapshot())["disk_written_bytes"]):
            before = now
            with suppress(TimeoutError):
                await asyncio.wait_for(self.client.process.wait(), 1.0)
            assert self.client.alive

    async def kill(self) -> None:
        """Kill the worker, as in a power failure."""
        os.kill(self.client.pid, signal.SIGKILL)
        await self.client.process.wait()


@asynccontextmanager
async def life(known: Known, n_ctx: int, **engine: object) -> AsyncIterator[Life]:
    """Run a worker for the duration of the block; close it cleanly unless it is dead."""
    spec = LoadSpec(str(known.model.path), n_ctx=n_ctx)
    client = await WorkerOptions(spec, engine={"headroom_bytes": 0, **engine}).start()
    try:
        yield Life(client, known)
    finally:
        await client.close()


def test_clean_and_unclean_restarts_cost_no_recomputation(model: Model, tmp_path: Path) -> None:
    """In each process, a file is edited, then three chats use the system prompt of the earlier
    processes."""
    twice: list[int] = []

    async def main() -> None:
        known = Known(model)
        for start in range(3):
            async with life(known, 4096, disk_dir=str(tmp_path)) as worker:
                await worker.edit(f"value{start}", 700)
                head = await worker.system("Answer carefully. ", 600)
                await worker.chats(
                    head, [f"I am person {i} of start {start}. Hello!" for i in range(3)], 3
                )
                twice.append(worker.twice)
                if start == 1:
                    await worker.written()
                    await worker.kill()

    asyncio.run(main())
    assert max(twice) <= MOST_TWICE, f"tokens computed twice in each start: {twice}"


@pytest.mark.long
def test_a_full_cache_serves_later_chats_as_well_as_the_first(model: Model, tmp_path: Path) -> None:
    """Six rounds of three new chats. Memory holds one and a half rounds."""
    twice: list[int] = []

    async def main() -> None:
        known = Known(model)
        async with life(
            known, 4096, cache_bytes=model.round_bytes * 3 // 2, disk_dir=str(tmp_path)
        ) as worker:
            for n in range(6):
                before = worker.twice
                head = await worker.system(f"Answer as number {n}. ", 600)
                await worker.chats(head, [f"I am person {i}. Hello!" for i in range(3)], 3)
                twice.append(worker.twice - before)

    asyncio.run(main())
    assert max(twice) <= MOST_TWICE, f"tokens computed twice in each round: {twice}"


@pytest.mark.parametrize(
    "disk", [True, pytest.param(False, marks=pytest.mark.long)], ids=["disk", "no disk"]
)
def test_a_sequence_larger_than_the_cache_survives_a_short_request(
    model: Model, disk: bool, tmp_path: Path
) -> None:
    """There are cells for both, so at most the sequence's last block (512 tokens) is computed
    again. If the model's state can't be truncated, no turn is."""
    found: list[tuple[int, int]] = []

    async def main() -> None:
        known = Known(model)
        folder = {"disk_dir": str(tmp_path), "disk_bytes": 10**9} if disk else {}
        async with life(known, 4096, cache_bytes=model.small_bytes, **folder) as worker:
            head = await worker.system("Read this. ", 1500)
            question = model.turn("user", "Hello!") + model.opening
            line, _ = await worker.ask(head + await worker.tokens(question))
            if disk:
                await worker.written()
            await worker.edit("short", 200)
            more = model.ends + question
            prompt = line + await worker.tokens(more)
            reusable = known.reusable(prompt)
            _, cached = await worker.ask(prompt)
            found.append((cached, reusable))

    asyncio.run(main())
    ((cached, reusable),) = found
    assert cached >= reusable - (0 if model.whole else 512), f"{cached} of {reusable} tokens"


def test_a_text_without_turns_is_found_after_a_restart(model: Model, tmp_path: Path) -> None:
    """Prompts of editors and plain completions have no turns at which a state could be kept."""
    found: list[tuple[int, int]] = []

    async def main() -> None:
        known = Known(model)
        for _ in range(2):
            async with life(known, 4096, disk_dir=str(tmp_path)) as worker:
                text = await worker.tokens(
                    "".join(f"line {i}: {i * 7919 % 997}\n" for i in range(400)), first=True
                )
                prompt = text[:1864]
                _, cached = await worker.ask(prompt)
                found.append((cached, len(prompt)))
                # One of its last lines is changed.
                _, cached = await worker.ask(
                    prompt[:1700] + await worker.tokens("something else is here now")
                )
                found.append((cached, 1700))

    asyncio.run(main())
    print(found)
    assert found[0][0] == 0
    assert found[1][0] >= 0.95 * found[1][1]
    assert found[2][0] >= 0.95 * found[2][1], (
        f"{found[2][0]} of {found[2][1]} tokens after the restart"
    )
    assert found[3][0] >= 0.95 * found[3][1]


@pytest.mark.parametrize(("rules", "titles"), [(40, False), (75, False), (75, True)])
def test_chats_that_branch_in_the_middle_of_a_turn_compute_only_their_own_part(
    model: Model, rules: int, titles: bool, tmp_path: Path
) -> None:
    """No state was kept where the chats branch, but a window is still in the context, and then a
    state is kept. If a title was requested in between, the window is gone."""
    twice: list[int] = []

    async def main() -> None:
        known = Known(replace(model, whole=False))
        for start in range(2):
            async with life(known, 4096, disk_dir=str(tmp_path)) as worker:
                for i in range(3):
                    head = await worker.tokens(f"{model.begins}user\n{RULES * rules}", first=True)
                    mine = await worker.tokens(
                        f"I am person {i} of start {start}.{model.ends}{model.opening}"
                    )
                    await worker.ask(head + mine)
                    if titles:
                        title = (
                            f"{model.begins}user\nA title of three words for a chat, "
                            f"please.{model.ends}{model.opening}"
                        )
                        await worker.ask(await worker.tokens(title, first=True))
                twice.append(worker.twice)

    asyncio.run(main())
    assert max(twice) <= MOST_TWICE, f"tokens computed twice in each start: {twice}"
