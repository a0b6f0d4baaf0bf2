"""Files that go with a question: text, the text of a PDF, or an image; refused with a clear reason where it is none, or can't fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localllm.conversation import pdf
from localllm.errors import ContextLengthError, UsageError
from localllm_tui.control.images import data_url, is_image

# No tokenizer in use averages more bytes than this over a text; the server counts exactly, this only refuses early.
MAX_BYTES_PER_TOKEN = 8
# Beyond any context served today: reading more could only end in the same refusal, later.
MAX_BYTES = 16_000_000


def is_pdf(data: bytes) -> bool:
    """Whether a file that begins so is a PDF."""
    return data.startswith(b"%PDF-")


def read_text(path: Path) -> tuple[str, str]:
    """(name, text) of a UTF-8 file or a PDF, for which it may take seconds; of an image its data URL. Raises UsageError."""
    path = path.expanduser()
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder, and only files can be attached", hint="attach the files one by one")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UsageError(f"{path.name} is {size:,} bytes, and at most {MAX_BYTES:,} can be attached")
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{path} can't be read: {e.strerror or e}") from e
    url = data_url(data)
    if url:
        return path.name, url
    if is_pdf(data):
        return path.name, _text_of_pdf(path.name, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(
            f"{path.name} is not UTF-8 text (byte {e.start:,} is not)", hint="convert it first, for example with iconv"
        ) from e
    if "\0" in text:
        raise UsageError(f"{path.name} is a binary file, and models read text and images")
    return path.name, text


def _text_of_pdf(name: str, data: bytes) -> str:
    """Its pages, one after another. One that is a picture says so; a PDF of nothing else is refused."""
    if not pdf.installed():
        raise UsageError(f"{name} is a PDF, and {pdf.MISSING.partition(': ')[0]}", hint=pdf.MISSING.partition(": ")[2])
    found = pdf.read(data, pictures=False)
    if found.problem:
        raise UsageError(f"{name}: {found.problem}", hint="attach its text, or pictures of its pages")
    if not any(page.text for page in found.pages):
        raise UsageError(f"{name} has no text: its pages are pictures", hint="attach pictures of its pages")
    return "\n\n".join(page.text or f"[page {n} is a picture]" for n, page in enumerate(found.pages, 1))


def check_room(attached: Sequence[tuple[str, str]], n_ctx: int | None) -> None:
    """Refuse files that can't fit in a context of `n_ctx` tokens whatever the tokenizer. Raises ContextLengthError."""
    # What an image comes to depends on the model: the server counts it.
    size = sum(len(text.encode()) for _, text in attached if not is_image(text))
    if n_ctx is not None and size > n_ctx * MAX_BYTES_PER_TOKEN:
        raise ContextLengthError(
            f"{', '.join(name for name, _ in attached)}: {size:,} bytes can't fit in a context of {n_ctx:,} tokens "
            f"(at most {n_ctx * MAX_BYTES_PER_TOKEN:,} bytes could)",
            hint="attach a part, or start the chat with a larger --context",
        )
