"""Secrets in whatever a person may read: nothing is left of them."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.config.load import ConfigError, load_config, parse_setting
from paceline.errors import BadInput, one_line
from paceline.masking import MASK, masked, masked_settings
from paceline.process.lifetime import exit_status
from paceline.process.structured_log import setup
from paceline_launcher.cli import app
from paceline_launcher.preflight import user_code
from paceline_launcher.preflight.findings import fail
from testbed.fleets.controller_processes import write_config

SECRET = "hunter2"
HIDING = [
    f"redis://:{SECRET}@h:6379/0",
    f"redis://worker:{SECRET}@[::1]:6379/0?db=1",
    f"rediss+sentinel://u:{SECRET}@a:1,b:2/mymaster/0",
    f"cannot reach 'https://{SECRET}@host/x' or https://host/y",
    f"one redis://a:{SECRET}@h/0,redis://b:{SECRET}@h/0 two",
    f"redis://:with@{SECRET}@h/0",
    f"redis://:with/{SECRET}@h/0",
    f"s3://bucket/prefix?endpoint=x&secret_key={SECRET}&b=1",
    f"https://h/hook?access_token={SECRET}",
    f"rediss://w:{SECRET}@h:1/0?ssl_check_hostname=false&ssl_ca_data=-----BEGIN%0A{SECRET}%3D",
    f"sqlite+x://u:{SECRET}@/path",
    f"redis//u:{SECRET}@h:6379/0",
    f"redis:u:{SECRET}@h:6379/0",
    f'Invalid bucket name "k:{SECRET}@b"',
]


@pytest.mark.parametrize("text", HIDING)
def test_nothing_of_a_secret_is_left(text: str) -> None:
    shown = masked(text)
    assert SECRET not in shown and MASK in shown
    assert masked(shown) == shown
    assert SECRET not in str(BadInput(text)) and SECRET not in one_line(ValueError(text))
    assert SECRET not in str(fail(text, text))


@pytest.mark.parametrize(
    "text",
    [
        "redis://h:6379/0",
        "see https://github.com/a/b?x=1#y",
        "mail a@b.c",
        "unix:/r@2/c.sock",
        "r/i:1@sha256:a",
        "evaluation: pass@8",
        "",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert masked(text) == text


def test_logs_and_last_words_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    text, stream = HIDING[0], io.StringIO()
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        setup("test", stream=stream)
        try:
            raise ValueError(text)
        except ValueError:
            logging.getLogger("x").exception("failed with %s", text)
    finally:
        logging.getLogger().handlers[:] = before[0]
        logging.getLogger().setLevel(before[1])
    assert "Traceback" in stream.getvalue() and SECRET not in stream.getvalue()

    def breaks() -> int:
        raise ValueError(text)

    assert exit_status(breaks, "p") == 1
    printed = capsys.readouterr().err
    assert "ValueError" in printed and SECRET not in printed


def test_settings_are_masked_wherever_they_stand() -> None:
    settings = {
        "payloads": {"url": [HIDING[0], "redis://h/0"]},
        "objective": {"options": {"api_key": SECRET, "max_token": 3, "token_file": "/t"}},
    }
    shown = masked_settings(settings)
    assert SECRET not in json.dumps(shown)
    assert shown["objective"]["options"] == {
        "api_key": MASK,
        "max_token": 3,
        "token_file": "/t",
    }


@pytest.mark.parametrize("name", ["auth.token", "redis.password"])
def test_a_setting_that_does_not_exist_hides_its_value(tmp_path: Path, name: str) -> None:
    given = f"{name}={SECRET}"
    for use in (parse_setting, lambda text: load_config(write_config(tmp_path), [text])):
        with pytest.raises(ConfigError) as refused:
            use(given)
        assert SECRET not in str(refused.value) and f"{name}={MASK}" in str(refused.value)


def test_a_secret_in_the_place_of_its_file_is_hidden(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    given = f'auth.token_file=["{SECRET}"]'
    with pytest.raises(ConfigError) as refused:
        load_config(file, [given])
    assert SECRET not in str(refused.value) and MASK in str(refused.value)
    file.write_text(f"{file.read_text()}\n[auth]\n{given.partition('.')[2]}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert SECRET not in str(refused.value) and MASK in str(refused.value)


@pytest.mark.parametrize("options", [[], ["--resolved"]])
def test_a_checked_configuration_is_printed_masked(tmp_path: Path, options: list[str]) -> None:
    urls = {"redis": {"url": HIDING[0]}, "payloads": {"url": [HIDING[1]]}}
    config = write_config(tmp_path, **urls)
    command = ["config", "check", str(config), "--settings-only", *options]
    ended = CliRunner().invoke(app, command)
    assert (MASK in ended.stdout) == bool(options), "only --resolved prints the settings"
    assert SECRET not in ended.output


def test_a_check_gets_its_configuration_where_no_stranger_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_config(tmp_path, redis={"url": HIDING[0]}))
    commands: list[list[str]] = []
    given: list[str] = []

    def run(command: tuple[str, ...], **options: str) -> Any:
        commands.append(list(command))
        given.append(options["input"])
        return subprocess.CompletedProcess(command, 1, "", f"check: no {HIDING[0]}")

    monkeypatch.setattr(user_code.subprocess, "run", run)
    tried = user_code.try_import(
        "paceline.dataset.recorded_preview",
        "format:secret-pattern",
        config=config.model_dump(mode="json"),
    )
    assert SECRET in given[0] and "secret-pattern" in given[0]
    assert commands == [[sys.executable, "-P", "-m", "paceline.dataset.recorded_preview"]]
    (found,) = tried.findings("reward.functions: ")
    assert found.state == "fail" and SECRET not in str(found)
