"""Files in messages of any dialect.

A text file is replaced by its text, a PDF by a mark until it is read.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from localllm.errors import UnsupportedError

MAX_BYTES = 20 * 10**6
_PDF_TYPE = "application/pdf"
# Some PDFs have a few other bytes before their header.
_MAX_PDF_OFFSET = 1024
_MAX_NAME_CHARS = 120


@dataclass(frozen=True, slots=True)
class AttachedPdf:
    """A PDF in a message, whose text contains `mark` in its place.

    `in_question`: the PDF belongs to the turn to be answered. `kind`: the client API's word for it.
    """

    mark: str
    data: bytes
    name: str
    where: str
    kind: str
    in_question: bool


def attached(
    part: Mapping[str, Any], where: str, kind: str, *, in_question: bool
) -> str | AttachedPdf:
    """The file in a part of a message: its text, or an AttachedPdf. Raises UnsupportedError."""
    name, encoded, declared_pdf = _file_fields(part)
    if not encoded:
        raise UnsupportedError(
            f"this server does not download {kind} by address or id: send the file in base64"
        )
    data = _decode_base64(encoded, kind)
    if data.startswith(b"%PDF-") or (declared_pdf and b"%PDF-" in data[:_MAX_PDF_OFFSET]):
        mark = f"\ue5c8file {hashlib.sha256(data).hexdigest()[:40]}\uf2a9"
        return AttachedPdf(mark, data, name, where, kind, in_question)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or declared_pdf:
        raise UnsupportedError(
            f"{kind} must be UTF-8 text or PDF, but {name or 'this one'} is neither"
        )
    return fenced(name, text)


def _decode_base64(sent_text: str, kind: str) -> bytes:
    """The bytes of a file sent as base64 or as a base64 data URL."""
    is_base64 = True
    encoded = sent_text
    if sent_text[:5].lower() == "data:":
        head, comma, encoded = sent_text.partition(",")
        is_base64 = bool(comma) and head.lower().endswith(";base64")
    if len(encoded) > MAX_BYTES * 4 // 3 + 4:
        raise UnsupportedError(f"{kind} may have at most {MAX_BYTES} bytes")
    if is_base64:
        with suppress(ValueError):
            return base64.b64decode(encoded, validate=True)
    raise UnsupportedError(f"{kind} must be base64, or a base64 data URL")


def _file_fields(part: Mapping[str, Any]) -> tuple[str, str, bool]:
    """(the file's name, its data as sent or "", True if declared as a PDF).

    Reads OpenAI's `file` and `input_file` and Anthropic's `document`.
    """
    inner: Any = part.get("file", part.get("source"))
    fields: Mapping[str, Any] = inner if isinstance(inner, Mapping) else part
    name = fields.get("filename", part.get("filename", part.get("title")))
    if not isinstance(name, str):
        name = ""
    name = re.sub(r"\s+", " ", name).strip()[:_MAX_NAME_CHARS]
    data = fields.get("file_data")
    if "file_data" not in fields and fields.get("type") == "base64":
        data = fields.get("data")
    if not isinstance(data, str):
        data = ""
    declared_pdf = data[:40].lower().startswith(f"data:{_PDF_TYPE};")
    return name, data, declared_pdf or fields.get("media_type") == _PDF_TYPE


def fenced(name: str, text: str) -> str:
    """A file's name, then its text between fences that do not occur in the text."""
    longest = max(map(len, re.findall(r"^`{3,}", text, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    title = f"File {name}" if name else "File"
    if text and not text.endswith("\n"):
        text += "\n"
    return f"{title}:\n{fence}\n{text}{fence}"
