"""Commit subjects have the form that CONTRIBUTING.md requires: `area: verb …`, 72 characters at
most."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_CHARACTERS = 72
# Add a verb here if a subject needs one that is missing.
VERBS = set(
    re.findall(
        r"\w+",
        """
        accept add allow answer apply ask avoid bind bound build cache call cancel change check
        choose clear close collect compare compile compute connect convert copy correct count
        cut decide declare decode define delete describe detect document draft draw drop encode end evict
        exclude expect explain export extend fetch find fix follow forget give group handle hide hold ignore
        import include inline install join keep learn let limit list load log lower make map
        mark match measure merge move name open order parse pass pin place plan prefer prefill
        prepare print protect put quote raise rank read record reduce refuse reject release rely
        remove rename render replace report require resolve restore restructure resume retry
        return reuse rewrap rewrite run save search select send separate serve set share shorten
        show simplify skip sort speed split start state stop store stream take tell test tighten time
        translate truncate try unify unpack update use validate verify wait warn weigh widen wrap
        write yield
        """,
    )
)


def subjects() -> list[str]:
    """Subjects of the commits since this test was added, newest first."""

    def git(*arguments: str) -> list[str]:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return found.stdout.splitlines() if found.returncode == 0 else []

    here = Path(__file__).relative_to(ROOT).as_posix()
    added = git("log", "--diff-filter=A", "--format=%H", "--", here)
    if not added:
        return []
    return git("log", "--no-merges", "--format=%s", f"{added[-1]}..HEAD")


def problem(subject: str) -> str:
    """Return the error in a subject, or an empty string."""
    if len(subject) > MAX_CHARACTERS:
        return f"{len(subject)} characters are more than {MAX_CHARACTERS}"
    form = re.fullmatch(r"[\w./ ,-]+: (\w+)\b.*", subject)
    if form is None:
        return "the form is `area: verb …`"
    if form[1] not in VERBS:
        return f"{form[1]!r} is not in the list of verbs in {Path(__file__).name}"
    return ""


def test_every_subject_names_an_area_and_begins_with_a_verb() -> None:
    found = {subject: problem(subject) for subject in subjects()}
    assert {subject: why for subject, why in found.items() if why} == {}


@pytest.mark.parametrize(
    "subject",
    ["cache evict by one policy", "cache: what leaves the context", f"cache: evict {'x' * 60}"],
)
def test_a_subject_of_another_form_is_noticed(subject: str) -> None:
    assert problem(subject)


def test_the_example_of_the_contributing_page_is_accepted() -> None:
    assert problem("cache: evict by one policy") == ""
