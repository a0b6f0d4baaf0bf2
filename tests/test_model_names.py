"""The order in which rules resolve a typed model name, and which spellings count as the same
name."""

from __future__ import annotations

import pytest

from localllm.model_names import NameMatch, NameTable, Rule, find, without_tag


def test_the_first_rule_that_finds_a_model_decides() -> None:
    tried: list[Rule] = []

    def finding(rule: Rule, *models: str):
        def found(typed: str) -> list[str]:
            tried.append(rule)
            return [f"{typed} by {model}" for model in models]

        return found

    rules = {
        Rule.PATTERN: finding(Rule.PATTERN, "pattern"),
        Rule.CATALOG: finding(Rule.CATALOG, "catalog", "another"),
        Rule.SERVED: finding(Rule.SERVED),
    }
    match = find(" name ", rules)
    assert (match.models, match.rule) == (["name by catalog", "name by another"], Rule.CATALOG)
    assert match.first == "name by catalog"
    assert tried == [Rule.SERVED, Rule.CATALOG]
    assert find("name", {Rule.SERVED: finding(Rule.SERVED)}) == NameMatch()


def test_model_name_rules_have_a_fixed_order() -> None:
    assert [rule.name for rule in sorted(Rule)] == [
        "SERVED", "PATH", "UPSTREAM", "INSTALLED", "PART", "CATALOG", "PATTERN",
    ]  # fmt: skip


@pytest.mark.parametrize("typed", ["tiny", "TINY", "tiny:latest", "Tiny:Latest"])
@pytest.mark.parametrize("name", ["Tiny", "tiny:latest"])
def test_the_default_tag_and_case_do_not_matter(name: str, typed: str) -> None:
    assert list(NameTable([(name, "model")]).named(typed)) == ["model"]


def test_the_default_tag_matters_where_two_models_differ_in_it() -> None:
    table = NameTable([("tiny", "a file"), ("tiny:latest", "of Ollama")])
    assert list(table.named("tiny")) == ["a file"]
    assert list(table.named("tiny:latest")) == ["of Ollama"]
    assert not table.named("tiny:1b")
    assert without_tag("tiny:1b") == "tiny:1b"


def test_the_most_specific_pattern_wins_and_is_not_a_model_name() -> None:
    table: NameTable[str] = NameTable()
    table.add_alias("claude-*", "any")
    table.add_alias("claude-haiku-?", "haiku")
    assert list(table.by_pattern("Claude-haiku-4:latest")) == ["haiku"]
    assert list(table.by_pattern("claude-opus")) == ["any"]
    assert not table.by_pattern("gpt")
    assert not table.named("claude-*")
    assert list(table.add_alias("claude-*", "later")) == ["any"]
