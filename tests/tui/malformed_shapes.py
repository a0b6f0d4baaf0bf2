"""Streams of answers with one malformed part after a good beginning.

They cover every part and many values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

GOOD = "the good part "
# Each place: a chunk in which VALUE is replaced by the malformed value.
VALUE = "\N{REPLACEMENT CHARACTER}value"


def _choice(**members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **members}]}


def _call(**members: Any) -> dict[str, Any]:
    return _choice(delta={"tool_calls": [members]})


PLACES: dict[str, Any] = {
    "chunk": VALUE,
    "choices": {"choices": VALUE},
    "choice": {"choices": [VALUE]},
    "delta": _choice(delta=VALUE),
    "content": _choice(delta={"content": VALUE}),
    "thinking": _choice(delta={"reasoning_content": VALUE}),
    "reason": _choice(delta={}, finish_reason=VALUE),
    "calls": _choice(delta={"tool_calls": VALUE}),
    "call": _choice(delta={"tool_calls": [VALUE]}),
    "call index": _call(index=VALUE, function={"name": "f", "arguments": "{}"}),
    "call function": _call(index=0, function=VALUE),
    "call name": _call(index=0, function={"name": VALUE}),
    "call arguments": _call(index=0, function={"name": "f", "arguments": VALUE}),
    "usage": {"usage": VALUE},
    "prompt tokens": {"usage": {"prompt_tokens": VALUE, "completion_tokens": 3}},
    "details": {"usage": {"prompt_tokens": 3, "prompt_tokens_details": VALUE}},
    "cached": {"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": VALUE}}},
    "timings": {"timings": VALUE},
    "prefilled": {"timings": {"prompt_n": VALUE}, "usage": {"prompt_tokens": 3}},
    "error": {"error": VALUE},
    "message": {"error": {"message": VALUE, "code": VALUE, "hint": VALUE}},
}
VALUES: dict[str, str] = {
    "number": "5", "negative": "-1", "1e999": "1e999", "NaN": "NaN", "long number": "1" * 5000,
    "true": "true", "text": '"x"', "half": r'"a\ud83d"', "list": "[1]", "object": '{"a": [1]}',
    "deep": "[" * 200_000 + "]" * 200_000,
}  # fmt: skip
WHOLE: dict[str, bytes] = {
    "no JSON": b"data: {nonsense\n\n",
    "web page": b"data: <html>\n\n",
    "bad UTF-8": b'data: {"choices":[{"delta":{"content":"\xff\xfe"}}]}\n\n',
    "NUL": b'data: {"choices":[{"delta":{"content":"a\\u0000b"}}]}\n\n',
    "split emoji": b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"\\ude00 end"}}]}\n\n',
    "long comment": b": " + b"news " * 100_000 + b"\n",
    "endless progress": b": prefill 1" + b"1" * 5000 + b"/2\n",
    "endless line": b"data: " + b"a" * (9 << 20) + b"\n\n",
}


def _data(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def shapes() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each stream."""
    good = _data(_choice(delta={"content": GOOD}))
    end = _data(_choice(delta={}, finish_reason="stop")) + b"data: [DONE]\n\n"
    for place, chunk in PLACES.items():
        for name, value in VALUES.items():
            data = json.dumps(chunk).replace(json.dumps(VALUE), value)
            yield f"{place}: {name}", good + f"data: {data}\n\n".encode() + end
    for name, data in WHOLE.items():
        yield name, good + data + end
