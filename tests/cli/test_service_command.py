"""`localllm service`: the manager's command, its output, and sockets handed over by a manager."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm import paths
from localllm.cli.all_commands import app
from localllm.cli.serve.running import published
from localllm.cli.service_unit import (
    listen_streams,
    service_of,
    settings_of_this_terminal,
    show_log,
    wait_for_workers,
    wait_until_it_listens,
)
from localllm.errors import UsageError
from localllm.server.http.settings import ServerSettings
from localllm.service.launchd import Launchd
from localllm.service.types import ServiceError
from localllm.settings import Settings
from service import recorded


def test_a_service_gets_absolute_paths_and_unchanged_model_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    service = service_of(
        ["m.gguf", "qwen3-8b:Q4_K_M"], Settings({"unix_socket": "s.sock"}), "systemd", None
    )
    assert service.command == (
        sys.executable, "-m", "localllm", "serve", "--unix", str(tmp_path / "s.sock"),
        str(tmp_path.resolve() / "m.gguf"),
        "qwen3-8b:Q4_K_M",
    )  # fmt: skip
    assert service.addresses == (str(tmp_path / "s.sock"),)
    assert service.environment["LOCALLLM_CONFIG_DIR"] == str(paths.config_dir())


def test_a_windows_service_gets_its_environment_and_log_as_arguments() -> None:
    command = service_of(["m"], Settings({}), "task-scheduler", None).command
    assert command[1:6] == ("-m", "localllm", "service", "run", "--log")
    assert f"LOCALLLM_CACHE_DIR={paths.cache_dir()}" in command


def test_a_service_listens_on_the_configured_address() -> None:
    assert listen_streams(Settings({}))[0] == "127.0.0.1:11535"
    assert listen_streams(Settings({"host": "::", "port": 80})) == ("[::]:80",)
    # A resolved name can change its address, and port 0 means any free port, so neither is used.
    assert listen_streams(Settings({"host": "nas.lan"})) == ()
    assert listen_streams(Settings({"port": 0})) == ()


def test_a_dry_run_prints_every_managers_files_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, sign in [
        ("systemd", "ListenStream="),
        ("launchd", "RunAtLoad"),
        ("task-scheduler", "LogonTrigger"),
    ]:
        said = CliRunner().invoke(
            app, ["service", "install", "qwen3-8b", "--dry-run", "--manager", name]
        )
        assert said.exit_code == 0, said.output
        assert sign in said.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_is_an_error_before_the_service_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*words: object) -> None:
        pytest.fail(f"asked the manager: {words}")

    monkeypatch.setattr("localllm.service.systemd.Systemd.install", never)
    said = CliRunner().invoke(app, ["service", "install", "no-such-model", "--manager", "systemd"])
    assert "no-such-model" in str(said.exception)


@pytest.mark.parametrize(("answer", "code", "words"), [
    (recorded.SYSTEMD_RUNNING, 0, "running: active (running)"),
    (recorded.SYSTEMD_FAILED, 6, "last exit code  3"),
    (recorded.SYSTEMD_NONE, 3, "localllm service install"),
])  # fmt: skip
def test_the_status_shows_the_state_of_the_service(
    answer: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\ncat <<'EOF'\n{answer}EOF\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = CliRunner().invoke(app, ["service", "status", "--manager", "systemd"])
    assert (said.exit_code, words in said.stdout) == (code, True), said.output
    as_json = CliRunner().invoke(app, ["service", "status", "--manager", "systemd", "--json"])
    assert json.loads(as_json.stdout)["installed"] == (code != 3)


def test_the_status_of_a_running_service_shows_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = tmp_path / "systemctl"
    answer = re.sub(r"MainPID=\d+", f"MainPID={os.getpid()}", recorded.SYSTEMD_RUNNING)
    systemctl.write_text(f"#!/bin/sh\ncat <<'EOF'\n{answer}EOF\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def status(*words: str) -> str:
        return CliRunner().invoke(app, ["service", "status", "--manager", "systemd", *words]).stdout

    with published(ServerSettings(port=8080), 8080):
        assert "address         http://127.0.0.1:8080/v1" in status()
        assert json.loads(status("--json"))["address"] == "http://127.0.0.1:8080/v1"
        assert wait_until_it_listens(0.0) == "http://127.0.0.1:8080/v1"
    with published(ServerSettings(unix_socket=str(tmp_path / "s.sock")), 0):
        assert f"address         the Unix socket {tmp_path.resolve() / 's.sock'}" in status()
    assert "address" not in status()


def test_a_journal_without_permission_is_distinguished_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A journal that this user may not read is distinguished from a broken one.

    If journald keeps it only in memory, users cannot read even their own entries.
    """
    journalctl = tmp_path / "journalctl"
    journalctl.write_text(
        "#!/bin/sh\necho 'No journal files were opened due to insufficient permissions.' "
        ">&2\nexit 1\n"
    )
    journalctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ServiceError, match="journal") as told:
        show_log(["journalctl", "--lines=2"])
    assert "usermod -aG systemd-journal" in (told.value.hint or "")


