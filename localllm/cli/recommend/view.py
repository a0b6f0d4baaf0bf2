"""Format the plans of one machine as tables or JSON. All decisions are made by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from localllm.cli.recommend.page import BAR_COLUMNS, bar, clip, paragraph, speed, width, wrapped
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
ASSUMED_FIXES = ("--bandwidth GBPS", "localllm device --measure", "--device NAME", "--memory GB")
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
    lines += paragraph(_memory_and_bandwidth(device))
    for finding in device.findings:
        if finding.fix in ASSUMED_FIXES:
            lines += paragraph(f"{finding.message}; else: {finding.fix}")
    for account in device.accounts:
        lines += paragraph(account)
    return lines


def _memory_and_bandwidth(device: Device) -> str:
    """Format the machine's memory and bandwidth."""
    memory = device.memory
    text = f"{gb(device.usable_bytes)} usable of {memory.total_bytes / 1e9:.1f}"
    if memory.available_bytes < device.usable_bytes:
        text += f", {gb(memory.available_bytes)} free now"
    bandwidth = device.bandwidth_gbps
    text += f"; {bandwidth.value:,.0f} GB/s ({bandwidth.basis})"
    if device.kind == "discrete" and device.host is not None:
        text += f"; plus {gb(device.host.limit_bytes)} of system memory"
        host_bandwidth = device.host_bandwidth_gbps
        if host_bandwidth:
            text += f" at {host_bandwidth.value:,.0f} GB/s ({host_bandwidth.basis})"
    return text


Installed = frozenset[tuple[str, str]]
NONE_INSTALLED: Installed = frozenset()


def marked(plan: Plan, installed: Installed) -> str:
    """Return the quant with marks that footnotes explain: ~ constructed, * other engine, +
    installed."""
    text = plan.variant.quant
    if plan.backend != _unmarked_engine().name:
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
    with_bar = text_width - BAR_COLUMNS - 1 >= _MIN_NAME
    usable = ""
    if with_bar:
        usable = f"{'of usable':{BAR_COLUMNS}} "
        text_width -= BAR_COLUMNS + 1
    name_columns = min(name_columns, text_width)
    head = (
        f"    {'model':{name_columns}} {'quant':12} {'memory':>8} {usable}{'tok/s':>9} {'wait':>6}"
    )
    rows = []
    for number, plan in enumerate(plans, 1):
        name = clip(plan.model.name, name_columns)
        quant = clip(marked(plan, installed), 12)
        memory = gb(plan.memory.total_bytes)
        usage = _usage_bar(plan) if with_bar else ""
        wait_text = span(plan.ttft_s.value)
        rows.append(
            f"{number:>3} {name:{name_columns}} {quant:12} {memory:>8} {usage}"
            f"{speed(plan.stream_range):>9} {wait_text:>6}"
        )
    return head, rows


def _usage_bar(plan: Plan) -> str:
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
    context_text = ""
    if plans:
        context_text = f" with {plans[0].settings.n_ctx // 1024}k of context"
    lines = heading(device, f"Recommended for {need.purpose_text}{context_text}")
    if not plans:
        lines += ["", "  no model of the catalog fits and is fast enough; the reasons:"]
    end_lines = _rejected_lines(answer, everything=everything)
    if listings_days > OLD_DAYS:
        end_lines += paragraph(
            f"the catalog's listings are {listings_days} days old; "
            "update them: localllm catalog update"
        )
    end_lines += _command_lines(plans, device, installed)
    if not plans:
        return [*lines, *end_lines]
    if everything:
        notes = _footnotes(plans, device, need.prompt_tokens, installed)
        notes += _basis_lines(plans)
        notes += reasons_of(plans[0], "about the first:")
        return [*lines, *_blocks(plans, installed), "", *notes, *end_lines]
    for n_shown in range(len(plans), 0, -1):
        shown = plans[:n_shown]
        page_lines = [*lines, *_blocks(shown, installed, short=True)]
        if n_shown < len(plans):
            page_lines.append(f"    … and {len(plans) - n_shown} more that fit (--all)")
        notes = _footnotes(shown, device, need.prompt_tokens, installed)
        page_lines += ["", *notes, *end_lines]
        if len(page_lines) <= _MAX_LINES:
            break
    return page_lines


