"""Read JSON of other programs: bounded in size and depth, with errors that name the bad part.

Chat servers, model hubs, upstreams and tools may send anything. `parse` returns a JsonPart, which
knows its path in the document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from localllm.errors import LocalLLMError
from localllm.json_limits import TooDeepError, check_depth

# A listing of a repository with 20,000 files has about 5 MiB and 140,000 values.
MAX_BYTES = 8 << 20
MAX_VALUES = 200_000
MAX_DEPTH = 64
# The largest count that JSON readers agree on (RFC 8259, 6).
_MAX_COUNT = 2**53
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_HIGH = re.compile(r"[\ud800-\udbff]\Z")
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


class MalformedError(
    LocalLLMError,
    code="malformed_answer",
    http_status=502,
    exit_code=6,
    default_hint="see which program answers at this address",
):
    """The JSON of another program can't be used. The message names the malformed part."""


def parse(
    text: str | bytes, most_chars: int = MAX_BYTES, most_values: int = MAX_VALUES
) -> JsonPart:
    """Parse a document of another program. Raises MalformedError if it is too large, nests too
    deeply or is not JSON."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig", "replace")
    if len(text) > most_chars:
        raise MalformedError(f"it is longer than {most_chars} characters")
    brackets = text.count("[") + text.count("{")
    # Separators within strings count, too. So this is more than the number of values.
    if brackets + text.count(",") > most_values:
        raise MalformedError(f"it has more than {most_values} values")
    try:
        value = json.loads(text)
        if brackets > MAX_DEPTH:
            check_depth(value, MAX_DEPTH)
    except (RecursionError, TooDeepError) as e:
        raise MalformedError(f"it nests deeper than {MAX_DEPTH} levels") from e
    except json.JSONDecodeError as e:
        reason = e.msg.removesuffix(" at")
        raise MalformedError(f"it is not JSON ({reason} at character {e.pos})") from e
    except ValueError as e:
        raise MalformedError("it has a number with too many digits") from e
    return JsonPart(value)


def read(pieces: Iterable[bytes]) -> bytes:
    """Join the pieces of a body. Raises MalformedError if it is larger than MAX_BYTES."""
    body = bytearray()
    for piece in pieces:
        body += piece
        check_size(body)
    return bytes(body)


def check_size(body: bytearray) -> None:
    """Raise MalformedError if a body is larger than MAX_BYTES."""
    if len(body) > MAX_BYTES:
        raise MalformedError(f"it is larger than {MAX_BYTES >> 20} MiB")


def check_uncompressed(coding: str | None) -> None:
    """Raise MalformedError for the Content-Encoding of a compressed body: a small one may become a
    huge one."""
    if coding not in (None, "", "identity"):
        raise MalformedError("it is compressed, although it was asked for without compression")


def well_formed(text: str) -> str:
    """`text` with each surrogate pair as one character, and U+FFFD for each lone surrogate."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class PieceJoiner:
    """Makes the pieces of one text well-formed. A piece may end within a surrogate pair: some
    servers cut text by UTF-16 units."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, piece: str) -> str:
        """Return `piece` with the half that was kept before it, without a half at its end."""
        text = self._half + piece
        self._half = ""
        if _HIGH.search(text):
            self._half = text[-1]
            text = text[:-1]
        return well_formed(text)

    def end(self) -> str:
        """Return U+FFFD if a half is left."""
        left = well_formed(self._half)
        self._half = ""
        return left


@dataclass(frozen=True, slots=True)
class JsonPart:
    """One value of a document, with its path, such as `choices[0].delta`.

    A missing member is a part with the value None, like `null`.
    """

    value: Any
    path: str = ""

    def get(self, name: str) -> JsonPart:
        """The member `name`. Raises MalformedError if this is not an object."""
        path = name
        if self.path:
            path = f"{self.path}.{name}"
        if self.value is None:
            return JsonPart(None, path)
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return JsonPart(self.value.get(name), path)

    def items(self) -> Iterator[JsonPart]:
        """The elements of a list, which is empty if it is missing. Raises MalformedError."""
        if self.value is None:
            return
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        for at, value in enumerate(self.value):
            yield JsonPart(value, f"{self.path}[{at}]")

    def piece(self) -> str:
        """The text as it was sent, which may contain halves of surrogate pairs; "" if it is
        missing. Raises MalformedError."""
        if self.value is None:
            return ""
        if not isinstance(self.value, str):
            raise self.wrong("text")
        return self.value

    def text(self) -> str:
        """The text, well-formed; "" if it is missing. Raises MalformedError."""
        return well_formed(self.piece())

    def index(self) -> int:
        """A position in a list; 0 if it is missing. Raises MalformedError."""
        if self.value is None:
            return 0
        found = self.count()
        if found is None:
            raise self.wrong("an index")
        return found

    def count(self) -> int | None:
        """A count; None if there is no usable one."""
        number = self.number()
        if number is None or number < 0 or number != int(number):
            return None
        return int(number)

    def number(self) -> float | None:
        """A number of at most 2^53; None if there is no usable one."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value) or abs(value) > _MAX_COUNT:
            return None
        return value

    def cleaned(self) -> Any:
        """The value as strict JSON: texts well-formed, and None for numbers that are unusable."""
        return _cleaned(self.value)

    def members(self) -> dict[str, Any]:
        """The members of an object; {} for any other value."""
        if isinstance(self.value, dict):
            return self.value
        return {}

    def wrong(self, wanted: str) -> MalformedError:
        """The error for a value that is not `wanted`."""
        kind = _KINDS.get(type(self.value), "an object")
        if self.value is None:
            kind = "missing"
        return MalformedError(f"{self.path or 'it'} is {kind}, not {wanted}")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {well_formed(name): _cleaned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return JsonPart(value).number()
    return value