def test_an_unknown_manager_and_an_unsupported_memory_limit_are_refused() -> None:
    said = CliRunner().invoke(app, ["service", "status", "--manager", "upstart"])
    assert isinstance(said.exception, UsageError)
    with pytest.raises(UsageError, match="can't limit memory"):
        service_of([], Settings({}), "launchd", 4.0)
    with pytest.raises(UsageError, match=r"at least 0\.5"):
        service_of([], Settings({}), "systemd", 0.1)


def test_the_last_lines_of_a_log_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "serve.log"
    log.write_text("one\ntwo\nthree\n")
    show_log(Launchd(tmp_path, 501, log).log_command(2, follow=False))
    assert capfd.readouterr().out == "two\nthree\n"
    log.unlink()
    with pytest.raises(ServiceError, match="tail"):
        show_log(Launchd(tmp_path, 501, log).log_command(2, follow=False))


def test_a_start_waits_only_for_the_workers_of_a_killed_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start waits for the workers of a killed server, and for no other processes.

    They are recognised by systemd's invocation id in their environment.
    """
    forever = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"]

    def child(run: str) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(
            forever,
            env={**os.environ, "INVOCATION_ID": run},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert made.stdout is not None
        made.stdout.readline()
        return made

    ours, other = child("this-run"), child("another-run")
    try:
        monkeypatch.setenv("INVOCATION_ID", "this-run")
        assert wait_for_workers(longest_s=0.05) == 1
        assert ours.wait(60) != 0
        assert wait_for_workers(longest_s=0.05) == 0
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.communicate()


_GIVEN = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
from localllm.cli.serve.listening import listening
from localllm.errors import UsageError
from localllm.server.http.settings import ServerSettings
from localllm.service.types import ServiceError
from localllm.server.http.settings import ServerSettings
try:
    with listening(ServerSettings(port=int(sys.argv[1])).secured()) as (socks, address):
        print(len(socks), address, "LISTEN_FDS" in os.environ)
except UsageError as e:
    print(e.message)
"""


def given(sock: socket.socket, port: int) -> str:
    """Return the output of a server that gets `sock` as descriptor 3, like from systemd."""

    def third() -> None:
        os.dup2(sock.fileno(), 3)

    done = subprocess.run(
        [sys.executable, "-c", _GIVEN, str(port)], env={**os.environ, "LISTEN_FDS": "1"},
        pass_fds=[3],
        preexec_fn=third, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors are handed over there")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_managers_socket_is_served_unless_it_admits_more_clients_than_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert given(sock, port) == f"1 http://127.0.0.1:{port}/v1 False\n"
        assert "which differs from the settings" in given(sock, port + 1)
    with socket.create_server(("0.0.0.0", 0)) as sock:
        assert "no key is set" in given(sock, sock.getsockname()[1])
    with socket.socket() as sock:
        assert "not a listening socket" in given(sock, 1)


def test_sockets_meant_for_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.server.http.sockets import inherited

    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert inherited() == []
    assert "LISTEN_FDS" not in os.environ


def test_settings_that_only_this_terminal_has_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_KV_TYPE", "q8_0")
    assert settings_of_this_terminal() == ["LOCALLLM_KV_TYPE"]
