"""What is said where only the bundled starter model is there: what it is, and the plans worth pulling on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from localllm_tui.control.desk import Offer
from localllm_tui.control.pulls import Pulls
from localllm_tui.control.wording import amount

SHOWN = 3
KEYS = ("F5", "F6", "F7")
STARTER = (
    "This is the starter model: 135 million parameters in 98 MB, bundled so that there is something to talk to at once. "
    "It shows how everything works, and is a toy: it often gets things wrong."
)


def lines(starter: str, offers: Sequence[Offer], pulls: Pulls, *, planned: bool) -> list[str]:
    """The page; until it is `planned` it says that it is looked up."""
    if not planned:
        return [STARTER, "", "Planning what this machine could run …"]
    best = worth(starter, offers)
    if not best:
        return [STARTER, "", "Nothing larger fits this machine: F4 shows why."]
    said = [STARTER, "", "Worth having on this machine; one key pulls one, while you chat on:"]
    for key, offer in zip(KEYS, best, strict=False):
        pull = pulls.of(offer.ref)
        if pull is not None and pull.done:
            said.append(f"  {key}  {offer.name} is here: {key} uses it")
        elif pull is not None:
            said.append(f"  {key}  {pull.words()}")
        else:
            speed = f"{offer.tok_s_low:.0f} to {offer.tok_s_high:.0f} tokens/s"
            said.append(f"  {key}  {offer.name} {offer.quant}: {amount(offer.file_bytes)}, {speed}")
    return [*said, "  F4  all models, with what each needs and why"]


def worth(starter: str, offers: Sequence[Offer]) -> list[Offer]:
    """The best plans that are not the starter itself."""
    return [o for o in offers if not starter.startswith(o.ref.partition(":")[0])][:SHOWN]
