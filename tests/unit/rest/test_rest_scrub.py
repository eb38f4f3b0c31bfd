"""What leaves the machine: no password, no query that may hold a key, no path of its own."""

from pathlib import Path

import pytest

from paceline.masking import Redactor


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:p@ss@host:6379/0", "redis://host:6379/0"),
        ("redis://:p?ss@host/0", "redis://…"),
        ("redis://:p'w@host/0", "redis://host/0"),
        ("http://user:p/w@host/x", "http://host/x"),
        ("redis://h/0?password=hunter2", "redis://h/0"),
        ("https://c/v1/traces?api_key=K", "https://c/v1/traces"),
        ("https://c/v1/traces?api_key=K@L", "https://…"),
        ("https://c/v1#token=K", "https://c/v1"),
        ("sqlite:////srv/secret/mlflow.db", "sqlite://…/mlflow.db"),
        ("sqlite+pysqlite:////srv/secret/mlflow.db?key=K", "sqlite+pysqlite://…/mlflow.db"),
        ("file:///srv/x", "file://…/x"),
        ("file:/srv/x", "file:…/x"),
        ("unix:///run/secret/redis.sock?password=K", "unix://…/redis.sock"),
        ("error:/etc/shadow", "error:…/shadow"),
        ("//etc/shadow", "…/shadow"),
        ("cannot read /etc/shadow: denied", "cannot read …/shadow: denied"),
        ("['http://h/x','/etc/shadow']", "['http://h/x','…/shadow']"),
        ("~/keys/a.pem ../keys/b.pem", "…/a.pem …/b.pem"),
        ("/srv/runs/one/checkpoints/7", "checkpoints/7"),
        ("tokens / s and/or 3/4", "tokens / s and/or 3/4"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_no_password_and_no_foreign_path_is_shown(text: str, shown: str) -> None:
    scrub = Redactor(Path("/srv/runs/one"))
    assert scrub.text(text) == shown
    assert scrub.value({"a": [text]}) == {"a": [shown]}
