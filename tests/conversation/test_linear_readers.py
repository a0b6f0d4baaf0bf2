"""Reading a tool call takes linear time in its length, in every format.

White space at any place of the head once took cubic time.
"""

from __future__ import annotations

import time

import pytest

from conversation.call_law import told
from conversation.test_cut_replies import reply_format
from conversation.test_tool_formats import WRITERS, Calls
from localllm.conversation.tools import FORMATS

CALL: Calls = [("f", {"n": 12})]
# Cubic readers took 10 s for 4,000 characters. Now each takes milliseconds for more than twice as
# many.
LENGTHS = (4096, 8192, 16_384)
MOST_S = 2.0


def read_s(name: str, text: str) -> float:
    """Return the processor time of this thread."""
    began_s = time.thread_time()
    told(reply_format(name), [text], cut=True)
    return time.thread_time() - began_s


@pytest.mark.parametrize("name", [f.name for f in FORMATS])
def test_white_space_after_a_marker_is_read_in_linear_time(name: str) -> None:
    for marker in next(f for f in FORMATS if f.name == name).markers:
        for n in LENGTHS:
            for space in (" ", "\n", ", ", "] "):
                assert read_s(name, marker + space * n + "x") < MOST_S


@pytest.mark.parametrize("writer", WRITERS)
def test_white_space_anywhere_in_a_call_is_read_in_linear_time(writer: str) -> None:
    name, write = WRITERS[writer]
    reply = write(CALL)
    for at in range(len(reply)):
        n = LENGTHS[0]
        assert read_s(name, reply[:at] + " " * n + reply[at:]) < MOST_S, reply[:at]