def _fit_one_line(text: str, first: str, reasons_of: str) -> list[str]:
    """Fit as many parts between semicolons as possible on one line, but at least the first."""
    parts = text.split("; ")
    while len(parts) > 1 and len(first + "; ".join(parts)) > width():
        parts.pop()
    return wrapped("; ".join(parts), first, reasons_of)


def _blocks(plans: Sequence[Plan], installed: Installed, *, short: bool = False) -> list[str]:
    """Format the header, and each plan's row with its reason below. `short`: reasons of one
    line."""

    if not plans:
        return []
    head, rows = numbered_rows(plans, installed)
    lines = ["", head]
    reason_lines = _fit_one_line if short else wrapped
    for row, plan in zip(rows, plans, strict=True):
        lines.append(row)
        lines += reason_lines(
            f"{_differences_from_first(plan, plans[0])}{plan.why}", "    ", "    "
        )
        if plan.memory.projector_bytes:
            lines += wrapped(projector_facts(plan), "    ", "    ")
    return lines


_KV_TYPE_TEXTS = {"q8_0": "8-bit", "q8_0/q4_0": "8- and 4-bit", "q4_0": "4-bit"}


def _differences_from_first(plan: Plan, first: Plan) -> str:
    """Return a prefix for the plan's reason if its context or KV type is unusual.

    The context is unusual if it differs from the first plan's, and the KV type if it is not f16.
    """
    text = ""
    if plan.settings.n_ctx != first.settings.n_ctx:
        text += f"{plan.settings.n_ctx // 1024}k of context; "
    kv_type = plan.settings.kv_type
    if kv_type != "f16":
        text += f"{_KV_TYPE_TEXTS.get(kv_type, kv_type)} KV cache; "
    return text


def _rejected_lines(answer: Recommendation, *, everything: bool) -> list[str]:
    """Format the rejected models with reasons, the nearest misses first."""
    if everything:
        lines = []
        for rejected in answer.rejected:
            lines += wrapped(f"{rejected.model.name}: {rejected.reason}", "  ", "    ")
        return _section("Not offered:", lines)
    near_misses = [
        rejected_model for rejected_model in answer.rejected if rejected_model.kind in _NEAR_MISSES
    ]
    near_misses.sort(key=_nearness)
    lines = []
    for rejected in near_misses[:_NEAR_MISSES_SHOWN]:
        lines += _fit_one_line(f"{rejected.model.name}: {rejected.reason}", "  ", "    ")
    if len(near_misses) > _NEAR_MISSES_SHOWN:
        lines.append(f"  … and {len(near_misses) - _NEAR_MISSES_SHOWN} more (--all)")
    return _section("Not offered:", lines)


_NEAR_MISSES = ("memory", "speed", "context", "engine")


def _nearness(rejected: Rejected) -> tuple[int, int]:
    """Sort key: models that need another llama.cpp come first, then those that need more memory.

    Small ones come before large ones.
    """
    order = ("engine", "memory")
    rank = order.index(rejected.kind) if rejected.kind in order else len(order)
    return rank, rejected.variant.file_bytes


