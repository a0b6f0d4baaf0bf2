"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound as a form, its text as JSON,
plain text or events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from localllm.conversation import sounds
from localllm.engine.messages import Generation, LoopLimits, Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import RequestBody
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob, PrefillProgress, Reply, ReplyWriter
from localllm.server.generation.prompt import ResponseOptions
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import TranslatedRequest

_TASKS = {
    "transcribe": "Transcribe the speech in this recording. Answer with its words alone.",
    "translate": "Translate the speech in this recording into English. Answer with the translation alone.",
}
# Speech models repeat themselves in silence.
_LOOPS = LoopLimits(max_pattern_size=64, min_count=10)
# Formats that need the time of each line.
_TIMED = ("srt", "vtt", "diarized_json")
# Qwen3-ASR writes the language and this mark before the text.
_ASR_MARK = "<asr_text>"
_ASR_BEGINS = "language "
_ASR_CHARS = 80


class TranscriptionFields(RequestBody):
    """POST /v1/audio/transcriptions, apart from `file`."""

    language: str | None = Field(None, max_length=40, description="the language that is spoken")
    prompt: str | None = Field(
        None, max_length=8192, description="names and spellings that may occur"
    )
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt", "diarized_json"] = "json"
    temperature: float | None = Field(None, ge=0, le=1, description="default: 0")
    timestamp_granularities: list[Literal["word", "segment"]] | None = None


def translate(
    fields: TranscriptionFields, files: Mapping[str, bytes], model: ServedModel, *, task: str
) -> TranslatedRequest:
    """Translate a form into a conversation of one turn: the sound, and what to do with it. Raises
    RequestError and UnsupportedError.

    `task`: "transcribe" or "translate"."""
    if not sounds.installed():
        raise UnsupportedError(sounds.MISSING)
    data = files.get("file")
    if data is None:
        raise RequestError("file is missing: send the sound as the form's file", param="file")
    if fields.response_format in _TIMED or fields.timestamp_granularities:
        asked: str = fields.response_format
        if asked not in _TIMED:
            asked = "timestamp_granularities"
        raise UnsupportedError(
            f"{asked} needs times, but models here write text without times",
            hint="use response_format json, text or verbose_json",
        )
    sound = sounds.attached_sound(data, "file", in_question=True)
    content = f"{sound.mark}\n{_instruction(fields, task)}"
    messages = [{"role": "user", "content": content, "sounds": [sound]}]
    sampling = replace(Sampling(), temperature=fields.temperature or 0.0)
    generation = Generation(sampling, loops=_LOOPS)
    chat = ChatRequest(messages, generation, ResponseOptions(effort="none"))

    def body(reply: Reply, job: GenerationJob) -> Any:
        text = _Transcript().feed(reply.choices[0].text, last=True).strip()
        if fields.response_format == "text":
            return text + "\n"
        if fields.response_format == "json":
            return {"text": text, "usage": _usage(reply)}
        return {
            "task": task,
            "language": fields.language or "unknown",
            "duration": _duration_s(job, model),
            "text": text,
            "segments": [],
            "usage": _usage(reply),
        }

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        return TranscriptEvents(outbox)

    return TranslatedRequest(chat, body, writer)


def _instruction(fields: TranscriptionFields, task: str) -> str:
    lines = [_TASKS[task]]
    if fields.language:
        lines.append(f"The language is {fields.language}.")
    if fields.prompt:
        lines.append(f"These words may occur: {fields.prompt}")
    return "\n".join(lines)


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _duration_s(job: GenerationJob, model: ServedModel) -> float:
    """Return the length of the job's sound."""
    rate_hz = model.info.audio_rate_hz if model.info is not None else 0
    n_bytes = sum(sounds.sample_bytes(file) for file in job.media.values())
    return round(n_bytes / 4 / max(rate_hz, 1), 3)


class _Transcript:
    """Removes what speech models write before the text: its language and a mark."""

    def __init__(self) -> None:
        self._held: str | None = ""

    def feed(self, text: str, *, last: bool = False) -> str:
        """Return the part of the transcript that is certain after more `text`."""
        if self._held is None:
            return text
        self._held += text
        _, mark, rest = self._held.partition(_ASR_MARK)
        undecided = self._held[: len(_ASR_BEGINS)] == _ASR_BEGINS[: len(self._held)]
        if not mark and undecided and not last and len(self._held) < _ASR_CHARS:
            return ""
        found = rest if mark else self._held
        self._held = None
        return found


class TranscriptEvents(ReplyWriter):
    """Writes transcript.text.delta events, and transcript.text.done at the end."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._transcript = _Transcript()
        self._texts: list[str] = []

    def text(self, choice: int, text: str, logprobs: tuple[Any, ...]) -> None:
        self._shown(self._transcript.feed(text))

    def end(self, reply: Reply) -> None:
        self._shown(self._transcript.feed("", last=True))
        done = {"text": "".join(self._texts).strip(), "usage": _usage(reply)}
        self._event("transcript.text.done", done)
        self._outbox.write(b"data: [DONE]\n\n")

    def _shown(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._event("transcript.text.delta", {"delta": text})

    def _event(self, kind: str, data: dict[str, Any]) -> None:
        self._outbox.write(b"data: " + json.dumps({"type": kind, **data}).encode() + b"\n\n")
