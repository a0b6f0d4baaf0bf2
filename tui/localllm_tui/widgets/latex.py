"""Reads a LaTeX formula and lays it out in boxes: on one line, or displayed with fractions of two
storeys, high brackets and matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from localllm_tui.widgets.boxes import (
    EMPTY,
    Box,
    above,
    bracketed,
    flat,
    fraction,
    grouped,
    in_row,
    is_product,
    root,
    table,
)
from localllm_tui.widgets.latex_rows import assembled, scripted
from localllm_tui.widgets.latex_signs import (
    ACCENTS,
    ALPHABETS,
    accented,
    chemical,
    in_alphabet,
    in_script,
    is_function,
    kind_of,
    negated,
    sign_of,
    stacks,
)
from localllm_tui.widgets.latex_tables import (
    EQUATIONS,
    TABLES,
    aligned_equations,
    flat_rows,
    flat_table,
    ruled,
)
from localllm_tui.widgets.latex_tokens import LatexTokens

_DEEPEST = 30
_SPACES = {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "/": "", "quad": "  ", "qquad": "    ",
           "thinspace": " ", "enspace": " ", ">": " ", "\n": " ",
           "colon": ": "}  # fmt: skip
_FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
_BETWEEN = ("\\over", "\\choose", "\\atop")  # TeX's own fractions, written between their parts
_TEXTS = ("text", "textbf", "textit", "textrm", "texttt", "textsf", "mbox", "hbox", "operatorname")
_PLAIN = ("mathrm", "mathit", "mathsf", "mathtt", "mathop", "mathbin", "mathrel", "mathord", "rm",
          "smash", "mathstrut", "emph")  # fmt: skip
_IGNORED = re.compile(
    r"(display|text|script)style|limits|nolimits|nonumber|notag|middle|boldmath|hline|centering"
    r"|[bB]igg?[lrm]?"
)


def lines_of(latex: str, *, displayed: bool) -> tuple[str, ...]:
    """The lines of a formula; () if it can't be read. `displayed`: fractions and matrices may take
    several lines."""
    try:
        return _LatexReader(latex, displayed).lines()
    except ValueError:  # an unknown macro, a brace that is not closed, or too deep
        return ()


class _LatexReader(LatexTokens):
    def __init__(self, latex: str, displayed: bool) -> None:
        super().__init__(latex)
        self._depth = 0
        self._displayed = displayed

    def lines(self) -> tuple[str, ...]:
        rows = self._grid("")
        return aligned_equations(rows).lines

    def _option(self) -> Box | None:
        """The argument in square brackets, if present."""
        if self._next != "[":
            return None
        self._take()
        inside = self._row(("]",))
        self._take()
        return inside

    # -- rows --------------------------------------------------------------------------------------

    def _grid(self, end: str) -> list[list[Box]]:
        """Rows of cells up to the token `end`."""
        rows: list[list[Box]] = [[]]
        while True:
            cell = self._row(("&", "\\\\", end))
            rows[-1].append(cell)
            token = self._take()
            if token == "\\\\":
                self._skip_space()
                self._option_of_break()
                rows.append([])
            elif token == end:
                break
        return [row for row in rows if not in_row(row).is_empty]

    def _option_of_break(self) -> None:
        if self._next == "[" and "]" in self._tokens[self._at : self._at + 8]:
            while self._take() != "]":
                pass

    def _row(self, stops: Sequence[str]) -> Box:
        """Boxes up to one of the tokens `stops`, which stays."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("too deep")
        parts: list[Box] = []
        spaces: list[str] = []  # before each part: "", "hard", or "soft" after a macro's name
        space = ""
        while self._next not in stops:
            token = self._next
            if token in _BETWEEN:
                self._take()
                over = assembled(parts, spaces)
                under = self._row(stops)
                self._depth -= 1
                return self._divided(token, over, under)
            if not token or token in ("}", "\\right", "\\end"):
                raise ValueError("a bracket is not closed, or not opened")
            if token.isspace() or token in ("&", "~", "\\\\"):
                space = self._take_space()
                continue
            box = flat(self._number()) if token.isdecimal() else self._nucleus()
            if box is not None:
                parts.append(self._with_scripts(box))
                spaces.append(space)
                space = ""
        self._depth -= 1
        return assembled(parts, spaces)

    def _take_space(self) -> str:
        """Take a space. It is "soft" after a macro's name, which it may only end."""
        before = self._tokens[self._at - 1] if self._at else ""
        token = self._take()
        if token.isspace() and before.startswith("\\") and before[-1:].isalpha():
            return "soft"
        return "hard"

    def _argument(self) -> Box:
        self._skip_space()
        if not self._next:
            raise ValueError("an argument is missing")
        return self._nucleus() or EMPTY

    def _on_one_line(self) -> Box:
        """The argument, laid out on one line."""
        displayed = self._displayed
        self._displayed = False
        box = self._argument()
        self._displayed = displayed
        if box.flat:
            return Box((box.text.strip(),), kind=box.kind)
        return box

    def _nucleus(self) -> Box | None:
        """A group, sign or macro with its arguments; None if it is not shown."""
        token = self._next
        if token in ("^", "_", "'"):
            return EMPTY
        self._take()
        if token == "{":
            inside = self._row(("}",))
            self._take()
            return inside
        if token.startswith("\\"):
            return self._macro(token[1:])
        return flat(token, kind_of(token))

    # -- scripts -----------------------------------------------------------------------------------

    def _with_scripts(self, nucleus: Box) -> Box:
        scripts: list[tuple[str, Box]] = []
        while True:
            at = self._at
            self._skip_space()
            token = self._next
            if token in ("\\limits", "\\nolimits"):
                self._take()
            elif token == "'":
                scripts.append(("^", flat(self._primes())))
            elif token in ("^", "_"):
                self._take()
                scripts.append((token, self._on_one_line()))
            else:
                self._at = at
                return scripted(nucleus, scripts, displayed=self._displayed)

    def _primes(self) -> str:
        n = 0
        while self._next == "'":
            self._take()
            n += 1
        return "′″‴"[min(n, 3) - 1]

    # -- macros ------------------------------------------------------------------------------------

    def _macro(self, name: str) -> Box | None:
        if not name:
            raise ValueError("the formula ends with a backslash")
        if _IGNORED.fullmatch(name):
            return None
        if name in _SPACES:
            return flat(_SPACES[name], "text")
        if is_function(name.rstrip("*")):
            return Box((name.rstrip("*"),), kind="op", limits=stacks(name.rstrip("*")))
        if name in _FRACTIONS:
            return self._fraction()
        if name.rstrip("*") in _TEXTS:
            return self._text(name)
        if name in ALPHABETS:
            return self._lettered(ALPHABETS[name])
        if name in ACCENTS:
            return self._accent(ACCENTS[name])
        return self._other(name)

    def _other(self, name: str) -> Box | None:
        handler = _HANDLERS.get(name)
        if handler is not None:
            return handler(self, name)
        if name in _PLAIN:
            return self._plain()
        return self._sign(name)

    def _not_shown(self, _name: str) -> None:
        self._raw()

    def _boxed(self, _name: str) -> Box:
        return bracketed(self._argument(), "[", "]")

    def _tag(self, _name: str) -> Box:
        return flat(f"  ({self._raw()})", "text")

    def _phantom(self, _name: str) -> Box:
        return flat(" " * self._argument().width, "text")

    def _space(self, _name: str) -> Box:
        self._raw()
        return flat(" ", "text")

    def _coloured(self, _name: str) -> Box:
        self._raw()
        return self._argument()

    def _negated(self, _name: str) -> Box:
        sign = self._on_one_line()
        return flat(negated(sign.text), sign.kind)

    def _state(self, name: str) -> Box:
        """A state of quantum mechanics."""
        left = "|" if name == "ket" else "⟨"
        right = "|" if name == "bra" else "⟩"
        return flat(f"{left}{self._on_one_line().text}{right}")

    def _chemical(self, _name: str) -> Box:
        return flat(chemical(self._raw()), "text")

    def _sign(self, name: str) -> Box:
        if not name.isalpha():
            sign = {"|": "‖", "\\": " "}.get(name, name)
            return flat(sign, kind_of(sign) if sign != "!" else "ord")
        sign = sign_of(name)
        kind = kind_of(sign)
        if name[0] in "lr" and sign in "|‖":
            kind = "open" if name[0] == "l" else "close"
        elif len(sign) > 1 and sign.isalpha():
            kind = "text"
        return Box((sign,), kind=kind, limits=stacks(sign))

    def _text(self, name: str) -> Box:
        raw = re.sub(r"\\([%&_# {}])", r"\1", self._raw())
        raw = raw.replace("\\,", " ").replace("~", " ")
        raw = re.sub(r"(?<!\\)\$([^$]+)(?<!\\)\$", self._formula_in_text, raw).replace("\\$", "$")
        if "\\" in raw:
            raise ValueError("a macro in a text")
        if name.startswith("operatorname"):
            return Box((raw,), kind="op", limits=name.endswith("*") or stacks(raw))
        return flat(raw, "text")

    def _formula_in_text(self, formula: re.Match[str]) -> str:
        lines = _LatexReader(formula[1], displayed=False).lines()
        if len(lines) != 1:
            raise ValueError("a high formula in a text")
        return lines[0]

    def _plain(self) -> Box:
        inside = self._argument()
        if inside.flat and len(inside.text) > 1 and inside.text.isalpha():
            return flat(inside.text, "text")
        return inside

    def _lettered(self, alphabet: str) -> Box:
        inside = self._argument()
        lines = tuple(in_alphabet(line, alphabet) for line in inside.lines)
        return Box(lines, inside.base, "ord" if inside.flat else inside.kind)

    def _accent(self, accent: str) -> Box:
        inside = self._on_one_line()
        if not inside.text:
            raise ValueError("an accent without a letter")
        return flat(accented(inside.text, accent), "ord" if len(inside.text) < 4 else "text")

    def _divided(self, name: str, over: Box, under: Box) -> Box:
        if name == "\\choose":
            return self._chosen(over, under)
        return self._fraction_of(over, under)

    def _fraction(self) -> Box:
        over = self._argument()
        return self._fraction_of(over, self._argument())

    def _fraction_of(self, over: Box, under: Box) -> Box:
        if self._displayed:
            return fraction(over, under)
        above_bar = over.text
        if not is_product(above_bar) and over.kind != "text":
            above_bar = f"({above_bar})"
        return flat(f"{above_bar}/{grouped(under)}", "frac")

    def _binomial(self, _name: str) -> Box:
        over = self._argument()
        return self._chosen(over, self._argument())

    def _chosen(self, over: Box, under: Box) -> Box:
        if self._displayed:
            return bracketed(above([over, under], 0), "(", ")")
        return flat(f"({over.text} choose {under.text})", "close")

    def _root(self, _name: str) -> Box:
        nth = self._option()
        if nth is not None and not nth.flat:
            raise ValueError("the degree of a root is too high")
        of = self._argument()
        if not of.flat:
            drawn = root(of)
            if nth is not None and nth.text:
                number = Box((nth.text, *[""] * (len(drawn.lines) - 1)), drawn.base)
                drawn = in_row([number, drawn])
            return drawn
        sign = "√"
        if nth is not None and nth.text:
            sign = (in_script(nth.text, "^") or f"{nth.text}") + sign
        plain = len(of.text) == 1 or of.text.isdigit()
        return flat(f"{sign}{of.text}" if plain else f"{sign}({of.text})")

    def _between(self, _name: str) -> Box:
        left = self._delimiter()
        inside = self._row(("\\right",))
        self._take()
        right = self._delimiter()
        if inside.flat and inside.kind == "frac" and not (left and right):
            inside = flat(f"({inside.text})")
        return bracketed(inside, left, right)

    def _delimiter(self) -> str:
        self._skip_space()
        token = self._take()
        if token == ".":
            return ""
        if not token.startswith("\\"):
            return token
        return self._sign(token[1:]).text

    def _set(self, name: str) -> Box:
        """A sign with something above or below it."""
        script = self._on_one_line()
        on = self._argument()
        mark = "_" if name == "underset" else "^"
        box = Box(on.lines, on.base, on.kind, limits=True)
        return scripted(box, [(mark, script)], displayed=self._displayed)

    def _brace(self, name: str) -> Box:
        inside = self._argument()
        if not self._displayed:
            return flat(f"({inside.text})", "close")
        width = max(3, inside.width)
        middle = width // 2
        if name == "underbrace":
            sign = f"╰{'─' * (middle - 1)}┬{'─' * (width - middle - 2)}╯"
            box = above([inside, flat(sign)], 0)
        else:
            sign = f"╭{'─' * (middle - 1)}┴{'─' * (width - middle - 2)}╮"
            box = above([flat(sign), inside], 1)
        return Box(box.lines, box.base, "close", limits=True)

    def _arrow(self, name: str) -> Box:
        below = self._option()
        if below is not None and not below.flat:
            raise ValueError("the text below an arrow is too high")
        over = self._on_one_line().text
        under = "" if below is None else f"[{below.text}]"
        if name == "xleftarrow":
            return flat(f"←{over}{under}─", "rel")
        return flat(f"─{over}{under}→", "rel")

    def _modulo(self, name: str) -> Box:
        if name == "bmod":
            return flat("mod", "bin")
        of = self._on_one_line().text
        if name == "pmod":
            return flat(f" (mod {of})", "text")
        return flat(f" mod {of}", "text")

    def _substack(self, _name: str) -> Box:
        self._skip_space()
        if self._take() != "{":
            raise ValueError("an argument is missing")
        displayed = self._displayed
        self._displayed = False
        rows = [in_row(row).text for row in self._grid("}")]
        self._displayed = displayed
        return flat(", ".join(rows), "row")

    def _environment(self, _name: str) -> Box:
        delimiter = self._delimiter_before()
        name = self._raw().rstrip("*")
        columns = ""
        if name in ("array", "alignat"):
            columns = re.sub("[^lcr|]", "", self._raw())
        rows = self._rows_of(name)
        if name in EQUATIONS:
            return aligned_equations(rows)
        left, right, aligned = TABLES[name]
        if name == "array":
            sign = "│" if self._displayed else "|"
            rows, aligned = ruled(rows, columns or aligned, sign)
        if self._displayed:
            return bracketed(table(rows, aligned or "c", 2), left, right)
        if delimiter and not left and not right:
            return flat_rows(rows, ", " if delimiter == "\\{" else " ")
        return flat_table(rows, left, right)

    def _rows_of(self, name: str) -> list[list[Box]]:
        """The rows of an environment."""
        if name not in TABLES and name not in EQUATIONS:
            raise ValueError(f"unknown environment {name}")
        rows = self._grid("\\end")
        if self._raw().rstrip("*") != name or not rows:
            raise ValueError(f"{name} does not end")
        return rows


