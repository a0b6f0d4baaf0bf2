"""The table of settings: precedence, origin of each value, and clear errors."""

from __future__ import annotations

import pytest

from localllm import paths
from localllm.errors import UsageError
from localllm.setting_table import TABLE
from localllm.settings import Settings


def write_config(text: str) -> None:
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(text)


def test_flag_beats_environment_beats_config_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Settings()["port"].value, Settings()["port"].origin) == (11535, "default")
    assert Settings()["port"].automatic
    write_config("port = 1\n")
    assert (Settings()["port"].value, Settings()["port"].origin) == (1, "config")
    monkeypatch.setenv("LOCALLLM_PORT", "2")
    assert (Settings()["port"].value, Settings()["port"].origin) == (2, "environment")
    assert (Settings({"port": 3})["port"].value, Settings({"port": 3})["port"].origin) == (
        3,
        "flag",
    )
    assert not Settings({"port": 3})["port"].automatic


def test_a_flag_that_was_not_given_does_not_override() -> None:
    assert Settings({"port": None})["port"].automatic


@pytest.mark.parametrize(
    "config",
    ["port = 'many'\n", "kv_type = 'q3'\n", "prot = 1\n", "port = \n", "offline = 'perhaps'\n",
     "power = 0\n", "power = 101\n", "power = 'half'\n", "port = '80%'\n", "port = 65536\n"],
)  # fmt: skip
def test_errors_in_the_config_are_reported(config: str) -> None:
    write_config(config)
    with pytest.raises(UsageError) as caught:
        Settings()
    assert "config.toml" in caught.value.message


@pytest.mark.parametrize(
    ("config", "meant"), [("contxt = 5\n", "context"), ("[upstreams.a]\n", "upstream")]
)
def test_the_closest_name_of_a_setting_or_table_is_suggested(config: str, meant: str) -> None:
    write_config(config)
    with pytest.raises(UsageError) as caught:
        Settings()
    assert caught.value.hint == f"did you mean {meant}?"


def test_a_percentage_may_have_its_sign() -> None:
    assert {Settings({"power": said}).value("power") for said in ("60%", "60", 60, 60.0)} == {60.0}


def test_every_setting_has_help_and_its_default_is_allowed() -> None:
    for setting in TABLE:
        assert setting.help
        assert setting.default is None or not setting.allowed or setting.default in setting.allowed


def test_a_port_that_does_not_exist_is_refused_with_its_range() -> None:
    with pytest.raises(
        UsageError, match=r"port in the command line must be a number of 0 to 65,535"
    ):
        Settings({"port": 99_999})
    assert Settings({"port": 65_535}).value("port") == 65_535
