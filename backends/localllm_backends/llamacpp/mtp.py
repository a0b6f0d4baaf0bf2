"""A model's own draft heads (MTP, "NextN") on llama.cpp: layers after the model's last one.

From a token and the model's hidden state at the position before it, a head predicts the token after
it. The order of operations follows llama.cpp's own driver: common/speculative.cpp,
common_speculative_impl_draft_mtp.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, SequenceId
from localllm_backends.draft_head_state import LONGEST_DRAFT, MIN_PROBABILITY
from localllm_backends.llamacpp.batch import Batch, Rows
from localllm_backends.llamacpp.gguf_header import NativeHeader, parts
from localllm_backends.llamacpp.heads import DraftHeads, best
from localllm_backends.llamacpp.native import bindings
from localllm_backends.llamacpp.weights import check_file

# Architectures whose heads llama.cpp runs in a separate context (src/models: DECODER_MTP graphs),
# and whether it runs several heads (nextn_layer_offset). For other architectures it aborts the
# process. Heads that share the model's KV (Gemma 4's assistants) are separate models in llama.cpp,
# and are not run here.
_ARCHITECTURES = {
    "bailingmoe3": False, "cohere2moe": False, "deepseek2": False, "deepseek32": False,
    "deepseek4": False,
    "glm-dsa": False, "glm4moe": False, "glm5-next": False, "hy_v3": True, "mimo2": True,
    "nemotron_h_moe": False,
    "qwen35": False, "qwen35moe": False, "qwen3next": False, "step35": True,
}  # fmt: skip


def check_heads(path: Path) -> None:
    """Raise LoadError, with the reason, unless the heads in this GGUF can draft here. Reads headers
    only."""
    check_file(path)
    missing = bindings().missing("mtp")
    reason = f"this llama.cpp can't: {missing}"
    if not missing:
        reason = _heads_unfit([NativeHeader(part) for part in parts(path)])
    if reason:
        raise LoadError(
            f"{path.name!r}: its draft heads can't be used: {reason}",
            "load the model with `--draft off`",
        )


def _heads_unfit(headers: Sequence[NativeHeader]) -> str:
    """Return why the heads in a model's files can't draft; "" if they can."""
    first = headers[0]
    architecture = first.text("general.architecture")
    n_heads = first.number(f"{architecture}.nextn_predict_layers")
    if not n_heads:
        return "its header lists no draft heads (nextn_predict_layers)"
    if architecture not in _ARCHITECTURES:
        return f"llama.cpp does not support draft heads of {architecture!r} models"
    if n_heads > 1 and not _ARCHITECTURES[architecture]:
        return (
            f"llama.cpp supports one draft head for {architecture!r} models, but "
            f"this file has {n_heads}"
        )
    if architecture == "deepseek2" and not first.number("deepseek2.attention.key_length_mla"):
        return "llama.cpp supports the draft head of 'deepseek2' models only with MLA attention"
    first_head = first.number(f"{architecture}.block_count") - n_heads
    weight = f"blk.{first_head}.nextn.eh_proj.weight"
    if not any(header.has_tensor(weight) for header in headers):
        return "its header lists draft heads, but the file does not contain their weights"
    return ""


class MtpHeads(DraftHeads):
    """Heads that draft one token after another, each from the hidden row of the previous one."""

    kind = "mtp"

    def __init__(
        self, llama: Any, target: Any, context: Any, layers: Sequence[int | None] = (None,)
    ) -> None:
        super().__init__(llama, target, context, layers)
        # All layers of a drafter are one head.
        self._n_heads = 1
        if self._drafter is None:
            own = llama.llama_get_model(context)
            self._n_heads = max(1, int(llama.llama_model_n_layer_nextn(own)))
        # Several heads draft one token each. A single head continues from its own tokens.
        self.longest = LONGEST_DRAFT
        if self._n_heads > 1:
            self.longest = self._n_heads
        # Return only the heads' own rows that are outputs.
        llama.llama_set_embeddings_nextn(context, True, True)
        self._batch = Batch(llama, self._n_batch, width=self._n_hidden)

    def _inputs(self, rows: Sequence[Rows]) -> Sequence[Rows]:
        """Return the heads' inputs for these rows of the model; here, the rows themselves."""
        return rows

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        """Run one pass for each head."""
        batch = self._batch
        first: dict[SequenceId, int] = {}
        batch.clear()
        rows = self._inputs([self._states[s].rows[i] for s, i in places])
        for (sequence, i), row in zip(places, rows, strict=True):
            state = self._states[sequence]
            first.setdefault(sequence, state.read + i)
            batch.add_row(state.unread[i], state.read + i, sequence, row, output=False)
        for head in range(self._n_heads):
            if head:
                # Each head has its own layer. The same cells are written again for it.
                for sequence, position in first.items():
                    self._memory.cut(sequence, position)
            if not self.decode(head):
                return False
        return True

    def decode(self, head: int) -> bool:
        if self._n_heads > 1:
            self._llama.llama_set_nextn_layer_offset(self._context, head)
        return self._decoder.decode(self._batch.native) == 0

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Draft for all sequences in lockstep."""
        sequences = [sequence for sequence, _, _ in wanted]
        drafts: list[list[int]] = [[] for _ in wanted]
        self.catch_up(sequences)
        newest = self._inputs([self._states[sequence].rows[-1] for sequence in sequences])
        rows: list[list[Rows]] = [[row] for row in newest]
        active = [i for i, (_, _, most) in enumerate(wanted) if most > 0]
        del active[self._n_batch // self._n_heads :]
        step = 0
        while active and step < self.longest:
            self._batch.clear()
            for i in active:
                self._add_draft_rows(wanted[i], drafts[i], rows[i], step)
            if not self.decode(step if self._n_heads > 1 else 0):
                break
            self._take_guesses(active, drafts, rows)
            step += 1
            active = [i for i in active if step == len(drafts[i]) < wanted[i][2]]
        self.forget_drafts(sequences)
        return drafts

    def _take_guesses(
        self, active: list[int], drafts: list[list[int]], rows: list[list[Rows]]
    ) -> None:
        """Add the newest token and hidden row to each of the `active` drafts, if the token is
        likely."""
        # All rows are outputs. So it does not matter if a model's graph returns the hidden rows of
        # all tokens or of outputs only.
        n = int(self._batch.native.n_tokens)
        each = n // len(active)
        logits = self._decoder.logits(n)
        hidden = self._hidden(n)
        last = each - 1
        for i in active:
            token, probability = best(logits[last])
            if probability >= MIN_PROBABILITY:
                drafts[i].append(token)
                rows[i].append(hidden[last].copy())
            last += each

    def _add_draft_rows(
        self, want: tuple[SequenceId, int, int], drafted: list[int], rows: list[Rows], step: int
    ) -> None:
        """Add a sequence's next rows to the batch.

        A single head continues from its last token. With several heads, each head reads all tokens
        since the model's last one again, since only it can write the KV of its layer.
        """
        sequence, newest, _ = want
        base = self._states[sequence].read
        tokens = [newest, *drafted]
        begin = 0 if self._n_heads > 1 else step
        if begin == 0 and step:
            self._memory.cut(sequence, base)
        for i in range(begin, step + 1):
            self._batch.add_row(tokens[i], base + i, sequence, rows[i], output=True)
