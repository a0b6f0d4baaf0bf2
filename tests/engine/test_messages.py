"""Events survive the trip through the worker's pipe, whatever is in them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.messages import (
    Event,
    Failure,
    Finish,
    Prefill,
    Queued,
    Text,
    Timings,
    TokenLogprob,
    Usage,
    event_from_json,
    event_text,
    event_to_json,
)

# Lone surrogates too: nothing between the model's bytes and here promises that there are none.
texts = st.text(st.characters(exclude_categories=()))
counts = st.integers(0, 2**40)
seconds = st.floats(0, 1e9)
logprobs = st.builds(
    TokenLogprob, texts, counts, st.floats(-1e3, 0), st.lists(st.tuples(texts, counts, st.floats(-1e3, 0))).map(tuple)
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Queued, texts, counts),
    st.builds(Prefill, texts, counts, counts, counts),
    st.builds(Text, texts, texts, st.lists(counts).map(tuple), st.lists(logprobs, max_size=2).map(tuple)),
    st.builds(
        Finish,
        texts,
        st.sampled_from(["stop", "length", "cancelled"]),
        st.builds(Usage, counts, counts, counts, counts, counts, texts),
        st.builds(Timings, seconds, seconds, seconds, seconds),
        st.none() | texts,
    ),
    st.builds(Failure, texts, texts, texts, texts),
)


@given(events)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    line = event_text(event)
    assert line.isascii()
    assert "\n" not in line
    assert event_from_json(json.loads(line)) == event


@given(events)
def test_the_text_holds_what_the_values_say(event: Event) -> None:
    """Text written by hand and JSON written by the library are the same, but for what a missing key means."""
    said, values = json.loads(event_text(event)), json.loads(json.dumps(event_to_json(event)))
    assert {"logprobs": [], **said} == {"logprobs": [], **values}
