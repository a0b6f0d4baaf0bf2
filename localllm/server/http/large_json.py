"""Large JSON bodies, read in slices of time: Python's own scanner instead of C's, which lets nobody
else run meanwhile.

One thread at a time computes, for two milliseconds; then the event loop, and the others, come
first."""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

# Threads of their own: work on bodies never waits for, or stops, what others do in threads.
POOL: Final = ThreadPoolExecutor(8, thread_name_prefix="bodies")
# What is made of large bodies once they are read: more threads that compute would keep everybody
# waiting for each of them.
FEW: Final = ThreadPoolExecutor(2, thread_name_prefix="large bodies")
_TURN = threading.Lock()
_SLICE_S, _PAUSE_S = 0.002, 0.001
_VALUES_A_LOOK = 64
# Longer than any float64 or what Python makes an int of; the conversion of a longer one could not
# be interrupted.
_LONG_NUMBER = re.compile(r"[-+.eE0-9]{4400}")
# Of a string: whole escapes and what lies between them.
_PIECE = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_PIECE_CHARS = 2**18
_HIGH, _LOW = frozenset(map(chr, range(0xD800, 0xDC00))), frozenset(map(chr, range(0xDC00, 0xE000)))
_NUMBER_STARTS = frozenset("-0123456789")
_Scan = Callable[[str, int], tuple[Any, int]]


class Turns:
    """A block of work that gives way to others whenever it is asked to `give_turn` and its slice is
    over.

    `late` is called, and must raise, once `most_s` seconds of work have been spent."""

    def __init__(self, most_s: float, late: Callable[[], NoReturn]) -> None:
        self._most_s, self._late = most_s, late
        self._began_s = self._spent_s = 0.0

    def __enter__(self) -> Turns:
        _TURN.acquire()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        _TURN.release()

    def give_turn(self) -> None:
        worked_s = time.monotonic() - self._began_s
        if worked_s < _SLICE_S:
            return
        self._spent_s += worked_s
        if self._spent_s > self._most_s:
            self._late()
        _TURN.release()
        try:
            time.sleep(_PAUSE_S)
        finally:
            _TURN.acquire()
        self._began_s = time.monotonic()


class SlicedDecoder(json.JSONDecoder):
    """`json.JSONDecoder` that looks at `turns` on its way. `count(depth, containers, values)` is
    called now and then, and at each list and object; it may raise. `clean` is applied to every
    text, keys included."""

    def __init__(
        self,
        turns: Turns,
        count: Callable[[int, int, int], None],
        clean: Callable[[str], str] | None,
        parse_constant: Callable[[str], Any],
    ) -> None:
        super().__init__(parse_constant=parse_constant)
        self._turns, self._count, self._clean = turns, count, clean
        self._depth = self._containers = self._values = 0
        # The pure Python halves of the standard library's decoder.
        decoder: Any = json.decoder
        self._read_object, self._read_array = decoder.JSONObject, decoder.JSONArray
        self.parse_object, self.parse_array = self._object, self._array
        self.parse_string = self._text
        scanner: Any = json.scanner
        self.scan_once = scanner.py_make_scanner(self)

    def _counted(self, scan: _Scan) -> _Scan:
        def counted(text: str, start: int) -> tuple[Any, int]:
            self._values += 1
            if self._values % _VALUES_A_LOOK == 0:
                self._count(self._depth, self._containers, self._values)
                self._turns.give_turn()
            if text[start : start + 1] in _NUMBER_STARTS and _LONG_NUMBER.match(text, start):
                raise ValueError("a number is too long")
            return scan(text, start)

        return counted

    def _enter(self) -> None:
        self._depth += 1
        self._containers += 1
        self._count(self._depth, self._containers, self._values)

    def _array(self, state: tuple[str, int], scan: _Scan) -> tuple[list[Any], int]:
        self._enter()
        found: tuple[list[Any], int] = self._read_array(state, self._scan(scan))
        self._depth -= 1
        return found

    def _object(
        self,
        state: tuple[str, int],
        strict: bool,
        scan: _Scan,
        hook: Any,
        pairs_hook: Any,
        memo: Any,
    ) -> tuple[dict[str, Any], int]:
        self._enter()
        found: tuple[dict[str, Any], int] = self._read_object(
            state, strict, self._scan(scan), hook, pairs_hook, memo
        )
        self._depth -= 1
        if self._clean is not None:
            return {self._clean(k): v for k, v in found[0].items()}, found[1]
        return found

    _kept: tuple[_Scan, _Scan] | None = None

    def _scan(self, scan: _Scan) -> _Scan:
        """`scan`, counted: wrapped once, however deep it is called."""
        if self._kept is not None and scan in self._kept:
            return self._kept[1]
        self._kept = (scan, self._counted(scan))
        return self._kept[1]

    def _text(self, text: str, begin: int, strict: bool = True) -> tuple[str, int]:
        """As `scanstring`; long ones by the piece."""
        read: Any = json.decoder
        quote = text.find('"', begin, begin + _PIECE_CHARS)
        found, end = "", begin
        if quote < 0 or text[quote - 1] == "\\":
            found, end = self._pieces(text, begin)
        if end == begin:  # short, or broken: the error names its place
            found, end = read.scanstring(text, begin, strict)
        return (found if self._clean is None else self._clean(found)), end

    def _pieces(self, text: str, begin: int) -> tuple[str, int]:
        """The string from `begin`, and where it ends; ("", begin) for a broken one."""
        read: Any = json.decoder
        pieces: list[str] = []
        end = begin
        try:
            while text[end : end + 1] != '"':
                start, matched = end, _PIECE.match(text, end, end + _PIECE_CHARS)
                end = matched.end() if matched else start
                if end == start:
                    return "", begin
                piece = read.scanstring(text[start:end] + '"', 0)[0]
                # a pair that was cut in two
                if pieces and pieces[-1][-1] in _HIGH and piece[0] in _LOW:
                    pair = (
                        (pieces[-1][-1] + piece[0])
                        .encode("utf-16-le", "surrogatepass")
                        .decode("utf-16-le")
                    )
                    pieces[-1], piece = pieces[-1][:-1] + pair, piece[1:]
                if piece:
                    pieces.append(piece)
                self._turns.give_turn()
        except json.JSONDecodeError:
            return "", begin
        return "".join(pieces), end + 1
