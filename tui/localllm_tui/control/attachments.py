"""Attachments of a question: text files, PDFs, images and sounds, how they are written in its text,
and their tokens."""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from localllm import paths
from localllm.conversation import pdf, sounds
from localllm.conversation.history import StoredMessage
from localllm.errors import ContextLengthError, UsageError

# No tokenizer in use averages more bytes than this over a text; the server counts exactly, this
# only refuses early.
MAX_BYTES_PER_TOKEN = 8
# Larger than any context served today.
MAX_BYTES = 16_000_000
# The formats that servers read, and the endings of files that were meant to be an image or a sound.
_MEDIA_ENDINGS = {
    "PNG, JPEG, WebP or GIF": (
        ".png", ".jpg", ".jpeg", ".webp", ".gif", ".heic", ".heif", ".avif", ".bmp", ".tif", ".tiff"
    ),
    "WAV, MP3 or FLAC": (
        ".wav", ".mp3", ".flac", ".m4a", ".aac", ".ogg", ".oga", ".opus", ".aiff", ".wma"
    ),
}  # fmt: skip


def read_text(path: Path) -> tuple[str, str]:
    """(name, text) of a UTF-8 file or a PDF, for which it may take seconds; of an image or a
    sound its data URL. Raises UsageError."""
    path = path.expanduser()
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UsageError(
                f"{path.name} is {size:,} bytes, but at most {MAX_BYTES:,} can be attached"
            )
        data = paths.file_bytes(path, MAX_BYTES)
    except OSError as e:
        raise UsageError(f"{path} can't be read: {e.strerror or e}") from e
    url = data_url(data)
    if url:
        return path.name, url
    if data.startswith(b"%PDF-"):
        return path.name, _text_of_pdf(path.name, data)
    for formats, endings in _MEDIA_ENDINGS.items():
        if path.name.lower().endswith(endings):
            raise UsageError(
                f"{path.name} can't be attached: it is damaged, or its format is not {formats}",
                hint="convert it to one of these formats first",
            )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(
            f"{path.name} is not UTF-8 text (byte {e.start:,} is not)",
            hint="convert it first, for example with iconv",
        ) from e
    if "\0" in text:
        raise UsageError(
            f"{path.name} is a binary file, but models read only text, images and sounds"
        )
    return path.name, text


# More files make no sensible question, and each is a line in the list of attachments.
MAX_OF_A_FOLDER = 200


def read_files(path: Path) -> tuple[list[tuple[str, str]], int]:
    """(name, text) of a file, or of each text file below a folder, except those that git ignores;
    and the number of files that are no text.

    Raises UsageError for too many files or bytes, and if the folder has no text files.
    """
    folder = path.expanduser()
    if not folder.is_dir():
        return [read_text(folder)], 0
    names = files_below(folder)
    if len(names) > MAX_OF_A_FOLDER:
        raise UsageError(
            f"{folder} has {len(names):,} files, but at most {MAX_OF_A_FOLDER} can be attached",
            hint="attach a folder within it",
        )
    size = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    if size > MAX_BYTES:
        raise UsageError(
            f"{folder} has more than {MAX_BYTES:,} bytes of files",
            hint="attach a folder within it",
        )
    texts = []
    for name in names:
        with suppress(UsageError):
            text = read_text(folder / name)[1]
            if not is_media(text):
                texts.append((f"{folder.name}/{name}", text))
    if not texts:
        raise UsageError(
            f"{folder} has no text files",
            hint="hidden files, binaries and files that git ignores are skipped",
        )
    return texts, len(names) - len(texts)


def _text_of_pdf(name: str, data: bytes) -> str:
    """The text of its pages. A page that is a picture is named as one; a PDF of pictures alone is
    refused."""
    if not pdf.installed():
        raise UsageError(
            f"{name} is a PDF, and {pdf.MISSING.partition(': ')[0]}",
            hint=pdf.MISSING.partition(": ")[2],
        )
    found = pdf.read(data, pictures=False)
    if found.problem:
        raise UsageError(
            f"{name}: {found.problem}", hint="attach its text, or pictures of its pages"
        )
    if not any(page.text for page in found.pages):
        raise UsageError(
            f"{name} has no text: its pages are pictures", hint="attach pictures of its pages"
        )
    pages = [page.text or f"[page {n} is a picture]" for n, page in enumerate(found.pages, 1)]
    return "\n\n".join(pages)


