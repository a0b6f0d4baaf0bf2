"""Building blocks of call readers: finding the end of a streamed JSON value, and two reader
classes.

A reader gets the text after an opening marker. It reports a call as soon as the name and the
beginning of the arguments are certain, then streams the arguments. Text that turns out not to be a
call is returned as plain text. A malformed call costs the user a tool call, but never causes an
error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from localllm import json_store
from localllm.conversation.reply import CallArguments, CallReader, CallStart, Content, Delta
from localllm.conversation.tools.base import Reader, Tool

Call: TypeAlias = tuple[str, str]
"""A function's name and its arguments as JSON text."""

# {"name": "f", "arguments": {   in any spacing, with the array's punctuation. Between two calls an
# id may follow the first.
JSON_HEAD = re.compile(
    r'[\s\]},;]*+(?:"id"\s*+:\s*+"[^"]*"[\s\]},;]*+)?\[?\s*+\{\s*+(?:"(?:id|type)"\s*+:\s*+"[^"]*"\s*+,\s*+)*"name"\s*+:\s*+("(?:[^"\\]|\\.)*")\s*+,\s*+'
    r'"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)

_STRUCTURE = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


class JsonEnd:
    """Finds the end of a JSON object or array that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._pending = ""  # a backslash whose letter has not arrived yet

    def feed(self, text: str) -> int:
        """Index just after the value's last bracket, or -1 if the value continues."""
        pending = self._pending
        self._pending = ""
        for match in _STRUCTURE.finditer(pending + text):
            if match[0] == '"':
                self._in_string = not self._in_string
            elif match[0] == "\\":
                self._pending = match[0]
            elif match[0] in _BRACKETS and not self._in_string:
                self._depth += _BRACKETS[match[0]]
                if self._depth <= 0:
                    return match.end() - len(pending)
        return -1


class JsonReader(CallReader):
    """Reads calls whose arguments are a JSON object after a recognisable head.

    - `head` matches up to the arguments' `{`. Its first non-empty group is the name.
    - `end` closes the block.
    - `names` limits calls to known functions, for formats in which a JSON answer may begin like a
      call.
    - `is_part`: the opening is itself the beginning of the block.
    - `single_value`: the text after the arguments does not belong to the block.
    """

    def __init__(
        self,
        first: int,
        opening: str,
        head: re.Pattern[str],
        end: str,
        *,
        names: frozenset[str] | None = None,
        is_part: bool = False,
        single_value: bool = False,
    ) -> None:
        self._next = self._first = first
        self._head = head
        self._end = end
        self._names = names
        self._single_value = single_value
        self._opening = "" if is_part else opening
        self._pending = opening if is_part else ""
        self._scan: JsonEnd | None = None

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        self._pending += text
        while self.rest is None and self._read_next(deltas):
            pass
        return deltas

    def _read_next(self, deltas: list[Delta]) -> bool:
        """Read arguments, the head of a call, or the end of the block.

        Returns False if more text is needed first.
        """
        if self._scan is not None:
            return self._read_arguments(self._scan, deltas)
        match = self._head.match(self._pending)
        if match is not None:
            self._begin_call(match, deltas)
            return True
        block, end, rest = self._pending.partition(self._end)
        if not end:
            return False
        self._end_block(block, deltas, end)
        self.rest = rest
        return True

    def _read_arguments(self, scan: JsonEnd, deltas: list[Delta]) -> bool:
        end = scan.feed(self._pending)
        fragment = self._pending if end < 0 else self._pending[:end]
        self._pending = self._pending[len(fragment) :]
        if fragment:
            deltas.append(CallArguments(self._next - 1, fragment))
        if end < 0:
            return False
        self._scan = None
        if self._single_value:
            self.rest = self._pending
            self._pending = ""
        return True

    def _begin_call(self, match: re.Match[str], deltas: list[Delta]) -> None:
        name_text = next(filter(None, match.groups()))
        name = name_text
        if name_text.startswith('"'):
            name = str(json_store.parsed(name_text) or name_text.strip('"'))
        if not self._is_known(name):
            deltas.append(Content(self._opening + self._pending))
            self.rest = ""
            self._pending = ""
            return
        deltas.append(CallStart(self._next, name))
        self._next += 1
        self._scan = JsonEnd()
        self._pending = self._pending[match.end() :]

    def close(self, cut: bool) -> list[Delta]:
        """End of the reply inside the block.

        Arguments that were already streamed stay as they are, even if the JSON is incomplete.
        """
        deltas: list[Delta] = []
        if self._scan is None and self.rest is None and not cut:
            self._end_block(self._pending, deltas, "")
        self._pending = ""
        return deltas

    def _end_block(self, block: str, deltas: list[Delta], end: str) -> None:
        """Handle a block that ended without (another) match of the head."""
        if self._next > self._first:
            return  # punctuation after the last call's arguments
        calls = json_calls(block)
        if calls is None or not all(self._is_known(name) for name, _ in calls):
            deltas.append(Content(self._opening + block + end))
            return
        deltas += complete_calls(self._next, calls)
        self._next += len(calls)

    def _is_known(self, name: str) -> bool:
        return self._names is None or name in self._names


def complete_calls(first: int, calls: list[Call]) -> list[Delta]:
    """The deltas of complete calls. The first call has the index `first` within the reply."""
    deltas: list[Delta] = []
    for index, (name, arguments) in enumerate(calls, first):
        deltas += [CallStart(index, name), CallArguments(index, arguments)]
    return deltas


def json_block(end: str = "\0", head: re.Pattern[str] = JSON_HEAD) -> Reader:
    """A reader of calls whose arguments are a JSON object after `head`, in a block up to `end`.

    An unclosed block extends to the end of the reply.
    """

    def reader(first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        return JsonReader(first, marker, head, end)

    return reader


def read_block(end: str, parse: Callable[[str], list[Call] | None]) -> Reader:
    """A reader of calls in a block up to `end`, independent of the offered tools."""

    def reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        return BlockReader(first, marker, end, parse)

    return reader


class BlockReader(CallReader):
    """Reads calls in a block once its `end` has arrived, for formats that are not JSON.

    `tail` is punctuation that may follow the end. `is_open` returns True if an end within the block
    belongs to a value, so that another end must follow. Without another end, the first one counts.
    """

    def __init__(
        self,
        first: int,
        opening: str,
        end: str,
        parse: Callable[[str], list[Call] | None],
        *,
        tail: str = "",
        is_open: Callable[[str], bool] | None = None,
    ) -> None:
        self._first = first
        self._opening = opening
        self._end = end
        self._parse = parse
        self._tail = tail
        self._is_open = is_open
        self._pending = ""
        self._search_from = 0  # no end of the block is in `_pending` before this index
        self._ended = False

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        self._pending += text
        if not self._ended:
            end = self._end_at()
            if end < 0:
                return deltas
            deltas = self._read(end)
        following = self._pending.lstrip()
        if self._tail and following.startswith(self._tail):
            self.rest = following[len(self._tail) :]
        elif not (self._tail and self._tail.startswith(following)):
            self.rest = self._pending
        return deltas

    def close(self, cut: bool) -> list[Delta]:
        """End of the reply. A block that the model left open is read as if closed, a cut one is not
        read."""
        if cut:
            return []
        if self._ended:
            if self._pending.strip():
                return [Content(self._pending)]
            return []
        end = self._pending.find(self._end)
        if end < 0:
            end = len(self._pending)
        deltas = self._read(end)
        self.rest = self._pending.removeprefix(self._tail)
        return deltas

    def _end_at(self) -> int:
        """The index of the block's end, or -1 if it continues."""
        while (position := self._pending.find(self._end, self._search_from)) >= 0:
            if self._is_open is None or not self._is_open(self._pending[:position]):
                return position
            self._search_from = position + 1
        self._search_from = max(self._search_from, len(self._pending) - len(self._end) + 1)
        return -1

    def _read(self, block_end: int) -> list[Delta]:
        """The calls of the block up to `block_end`. Its end may be missing there."""
        block = self._pending[:block_end]
        after_end = block_end + len(self._end)
        calls = self._parse(block)
        block_text = self._opening + self._pending[:after_end]
        self._pending = self._pending[after_end:]
        self._ended = True
        if calls:
            return complete_calls(self._first, calls)
        return [Content(block_text)]


def json_calls(block: str) -> list[Call] | None:
    """Calls from complete JSON: an object or an array of them, with any of the usual key names."""
    value = json_store.parsed(block)
    if not isinstance(value, list):
        value = [value]
    calls: list[Call] = []
    for item in value:
        if not isinstance(item, dict):
            return None
        if isinstance(item.get("function"), dict):
            item = item["function"]
        name = item.get("name")
        arguments: Any = next(
            (item[key] for key in ("arguments", "parameters", "args") if key in item), {}
        )
        if isinstance(arguments, str):
            arguments = json_store.parsed(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, as_json(arguments)))
    return calls or None


def as_json(value: object) -> str:
    """JSON that can be encoded as UTF-8. Characters are escaped only if there is a lone
    surrogate."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
