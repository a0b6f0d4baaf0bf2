"""Reads PDFs with PDFium in a child process with limits on pages, bytes, memory and time.

Needs the extra `pdf`. PDFium's native parsers read untrusted bytes, so the process may crash, hang
or grow. A `LimitedChild` runs this module. A request has the PDF in base64 and the maximum number
of pictures. The response lists the pages. Each page has a `text`, or a `picture` in base64 if it
has no text, or neither. If the PDF can't be read, the response is the reason.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.limited_child import ChildError, ChildLimits, LimitedChild, RefusedError, serve

MAX_PAGES = 100
MAX_CHARS = 2_000_000
MAX_PICTURES = 20
# Small PDFs can unpack to any size. Scans in colour with 20 MB of data take 60 to 100 MiB, at 300
# and at 600 dpi.
_LIMITS = ChildLimits(cpu_s=20.0, memory_bytes=192 * 2**20, spare_bytes=32 * 2**20)
# The largest side of a page's picture in pixels. The text of a letter-size page is legible then.
_PICTURE_SIDE_PX = 1536
_JPEG_QUALITY = 85
# Longer than the child's CPU limit, because other processes may delay it.
_TIME_LIMIT_S = 3 * _LIMITS.cpu_s
MISSING = "PDF support is not installed: pip install 'localllm[pdf]'"


@dataclass(frozen=True, slots=True)
class Page:
    """A page's text, or a picture of it (JPEG in base64) if it has no text.

    Both are empty if the model does not see pictures.
    """

    text: str = ""
    picture: str = ""


@dataclass(frozen=True, slots=True)
class Pdf:
    """The pages of a PDF, or the problem if it can't be read."""

    pages: tuple[Page, ...] = ()
    problem: str = ""


def installed() -> bool:
    return importlib.util.find_spec("pypdfium2") is not None


def read(data: bytes, *, pictures: bool, time_limit_s: float = _TIME_LIMIT_S) -> Pdf:
    """Read the PDF `data`; blocks until the child has answered.

    `pictures` also renders pages without text, for a model with vision.
    """
    child = LimitedChild("localllm.conversation.pdf", _LIMITS)
    deadline_s = time.monotonic() + time_limit_s

    def has_time() -> bool:
        return time.monotonic() < deadline_s

    question = [base64.b64encode(data).decode(), MAX_PICTURES if pictures else 0]
    try:
        pages = child.ask(question, wanted=has_time)
    except RefusedError as e:
        return Pdf(problem=e.message)
    except ChildError as e:
        if not has_time():
            return Pdf(problem=f"the PDF could not be read within {time_limit_s:.0f} seconds")
        return Pdf(problem=f"the PDF is damaged, or too large to read: {e.message}")
    finally:
        child.close()
    return Pdf(tuple(Page(**page) for page in pages))


# --- the child ------------------------------------------------------------------------------------


def pages_of(data: bytes, pictures: int) -> list[dict[str, str]]:
    """The pages of a PDF. Raises ValueError with the reason if it can't be read."""
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(data) as document:
            if len(document) > MAX_PAGES:
                raise ValueError(f"the PDF has {len(document)} pages; the limit is {MAX_PAGES}")
            if not len(document):
                raise ValueError("the PDF has no pages")
            return _read(document, pictures)
    except pypdfium2.PdfiumError as e:
        if "password" in str(e).lower():
            raise ValueError("the PDF is protected by a password") from e
        raise ValueError("the PDF is damaged") from e


def _read(document: Any, pictures: int) -> list[dict[str, str]]:
    pages: list[dict[str, str]] = []
    n_chars = 0
    for page in document:
        textpage = page.get_textpage()
        text = textpage.get_text_bounded().replace("\r\n", "\n").replace("\0", "").strip()
        # Broken fonts produce lone surrogates, which can't be encoded.
        text = text.encode("utf-8", "replace").decode()
        textpage.close()
        n_chars += len(text)
        if n_chars > MAX_CHARS:
            raise ValueError(f"the PDF has more than {MAX_CHARS} characters")
        if text:
            pages.append({"text": text})
        elif pictures > 0:
            pictures -= 1
            pages.append({"picture": _picture(page)})
        else:
            pages.append({})
        page.close()
    return pages


def _picture(page: Any) -> str:
    scale = min(4.0, _PICTURE_SIDE_PX / max(*page.get_size(), 1.0))
    buffer = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()


def _answer(question: list[Any]) -> list[dict[str, str]]:
    pictures = question.pop()
    data = base64.b64decode(question.pop())  # the encoded text is freed
    return pages_of(data, pictures)


def _answerer(setup: object) -> Callable[[list[Any]], list[dict[str, str]]]:
    return _answer


if __name__ == "__main__":
    serve(_answerer)
