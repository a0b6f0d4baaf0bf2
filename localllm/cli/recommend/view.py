"""Format the plans of one machine as tables or JSON. All decisions are made by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from localllm.cli.recommend.page import BAR, bar, clip, paragraph, speed, width, wrapped
from localllm.device.types import Device, device_to_json
from localllm.formatting import gb, mb, span
from localllm.library.catalog import OLD_DAYS
from localllm.load.candidates import projector_facts
from localllm.memory.verdict import TIGHT_MEANS
from localllm.plain_output import ascii_json
from localllm.planner import kv_sizes, scoring
from localllm.planner.serialise import recommendation_to_json
from localllm.planner.types import Plan, Recommendation, Rejected, backend_of
from localllm_backends import registry
from localllm_backends.declaration import Declaration
from localllm_catalog.types import Model

# Flags or commands that replace an assumed figure, or a CPU taken for this machine's.
ASSUMED_FIXES = ("--bandwidth GBPS", "localllm device --measure", "--device NAME")
# Columns of a row without the model's name. If the bar would leave less than `_MIN_NAME` columns
# for the name, it is omitted.
_ROW_COLUMNS = 43
_MIN_NAME = 20
_NEAR_MISSES_SHOWN = 2
# Maximum length of a list, so that it can be read at a glance.
_MAX_LINES = 25


def heading(device: Device, subject: str) -> list[str]:
    """Format the title, and the machine's memory and bandwidth with their sources."""
    simulated = " (simulated)" if device.simulated else ""
    lines = paragraph(f"{subject} on {device.name}{simulated}")
    lines += paragraph(_offered(device))
    for finding in device.findings:
        if finding.fix in ASSUMED_FIXES:
            lines += paragraph(f"{finding.message}; else: {finding.fix}")
    for account in device.accounts:
        lines += paragraph(account)
    return lines


def _offered(device: Device) -> str:
    """Format the machine's memory and bandwidth."""
    memory = device.memory
    text = f"{gb(device.usable_bytes)} usable of {memory.total_bytes / 1e9:.1f}"
    if memory.available_bytes < device.usable_bytes:
        text += f", {gb(memory.available_bytes)} free now"
    rate = device.bandwidth_gbps
    text += f"; {rate.value:,.0f} GB/s ({rate.basis})"
    if device.kind == "discrete" and device.host is not None:
        text += f"; plus {gb(device.host.limit_bytes)} of system memory"
        rate_of_host = device.host_bandwidth_gbps
        if rate_of_host:
            text += f" at {rate_of_host.value:,.0f} GB/s ({rate_of_host.basis})"
    return text


Installed = frozenset[tuple[str, str]]
NONE_INSTALLED: Installed = frozenset()


def marked(plan: Plan, installed: Installed) -> str:
    """Return the quant with marks that footnotes explain: ~ constructed, * other engine, +
    installed."""
    text = plan.variant.quant
    if plan.backend != _usual().name:
        text += "*"
    if (plan.model.id, plan.variant.quant) in installed:
        return f"{text}+"
    if plan.variant.is_estimate:
        return f"~{text}"
    return text


def numbered_rows(plans: Sequence[Plan], installed: Installed) -> tuple[str, list[str]]:
    """Format the header and a row for each plan.

    Narrow terminals omit the bar. Wide ones show full names.
    """
    name_columns = max([_MIN_NAME, *(len(p.model.name) for p in plans)])
    text_width = width() - _ROW_COLUMNS
    with_bar = text_width - BAR - 1 >= _MIN_NAME
    usable = ""
    if with_bar:
        usable = f"{'of usable':{BAR}} "
        text_width -= BAR + 1
    name_columns = min(name_columns, text_width)
    head = (
        f"    {'model':{name_columns}} {'quant':12} {'memory':>8} {usable}{'tok/s':>9} {'wait':>6}"
    )
    rows = []
    for number, plan in enumerate(plans, 1):
        name = clip(plan.model.name, name_columns)
        quant = clip(marked(plan, installed), 12)
        memory = gb(plan.memory.total_bytes)
        filled = _filled(plan) if with_bar else ""
        wait = span(plan.ttft_s.value)
        rows.append(
            f"{number:>3} {name:{name_columns}} {quant:12} {memory:>8} {filled}"
            f"{speed(plan.stream_range):>9} {wait:>6}"
        )
    return head, rows


def _filled(plan: Plan) -> str:
    """Format the plan's share of the usable memory as a bar and a space."""
    share = plan.memory.total_bytes / max(1, plan.memory.limit_bytes)
    return f"{bar(share)} "


