"""Fill-in-the-middle: code before and after the cursor, and other files, as the model's own FIM tokens.

The arrangement is llama.cpp's (tools/server, /infill): repository name, other files, then prefix, suffix, middle.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.engine.worker.client import EngineClient
from localllm.errors import UnsupportedError

# Of the window that is left beside the answer: the text before the cursor says more than the text after it.
_PREFIX_SHARE, _SUFFIX_SHARE = 0.6, 0.2


async def fim_prompt(
    engine: EngineClient,
    prefix: str,
    suffix: str,
    *,
    extra: Sequence[tuple[str, str]] = (),
    answer_tokens: int | None = None,
    middle: str = "",
) -> list[int]:
    """Token ids that make the model write what belongs between `prefix` and `suffix`.

    `extra` are other files as (name, text), the most relevant last; `middle` is what the answer begins with. Text too
    far from the cursor is left out so that prompt and `answer_tokens` fit the window. Raises UnsupportedError for a
    model without FIM tokens.
    """
    fim = engine.info.fim_tokens
    if not {"pre", "suf", "mid"} <= set(fim):
        raise UnsupportedError(
            "this model has no fill-in-the-middle tokens: it can't honour a suffix",
            hint="name one that has: `localllm recommend --for autocomplete` lists some",
            param="suffix",
        )
    window = engine.info.n_ctx - min(answer_tokens or 256, engine.info.n_ctx // 2)
    before = await engine.tokenize(prefix, special=False)
    after = await engine.tokenize(suffix, special=False)
    begun = await engine.tokenize(middle, special=False) if middle else []
    room = max(0, window - 8 - len(begun))
    keep_after = min(len(after), max(int(room * _SUFFIX_SHARE), room - len(before)))
    keep_before = min(len(before), max(int(room * _PREFIX_SHARE), room - keep_after))
    keep_after = min(keep_after, room - keep_before)
    cut = [fim["pre"], *before[len(before) - keep_before :], fim["suf"], *after[:keep_after], fim["mid"], *begun]
    context = await _files(engine, extra, room - keep_before - keep_after)
    bos = engine.info.bos_token
    return [*([bos] if engine.info.adds_bos and bos is not None else []), *context, *cut]


async def _files(engine: EngineClient, extra: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Other files, the last ones first to be kept."""
    fim = engine.info.fim_tokens
    parts: list[list[int]] = []
    for name, text in reversed(extra):
        body = await engine.tokenize(f"{name}\n{text}\n", special=False)
        part = [fim["sep"], *body] if "sep" in fim else [*await engine.tokenize("\n\n--- "), *body]
        if len(part) > room:
            break
        room -= len(part)
        parts.append(part)
    context = [t for part in reversed(parts) for t in part]
    if context and "sep" in fim:
        current = await engine.tokenize("filename\n", special=False)
        context = [*context, fim["sep"], *current] if room > len(current) + 1 else context
    return context
