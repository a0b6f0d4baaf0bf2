"""The signs, names and alphabets of LaTeX's formulas as Unicode."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

from localllm_tui.widgets.boxes import Kind


def _pairs(text: str) -> dict[str, str]:
    """Names and the word that follows each."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


RAISED = dict(
    zip(
        "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWβγδθφχ,*∗′″‴†∘⊤",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵝᵞᵟᶿᵠᵡ,**′″‴†°ᵀ",
        strict=True,
    )
)
LOWERED = dict(
    zip(
        "0123456789+-=()aehijklmnoprstuvxβγρφχ,",
        "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ,",
        strict=True,
    )
)
# Signs that the library lacks or renders differently.
_SIGNS = _pairs("""
ne ≠ neq ≠ iff ⟺ implies ⟹ impliedby ⟸ to → gets ← land ∧ lor ∨ lnot ¬ neg ¬ dots … ldots …
dotsc … dotsb ⋯ cdots ⋯ vdots ⋮ ddots ⋱ mid ∣ vert | Vert ‖ lvert | rvert | lVert ‖ rVert ‖
lbrace { rbrace } lbrack [ rbrack ] langle ⟨ rangle ⟩ colon : triangle △ Re ℜ Im ℑ bot ⊥ models
⊨ dagger † ddagger ‡ hslash ℏ hbar ℏ imath ı jmath ȷ surd √ clubsuit ♣ diamondsuit ♢ heartsuit ♡
spadesuit ♠ coloneqq := lhd ⊲ rhd ⊳ cdot · bullet • ast ∗ star ⋆ circ ∘ setminus ∖ bigoplus ⨁
bigotimes ⨂ bigvee ⋁ bigwedge ⋀ oiint ∯ degree ° checkmark ✓ Longrightarrow ⟹ Longleftarrow ⟸
Longleftrightarrow ⟺ longmapsto ⟼ leadsto ⇝ square □ Box □ blacksquare ■ qed ∎ prime ′ backslash
\\ owns ∋ ni ∋ llbracket ⟦ rrbracket ⟧ And & le ≤ leq ≤ ge ≥ geq ≥ leqslant ≤ geqslant ≥ S §
copyright © pounds £ euro € mathsection § slash / nexists ∄ lt < gt > epsilon ϵ R ℝ N ℕ Z ℤ Q ℚ
C ℂ
""")
_STACKING = re.compile(r"lim(inf|sup)?|(arg)?(max|min)|sup|inf|det|gcd|Pr")
_FUNCTIONS = re.compile(
    r"(arc)?(cos|sin|tan)|(cos|sin|tan|cot)h|cot|csc|sec|arg|deg|dim|exp|hom|ker|lg|ln|log|lcm"
)
_BIG = "∑∏∐∫∬∭∮∯⋃⋂⨁⨂⋁⋀"
_STACKING_SIGNS = "∑∏∐⋃⋂⨁⨂⋁⋀"
_RELATIONS = "=<>≤≥≠≈≡∼≃≅∝∈∉∋⊂⊆⊃⊇⊊⊋≪≫∥∤∣⊢⊣⊨≺≻≼≽≲≳≐≜≔≍⊲⊳∦⊑⊒≉≢≁⊄⊈⊅⊉≮≯≰≱⋈⊥∴∵"
_OPERATORS = "±∓×÷·∗⋆•∪∩∧∨⊕⊗⊖⊙⊘∖⊎⊔⊓‡≀⋉⋊⨿∘"
_OPENING = "([{⟨⌊⌈⟦"
_CLOSING = ")]}⟩⌋⌉⟧!"
# The combining character of each accent.
ACCENTS = {
    name: chr(int(code, 16))
    for name, code in _pairs("""
hat 0302 widehat 0302 tilde 0303 widetilde 0303 bar 0304 overline 0305 underline 0332 vec 20d7
overrightarrow 20d7 overleftarrow 20d6 overleftrightarrow 20e1 dot 0307 ddot 0308 dddot 20db check 030c breve 0306 acute 0301 grave 0300
mathring 030a cancel 0338 bcancel 0338 xcancel 0338
""").items()
}
# A number below, a script in braces or of one sign, or a charge at the end.
_CHEMICAL = re.compile(
    r"(?<=[A-Za-z)\]])(?P<count>\d+)|(?P<mark>[\^_])(?:\{(?P<script>[^{}]*)\}|(?P<short>\d*[+-]\d*|\w))"
    r"|(?<=[A-Za-z0-9)\]])(?P<charge>[+-])(?=\s|$|\])"
)
_CHEMICAL_ARROW = re.compile(r"(<=>|<->|->|<-)(?:\[([^\]]*)\])?(?:\[([^\]]*)\])?")
_CHEMICAL_ARROWS = {"<=>": "⇌", "<->": "↔", "->": "→", "<-": "←"}
# The dot before the water of a hydrate, and the arrows of a gas and of a solid.
_CHEMICAL_SIGNS = (
    (re.compile(r"(?<=[A-Za-z0-9)\]])[.*](?=\d*[A-Z])"), "·"),
    (re.compile(r"(?<=\s)v(?=\s|$)"), "↓"),
    (re.compile(r"(?<=\s)\^(?=\s|$)"), "↑"),
)
# These accents belong to each of several letters, the others to the letter in the middle.
_LONG_ACCENTS = frozenset("\u0305\u0332\u20d7\u20d6\u20e1\u0338")
_ONE_SIGN = re.compile("[^\u0300-\u036f\u20d0-\u20ff][\u0300-\u036f\u20d0-\u20ff]*")
_WORDS = re.compile(r"\w \w")
ALPHABETS = {
    "mathbf": "BOLD", "boldsymbol": "BOLD", "bm": "BOLD", "bold": "BOLD", "mathbb": "DOUBLE-STRUCK",
    "mathcal": "SCRIPT", "mathscr": "SCRIPT", "mathfrak": "FRAKTUR",
}  # fmt: skip


