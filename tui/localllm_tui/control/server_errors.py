"""The error of a server that refuses a request, in one of the shapes that servers use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

from localllm.errors import LocalLLMError, by_code
from localllm.foreign_json import JsonPart, MalformedError, parse
from localllm_tui.control.stream_reader import error_of
from localllm_tui.control.terminal import one_line

_TITLE = re.compile(r"<title[^>]*>([^<]{1,200})</title>", re.IGNORECASE)
_PAGE = re.compile(r"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
_MAX_CHARS = 200
_MAX_BYTES = 4000  # of a page, that are searched for its title
# A server may ask a client to wait, in seconds, with these statuses.
_BUSY = (429, 503)
_NO_KEY = (401, 403)


def refused(status: int, headers: Mapping[str, str], body: bytes) -> LocalLLMError:
    """The error of a response with this status."""
    error = _error(status, body)
    if not error.hint:
        error.hint = _hint(status, headers.get("retry-after", ""))
    return error


def _error(status: int, body: bytes) -> LocalLLMError:
    answered = f"the server answered {status}"
    try:
        members = JsonPart(parse(body).members())
    except MalformedError:
        members = JsonPart(None)
    error = members.get("error")
    if error.value:
        return error_of(error)
    # vLLM's older releases, and FastAPI
    for name in ("message", "detail"):
        sentence = _sentence(members.get(name))
        if sentence:
            return by_code("backend_error", f"{answered}: {sentence}")
    text = body[:_MAX_BYTES].decode("utf-8", "replace")
    if _PAGE.match(text):
        text = _title(status, text)
    text = text.strip()[:_MAX_CHARS]
    if text:
        return by_code("backend_error", f"{answered}: {text}")
    return by_code("backend_error", answered)


def _sentence(members: JsonPart) -> str:
    """The text of a message, or of a list of messages about parts of the request."""
    if isinstance(members.value, str):
        return one_line(members.value)
    if not isinstance(members.value, list):
        return ""
    sentences = []
    for part in members.items():
        message = part.members().get("msg")
        where = part.members().get("loc")
        if not isinstance(message, str):
            continue
        place = ""
        if isinstance(where, list) and where:
            place = f"{where[-1]}: "
        sentences.append(one_line(place + message))
    return "; ".join(sentences)


def _title(status: int, page: str) -> str:
    """The words of a web page about an error, such as a gateway's."""
    titled = _TITLE.search(page)
    if titled is not None:
        return one_line(titled[1]).removeprefix(f"{status} ")
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "a web page"


def _hint(status: int, retry_after: str) -> str:
    """The user's next step after a response with this status; "" if it is not known."""
    if status in _NO_KEY:
        return "pass the server's key with --api-key or LOCALLLM_API_KEY"
    if status not in _BUSY:
        return ""
    if re.fullmatch(r"\d{1,6}", retry_after):
        return f"the server asks to wait {int(retry_after):,} s"
    if retry_after:
        return f"the server asks to wait until {one_line(retry_after)[:40]}"
    if status == 429:
        return "the server limits requests: wait a moment, then ask again"
    return ""
