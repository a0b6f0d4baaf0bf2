"""The scenarios of the benchmark. Each is a typical situation of users, and runs once on one
server."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial, partialmethod

from localllm.bench.ratio import RoundComparison
from localllm.bench.stream import BenchTarget, Messages, StreamedAnswer
from localllm.bench.token_counts import Counter, Tokens, TokensRead
from localllm.errors import BackendError, UnsupportedError

# The description of each scenario, shown by `bench --against` and in docs/benchmarks.md.
MEANS: Mapping[str, str] = {
    "single": "one chat: decode speed of an answer",
    "prefill": "a long text is pasted: speed of prefill before the answer starts",
    "two": "two people, or an editor and a chat: total tokens/s",
    "four": "four streams (a small team, an agent with subagents): total tokens/s",
    "eight": "eight streams: total tokens/s",
    "stall": (
        "another client sends 3,000 tokens while your answer streams: longest pause of your "
        "stream, as a multiple of its usual gap"
    ),
    "warm": "the next question of a long conversation, and the same question repeated",
    "again": "a prompt of 2,000 tokens is sent again at once, as by an agent that retries",
    "thrash": (
        "three chats in turn, with a request for a title after each turn: are "
        "their prompts still cached"
    ),
    "cancel": "you stop an answer and ask again: delay caused by the stopped answer",
    "restart": "the server is restarted: is an earlier conversation still cached",
    "copy": "an agent repeats a file with one change: gain of drafting from the prompt",
}
DEFAULT = ("single", "prefill", "two", "four", "eight", "stall", "thrash", "cancel", "copy")
# Tokens of the first stream before the second request of "stall" arrives, and in total.
_ALONE_TOKENS = 60
_STALL_TOKENS = 600
# Number of functions in the file of "copy".
_N_FUNCTIONS = 7
# Number of attempts: a model may end its story before the second request arrives.
_MAX_STORIES = 3
# An answer of fewer tokens is too short for measuring its speed.
_MIN_ANSWER_TOKENS = 8
# With fewer gaps, the 95th percentile is the same as the maximum.
_MIN_GAPS = 20
# Time in seconds for the server's work after an answer, such as storing its KV.
_SETTLE_S = 0.5


# The tables of results: title, unit, and whether more or less is better.
_AGGREGATE_TITLE = "aggregate, {} streams"
_GAPS_TITLE = "{} streams: 95th percentile of the gaps"
SINGLE = RoundComparison("decode, one stream", "tok/s")
GAP = RoundComparison("one stream: 95th percentile of the gaps", "ms", "less")
PREFILL = RoundComparison("prefill, 3,000 new tokens", "tok/s")
FIRST = RoundComparison("first token of 3,000 new ones", "s", "less")
STALL = RoundComparison("stall: largest gap ÷ gap before", "×", "less")
NEWCOMER = RoundComparison("stall: newcomer's first token", "s", "less")
COLD = RoundComparison("cold first token of 1,400", "s", "less")
WARM = RoundComparison("warm turn ÷ cold first token", "×", "less")
AGAIN = RoundComparison("identical prompt, first token", "ms", "less")
AT_ONCE = RoundComparison("2,000 known tokens at once, first token", "ms", "less")
TWICE = RoundComparison("thrash: tokens read twice", "tokens", "less")
TURNS = RoundComparison("thrash: mean first token", "ms", "less")
CANCEL = RoundComparison("cancel: next first token ÷ idle", "×", "less")
RESTART = RoundComparison("restart: first token ÷ cold", "×", "less")
COPY = RoundComparison("copy-edit, one stream", "tok/s")


class Scenarios:
    """The scenarios. Each method runs one of them once on one server, and records the results in
    `tables`.

    `tokens` returns the tokens of messages by the chat template. If it is None, repeated prefill
    can't be counted. `means` maps the names of the scenarios to their descriptions.
    """

    means: Mapping[str, str] = MEANS

    def __init__(self, counter: Counter, tokens: Tokens | None) -> None:
        self.counter = counter
        self.tokens = tokens
        self.tables: dict[str, RoundComparison] = {}
        self.round = 0
        self._first = int(time.time())
        self._seed = self._first
        self._lock = threading.Lock()

    def record(self, figure: RoundComparison, target: BenchTarget, value: float) -> None:
        table = self.tables.setdefault(figure.title, replace(figure, values={}))
        table.fill(target.name, self.round)
        table.add(target.name, value)

    def finished(self, rounds: int, names: Sequence[str]) -> list[RoundComparison]:
        """The tables, with the servers in the order of `names`, and NaN for every round without a
        value."""
        for table in self.tables.values():
            for name in names:
                table.fill(name, rounds)
            table.values = {name: table.values[name] for name in names}
        return [*self.tables.values()]

    def next_seed(self) -> int:
        with self._lock:
            self._seed += 1
            return self._seed

    def run(self, name: str, target: BenchTarget) -> None:
        """Run one of `means`. Raises BackendError, also if an answer is empty or too short to
        measure."""
        getattr(self, f"run_{name}")(target)

    # --- speed ------------------------------------------------------------------------------------

    def run_single(self, t: BenchTarget) -> None:
        """Measure the decode speed of one stream, and the evenness of its gaps.

        While a draft is verified, the stream pauses.
        """
        answer = t.chat(user(f"Tell a story. {self.next_seed()}"), 128)
        self.record(SINGLE, t, answer.rate(self._count_tokens(t, answer)))
        if len(answer.gaps_s) >= _MIN_GAPS:
            self.record(GAP, t, _p95_ms(answer.gaps_s))

    def run_prefill(self, t: BenchTarget) -> None:
        text = unseen_text(610, self.next_seed())
        answer = self._chat(t, user(text), 2)
        tokens = self.counter.tokens_in(text) or answer.usage.get("prompt_tokens")
        self.record(FIRST, t, answer.ttft_s)
        if isinstance(tokens, int) and tokens:
            self.record(PREFILL, t, tokens / answer.ttft_s)

    def _streams(self, t: BenchTarget, n_streams: int) -> None:
        """Aggregate decode of n streams that start together."""
        texts = [f"Tell story {self.next_seed()}." for _ in range(n_streams)]
        started_s = time.perf_counter()
        answers = _run_together([partial(t.chat, user(text), 96) for text in texts])
        seconds = time.perf_counter() - started_s
        n_tokens = sum(self._count_tokens(t, answer) for answer in answers)
        self.record(
            RoundComparison(_AGGREGATE_TITLE.format(n_streams), "tok/s"), t, n_tokens / seconds
        )
        gaps: list[float] = []
        for answer in answers:
            gaps += answer.gaps_s
        if len(gaps) >= _MIN_GAPS:
            self.record(
                RoundComparison(_GAPS_TITLE.format(n_streams), "ms", "less"), t, _p95_ms(gaps)
            )

    run_two = partialmethod(_streams, n_streams=2)
    run_four = partialmethod(_streams, n_streams=4)
    run_eight = partialmethod(_streams, n_streams=8)

    def run_copy(self, t: BenchTarget) -> None:
        """Copy a file with one change. All servers get the same file in a round: how faithfully a
        model copies, and so how often a draft is right, differs a lot between files."""
        body = {
            "prompt": copy_edit(self._first + self.round),
            "max_tokens": 320,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = t.stream(body)
        self.record(COPY, t, answer.rate(self._count_tokens(t, answer)))

    # --- waiting ----------------------------------------------------------------------------------

    def run_stall(self, t: BenchTarget) -> None:
        """Send a 3,000-token prompt while a stream runs.

        Records the largest gap of the stream meanwhile, and the TTFT of the new request.
        """
        n_pieces: list[int] = []
        for _ in range(_MAX_STORIES):
            early_answer = self._stall(t)
            if early_answer is None:
                return
            n_pieces.append(early_answer.pieces)
        raise BackendError(
            f"{t.name}: the streams ended after {n_pieces} pieces, before the new client's answer"
        )

    def _stall(self, t: BenchTarget) -> StreamedAnswer | None:
        """Run one attempt. Returns None if it was measured, or the streamed answer that ended too
        early."""
        decoding = threading.Event()

        def record_piece(n_pieces: int) -> None:
            if n_pieces == _ALONE_TOKENS:
                decoding.set()

        def ended_early(_: Future[StreamedAnswer]) -> None:
            decoding.set()

        with ThreadPoolExecutor(1) as pool:
            story = user(f"Long story {self.next_seed()}")
            stream = pool.submit(t.chat, story, _STALL_TOKENS, on_piece=record_piece)
            stream.add_done_callback(ended_early)
            decoding.wait()
            if stream.done():
                return stream.result()
            started_s = time.perf_counter()
            newcomer = t.chat(user(unseen_text(610, self.next_seed())), 4)
            ended_s = time.perf_counter()
            answer = stream.result()
        gaps = answer.gaps_between(started_s, ended_s)
        if not gaps:
            return answer
        usual_gap_s = statistics.median(answer.gaps_s[: _ALONE_TOKENS - 10])
        longest_s = max(self.per_token_s(gap, text) for gap, text in gaps)
        self.record(STALL, t, longest_s / usual_gap_s)
        self.record(NEWCOMER, t, self._non_empty(t, newcomer).ttft_s)
        return None

    def per_token_s(self, gap_s: float, text: str) -> float:
        """Return the gap before a piece, divided by the tokens of the character in it.

        A character of several tokens takes as many steps on every server. For example, “ has two
        tokens with SmolLM2's tokenizer. A piece with several tokens of words is not divided,
        because the stream paused before it.
        """
        character = text.strip()
        if len(character) != 1 or character.isascii():
            return gap_s
        return gap_s / (self.counter.tokens_in(text) or 1)

    def run_cancel(self, t: BenchTarget) -> None:
        """TTFT right after dropping a long generation, against an idle server's."""
        idle = self._chat(t, user(f"Hi {self.next_seed()}"), 4)
        self._non_empty(t, t.chat(user(f"Long {self.next_seed()}"), 2000, stop_after=10))
        after = self._chat(t, user(f"Hi {self.next_seed()}"), 4)
        self.record(CANCEL, t, after.ttft_s / idle.ttft_s)

    # --- what is kept -----------------------------------------------------------------------------

    def run_warm(self, t: BenchTarget) -> None:
        """Measure the TTFT of a new 1,400-token prefix, of a new last turn, and of the same prompt
        again."""
        system = self._system()
        cold = self._chat(t, [system, *user("First question?")], 8)
        time.sleep(_SETTLE_S)
        turn = [system, *user("Second, other question?")]
        warm = self._chat(t, turn, 8)
        again = self._chat(t, turn, 8)
        self.record(COLD, t, cold.ttft_s)
        self.record(WARM, t, warm.ttft_s / cold.ttft_s)
        self.record(AGAIN, t, again.ttft_s * 1000)

    def run_again(self, t: BenchTarget) -> None:
        """Send the same 2,000 tokens twice in every round: only the first round has to prefill
        them."""
        messages = user(unseen_text(400, self._first))
        self._chat(t, messages, 8)
        again = self._chat(t, messages, 8)
        self.record(AT_ONCE, t, again.ttft_s * 1000)

    def run_thrash(self, t: BenchTarget) -> None:
        """Three chats sharing a system prompt, four growing turns each, a title request after every
        turn."""
        tokens_read = TokensRead(self.tokens) if self.tokens is not None else None
        system = self._system()
        chats = [[system, *user(f"I am person {i}. Hello!")] for i in range(3)]
        ttfts: list[float] = []
        is_counted = tokens_read is not None

        def ask(messages: Messages, max_tokens: int) -> StreamedAnswer:
            answer = self._chat(t, messages, max_tokens)
            if tokens_read is not None:
                tokens_read.add(messages, answer)
            return answer

        for turn in range(4):
            for i, messages in enumerate(chats):
                answer = ask(messages, 24)
                if (turn, i) != (0, 0):
                    ttfts.append(answer.ttft_s)
                    is_counted = is_counted and answer.cached_tokens is not None
                messages += [
                    {"role": "assistant", "content": answer.text},
                    *user(f"And then, number {turn}?"),
                ]
                ask(user("Write a title of three words for a chat."), 6)
        if tokens_read is not None and is_counted:
            self.record(TWICE, t, tokens_read.twice)
        self.record(TURNS, t, 1000 * statistics.mean(ttfts))

    def run_restart(self, t: BenchTarget) -> None:
        """Measure the TTFT of the same 1,400-token prompt after a restart."""
        if t.restart is None:
            raise UnsupportedError(
                f"there is no command to restart {t.name}: set --restart-cmd for each server"
            )
        messages = [self._system(), *user("Question?")]
        cold = self._chat(t, messages, 8)
        time.sleep(2 * _SETTLE_S)
        t.restart()
        t.wait_ready()
        again = self._chat(t, messages, 8)
        self.record(RESTART, t, again.ttft_s / cold.ttft_s)

    # --- honesty ----------------------------------------------------------------------------------

    def _system(self) -> dict[str, str]:
        """A long system prompt that no server has seen."""
        return {"role": "system", "content": f"{self.next_seed()} {SYSTEM}"}

    def _chat(self, t: BenchTarget, messages: Messages, max_tokens: int) -> StreamedAnswer:
        """An answer of at most `max_tokens` tokens. Raises BackendError if it is empty."""
        return self._non_empty(t, t.chat(messages, max_tokens))

    def _non_empty(self, t: BenchTarget, answer: StreamedAnswer) -> StreamedAnswer:
        if not answer.text.strip():
            raise BackendError(
                f"{t.name} returned no text (it reports {answer.reported_tokens} tokens)"
            )
        return answer

    def _count_tokens(self, t: BenchTarget, answer: StreamedAnswer) -> int:
        tokens = self.counter.tokens_of(t, self._non_empty(t, answer))
        if tokens < _MIN_ANSWER_TOKENS or not answer.gaps_s:
            raise BackendError(
                f"{t.name} answered with {tokens} tokens in {answer.pieces} pieces: too few to time"
            )
        return tokens


