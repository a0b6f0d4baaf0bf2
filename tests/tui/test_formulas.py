"""LaTeX as Unicode where it is a formula, and never a price or code."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm_tui.widgets.formulas import as_unicode
from localllm_tui.widgets.markdown import MarkdownRows


def shown(said: str, width: int = 70, **how: Any) -> str:
    return "\n".join(row.text.plain.rstrip() for row in MarkdownRows(said, **how).at(width))


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (r"so $E = mc^2$ holds", "so E = mc² holds"),
        (r"\(a_{ij} \le x^{n+1}\), and **$\alpha$**", "aᵢⱼ ≤ xⁿ⁺¹, and α"),
        (r"$$\frac{-b \pm \sqrt{b^2-4ac}}{2a}$$", "    (-b ± √(b²-4ac))/(2a)"),
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
        r"$\unknownmacro{x} = 1$", r"$\frac$", "$" + "{" * 400 + "=$",
    ],
)  # fmt: skip
def test_what_is_no_formula_stands_as_it_is(said: str) -> None:
    assert " ".join(shown(said, 2000).split()) == said.replace("`", "")


def test_code_is_never_a_formula() -> None:
    assert shown("```sh\necho $$ $x^2$\n\\[ -f x \\]\n```\n\n    $y_1$") == (
        "  [1] sh\n  echo $$ $x^2$\n  \\[ -f x \\]\n\n  $y_1$"
    )


@given(st.text("\\{}$^_&%#~ abfracsqt[]()\n12=", max_size=300))
@settings(max_examples=200, deadline=None)
def test_whatever_a_model_writes_is_shown(said: str) -> None:
    assert "\x1b" not in as_unicode(said)
    MarkdownRows(f"$${said}$$ \\({said}\\)").at(40)


def test_no_formula_reads_a_file_or_talks_to_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert "root" not in as_unicode(r"\input{/etc/passwd} \include{/etc/passwd}")
        assert as_unicode(r"\alpha") == "α"
    assert not [record for record in caplog.records if record.name.startswith("pylatexenc")]