def check_fits_context(attached: Sequence[tuple[str, str]], n_ctx: int | None) -> None:
    """Refuse files that can't fit in a context of `n_ctx` tokens with any tokenizer. Raises
    ContextLengthError."""
    # The tokens of media depend on the model, so the server counts them.
    size = sum(len(text.encode()) for _, text in attached if not is_media(text))
    if n_ctx is None or size <= n_ctx * MAX_BYTES_PER_TOKEN:
        return
    names = ", ".join(name for name, _ in attached)
    raise ContextLengthError(
        f"{names}: {size:,} bytes can't fit in a context of {n_ctx:,} tokens "
        f"(at most {n_ctx * MAX_BYTES_PER_TOKEN:,} bytes fit)",
        hint="attach a part, or start the chat with a larger --context",
    )


_IMAGE = re.compile(
    rb"(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8[79]a)|(?P<webp>RIFF.{4}WEBP)",
    re.DOTALL,
)
_MARKED = re.compile(
    r"!\[([^\]\n]*)\]\((data:(?:image|audio)/[a-z0-9]+;base64,[A-Za-z0-9+/=]+)\)\n*"
)


def data_url(data: bytes) -> str:
    """The file as a data: URL if it is an image or a sound that servers read; else ""."""
    image = _IMAGE.match(data)
    if image is not None:
        kind = f"image/{image.lastgroup}"
    elif sounds.kind_of(data):
        kind = f"audio/{sounds.kind_of(data)}"
    else:
        return ""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def is_media(text: str) -> bool:
    """True if an attachment is the data: URL of an image or a sound."""
    return text.startswith("data:image/") or is_sound(text)


def is_sound(text: str) -> bool:
    """True if an attachment is the data: URL of a sound."""
    return text.startswith("data:audio/")


def sound_length(url: str) -> str:
    """The length of a sound as minutes and seconds; "" if its file does not tell."""
    length_s = sounds.length_s(base64.b64decode(url.partition(",")[2]))
    if length_s is None:
        return ""
    minutes, seconds = divmod(round(length_s), 60)
    return f"{minutes}:{seconds:02d}"


def as_sent(
    messages: Sequence[Mapping[str, Any]], *, items: bool = False
) -> list[Mapping[str, Any]]:
    """`messages` with the images and sounds in questions as parts, as /v1/chat/completions reads them
    (`items`: /v1/responses)."""
    return [_in_parts(m, items=items) for m in messages]


def _in_parts(message: Mapping[str, Any], *, items: bool) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, str) or not _MARKED.search(content):
        return message
    *marked, rest = _MARKED.split(content)  # a text, a name and a medium in turn
    parts: list[dict[str, Any]] = []
    kind = "input_text" if items else "text"
    for text, url in zip(marked[::3], marked[2::3], strict=True):
        if text.strip("\n"):
            parts.append({"type": kind, "text": text.strip("\n")})
        if is_sound(url):
            head, _, data = url.partition(",")
            form = head.partition("/")[2].partition(";")[0]
            parts.append({"type": "input_audio", "input_audio": {"data": data, "format": form}})
        elif items:
            parts.append({"type": "input_image", "image_url": url})
        else:
            parts.append({"type": "image_url", "image_url": {"url": url}})
    if rest:
        parts.append({"type": kind, "text": rest})
    return {**message, "content": parts}


def typed_in(question: StoredMessage) -> str:
    """The text that was typed for `question`, without the attached files."""
    return str(question.meta.get("typed", question.content))


def code_blocks(markdown: str) -> list[str]:
    """The contents of the fenced code blocks in `markdown`, in order; an unclosed last one
    counts."""
    from markdown_it import (
        MarkdownIt,
    )  # parsed like drawn answers, so that the numbers on the screen match

    drawn = re.sub("\r(?!\n)", "", markdown)  # the screen shows no line break there
    return [
        found.content.rstrip("\n")
        for found in MarkdownIt("gfm-like").parse(drawn)
        if found.type == "fence"
    ]


