"""Count the tokens of answers, and the prompt tokens that a server computed more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from localllm.bench.stream import BenchTarget, Messages, StreamedAnswer
from localllm.errors import BackendError

Tokens = Callable[[Messages], Sequence[int]]


@dataclass
class Counter:
    """Counts the tokens of answers: the server's own count, limited by the tokens of the text that
    arrived. The text is tokenized by `of`, one of the servers. Without a tokenizer (None), the
    pieces of the stream are counted, and an answer has at most as many tokens as bytes.

    `differing`: servers whose count is a tenth larger than that of the text, with both counts.
    """

    of: BenchTarget | None
    differing: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def for_servers(cls, targets: Sequence[BenchTarget]) -> Counter:
        """A counter with the tokenizer of the first server that offers one: all serve the same
        model."""
        return cls(next((t for t in targets if _offers_tokenizer(t)), None))

    def __str__(self) -> str:
        if self.of is None:
            return "by the pieces in the streams, because no server offers its tokenizer"
        return f"in the received text, with the tokenizer of {self.of.name}"

    def tokens_of(self, target: BenchTarget, answer: StreamedAnswer) -> int:
        reported = answer.reported_tokens
        counted = self.tokens_in(answer.text)
        if reported is None:
            return answer.pieces if counted is None else counted
        if counted is None:
            counted = len(answer.text.encode())
        if reported - counted > max(2, counted / 10):
            self.differing[target.name] = (reported, counted)
        return min(reported, counted)

    def tokens_in(self, text: str) -> int | None:
        """Tokens of `text`; None if no server offers its tokenizer."""
        if self.of is None:
            return None
        return len(tokenized(self.of, text, special=False))


class TokensRead:
    """The prompts that one server has read so far. `tokens` returns the tokens of messages by the
    server's template."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._read_sequences: list[list[int]] = []
        self.twice = 0

    def add(self, messages: Messages, answer: StreamedAnswer) -> None:
        """Count one request.

        The answer's own tokens count as read if its text results in the same tokens. The last token
        of a prompt does not count: it is always computed, because its logits are needed.
        """
        prompt = list(self._tokens(messages))
        n_shared = max(
            (common_prefix_length(prompt, sequence) for sequence in self._read_sequences), default=0
        )
        n_known = min(n_shared, len(prompt) - 1)
        self.twice += max(0, n_known - (answer.cached_tokens or 0))
        with_answer = [*messages, {"role": "assistant", "content": answer.text}]
        self._read_sequences += [prompt, list(self._tokens(with_answer))]


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix in tokens."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def templated_tokens(targets: Sequence[BenchTarget]) -> Tokens | None:
    """A function that renders messages with the chat template and returns their tokens. It uses the
    first server that offers this (llama-server and localllm do); None if no server does. The same
    model has the same template on all servers."""
    question: Messages = [{"role": "user", "content": "Hi"}]
    for target in targets:
        try:
            _templated_tokens(target, question)
        except BackendError:
            continue
        return partial(_templated_tokens, target)
    return None


def _templated_tokens(target: BenchTarget, messages: Messages) -> list[int]:
    ends_with_question = messages[-1]["role"] != "assistant"
    body = {"messages": messages, "add_generation_prompt": ends_with_question}
    prompt = target.post(f"{target.root}/apply-template", body).get("prompt", "")
    return tokenized(target, str(prompt))


def tokenized(target: BenchTarget, text: str, *, special: bool = True) -> list[int]:
    """The tokens of `text`. With `special`, control tokens are parsed and the tokens that begin a
    prompt are added. Raises BackendError if the server has no endpoint for its tokenizer."""
    body = {"content": text, "add_special": special, "parse_special": special}
    tokens = target.post(f"{target.root}/tokenize", body).get("tokens")
    if not isinstance(tokens, list):
        raise BackendError(f"{target.name} does not offer its tokenizer")
    return tokens


def _offers_tokenizer(target: BenchTarget) -> bool:
    try:
        return bool(tokenized(target, "Hello"))
    except BackendError:
        return False
