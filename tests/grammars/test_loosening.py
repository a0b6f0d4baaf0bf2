"""A schema that can be enforced only in part is loosened, within limits.

A schema that takes too much work is refused, and not loosened further.
"""

from __future__ import annotations

import json
import threading

import pytest

from localllm.errors import BusyError, UnsupportedError
from localllm.grammars import json_schema, loosening
from localllm.grammars.loosening import enforceable, loosened
from localllm.grammars.reasons import reason_of


def optional(n: int) -> dict[str, object]:
    """Return an object schema whose check takes time quadratic in `n`."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}


@pytest.mark.parametrize("n", [300, 1000])
def test_a_long_schema_is_loosened_like_a_short_one(n: int) -> None:
    schema = {**optional(n), "not": {"required": ["p1"]}}
    assert len(json.dumps(schema)) > loosening.SHORT_CHARS
    assert loosened(schema) == json_schema.loosened(schema)
    assert "not" in loosened(schema)[1]


def test_a_schema_that_takes_too_long_to_check_is_refused() -> None:
    for n in (16_384, 8192):
        with pytest.raises(UnsupportedError, match="can't be checked: it takes more than 1 s"):
            enforceable(("loose_schema", json.dumps(optional(n))))
    # The next schema is checked as usual.
    assert loosened(optional(300))[1] == ()


def test_one_large_schema_is_checked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loosening, "MAX_WAIT_S", 0.0)
    begun = threading.Event()
    ask = loosening.CHILD.ask
    refused: list[Exception] = []

    def asked(*args: object, **options: object) -> object:
        begun.set()
        return ask(*args, **options)  # type: ignore[arg-type]

    def check() -> None:
        try:
            loosened(optional(16_000))
        except UnsupportedError as e:
            refused.append(e)

    monkeypatch.setattr(loosening.CHILD, "ask", asked)
    first = threading.Thread(target=check)
    first.start()
    assert begun.wait(30)
    with pytest.raises(BusyError):
        loosened(optional(301))
    first.join()
    assert len(refused) == 1


def test_finding_a_reason_takes_no_longer_for_a_long_message() -> None:
    """llguidance's message contains the answer so far. A message of this length once took
    minutes."""
    assert reason_of("k" * 2**20).words == ()
    assert reason_of("x for '$ref' " + "k" * 2**20).words == ("$ref",)
