"""Forms (multipart/form-data): reads them within the limits of a body, and of parts and fields.

Needs the extra `audio` (python-multipart)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from localllm.errors import RequestError
from localllm.server.http.errors import MediaTypeError
from localllm.server.http.json_body import process_body, read_raw
from localllm.server.http.settings import ServerSettings

KIND = "multipart/form-data"
_MAX_PARTS = 64
_MAX_FIELD_BYTES = 2**16
_MAX_HEADER_BYTES = 2**12


@dataclass
class SentForm:
    """A form: the texts of its fields by name, and the contents of its files by name."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str | list[str]]:
        """The last text of each field; all texts of a field that is named `name[]`."""
        found: dict[str, str | list[str]] = {}
        for name, texts in self.texts.items():
            if name.endswith("[]"):
                found[name[:-2]] = texts
            else:
                found[name] = texts[-1]
        return found


async def read_form(request: Request, settings: ServerSettings) -> SentForm:
    """Return the form of the request's body. Raises RequestError."""
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != KIND:
        raise MediaTypeError(f"the body must be sent as Content-Type: {KIND}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("a form can't have a Content-Encoding")
    body = await read_raw(request, settings)
    return await process_body(partial(_parsed, sent, body))


def _parsed(content_type: str, body: bytes) -> SentForm:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise RequestError("the form's Content-Type has no boundary")
    parts = _Parts()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.header_name,
                "on_header_value": parts.header_value,
                "on_header_end": parts.header_end,
                "on_part_data": parts.data,
                "on_part_end": parts.end,
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as e:
        raise RequestError(f"the body is not a form: {str(e)[:120]}") from e
    return parts.form


class _Parts:
    """Collects the parts of a form, which the parser reports piece by piece."""

    def __init__(self) -> None:
        self.form = SentForm()
        self._n_parts = 0
        self._name = self._value = b""
        self._disposition = b""
        self._content: list[bytes] = []

    def begin(self) -> None:
        self._n_parts += 1
        if self._n_parts > _MAX_PARTS:
            raise RequestError(f"the form has more than {_MAX_PARTS} parts")
        self._disposition = b""
        self._content = []

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name = _longer(self._name, data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = _longer(self._value, data[start:end])

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def end(self) -> None:
        from python_multipart.multipart import parse_options_header

        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"").decode("utf-8", "replace")
        content = b"".join(self._content)
        if b"filename" in options:
            self.form.files[name] = content
            return
        if len(content) > _MAX_FIELD_BYTES:
            raise RequestError(f"{name[:80]} has more than {_MAX_FIELD_BYTES} bytes", param=name)
        self.form.texts.setdefault(name, []).append(content.decode("utf-8", "replace"))


def _longer(text: bytes, more: bytes) -> bytes:
    if len(text) + len(more) > _MAX_HEADER_BYTES:
        raise RequestError(f"a part's header has more than {_MAX_HEADER_BYTES} bytes")
    return text + more