def table(
    answer: Recommendation,
    device: Device,
    *,
    everything: bool = False,
    installed: Installed = NONE_INSTALLED,
    listings_days: int = 0,
) -> list[str]:
    """Format the recommended plans with reasons, near misses, and the command to run.

    The list has at most 25 lines and is shortened to fit. With `everything` it includes every model
    and its reason, and more about the first plan.

    `installed`: ids and quants of installed models.
    `listings_days`: the age of the catalog's listings.
    """
    need = scoring.need_of(answer.workload)
    plans = answer.plans
    at = ""
    if plans:
        at = f" with {plans[0].settings.n_ctx // 1024}k of context"
    lines = heading(device, f"Recommended for {need.purpose_text}{at}")
    if not plans:
        lines += ["", "  no model of the catalog fits and is fast enough; the reasons:"]
    end = _refused(answer, everything=everything)
    if listings_days > OLD_DAYS:
        end += paragraph(
            f"the catalog's listings are {listings_days} days old; "
            "update them: localllm catalog update"
        )
    end += _run(plans, device, installed)
    if not plans:
        return [*lines, *end]
    if everything:
        notes = _footnotes(plans, device, need.prompt_tokens, installed)
        notes += _bases(plans)
        notes += further(plans[0], "about the first:")
        return [*lines, *_blocks(plans, installed), "", *notes, *end]
    for n_shown in range(len(plans), 0, -1):
        shown = plans[:n_shown]
        found = [*lines, *_blocks(shown, installed, short=True)]
        if n_shown < len(plans):
            found.append(f"    … and {len(plans) - n_shown} more that fit (--all)")
        notes = _footnotes(shown, device, need.prompt_tokens, installed)
        found += ["", *notes, *end]
        if len(found) <= _MAX_LINES:
            break
    return found


def _one_line(text: str, first: str, further: str) -> list[str]:
    """Fit as many parts between semicolons as possible on one line, but at least the first."""
    parts = text.split("; ")
    while len(parts) > 1 and len(first + "; ".join(parts)) > width():
        parts.pop()
    return wrapped("; ".join(parts), first, further)


def _blocks(plans: Sequence[Plan], installed: Installed, *, short: bool = False) -> list[str]:
    """Format the header, and each plan's row with its reason below. `short`: reasons of one
    line."""

    if not plans:
        return []
    head, rows = numbered_rows(plans, installed)
    lines = ["", head]
    reason_lines = _one_line if short else wrapped
    for row, plan in zip(rows, plans, strict=True):
        lines.append(row)
        lines += reason_lines(f"{_unusual(plan, plans[0])}{plan.why}", "    ", "    ")
        if plan.memory.projector_bytes:
            lines += wrapped(projector_facts(plan), "    ", "    ")
    return lines


_CACHES = {"q8_0": "8-bit", "q8_0/q4_0": "8- and 4-bit", "q4_0": "4-bit"}


def _unusual(plan: Plan, first: Plan) -> str:
    """Return a prefix for the plan's reason if its context or KV type is unusual.

    The context is unusual if it differs from the first plan's, and the KV type if it is not f16.
    """
    text = ""
    if plan.settings.n_ctx != first.settings.n_ctx:
        text += f"{plan.settings.n_ctx // 1024}k of context; "
    kv_type = plan.settings.kv_type
    if kv_type != "f16":
        text += f"{_CACHES.get(kv_type, kv_type)} KV cache; "
    return text


def _refused(answer: Recommendation, *, everything: bool) -> list[str]:
    """Format the rejected models with reasons, the nearest misses first."""
    if everything:
        lines = []
        for rejected in answer.rejected:
            lines += wrapped(f"{rejected.model.name}: {rejected.reason}", "  ", "    ")
        return _titled("Not offered:", lines)
    near_misses = [r for r in answer.rejected if r.kind in _NEAR_MISSES]
    near_misses.sort(key=_nearness)
    lines = []
    for rejected in near_misses[:_NEAR_MISSES_SHOWN]:
        lines += _one_line(f"{rejected.model.name}: {rejected.reason}", "  ", "    ")
    if len(near_misses) > _NEAR_MISSES_SHOWN:
        lines.append(f"  … and {len(near_misses) - _NEAR_MISSES_SHOWN} more (--all)")
    return _titled("Not offered:", lines)


_NEAR_MISSES = ("memory", "speed", "context", "engine")


def _nearness(rejected: Rejected) -> tuple[int, int]:
    """Sort key: models that need another llama.cpp come first, then those that need more memory.

    Small ones come before large ones.
    """
    order = ("engine", "memory")
    rank = order.index(rejected.kind) if rejected.kind in order else len(order)
    return rank, rejected.variant.file_bytes


