"""The endpoints of `localllm serve`.

They are both addresses of localhost, a stored key, TLS, and the names and origins that a user
allows.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from localllm import paths
from localllm.cli.all_commands import app
from localllm.cli.serve.api_keys import stored_or_new_key
from localllm.cli.serve.listening import listening, reachable_address, server_settings
from localllm.errors import LocalLLMError, PortInUseError, UsageError
from localllm.server.http import sockets
from localllm.server.http.settings import ServerSettings, TlsFiles
from localllm.settings import Settings
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")


# --- addresses ------------------------------------------------------------------------------------


@needs_ipv6
def test_localhost_listens_on_ipv4_and_ipv6_on_one_port() -> None:
    with listening(ServerSettings(host="localhost", port=0).secured()) as (socks, address):
        names = {(s.family, s.getsockname()[0], s.getsockname()[1]) for s in socks}
        port = socks[0].getsockname()[1]
        assert names == {(socket.AF_INET, "127.0.0.1", port), (socket.AF_INET6, "::1", port)}
        assert address == f"http://localhost:{port}/v1"


def test_localhost_is_the_default_host() -> None:
    assert Settings().value("host") == "localhost"


def test_a_server_on_all_interfaces_shows_the_address_that_other_machines_reach() -> None:
    with listening(ServerSettings(host="0.0.0.0", port=0, api_key="k").secured()) as (
        socks,
        address,
    ):
        told, port = reachable_address(address), socks[0].getsockname()[1]
        # Without a network there is no such address.
        assert told is None or (told.endswith(f":{port}/v1") and "0.0.0.0" not in told)
    assert reachable_address("http://localhost:1/v1") is None
    assert reachable_address("http://10.0.0.8:1/v1") is None


@needs_ipv6
def test_clients_of_both_addresses_of_localhost_are_answered() -> None:
    with running_server({"tiny": ScriptedEngine()}, host="localhost") as server:
        for name in ("127.0.0.1", "[::1]", "localhost"):
            assert (
                httpx.get(f"http://{name}:{server.port}/v1/models", trust_env=False).status_code
                == 200
            )


@needs_ipv6
def test_an_address_used_by_another_program_is_an_error_that_names_it() -> None:
    """If another program holds one of the addresses, the error names it.

    That program would otherwise get requests of our clients to `localhost`.
    """
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen()
        with pytest.raises(PortInUseError, match="::1"):
            sockets.bind("localhost", other.getsockname()[1])


def test_a_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without(family: int = socket.AF_INET, *args: object) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", without)
    socks = sockets.bind("localhost", 0)
    assert [s.getsockname()[0] for s in socks] == ["127.0.0.1"]
    for s in socks:
        s.close()


# --- the key --------------------------------------------------------------------------------------


def test_a_generated_key_is_stored_between_starts_and_readable_only_by_its_owner() -> None:
    first = server_settings(Settings({"host": "0.0.0.0"}))
    assert first.generated_key
    assert first.api_key == server_settings(Settings({"host": "0.0.0.0"})).api_key
    path = paths.data_dir() / "server-key"
    assert path.read_text().strip() == first.api_key
    assert path.stat().st_mode & 0o077 == 0
    second = server_settings(Settings({"host": "0.0.0.0"}), new_key=True)
    assert second.api_key != first.api_key
    assert server_settings(Settings({"host": "0.0.0.0"})).api_key == second.api_key


def test_no_key_is_stored_if_none_is_generated() -> None:
    assert server_settings(Settings({"allow_users": True})).api_key is None
    assert server_settings(Settings({"host": "0.0.0.0", "api_key": "mine"})).api_key == "mine"
    assert not (paths.data_dir() / "server-key").exists()
    for settings in (
        Settings({"allow_users": True}),
        Settings({"host": "0.0.0.0", "api_key": "mine"}),
    ):
        with pytest.raises(UsageError, match="--new-key"):
            server_settings(settings, new_key=True)


@pytest.mark.parametrize(
    "damaged", ["", "short", "two words that are long enough", "x" * 5000, "\x00" * 32]
)
def test_a_damaged_key_is_replaced_and_a_readable_key_file_is_made_private(damaged: str) -> None:
    path = paths.data_dir() / "server-key"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(damaged)
    key = stored_or_new_key()
    assert len(key) >= 24
    assert key != damaged
    path.chmod(0o644)
    assert stored_or_new_key() == key
    assert path.stat().st_mode & 0o077 == 0


def test_a_folder_where_no_key_can_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALLLM_DATA_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(LocalLLMError, match="key can't be written"):
        stored_or_new_key()


def test_the_key_is_shown_with_quiet_too(tiny_model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "localllm",
        "serve",
        str(tiny_model),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--quiet",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
    finally:
        process.terminate()
        rest = process.communicate(timeout=30)[1]
    assert stored_or_new_key() in line
    assert rest == ""


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Return a self-signed certificate for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", "2",
               "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
               "-keyout", str(files.key), "-out", str(files.certificate)]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")
    return files


def test_requests_are_served_over_tls(certificate: TlsFiles) -> None:
    with running_server({"tiny": ScriptedEngine()}, host="127.0.0.1", tls=certificate) as server:
        trusted = ssl.create_default_context(cafile=str(certificate.certificate))
        with httpx.Client(
            base_url=f"https://127.0.0.1:{server.port}", verify=trusted, trust_env=False
        ) as client:
            assert client.get("/v1/models").status_code == 200
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            assert "[DONE]" in client.post("/v1/chat/completions", json=body).text
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False)


def test_incomplete_tls_handshakes_delay_no_client_and_are_closed(certificate: TlsFiles) -> None:
    """Incomplete TLS handshakes delay no client and are closed.

    These are more than the limit for unknown connections. The oldest are closed first, and all
    of them after a while.
    """
    trusted = ssl.create_default_context(cafile=str(certificate.certificate))
    limits = {"max_connections": 8, "max_unknown_connections": 8, "header_timeout_s": 300.0}
    with (
        running_server({"tiny": ScriptedEngine()}, tls=certificate, **limits) as server,
        ExitStack() as opened,
    ):
        for _ in range(40):
            silent = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            opened.enter_context(silent)
            last = silent
        url = f"https://127.0.0.1:{server.port}/v1/models"
        assert httpx.get(url, verify=trusted, trust_env=False, timeout=30).status_code == 200
        # The first connections were closed despite their 300 s. The newest one may continue.
        with trusted.wrap_socket(last, server_hostname="127.0.0.1") as late:
            late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in late.recv(4000)
    limits["header_timeout_s"] = 0.2
    with (
        running_server({"tiny": ScriptedEngine()}, tls=certificate, **limits) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent,
    ):
        assert silent.recv(1) == b""


def test_the_address_is_https_and_one_file_may_contain_certificate_and_key(
    certificate: TlsFiles, tmp_path: Path
) -> None:
    assert certificate.key is not None
    both = tmp_path / "both.pem"
    both.write_text(certificate.certificate.read_text() + certificate.key.read_text())
    settings = server_settings(Settings({"host": "127.0.0.1", "port": 0, "tls_cert": str(both)}))
    with listening(settings) as (_, address):
        assert address.startswith("https://127.0.0.1:")


@pytest.mark.parametrize(
    ("cert", "key", "says"),
    [
        ("missing.pem", "key.pem", "missing.pem"),
        ("cert.pem", "missing.pem", "missing.pem"),
        ("cert.pem", "other.pem", "does not belong"),
        ("cert.pem", "locked.pem", "encrypted"),
        ("cert.pem", None, "no private key"),
        ("noise.pem", "key.pem", "PEM"),
        (None, "key.pem", "--tls-cert"),
    ],
)
def test_unusable_tls_files_are_refused_with_the_reason_before_anything_loads(
    certificate: TlsFiles, tmp_path: Path, cert: str | None, key: str | None, says: str
) -> None:
    assert certificate.key is not None
    (tmp_path / "cert.pem").write_bytes(certificate.certificate.read_bytes())
    (tmp_path / "key.pem").write_bytes(certificate.key.read_bytes())
    (tmp_path / "noise.pem").write_text("not a certificate")
    other = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run([*other, "-out", str(tmp_path / "other.pem")], check=True, capture_output=True)
    locked = [*other, "-aes256", "-pass", "pass:secret", "-out", str(tmp_path / "locked.pem")]
    subprocess.run(locked, check=True, capture_output=True)
    flags = {"tls_cert": cert and str(tmp_path / cert), "tls_key": key and str(tmp_path / key)}
    with pytest.raises(UsageError, match=says):
        server_settings(Settings(flags))


def test_a_unix_socket_has_no_tls(certificate: TlsFiles) -> None:
    with pytest.raises(UsageError, match="Unix socket"):
        server_settings(
            Settings({"unix_socket": "s.sock", "tls_cert": str(certificate.certificate)})
        )


# --- names and origins ----------------------------------------------------------------------------


def test_allowed_hosts_and_origins_come_from_flags_environment_and_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"allow_host": ["nas.lan", "big.lan"], "allow_origin": ["https://chat.example"]}
    settings = server_settings(Settings(flags))
    assert settings.allowed_hosts == ("nas.lan", "big.lan")
    assert settings.allowed_origins == ("https://chat.example",)
    monkeypatch.setenv("LOCALLLM_ALLOW_HOST", "one.lan, two.lan")
    assert server_settings(Settings()).allowed_hosts == ("one.lan", "two.lan")
    monkeypatch.delenv("LOCALLLM_ALLOW_HOST")
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(
        'allow_host = ["three.lan"]\nallow_origin = "https://a.example"\n'
    )
    settings = server_settings(Settings())
    assert (settings.allowed_hosts, settings.allowed_origins) == (
        ("three.lan",),
        ("https://a.example",),
    )


def test_an_invalid_allow_origin_is_refused_before_anything_loads(
    tiny_model: Path,
) -> None:
    result = CliRunner().invoke(app, ["serve", str(tiny_model), "--allow-origin", "*"])
    assert isinstance(result.exception, UsageError)
    assert "--api-key" in result.exception.hint
    shown = CliRunner().invoke(app, ["config", "--json"])
    assert '"allow_host"' in shown.output
