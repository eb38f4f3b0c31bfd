"""A token is checked wherever it comes from."""

from pathlib import Path

import pytest

from paceline.config.sections.services import AuthConfig
from paceline.rpc.auth import TOKEN_VARIABLE, AuthError, read_token


@pytest.mark.parametrize("token", ["short", "0123456789 abcdef0", "0123456789abcd\u00e9f0"])
def test_a_weak_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(AuthError, match=f"{TOKEN_VARIABLE} must be one line"):
        read_token(AuthConfig())
    monkeypatch.delenv(TOKEN_VARIABLE)
    (tmp_path / "token").write_text(token)
    with pytest.raises(AuthError, match="token_file"):
        read_token(AuthConfig(token_file=str(tmp_path / "token")))


def test_the_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    assert read_token(AuthConfig(token_file="/nowhere")) == "0123456789abcdef"