def _titled(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    return ["", title, *lines]


def _run(plans: Sequence[Plan], device: Device, installed: Installed) -> list[str]:
    """Return the command that runs the first plan. Empty for a simulated machine."""
    if device.simulated or not plans:
        return []
    model = plans[0].model.id
    quant = plans[0].variant.quant
    command = f"localllm chat -m {model}:{quant}"
    if (model, quant) not in installed:
        command = f"localllm pull {model}:{quant} && {command}"
    return ["", command]


def further(plan: Plan, title: str) -> list[str]:
    """Format the plan's further reasons below a title: context limits, the other engine,
    drafting."""
    if not plan.reasons:
        return []
    lines = [title]
    for reason in plan.reasons:
        lines += wrapped(reason, "  ", "    ")
    return lines


def _footnotes(
    plans: Sequence[Plan], device: Device, prompt_tokens: int, installed: Installed
) -> list[str]:
    lines = paragraph(
        "tok/s: 80 % range, with drafts if the plan has them; wait: until the first token after "
        f"{prompt_tokens:,} new tokens of prompt"
    )
    lines += _marks(plans, installed)
    if device.accelerator == "cpu" and not device.simulated and not device.matrix_rates:
        lines += paragraph(
            "the CPU's speed is assumed from its kind; `localllm device --measure` measures it"
        )
    return lines


def _bases(plans: Sequence[Plan]) -> list[str]:
    parts = chain.from_iterable(plan.decode_tok_s.basis.split("; ") for plan in plans)
    bases = list(dict.fromkeys(parts))
    return paragraph("speeds from " + "; ".join(bases[:4]))


def _usual() -> Declaration:
    """Return the engine whose plans have no mark."""
    return registry.running("gguf")


def _marks(plans: Sequence[Plan], installed: Installed) -> list[str]:
    """Explain the marks next to the quants that occur in `plans`."""
    signs = "".join(marked(p, installed) for p in plans)
    lines = []
    if "~" in signs:
        lines += paragraph("~ not in any listing: this file's name and size are estimated")
    if "*" in signs:
        labels = {backend_of(p.variant).label for p in plans if p.backend != _usual().name}
        others = " or ".join(sorted(labels))
        lines += paragraph(f"* runs on {others}, the rest on {_usual().label}")
    if "+" in signs:
        lines += paragraph("+ installed")
    return lines


def model_table(
    model: Model, plans: Sequence[Plan], device: Device, *, installed: Installed = NONE_INSTALLED
) -> list[str]:
    """Format every variant of one model, whether it fits, and memory by context."""
    title = model.name
    if len(plans) > 1:
        title = f"{model.name}: every variant"
    lines = [*heading(device, title), "", *_variant_rows(plans, installed), ""]
    first = plans[0]
    n_ctx = first.settings.n_ctx
    lines += paragraph(f"memory at {n_ctx:,} tokens of context; each further 1,024 tokens cost:")
    for kind, cost in _slopes(model):
        lines.append(f"  {kind:9} {mb(cost):>11}")
    lines += paragraph(
        "longest: longest context that fits; tok/s: 80 % range with a nearly empty context"
    )
    if any(p.fits == "tight" for p in plans):
        lines += paragraph(f"tight: {TIGHT_MEANS}")
    lines += paragraph(f"speeds from {first.decode_tok_s.basis}")
    if 0 < model.native_context < n_ctx:
        lines += paragraph(first.why)
    lines += _caches(plans)
    lines += paragraph(model.shape_warning)
    lines += _marks(plans, installed)
    return lines


def _variant_rows(plans: Sequence[Plan], installed: Installed) -> list[str]:
    """Format the header and a row for each variant of one model."""
    with_bar = width() >= 80
    usable = f"{'of usable':{BAR}} " if with_bar else ""
    lines = [
        f"  {'quant':12} {'file':>8} {'memory':>9} {usable}{'fits':5} {'tok/s':>9} {'longest':>8}"
    ]
    for plan in plans:
        quant = clip(marked(plan, installed), 12)
        file = gb(plan.variant.file_bytes)
        memory = gb(plan.memory.total_bytes)
        filled = _filled(plan) if with_bar else ""
        decode = "–"
        if plan.fits != "no":
            decode = speed(plan.decode_tok_s)
        longest = "none"
        if plan.max_ctx >= 1024:
            longest = f"{plan.max_ctx // 1024}k"
        lines.append(
            f"  {quant:12} {file:>8} {memory:>9} {filled}{plan.fits:5} {decode:>9} {longest:>8}"
        )
    return lines


def _caches(plans: Sequence[Plan]) -> list[str]:
    """List the variants that are planned with a KV cache other than f16."""
    kinds: dict[str, list[str]] = {}
    for plan in plans:
        if plan.fits != "no" and plan.settings.kv_type != "f16":
            kinds.setdefault(plan.settings.kv_type, []).append(plan.variant.quant)
    lines: list[str] = []
    for kind, quants in kinds.items():
        lines += paragraph(f"with a {kind} KV cache: {', '.join(quants)}")
    return lines


def _slopes(model: Model) -> list[tuple[str, int]]:
    slopes = []
    for kv_type in ("f16", "q8_0", "q4_0"):
        if kv_sizes.kv_type_allowed(model, kv_type):
            slopes.append((kv_type, kv_sizes.kv_bytes_per_1k_tokens(model, kv_type)))
    return slopes


def json_text(answer: Recommendation, device: Device) -> str:
    """Return the published JSON of an answer, with keys in the schema's order.

    Identical inputs produce identical output.
    """
    return ascii_json(recommendation_to_json(answer, device_to_json(device)))
