"""The conformance table of OpenAI's completions, including fill-in-the-middle."""

from __future__ import annotations

from server.rows import (
    FIM,
    TEXT,
    Row,
    honoured,
    refused,
    sampling,
    text,
)

COMPLETIONS: list[Row] = [
    honoured(
        "prompt as text",
        {},
        lambda r, j, h: (r.prompt, j["choices"][0]["text"]) == ("ab", "Hello world"),
        path=TEXT,
    ),
    honoured(
        "prompt as ids", {"prompt": [1, 2, 3]}, lambda r, j, h: r.prompt == [1, 2, 3], path=TEXT
    ),
    honoured(
        "prompts",
        {"prompt": ["a", "b"], "n": 2},
        lambda r, j, h: len(j["choices"]) == 4 and j["usage"]["prompt_tokens"] == 2,
        path=TEXT,
    ),
    honoured(
        "echo",
        {"echo": True},
        lambda r, j, h: j["choices"][0]["text"] == "abHello world",
        path=TEXT,
    ),
    honoured(
        "suffix",
        {"suffix": "cd"},
        lambda r, j, h: r.prompt == [200, 97, 98, 201, 99, 100, 202],
        path=TEXT,
    ),
    honoured(
        "legacy logprobs",
        {"logprobs": 2},
        lambda r, j, h: len(j["choices"][0]["logprobs"]["top_logprobs"][0]) == 2,
        path=TEXT,
    ),
    sampling("temperature", 0.1, 0.1, TEXT),
    sampling("seed", 3, 3, TEXT),
    refused("an empty list of prompts", {"prompt": []}, "empty", path=TEXT),
    refused("a prompt that is a number", {"prompt": 5}, "prompt", path=TEXT),
    refused("echo with logprobs", {"echo": True, "logprobs": 1}, "echo", path=TEXT),
    refused("suffix for many", {"prompt": ["a", "b"], "suffix": "c"}, "suffix", path=TEXT),
    refused("best_of", {"best_of": 2}, "best_of", path=TEXT),
    honoured(
        "Mistral's fim",
        {"suffix": "cd"},
        lambda r, j, h: r.prompt[0] == 200 and text(j) == "Hello world",
        path=FIM,
    ),
    refused("embeddings of a chat model", {"input": "x"}, "generates text", path="/v1/embeddings"),
]
