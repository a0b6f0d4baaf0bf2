"""Every row of the table in docs/api/security.md has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
HI = [{"role": "user", "content": "my-private-words"}]
# The tests of each row's way of access.
TRIED: Mapping[str, tuple[str, ...]] = {
    "address": (
        "server/test_security.py::test_an_address_that_others_can_reach_gets_a_key",
        "cli/test_listening.py::test_a_made_up_key_is_kept_between_starts_and_only_its_owner_reads_it",
        "cli/test_listening.py::test_the_key_is_shown_to_the_quiet_too",
    ),
    "key": ("server/test_security.py::test_the_key_is_required_everywhere_but_health",),
    "users of this machine": (
        "server/test_other_users.py::test_another_user_is_answered_on_no_route_but_health",
        "server/test_other_users.py::test_the_chats_engine_answers_another_user_on_no_route_but_health",
        "server/test_other_users.py::test_every_user_is_answered_if_the_owner_allows_it",
        "server/test_other_users.py::test_a_system_that_reports_no_users_gets_a_kept_key",
    ),
    "Host": (
        "server/test_security.py::test_a_foreign_host_is_refused_everywhere",
        "server/test_doors.py::test_an_address_or_a_container_s_name_is_served_with_the_key_and_only_with_it",
        "server/test_doors.py::test_a_name_the_user_allowed_is_served_and_no_other",
        "server/test_doors.py::test_no_name_that_a_page_can_point_here_is_served_whatever_else_is_right",
    ),
    "Origin (web pages)": (
        "server/test_security.py::test_a_foreign_origin_is_refused_everywhere",
        "server/test_doors.py::test_a_page_the_user_allowed_is_let_in_and_no_page_like_it",
        "server/test_doors.py::test_every_page_is_allowed_only_behind_a_key",
    ),
    "pages without an Origin": (
        "server/test_doors.py::test_a_foreign_page_can_not_even_ask_without_an_origin",
    ),
    "TLS": (
        "cli/test_listening.py::test_it_is_served_over_tls",
        "cli/test_listening.py::test_files_that_can_not_be_used_say_why_before_anything_loads",
    ),
    "Unix socket": ("server/test_security.py::test_a_unix_socket_only_its_owner_can_open",),
    "bodies": (
        "server/test_security.py::test_a_post_that_a_page_could_send_without_asking_is_refused",
        "server/test_security.py::test_of_the_types_a_page_can_send_only_curls_is_read_and_only_from_programs",
        "server/test_security.py::test_a_body_too_large_is_refused_announced_or_not",
        "server/test_security.py::test_a_body_that_trickles_is_cut_off",
        "server/test_bodies.py::test_a_bomb_is_never_unpacked_beyond_the_limit",
        "server/test_bodies.py::test_a_body_of_too_many_parts_is_refused_and_brackets_in_a_text_are_none",
        "server/test_heavy_bodies.py::test_a_heavy_body_is_refused",
        "server/test_heavy_bodies.py::test_nobody_waits_for_a_heavy_body",
        "server/test_heavy_bodies.py::test_nobody_waits_for_ten_packed_ones",
        "server/test_connections.py::test_a_body_at_the_least_rate_is_waited_for_and_a_slower_one_is_not",
    ),
    "headers": (
        "server/test_security.py::test_headers_that_trickle_are_cut_off",
        "server/test_security.py::test_repeated_host_headers_are_refused",
    ),
    "connections": (
        "server/test_connections.py::test_any_number_without_a_key_keeps_nobody_waiting",
        "server/test_connections.py::test_any_number_without_a_key_ends",
        "server/test_connections.py::test_who_was_let_in_rests_longer_than_a_stranger",
        "server/test_connections.py::test_a_known_one_that_rests_makes_room_and_busy_ones_do_not",
    ),
    "files": (
        "server/test_security.py::test_model_names_reach_no_file",
        "cli/test_served_models.py::test_no_request_reaches_a_file_by_its_path",
    ),
    "fetching and removing models": (
        "server/test_pulling.py::test_it_is_refused_until_it_is_allowed_and_the_refusal_says_how",
        "server/test_pulling.py::test_a_model_that_answers_is_not_removed",
    ),
    "images at addresses": (
        "server/test_no_fetching.py::test_nothing_is_fetched",
        "server/test_image_hosts.py::test_any_other_host_is_refused_with_the_reason",
        "server/test_image_hosts.py::test_an_image_of_a_host_that_was_named_is_fetched",
        "server/test_image_hosts.py::test_a_name_that_leads_inside_is_refused",
        "server/test_image_hosts.py::test_what_does_not_come_says_why",
        "server/test_image_hosts.py::test_what_one_request_may_fetch_is_bounded",
        "server/test_image_hosts.py::test_llama_cpp_s_form_has_no_addresses",
    ),
    "loading a model": (
        "cli/test_served_models.py::test_no_request_reaches_a_file_by_its_path",
        "cli/test_served_models.py::test_with_only_no_other_model_is_offered_but_all_names_of_the_named_one_are",
    ),
    "unloading (`keep_alive`, `/models/unload`)": (
        "server/test_managing.py::test_a_model_in_use_is_not_unloaded",
        "server/test_ollama.py::test_a_model_in_use_is_unloaded_when_its_requests_have_ended",
    ),
    "what is kept (responses)": (
        "server/test_security_table.py::test_stored_responses_are_never_listed",
    ),
    "figures (`/metrics`, `/slots`, `/props`)": (
        "server/test_security_table.py::test_metrics_contain_no_text_of_a_prompt_or_answer",
        "server/test_managing.py::test_slots_tell_what_runs_and_what_waits_and_no_word_of_it",
    ),
}


def doors() -> list[str]:
    """The first column of the table."""
    section = (
        (ROOT / "docs" / "api" / "security.md")
        .read_text(encoding="utf-8")
        .partition("\n## Access\n")[2]
        .partition("\n### ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]


def test_every_row_is_tried() -> None:
    assert doors() == list(TRIED)


@pytest.mark.parametrize("named", sorted({test for tests in TRIED.values() for test in tests}))
def test_every_test_named_in_a_row_exists(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_stored_responses_are_never_listed() -> None:
    """Stored responses are never listed.

    They are available only by their ids, which cannot be guessed.
    """
    with (
        running_server({"tiny": ScriptedEngine()}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        kept = [http.post("/v1/responses", json={"input": HI}).json()["id"] for _ in range(2)]
        assert http.get("/v1/responses").status_code == 405
        for one in kept:
            assert re.fullmatch(r"resp_[0-9a-f]{24}", one), "96 random bits"
            assert http.get(f"/v1/responses/{one}").status_code == 200
            other = one[:-1] + ("0" if one[-1] != "0" else "1")
            assert http.get(f"/v1/responses/{other}").status_code == 404


def test_metrics_contain_no_text_of_a_prompt_or_answer() -> None:
    engine = ScriptedEngine(script=("my-private-answer",))
    with (
        running_server({"tiny": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        said = http.post("/v1/chat/completions", json={"messages": HI, "user": "my-private-name"})
        assert "my-private-answer" in said.text
        for path in ("/metrics", "/slots", "/props", "/v1/models", "/models", "/api/ps", "/health"):
            reply = http.get(path)
            assert reply.status_code == 200, path
            assert "my-private" not in reply.text, path
