"""LaTeX between dollars and in \\(…\\) as Unicode: the formulas of Markdown, and their text in a
terminal."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

from localllm_tui.control.terminal import printable

# A model may write anything: a longer one stays as it is.
LONGEST = 2_000
_DEEPEST = 8
_INLINE = re.compile(
    r"\$\$(?P<shown>[^$]{1,2000})\$\$"
    # Prices and shell variables have a space within, or a letter or digit behind; "the $n$th" has
    # too.
    r"|\$(?P<dollars>(?![\s$])[^$\n]{0,500}[^\s$\\])\$(?!(?!th\b)[\w$])"
    r"|\\\((?P<round>.{1,2000}?)\\\)|\\\[(?P<square>.{1,2000}?)\\\]",
    re.DOTALL,
)
_ENDS = {"$$": "$$", "\\[": "\\]"}
_NAME = re.compile(r"\\[A-Za-z]+")
_GROUP = re.compile(r"\{[^{}]*\}")
_SIGNS = re.compile(r"[\\^_=<>+]")
_WORD = re.compile(r"[^\W\d_]{3}")
_LETTER = re.compile(r"[^\W\d_]'*")
_SCRIPT = re.compile(r"([\^_])\s*(?:\{([^{}]*)\}|(\\[A-Za-z]+|[^\s\\{}]))")
_RAISED = dict(
    zip(
        "0123456789+-=()abcdefghijklmnoprstuvwxyz*'",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ*′",
        strict=True,
    )
)
_LOWERED = dict(
    zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True)
)
_LOWERED[","] = _RAISED[","] = ","
_RAISED |= {"\\top": "ᵀ", "\\circ": "°", "\\prime": "′", "T": "ᵀ"}
_SIMPLE = re.compile(r"[\d.]*|[A-Za-z]{3,}|.[₀-₉ₐ-ₜᵢⱼ]*")
_FUNCTIONS = re.compile(
    r"([\w)}]?)\\(arccos|arcsin|arctan|arg|cosh|cos|cot|det|dim|exp|gcd|inf|ker|lim|ln|log|max|min|Pr|sinh|sin|sup|tanh|tan)(?![A-Za-z])"
)
_RELATION = re.compile(r"[ \t]*([=<>≤≥≠≈≡∼≃≅∝→⟶←↔⇒⟹⇔⟺↦∈∉⊂⊆⊃∪∩∧∨±×])[ \t]*")
_COLUMNS = re.compile(r"(?<=\S) {4,}(?=\S)")
# What the library does not know, or says in another sense: as text, and with as many arguments.
_SAID = {
    "ne": "≠", "neq": "≠", "iff": "⟺", "implies": "⟹", "land": "∧", "lor": "∨", "lnot": "¬",
    "dots": "…", "|": "‖",
    "quad": "  ", "qquad": "  ", "bmod": " mod ", "mod": " mod ", "pmod": " (mod %s)",
    "binom": "(%s choose %s)", "boxed": "[%s]", "operatorname": "%s", "mathsf": "%s",
    **dict.fromkeys(("left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "limits",
    "displaystyle", "!"), ""),
}  # fmt: skip
_TAKING = {
    "dfrac": "{{", "tfrac": "{{", "cfrac": "{{", "binom": "{{", "operatorname": "{", "boxed": "{",
    "pmod": "{", "mathsf": "{",
}  # fmt: skip
# Placeholders for signs that must not be parsed again: the end of a name, _ and ^.
_END = "\x01"
_LOW = "\x02"
_HIGH = "\x03"


def with_formulas(parser: MarkdownIt) -> MarkdownIt:
    """`parser`, which makes nodes `formula` and `formula_block` of LaTeX."""
    parser.inline.ruler.before("escape", "formula", _inline_rule)
    parser.block.ruler.before(
        "fence", "formula_block", _block_rule, {"alt": ["paragraph", "reference", "blockquote"]}
    )
    return parser


def _inline_rule(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\":
        return False
    found = _INLINE.match(state.src, state.pos)
    if found is None or state.src[state.pos - 1 : state.pos].isalnum():
        return False
    dollars = found["dollars"]
    if dollars is not None and not is_formula(dollars):
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = found[found.lastgroup or 0]
        token.markup = found[0]
    state.pos = found.end()
    return True


def _block_rule(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """A block from $$ or \\[ to its end, or to an empty line. A block without its end is not drawn
    as a formula yet."""
    begun = _line_of(state, first)
    end = _ENDS.get(begun[:2], "")
    if state.is_code_block(first) or not end or not _begins_block(begun, end):
        return False
    if silent:
        return True
    n = first
    ended = end in begun[2:]
    while (
        not ended
        and n + 1 < last
        and _line_of(state, n + 1).strip()
        and state.sCount[n + 1] >= state.blkIndent
    ):
        n += 1
        ended = _line_of(state, n).rstrip().endswith(end)
    token = state.push("formula_block", "", 0)
    token.map = [first, n + 1]
    token.block = True
    token.markup = "\n".join(_line_of(state, k) for k in range(first, n + 1))
    token.content = token.markup.rstrip()[2:-2] if ended else ""
    state.line = n + 1
    return True


def _line_of(state: StateBlock, n: int) -> str:
    return state.src[state.bMarks[n] + state.tShift[n] : state.eMarks[n]]


def _begins_block(line: str, end: str) -> bool:
    ends_within = end in line[2:] and not line.rstrip().endswith(end)
    return not ends_within and is_formula(line[2:] or "=")


def is_formula(said: str) -> bool:
    """Whether the text between dollars is a formula, not the words between two prices: it has an
    operator and no words, or is one letter."""
    bare = _GROUP.sub("", _NAME.sub("", said))
    return bool(_LETTER.fullmatch(said) or (_SIGNS.search(said) and not _WORD.search(bare)))


@lru_cache(maxsize=256)
def as_unicode(latex: str) -> str:
    """LaTeX as Unicode; "" if it is too long or can't be converted."""
    if len(latex) > LONGEST:
        return ""
    try:
        reader, walker = _reader()
        said = reader.latex_to_text(_with_scripts(latex), latex_context=walker)
    except Exception:
        # whatever a library makes of what a model wrote: it is shown as it was written
        return ""
    said = printable(said.replace(_LOW, "_").replace(_HIGH, "^"))
    lines = []
    for line in said.split("\n"):
        spaced = _COLUMNS.sub(", ", _RELATION.sub(r" \1 ", line))
        if spaced.strip():
            lines.append(" ".join(spaced.split()))
    return "\n".join(lines)


def _with_scripts(latex: str) -> str:
    """Superscripts and subscripts as Unicode if all their signs have one, else in brackets; the
    innermost first."""
    latex = _FUNCTIONS.sub(_set_apart, latex)
    for _ in range(_DEEPEST):
        before = latex
        latex = _SCRIPT.sub(_script, latex)
        if latex == before:
            break
    return latex


def _set_apart(found: re.Match[str]) -> str:
    """A function's name with a space after the sign before it."""
    if found[1]:
        return f"{found[1]} {found[2]}"
    return found[2]


def _script(found: re.Match[str]) -> str:
    known = _LOWERED
    mark = _LOW
    if found[1] == "^":
        known = _RAISED
        mark = _HIGH
    inside = found[2] if found[2] is not None else found[3]
    signs = [inside] if inside in known else [*inside.replace(" ", "")]
    if signs and all(sign in known for sign in signs):
        return _END + "".join(known[sign] for sign in signs)
    if found[2] is None or _SIMPLE.fullmatch(inside):
        return mark + inside
    return f"{mark}({inside})"


@lru_cache(maxsize=1)
def _reader() -> tuple[Any, Any]:
    """The converter of LaTeX to text, and the arguments of its macros."""
    from pylatexenc import latexwalker
    from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db
    from pylatexenc.macrospec import std_macro

    # it would tell the terminal what it does not know
    logging.getLogger("pylatexenc").setLevel(logging.CRITICAL)

    def grouped(said: str) -> str:
        if _SIMPLE.fullmatch(said):
            return said
        return f"({said})"

    def taken(node: Any, reader: Any) -> list[str]:
        args = node.nodeargd.argnlist
        return ["" if arg is None else str(reader.nodelist_to_text([arg])).strip() for arg in args]

    def fraction(node: Any, l2tobj: Any) -> str:
        over, under = taken(node, l2tobj)
        return f"{grouped(over)}/{grouped(under)}"

    def root(node: Any, l2tobj: Any) -> str:
        nth, of = taken(node, l2tobj)
        return "".join(_RAISED.get(c, c) for c in nth) + "√" + grouped(of)

    def unknown(node: Any) -> str:
        raise ValueError(node.macroname)

    ours = [MacroTextSpec("sqrt", simplify_repl=root)]
    for name in ("frac", "dfrac", "tfrac", "cfrac"):
        ours.append(MacroTextSpec(name, simplify_repl=fraction))
    ours += [MacroTextSpec(name, said) for name, said in _SAID.items()]
    taking = [std_macro(name, arguments) for name, arguments in _TAKING.items()]
    texts = get_default_latex_context_db()
    texts.add_context_category("terminal", prepend=True, macros=ours)
    texts.set_unknown_macro_spec(MacroTextSpec("", simplify_repl=unknown))
    walker = latexwalker.get_default_latex_context_db()
    walker.add_context_category("terminal", prepend=True, macros=taking)
    return LatexNodes2Text(latex_context=texts, math_mode="text"), walker
