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
        "cli/test_listening.py::test_a_generated_key_is_stored_between_starts_and_readable_only_by_its_owner",
        "cli/test_listening.py::test_the_key_is_shown_with_quiet_too",
    ),
    "key": ("server/test_security.py::test_the_key_is_required_everywhere_but_health",),
    "users of this machine": (
        "server/test_other_users.py::test_another_user_is_answered_only_on_health_routes",
        "server/test_other_users.py::test_the_chats_engine_answers_another_user_only_on_health_routes",
        "server/test_other_users.py::test_every_user_is_answered_if_the_owner_allows_it",
        "server/test_other_users.py::test_a_system_that_reports_no_users_gets_a_kept_key",
    ),
    "Host": (
        "server/test_security.py::test_a_foreign_host_is_refused_everywhere",
        "server/test_doors.py::test_an_address_or_a_container_s_name_is_served_with_the_key_and_only_with_it",
        "server/test_doors.py::test_a_name_the_user_allowed_is_served_and_no_other",
        "server/test_doors.py::test_a_host_name_that_a_web_page_can_rebind_is_refused_even_with_a_key",
    ),
    "Origin (web pages)": (
        "server/test_security.py::test_a_foreign_origin_is_refused_everywhere",
        "server/test_doors.py::test_a_page_the_user_allowed_is_let_in_and_no_page_like_it",
        "server/test_doors.py::test_every_page_is_allowed_only_behind_a_key",
    ),
    "pages without an Origin": (
        "server/test_doors.py::test_a_foreign_page_cannot_send_a_get_without_an_origin",
    ),
    "TLS": (
        "cli/test_listening.py::test_requests_are_served_over_tls",
        "cli/test_listening.py::test_unusable_tls_files_are_refused_with_the_reason_before_anything_loads",
    ),
    "Unix socket": ("server/test_security.py::test_a_unix_socket_can_be_opened_only_by_its_owner",),
    "bodies": (
        "server/test_security.py::test_a_post_that_a_page_could_send_without_asking_is_refused",
        "server/test_security.py::test_of_the_content_types_a_page_can_send_only_curls_is_read_and_only_from_programs",
        "server/test_security.py::test_a_body_too_large_is_refused_announced_or_not",
        "server/test_security.py::test_a_body_that_arrives_too_slowly_is_cut_off",
        "server/test_bodies.py::test_a_compression_bomb_is_never_decompressed_beyond_the_limit",
        "server/test_bodies.py::test_a_body_of_too_many_parts_is_refused_and_brackets_in_a_text_are_none",
        "server/test_heavy_bodies.py::test_a_heavy_body_is_refused",
        "server/test_heavy_bodies.py::test_a_heavy_body_delays_no_other_client",
        "server/test_heavy_bodies.py::test_ten_compressed_bodies_delay_no_other_client",
        "server/test_connections.py::test_a_body_at_the_least_rate_is_waited_for_and_a_slower_one_is_not",
    ),
    "headers": (
        "server/test_security.py::test_headers_that_arrive_too_slowly_are_cut_off",
        "server/test_security.py::test_repeated_host_headers_are_refused",
    ),
    "connections": (
        "server/test_connections.py::test_any_number_of_connections_without_a_key_delays_no_client",
        "server/test_connections.py::test_any_number_of_connections_without_a_key_is_closed",
        "server/test_connections.py::test_an_admitted_connection_may_be_idle_longer_than_an_unknown_one",
        "server/test_connections.py::test_an_idle_known_connection_is_closed_for_a_new_one_and_busy_ones_are_not",
    ),
    "files": (
        "server/test_security.py::test_model_names_reach_no_file",
        "cli/test_served_models.py::test_no_request_reaches_a_file_by_its_path",
    ),
    "fetching and removing models": (
        "server/test_pulling.py::test_pulling_is_refused_until_allowed_and_the_refusal_names_the_option",
        "server/test_pulling.py::test_a_model_that_answers_is_not_removed",
    ),
    "images at addresses": (
        "server/test_no_fetching.py::test_a_request_fetches_no_address_and_reads_no_file",
        "server/test_image_hosts.py::test_any_other_host_is_refused_with_the_reason",
        "server/test_image_hosts.py::test_an_image_of_an_allowed_host_is_fetched",
        "server/test_image_hosts.py::test_a_host_name_with_an_internal_address_is_refused",
        "server/test_image_hosts.py::test_an_image_that_cannot_be_fetched_is_refused_with_the_reason",
        "server/test_image_hosts.py::test_the_images_that_one_request_may_fetch_are_limited",
        "server/test_image_hosts.py::test_addresses_in_llama_cpps_form_are_refused",
    ),
    "loading a model": (
        "cli/test_served_models.py::test_no_request_reaches_a_file_by_its_path",
        "cli/test_served_models.py::test_only_offers_the_named_model_under_all_of_its_names",
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
        "server/test_managing.py::test_slots_show_running_and_waiting_requests_without_their_text",
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
