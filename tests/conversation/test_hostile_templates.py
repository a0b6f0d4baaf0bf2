"""Templates come out of downloaded files: none takes more than 64 MiB or 5 s, by the system's
measure, or ends in an error that is not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localllm.conversation.template import ChatTemplate

if sys.platform != "linux":
    pytest.skip("the measure is Linux's", allow_module_level=True)

from conversation.hostile_templates import ATTACKS, SLOW

MOST_MIB, MOST_S = 64.0, 5.0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted(ATTACKS.keys() - SLOW), id="quick"),
        pytest.param(sorted(SLOW), marks=pytest.mark.long, id="slow"),
    ],
)
def test_no_template_takes_more_than_its_share(names: list[str]) -> None:
    command = [sys.executable, "-m", "conversation.hostile_templates", *names]
    said = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    ).stdout
    found = dict(line.split("|") for line in said.splitlines())
    assert sorted(found) == names, "one of them was killed"
    for name, line in found.items():
        mib, seconds, end = line.split()
        assert end in ("rendered", "refused"), f"{name}: {line}"
        assert float(mib) <= MOST_MIB, f"{name}: {line}"
        # a turn of 64 steps is seen to its end
        assert float(seconds) <= MOST_S + 0.5, f"{name}: {line}"


def test_there_are_fifty_and_more() -> None:
    assert len(ATTACKS) >= 50


def test_a_list_that_grows_by_each_message_is_no_fault() -> None:
    source = (
        "{% set ns = namespace(kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + "
        "[{'role': m.role, 'text': m.content}] %}"
        "{% endfor %}{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ ns.kept | length }}"
    )
    messages = [{"role": "user", "content": "word " * 20}] * 2000
    assert ChatTemplate(source).render(messages).endswith("2000")
