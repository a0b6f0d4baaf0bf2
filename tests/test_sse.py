"""Server-sent events are read correctly for any division into chunks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from localllm.sse import LineBuffer, objects

STREAM = (
    ': prefill 1/2\n\ndata: {"a":"x\u2028y"}\r\n\r\nevent: ping\ndata:{"b":2}\n\ndata: '
    '[DONE]\n\ndata: {"é":3}'
).encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_any_split_of_a_stream_gives_the_same_events(cuts: list[int]) -> None:
    buffer = LineBuffer()
    places = [0, *sorted(cuts), len(STREAM)]
    lines = []
    for start, end in itertools.pairwise(places):
        lines += buffer.feed(STREAM[start:end])
    lines += buffer.end()
    assert lines[0] == ": prefill 1/2"
    assert [part.value for part in objects(lines)] == [{"a": "x\u2028y"}, {"b": 2}, {"é": 3}]