def _section(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    return ["", title, *lines]


def _command_lines(plans: Sequence[Plan], device: Device, installed: Installed) -> list[str]:
    """Return the command that runs the first plan. Empty for a simulated machine."""
    if device.simulated or not plans:
        return []
    model = plans[0].model.id
    quant = plans[0].variant.quant
    command = f"localllm chat -m {model}:{quant}"
    if (model, quant) not in installed:
        command = f"localllm pull {model}:{quant} && {command}"
    return ["", command]


def reasons_of(plan: Plan, title: str) -> list[str]:
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
    lines += _mark_lines(plans, installed)
    if device.accelerator == "cpu" and not device.simulated and not device.matrix_rates:
        lines += paragraph(
            "the CPU's speed is assumed from its kind; `localllm device --measure` measures it"
        )
    return lines


def _basis_lines(plans: Sequence[Plan]) -> list[str]:
    parts = chain.from_iterable(plan.decode_tok_s.basis.split("; ") for plan in plans)
    bases = list(dict.fromkeys(parts))
    return paragraph("speeds from " + "; ".join(bases[:4]))


def _unmarked_engine() -> Declaration:
    """Return the engine whose plans have no mark."""
    return registry.running("gguf")


def _mark_lines(plans: Sequence[Plan], installed: Installed) -> list[str]:
    """Explain the marks next to the quants that occur in `plans`."""
    signs = "".join(marked(plan, installed) for plan in plans)
    lines = []
    if "~" in signs:
        lines += paragraph("~ not in any listing: this file's name and size are estimated")
    if "*" in signs:
        labels = {
            backend_of(plan.variant).label
            for plan in plans
            if plan.backend != _unmarked_engine().name
        }
        other_engines = " or ".join(sorted(labels))
        lines += paragraph(f"* runs on {other_engines}, the rest on {_unmarked_engine().label}")
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
    for kv_type, n_bytes in _kv_bytes_per_1k(model):
        lines.append(f"  {kv_type:9} {mb(n_bytes):>11}")
    lines += paragraph(
        "longest: longest context that fits; tok/s: 80 % range with a nearly empty context"
    )
    if any(plan.fits == "tight" for plan in plans):
        lines += paragraph(f"tight: {TIGHT_MEANS}")
    lines += paragraph(f"speeds from {first.decode_tok_s.basis}")
    if 0 < model.native_context < n_ctx:
        lines += paragraph(first.why)
    lines += _kv_type_lines(plans)
    lines += paragraph(model.shape_warning)
    lines += _mark_lines(plans, installed)
    return lines


def _variant_rows(plans: Sequence[Plan], installed: Installed) -> list[str]:
    """Format the header and a row for each variant of one model."""
    with_bar = width() >= 80
    usable = f"{'of usable':{BAR_COLUMNS}} " if with_bar else ""
    lines = [
        f"  {'quant':12} {'file':>8} {'memory':>9} {usable}{'fits':5} {'tok/s':>9} {'longest':>8}"
    ]
    for plan in plans:
        quant = clip(marked(plan, installed), 12)
        file = gb(plan.variant.file_bytes)
        memory = gb(plan.memory.total_bytes)
        usage = _usage_bar(plan) if with_bar else ""
        decode = "–"
        if plan.fits != "no":
            decode = speed(plan.decode_tok_s)
        longest = "none"
        if plan.max_ctx >= 1024:
            longest = f"{plan.max_ctx // 1024}k"
        lines.append(
            f"  {quant:12} {file:>8} {memory:>9} {usage}{plan.fits:5} {decode:>9} {longest:>8}"
        )
    return lines


def _kv_type_lines(plans: Sequence[Plan]) -> list[str]:
    """List the variants that are planned with a KV cache other than f16."""
    quants_by_type: dict[str, list[str]] = {}
    for plan in plans:
        if plan.fits != "no" and plan.settings.kv_type != "f16":
            quants_by_type.setdefault(plan.settings.kv_type, []).append(plan.variant.quant)
    lines: list[str] = []
    for kv_type, quants in quants_by_type.items():
        lines += paragraph(f"with a {kv_type} KV cache: {', '.join(quants)}")
    return lines


def _kv_bytes_per_1k(model: Model) -> list[tuple[str, int]]:
    costs = []
    for kv_type in ("f16", "q8_0", "q4_0"):
        if kv_sizes.kv_type_allowed(model, kv_type):
            costs.append((kv_type, kv_sizes.kv_bytes_per_1k_tokens(model, kv_type)))
    return costs


def json_text(answer: Recommendation, device: Device) -> str:
    """Return the published JSON of an answer, with keys in the schema's order.

    Identical inputs produce identical output.
    """
    return ascii_json(recommendation_to_json(answer, device_to_json(device)))