_HANDLERS: dict[str, Callable[[_LatexReader, str], Box | None]] = {
    "sqrt": _LatexReader._root,
    "left": _LatexReader._between,
    "begin": _LatexReader._environment,
    "not": _LatexReader._negated,
    "tag": _LatexReader._tag,
    "substack": _LatexReader._substack,
    "ce": _LatexReader._chemical,
    "pu": _LatexReader._chemical,
}
_HANDLERS |= dict.fromkeys(("binom", "dbinom", "tbinom"), _LatexReader._binomial)
_HANDLERS |= dict.fromkeys(("overset", "underset", "stackrel"), _LatexReader._set)
_HANDLERS |= dict.fromkeys(("underbrace", "overbrace"), _LatexReader._brace)
_HANDLERS |= dict.fromkeys(("xrightarrow", "xleftarrow"), _LatexReader._arrow)
_HANDLERS |= dict.fromkeys(("pmod", "bmod", "mod"), _LatexReader._modulo)
_HANDLERS |= dict.fromkeys(("boxed", "fbox"), _LatexReader._boxed)
_HANDLERS |= dict.fromkeys(("phantom", "hphantom"), _LatexReader._phantom)
_HANDLERS |= dict.fromkeys(("hspace", "vspace", "kern"), _LatexReader._space)
_HANDLERS |= dict.fromkeys(("color", "label"), _LatexReader._not_shown)
_HANDLERS |= dict.fromkeys(("textcolor", "colorbox"), _LatexReader._coloured)
_HANDLERS |= dict.fromkeys(("bra", "ket", "braket"), _LatexReader._state)