def _p95_ms(gaps_s: Sequence[float]) -> float:
    """The 95th percentile, in milliseconds."""
    return statistics.quantiles(gaps_s, n=20)[-1] * 1000


def _run_together(calls: Sequence[Callable[[], StreamedAnswer]]) -> list[StreamedAnswer]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]


# About 1,400 tokens: a coding agent's instructions have at least this length.
SYSTEM = (
    "You are a careful assistant. "
    + ("Rule: answer shortly, plainly and only about what was asked. ") * 110
)
NAMES = (
    "apple", "brook", "cedar", "delta", "ember", "frost", "grove", "haven", "inlet", "jetty", "knoll",
    "lagoon",
)  # fmt: skip


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def unseen_text(words: int, seed: int) -> str:
    """Text no cache has seen, about five tokens a word."""
    return " ".join(f"w{(seed * 7919 + i * 104729) % 9973}" for i in range(words))


def source_file(seed: int) -> str:
    """A Python file that no model has seen: about 36 to 55 tokens a function, by the tokenizer."""
    rng = random.Random(seed)
    lines = []
    for i in range(_N_FUNCTIONS):
        a, b = rng.sample(NAMES, 2)
        limit = rng.randrange(10, 999)
        subtrahend = rng.randrange(2, 99)
        factor = rng.randrange(2, 99)
        lines.append(f"def {a}_{b}_{i}({a}: int, limit: int = {limit}) -> int:")
        lines.append(f"    if {a} > limit:")
        lines.append(f"        return {a} - {subtrahend}")
        lines.append(f"    return {a} * {factor} + {b!r}.count('e')")
        lines.append("")
    return "\n".join(lines)


def copy_edit(seed: int) -> str:
    """Return a file and the beginning of its copy with one word changed, as a text to continue.

    The beginning and a complete copy are given because a small model would otherwise write another
    text, which would not measure drafting.
    """
    text = source_file(seed)
    beginning = "\n".join(text.splitlines()[:5]).replace("def ", "async def ", 1)
    return f"{text}\n\n---\n\n{text}\n\n---\n\n{beginning}\n"
