"""LaTeX formulas are shown as Unicode; prices and code are not changed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm_tui.widgets.formulas import as_lines, as_unicode
from localllm_tui.widgets.markdown import MarkdownRows
from tui.formula_cases import FORMULAS, OTHER_FORMULAS


def shown(said: str, width: int = 70, **how: Any) -> str:
    return "\n".join(row.text.plain.rstrip() for row in MarkdownRows(said, **how).at(width))


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (r"so $E = mc^2$ holds", "so E = mc² holds"),
        (r"\(a_{ij} \le x^{n+1}\), and **$\alpha$**", "aᵢⱼ ≤ xⁿ⁺¹, and α"),
        (r"so $\frac{-b \pm \sqrt{b^2-4ac}}{2a}$", "so (-b ± √(b²-4ac))/(2a)"),
        ("so\n$$\nx = 1 \\\\\n- y\n$$\nthen", "so\n\n    x = 1\n    - y\n\nthen"),
        ("\\[\n\\sum_{i=1}^{n} i\n\\]", "    ∑ᵢ₌₁ⁿ i"),
        (r"- the $n$th, $\sqrt[3]{y}$" + "\n- $A^T$", "• the nth, ³√y\n• Aᵀ"),
        (r"| $\pi$ | $e^{-x^2}$ |" + "\n|---|---|\n", "π │ e^(-x²)\n──┼────────"),
        (r"$\lim_{x \to 0} \sin x \ne \log_2 n$", "lim_(x → 0) sin x ≠ log₂ n"),
    ],
)
def test_a_formula_is_written_in_unicode(said: str, seen: str) -> None:
    assert shown(said) == seen


@pytest.mark.parametrize(
    "said",
    [
        "$5 and $10", "It cost $5, then 10$ more.", "$5/month or 50$ a year", "US$20 = 18 and "
                                                                              "US$30", "$PATH and "
                                                                                       "$HOME",
        "$HOME/bin:$PATH", "set $a=1 and $b=2", "from $100 to $200 (+50%)", "$1_000 or "
                                                                            "$2_000", "pays $5 = "
                                                                                      "$4 "
                                                                                      "+ "
                                                                                      "$1",
        "`$x^2$` and `\\(y\\)`", "$$ is the process", "a $ b = c $ d", "$unclosed = 1",
        r"$\unknownmacro{x} = 1$", r"$\frac$",
    ],
)  # fmt: skip
def test_text_that_is_not_a_formula_is_not_changed(said: str) -> None:
    assert " ".join(shown(said, 2000).split()) == said.replace("`", "")


def test_a_formula_that_is_too_deep_is_shown_as_its_source() -> None:
    said = "$" + "{" * 400 + "=$"
    assert "".join(shown(said, 2000).split()) == said


def test_code_is_never_a_formula() -> None:
    assert shown("```sh\necho $$ $x^2$\n\\[ -f x \\]\n```\n\n    $y_1$") == (
        "  [1] sh\n  echo $$ $x^2$\n  \\[ -f x \\]\n\n  $y_1$"
    )


@given(st.text("\\{}$^_&%#~ abfracsqt[]()\n12=", max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_formula_source_is_shown(said: str) -> None:
    assert "\x1b" not in as_unicode(said)
    assert max(map(len, as_lines(said, 40)), default=0) <= 120
    MarkdownRows(f"$${said}$$ \\({said}\\)").at(40)


def test_no_formula_reads_a_file_or_writes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert "root" not in as_unicode(r"\input{/etc/passwd} \include{/etc/passwd}")
        assert as_unicode(r"\alpha") == "α"
    assert not [record for record in caplog.records if record.name.startswith("pylatexenc")]


def test_eighty_formulas_have_the_expected_text() -> None:
    assert len(FORMULAS) == 80
    wrong = [
        (latex, as_unicode(latex), text) for latex, text in FORMULAS if as_unicode(latex) != text
    ]
    assert not wrong


@pytest.mark.parametrize(("latex", "text"), OTHER_FORMULAS)
def test_rarer_forms_of_formulas_have_the_expected_text(latex: str, text: str) -> None:
    assert as_unicode(latex) == text


@pytest.mark.parametrize(
    ("latex", "rows"),
    [
        (r"x = \frac{a+b}{2}", ["    a+b", "x = ───", "     2"]),
        (r"e^{-\frac{x}{2}}", [" -x/2", "e"]),
        (r"10^{\alpha}", ["  α", "10"]),
        (r"\frac{\frac{a}{b}}{c}", [" a", " ─", " b", "───", " c"]),
        (r"(\frac{a}{b})^2", [" a", "(─)²", " b"]),
        (r"\sup_{x \in A}|f(x)|", [" sup  |f(x)|", "x ∈ A"]),
        (r"\lVert x \rVert_{\infty}", ["‖x‖", "   ∞"]),
        (r"\left(\begin{array}{c|c}1&2\\3&4\end{array}\right)", ["⎛1  │  2⎞", "⎝3  │  4⎠"]),
        (r"\begin{align}a&=1&b&=2\\c&=3&d&=4\end{align}", ["a = 1   b = 2", "c = 3   d = 4"]),
        (r"\sqrt{\frac{a}{b}}", ["  ┌─", "  │a", "  │─", "╲╱│b"]),
        (r"\sum_{i=0}^{\infty} x", ["  ∞", "  ∑   x", "i = 0"]),
        (r"\begin{pmatrix} 1 & -1 \\ 10 & 2 \end{pmatrix}^T", ["⎛1   -1⎞ᵀ", "⎝10  2 ⎠"]),
        (
            r"f = \begin{cases} 1 & x > 0 \\ 0 & x = 0 \\ -1 & x < 0 \end{cases}",
            ["    ⎧1   x > 0", "f = ⎨0   x = 0", "    ⎩-1  x < 0"],
        ),
        (r"\begin{align} a &= b \\ &= cd \end{align}", ["a = b", "  = cd"]),
        (r"a &= b \\ &= \left[\frac12\right]", ["a = b", "    ⎡1⎤", "  = ⎢─⎥", "    ⎣2⎦"]),
        (r"\underbrace{a+b+c}_{n}", ["a+b+c", "╰─┬─╯", "  n"]),
    ],
)
def test_a_displayed_formula_is_drawn_on_several_rows(latex: str, rows: list[str]) -> None:
    assert as_lines(latex, 40) == tuple(rows)
    assert shown(f"$$\n{latex}\n$$") == "\n".join("    " + row for row in rows)


def test_a_displayed_formula_that_is_too_wide_is_written_on_one_line() -> None:
    latex = r"\frac{" + "+".join("abcdefgh") + "}{2}"
    assert as_lines(latex, 15) == ("a+b+c+d+e+f+g+h", "───────────────", "       2")
    assert as_lines(latex, 14) == ()
    assert shown(f"$${latex}$$", 18).split() == ["(a+b+c+d+e+f+g", "+h)/2"]