def code_block(markdown: str, number: int | None, whose: str) -> tuple[str, str]:
    """The code block of this number (None: the last), and its name in words. Raises UsageError if
    `whose` has no such block."""
    blocks = code_blocks(markdown)
    if not blocks:
        raise UsageError(f"{whose} has 0 code blocks")
    at = len(blocks) if number is None else number
    if not 1 <= at <= len(blocks):
        raise UsageError(f"{whose} has {len(blocks)} code blocks, not {at}")
    return blocks[at - 1], f"code block {at} of {len(blocks)}"


def fenced(name: str, body: str) -> str:
    """A file's text as a named Markdown code block, its fence longer than any inside; media as a
    Markdown image."""
    if is_media(body):
        return f"![{re.sub(r'[^-_.0-9A-Za-z ]', '_', name)}]({body})"
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    language = name.rpartition(".")[2] if "." in name else ""
    return f"File {name}:\n{fence}{language}\n{body.rstrip()}\n{fence}"


def with_files(text: str, attached: Sequence[tuple[str, str]], files: str = "") -> str:
    """Return a question as it is sent: `files` (already fenced), the `attached` files, then the
    text."""
    parts = [files] if files else []
    parts += [fenced(name, body) for name, body in attached]
    return "\n\n".join([*parts, text])


def files_of(turn: StoredMessage) -> tuple[str, list[str]]:
    """The files that went with a question: fenced as they were sent, and their names."""
    names = [str(name) for name in turn.meta.get("attached", ())]
    if not names:
        return "", []
    typed = str(turn.meta.get("typed", ""))
    return turn.content.removesuffix(typed).rstrip(), names


# More names than this are not read.
MAX_FILES = 20_000
_GIT_WITHIN_S = 2.0


def files_below(folder: Path) -> list[str]:
    """The files below `folder`, as relative paths: those that git does not ignore, or without git
    those that are not hidden."""
    try:
        known = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=folder,
            capture_output=True,
            timeout=_GIT_WITHIN_S,
            check=True,
        )
        names = [os.fsdecode(name) for name in known.stdout.split(b"\0") if name]
        return sorted(names[:MAX_FILES])
    except (OSError, subprocess.SubprocessError):
        return sorted(islice(_walk(folder), MAX_FILES))


def files_and_folders(folder: Path) -> list[str]:
    """Return the files below `folder`, and their folders with a slash at the end."""
    names = files_below(folder)
    folders: set[Path] = set().union(*(Path(name).parents for name in names)) - {Path()}
    return sorted([*names, *(f"{folder.as_posix()}/" for folder in folders)])


def names_like(typed: str, names: list[str]) -> list[str]:
    """The names that have the letters of `typed` in their order: those that have it whole first,
    the shorter before the longer."""
    if not typed:
        return names
    complete_match = []
    scattered = []
    for name in names:
        if typed.lower() in name.lower():
            complete_match.append(name)
        elif _has_letters(name.lower(), typed.lower()):
            scattered.append(name)
    return sorted(complete_match, key=len) + sorted(scattered, key=len)


def _has_letters(name: str, typed: str) -> bool:
    letters = iter(name)
    return all(letter in letters for letter in typed if letter != " ")


def _walk(folder: Path) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        folders[:] = [name for name in folders if name not in ("node_modules", "__pycache__")]
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(where, name), folder)


# Paths of dropped files have fewer characters than this.
_LONGEST_DROP = 100_000


def dropped_files(pasted: str) -> list[Path]:
    """The files whose paths a terminal typed because they were dropped on it; empty if `pasted` is
    other text.

    Terminals quote the paths, put a backslash before spaces, or give file:// addresses.
    """
    text = pasted.strip()
    if len(text) > _LONGEST_DROP or "\0" in text:
        return []
    if not text.startswith(("/", "~", "'", '"', "file://")):
        return []
    complete_match = _path(text)
    if complete_match is not None:
        return [complete_match]
    try:
        parts = shlex.split(text)
    except ValueError:
        return []
    paths = []
    for part in parts:
        path = _path(part)
        if path is None:
            return []
        paths.append(path)
    return paths


def _path(text: str) -> Path | None:
    if text.startswith("file://"):
        text = unquote(urlparse(text).path)
    try:
        path = Path(text).expanduser()
        if path.is_absolute() and path.is_file():
            return path
        return None
    except (OSError, RuntimeError, ValueError):
        return None