def kind_of(sign: str) -> Kind:
    """The class of one sign."""
    if sign in _RELATIONS or _is_arrow(sign) or sign == ":=":
        return "rel"
    if sign in _BIG:
        return "op"
    if sign in _OPERATORS:
        return "bin"
    if sign in "+-*/":
        return "infix"
    if sign == "|":
        return "bar"
    if sign in _OPENING:
        return "open"
    if sign in _CLOSING:
        return "close"
    if sign in ",;:":
        return "punct"
    return "ord"


def _is_arrow(sign: str) -> bool:
    return "←" <= sign[:1] <= "⇿" or "⟰" <= sign[:1] <= "⟿"


def is_function(name: str) -> bool:
    return _FUNCTIONS.fullmatch(name) is not None or _STACKING.fullmatch(name) is not None


def stacks(name: str) -> bool:
    """True if the scripts of a function or sign are above and below it in a displayed formula."""
    return _STACKING.fullmatch(name) is not None or name in _STACKING_SIGNS


def sign_of(name: str) -> str:
    """The sign of a macro. Raises ValueError for an unknown macro."""
    own = _SIGNS.get(name)
    if own is not None:
        return own
    of_library, others = _library()
    spec = of_library.get_macro_spec(name)
    text = getattr(spec, "simplify_repl", None)
    if isinstance(text, str) and text and "%" not in text:
        return text
    if name in others:
        return others[name]
    raise ValueError(f"unknown macro {name}")


@lru_cache(maxsize=1)
def _library() -> tuple[Any, dict[str, str]]:
    """The library's macros, and the signs that it writes as one macro, by name."""
    from pylatexenc.latex2text import get_default_latex_context_db
    from pylatexenc.latexencode import get_builtin_uni2latex_dict

    others: dict[str, str] = {}
    for code, latex in get_builtin_uni2latex_dict().items():
        name = re.fullmatch(r"\\(?:ensuremath\{\\)?([A-Za-z]+)\}?", latex)
        if name is not None:
            others.setdefault(name[1], chr(code))
    return get_default_latex_context_db(), others


def in_alphabet(text: str, alphabet: str) -> str:
    """`text` in an alphabet of mathematics; letters that the alphabet lacks stay."""
    return "".join(_letter(sign, alphabet) for sign in text)


def _letter(sign: str, alphabet: str) -> str:
    name = unicodedata.name(sign, "").replace("LATIN ", "").replace("GREEK ", "")
    name = name.replace(" LETTER", "")
    # Unicode named some of these letters before it had the alphabets
    for prefix in (f"MATHEMATICAL {alphabet}", alphabet.replace("FRAKTUR", "BLACK-LETTER")):
        try:
            return unicodedata.lookup(f"{prefix} {name}")
        except KeyError:
            continue
    return sign


def accented(text: str, accent: str) -> str:
    """`text` under an accent, a combining character."""
    if accent in _LONG_ACCENTS:
        return _ONE_SIGN.sub(rf"\g<0>{accent}", text)
    middle = (len(text) + 1) // 2
    return unicodedata.normalize("NFC", text[:middle] + accent + text[middle:])


def negated(sign: str) -> str:
    return unicodedata.normalize("NFC", f"{sign}\u0338")


def in_script(text: str, mark: str) -> str:
    """`text` as Unicode's superscript or subscript; "" without such letters."""
    known = RAISED if mark == "^" else LOWERED
    signs = text.replace(" ", "")
    if not signs or _WORDS.search(text):
        return ""
    if all(sign in known for sign in signs):
        return "".join(known[sign] for sign in signs)
    return ""


def chemical(raw: str) -> str:
    """A formula of chemistry, with its numbers below. Raises ValueError for an unknown macro."""
    text = re.sub(r"\\([A-Za-z]+)\s*", lambda macro: sign_of(macro[1]), raw.strip())
    text = _CHEMICAL_ARROW.sub(_chemical_arrow, text)
    for pattern, sign in _CHEMICAL_SIGNS:
        text = pattern.sub(sign, text)
    return _CHEMICAL.sub(_chemical_script, text)


def _chemical_arrow(found: re.Match[str]) -> str:
    arrow = _CHEMICAL_ARROWS[found[1]]
    labels = ", ".join(label for label in (found[2], found[3]) if label)
    if not labels:
        return arrow
    if arrow == "→":
        return f"─{labels}→"
    return f"{arrow}({labels})"


def _chemical_script(found: re.Match[str]) -> str:
    if found["count"]:
        return in_script(found["count"], "_")
    mark = found["mark"] or "^"
    script = found["script"] or found["short"] or found["charge"] or ""
    return in_script(script, mark) or found[0]
