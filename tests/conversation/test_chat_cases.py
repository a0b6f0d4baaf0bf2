"""llama.cpp's own cases of parsing an answer: how many of them our server reads alike.

Other tests read the file of cases.

The cases are not in this repository: name a llama.cpp source tree in LOCALLLM_LLAMA_CPP_SOURCE.
`python -m benchmarks.chat_cases` prints each case that fails.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.chat_cases import FAMILIES, Result, found_in, report, run
from benchmarks.cpp_cases import read_cases
from localllm_catalog import families

_SOURCE = os.environ.get("LOCALLLM_LLAMA_CPP_SOURCE")
# Minimum shares of cases that are read alike: among the catalog's families, and among all.
_OF_CATALOG, _OF_ALL = 0.98, 0.97


@pytest.mark.skipif(
    not _SOURCE, reason="set LOCALLLM_LLAMA_CPP_SOURCE to a llama.cpp source tree to try its cases"
)
def test_most_cases_of_llama_cpp_are_parsed_alike_and_none_shows_a_partial_call_or_tag() -> None:
    source = Path(_SOURCE or "")
    found = found_in(source)
    assert not found.unread
    assert len(found.cases) >= 400
    results = [run(case, source) for case in found.cases]
    said = report(results)
    assert _share(results) >= _OF_ALL, said
    assert _share([r for r in results if r.family is not None]) >= _OF_CATALOG, said
    cut = [r for r in results if any("cut behind" in f or "by letters" in f for f in r.faults)]
    assert not cut, report(cut)


def _share(results: list[Result]) -> float:
    return sum(not r.faults for r in results) / len(results)


def test_every_family_is_in_the_catalog() -> None:
    known = {path.stem for path in (Path(families.__path__[0])).glob("*.toml")}
    assert set(FAMILIES.values()) <= known


CPP = r"""
#include "chat.h"
// A comment with "quotes and tst.test("
static common_chat_tool clock_tool{
    /* .name = */ "clock", "Says the time", R"({"type": "object", "properties": {"zone": {"type": "string"}}})",
};
static std::vector<common_chat_tool> tools{ clock_tool };
const common_chat_msg asked{ "user", "When?", {}, {}, "", "", "" };
const common_chat_msg told = simple_assist_msg("It is\nten.", "Look \"up\"");
static void test_more(const std::string & path, bool detailed_debug) {
    auto tst = peg_tester(path, detailed_debug);
    tst.test("Hi.").expect(told).run();
}
static void test_all(bool detailed_debug) {
    const std::string call = "<call>" "{}";
    {
        auto tst = peg_tester("a.jinja", detailed_debug);
        if (detailed_debug) { tst.test("never").run(); }
        common_chat_msg question;
        question.role    = "user";
        question.content = "Now?";
        tst.test("So: " + call + R"#({"a": ")"})#")
            .tools({ clock_tool })
            .messages({ asked, question })
            .parallel_tool_calls(true)
            .expect_content("So:")
            .expect_tool_calls({ { "clock", "{\"zone\": \"\u00e9\"}", {} } })
            .run();
        tst.test(unheard_of(1)).run();
    }
    for (const char * path : { "b.jinja", "c.jinja" }) {
        test_more(path, detailed_debug);
    }
    for (int i = 0; i < 3; i++) { tst.test("never").run(); }
}
"""


def test_a_file_of_cases_is_read(tmp_path: Path) -> None:
    path = tmp_path / "test-chat.cpp"
    path.write_text(CPP, encoding="utf-8")
    found = read_cases(path)
    first, *others = found.cases
    assert (first.template, first.said, first.content) == (
        "a.jinja",
        'So: <call>{}{"a": ")"}',
        "So:",
    )
    assert list(first.calls) == [("clock", '{"zone": "é"}')]
    assert [m["content"] for m in first.settings["messages"]] == ["When?", "Now?"]
    assert first.settings["tools"][0][0] == "clock"
    assert first.settings["parallel_tool_calls"] is True
    assert [c.template for c in others] == ["b.jinja", "c.jinja"]
    assert [(c.content, c.reasoning) for c in others] == [("It is\nten.", 'Look "up"')] * 2
    assert [why for _, why in found.unread] == ["the function unheard_of is not known"]
