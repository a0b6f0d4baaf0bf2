"""GET /slots: what a loaded model is working at, without a word of any prompt."""

from __future__ import annotations

from typing import Any

from localllm.server.models.served import ServedModel


async def slots(model: ServedModel) -> list[dict[str, Any]]:
    """One entry per request that can run at once, with the one that runs there; then those that wait."""
    info = model.info
    if not model.loaded or info is None:
        return []
    jobs: list[dict[str, Any]] = (await model.snapshot()).get("jobs", [])
    running = [j for j in jobs if j["state"] != "waiting"]
    waiting = [j for j in jobs if j["state"] == "waiting"]
    free = max(0, info.n_seq_max - len(running))
    entries = [*running, *[None] * free, *waiting]
    return [_slot(i, info.n_ctx, job) for i, job in enumerate(entries)]


def _slot(number: int, n_ctx: int, job: dict[str, Any] | None) -> dict[str, Any]:
    base = {"id": number, "n_ctx": n_ctx, "speculative": True, "is_processing": job is not None}
    if job is None:
        return {**base, "state": "idle"}
    return {
        **base,
        "state": job["state"],
        "id_task": job["number"],
        "n_prompt_tokens": job["prompt_tokens"],
        "n_prompt_tokens_processed": job["processed_tokens"],
        "n_prompt_tokens_cache": job["cached_tokens"],
        "params": {**job["sampling"], "n_predict": job["max_tokens"], "max_tokens": job["max_tokens"]},
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": False,
                "n_remain": job["max_tokens"] - job["generated_tokens"],
                "n_decoded": job["generated_tokens"],
            }
        ],
    }
