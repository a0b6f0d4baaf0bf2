"""Images in messages of any dialect: each is extracted, and a mark replaces it in the text.

The content of a message stays a text, so templates, compaction and prefix_reuse.py need no code for
images. A mark is named by the hash of its file, so the same image has the same mark in every turn.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.conversation import sounds
from localllm.errors import RequestError, UnsupportedError

KINDS = ("image_url", "image", "input_image")
_DATA = "data:"
_TYPES = (
    "image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "application/octet-stream"
)  # fmt: skip
# The beginning of every JPEG in base64. It looks like a path.
_JPEG = "/9j/"
_ADDRESS = re.compile(r"https?://[^\s]{1,4000}\Z", re.IGNORECASE)
NOTE = "[image omitted: this model does not support images]"
_REMOTE = "this server does not download images: send the image as a data URL or in base64"


@dataclass(frozen=True, slots=True)
class AttachedImage:
    """An image in a message, whose text contains `mark` in its place.

    - `file`: the image in base64, or "" if there is a `problem`.
    - `in_question`: the image belongs to the turn to be answered.
    - `address`: the URL from which it could be fetched, if fetching is allowed.
    """

    mark: str
    file: str
    where: str
    in_question: bool
    problem: str = ""
    address: str = ""

    def fetched(self, data: bytes) -> AttachedImage:
        """A copy of this image with `data` as its file."""
        file = base64.b64encode(data).decode()
        return replace(self, mark=_mark(file), file=file, problem="", address="")


@dataclass
class PreparedMessages:
    """Messages as a model gets them.

    `files` maps marks to images in base64 or to samples. `ignored` names the field whose images were replaced by
    notes.
    """

    messages: list[dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def attached(part: Mapping[str, Any], where: str, *, in_question: bool) -> AttachedImage:
    """The image in a part of a message, in any dialect's form."""
    file: Any = part.get("image_url", part.get("source", part.get("image", part.get("url"))))
    if isinstance(file, Mapping):
        if file.get("type") == "base64" or "data" in file:
            file = file.get("data")
        else:
            file = file.get("url")
    return attached_image(file, where, in_question=in_question)


def attached_image(file: Any, where: str, *, in_question: bool) -> AttachedImage:
    """The image in `file`: base64, or a base64 data URL."""
    data, problem = _without_scheme(file)
    image = AttachedImage(_mark(data or where), data, where, in_question, problem)
    if problem == _REMOTE and _ADDRESS.match(file):
        return replace(image, address=file)
    return image


def _mark(name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"\ue5c8image {digest[:40]}\uf2a9"


def _without_scheme(file: Any) -> tuple[str, str]:
    """(the base64, or the reason why there is no image)."""
    if not isinstance(file, str) or not file:
        return "", "the image is missing: send a data URL or base64"
    if file[: len(_DATA)].lower() == _DATA:
        head, comma, data = file.partition(",")
        kind, _, coding = head[len(_DATA) :].lower().partition(";")
        if not comma or not coding.endswith("base64"):
            return "", "an image's data URL must be in base64"
        if kind and kind not in _TYPES:
            return "", f"{kind[:40]} is not supported: send PNG, JPEG, WebP or GIF"
        return data, ""
    if "://" in file[:64] or (file.startswith(("/", ".", "~")) and not file.startswith(_JPEG)):
        return "", _REMOTE
    return file, ""


def prepare_media(messages: Sequence[Mapping[str, Any]], *, vision: bool) -> PreparedMessages:
    """`messages` for a model with or without vision. Their sounds are decoded already.

    A note replaces each image of an earlier turn that the model can't read. Such an image in the
    turn to be answered raises RequestError.
    """
    prepared = PreparedMessages([])
    for message in messages:
        copy = dict(message)
        for sound in copy.pop("sounds", ()):
            prepared.files[sound.mark] = sounds.SAMPLES + sound.samples
        for image in copy.pop("images", ()):
            if vision and not image.problem:
                prepared.files[image.mark] = image.file
                continue
            if image.in_question and vision:
                raise RequestError(f"{image.where}: {image.problem}", param=image.where)
            if image.in_question:
                raise UnsupportedError(
                    f"{image.where}: this model does not support images",
                    param=image.where,
                    hint=(
                        "`localllm recommend --sees` lists models that read them; a projector "
                        "file must be in the model's folder"
                    ),
                )
            note = f"[{image.problem}]" if vision else NOTE
            copy["content"] = copy["content"].replace(image.mark, note, 1)
            prepared.ignored = ["messages.images"]
        prepared.messages.append(copy)
    return prepared


def images_in_prompt(
    text: str, marker: str, files: Sequence[str], where: str, *, vision: bool
) -> tuple[str, dict[str, str]]:
    """A text prompt with marks in place of each `marker`, and the files by their marks.

    Each `marker` in the text refers to the next of `files`. Raises RequestError.
    """
    parts = text.split(marker)
    n_markers = len(parts) - 1
    if n_markers != len(files):
        raise RequestError(
            f"the prompt has {n_markers} markers {marker}, but {where} has {len(files)} images: "
            "send one image for each marker",
            param=where,
        )
    images = []
    text_with_marks = parts[0]
    for i, file in enumerate(files):
        image = attached_image(file, f"{where}[{i}]", in_question=True)
        images.append(image)
        text_with_marks += image.mark + parts[i + 1]
    prepared = prepare_media([{"content": text_with_marks, "images": images}], vision=vision)
    return text_with_marks, prepared.files
