"""Ray: the job's entrypoint exists and has the run's settings, and its script tells a lost job from
a failed one."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import load_config
from tests.fixtures.rendered import (
    EXAMPLES,
    base_environment,
    check_command,
    commands_of,
    render,
    shorten_pauses,
)

CPU = EXAMPLES / "digit_sort.toml"
OWN_REDIS = ("--set", "redis.url=redis://:hidden@here:6379/0")
VARIANTS: dict[str, tuple[Any, ...]] = {
    "cpu": (CPU,),
    "own redis": (CPU, *OWN_REDIS),
}


@pytest.fixture(scope="module", params=VARIANTS)
def rendered(request: pytest.FixtureRequest) -> dict[str, str]:
    config, *options = VARIANTS[request.param]
    return render(config, "ray", *options)


def entrypoint(files: dict[str, str], where: Path) -> list[str]:
    """The call of ``paceline`` by the job on the head."""
    lines = [
        f"run_dir={where / 'run'}" if line.startswith("run_dir=") else line
        for line in files["start.sh"].splitlines()
    ]
    script = "python() { echo 10.0.0.7; }\n" + "\n".join(lines)
    (words,) = commands_of(script, where, {"REDIS_URL": "redis://:pw@there:6379/0"})
    return words


def test_the_entrypoint_has_the_controllers_and_ray_the_workers(
    rendered: dict[str, str], tmp_path: Path
) -> None:
    words = entrypoint(rendered, tmp_path)
    assert check_command(words) == "node"
    assert words[words.index("--master") + 1] == "10.0.0.7:7000"
    config = load_config(words[2])
    assert config.fleet.provider == "ray" and config.ray.address == "auto"
    assert "hidden" not in str(rendered) and "pw@" not in " ".join(words)
    assert ("pw@" in str(config.redis.url)) == ("REDIS_URL" in rendered["start.sh"])
    assert Path(words[2]).stat().st_mode & 0o77 == 0


RAY = """\
#!/bin/bash
echo "$@" >> "$CALLS"
case "$1 $2" in
  "job submit") [ "$(grep -c "job submit" "$CALLS")" -gt "$LOST" ] && exit "$STATUS"; exit 1 ;;
  "job status") [ "$(grep -c "job submit" "$CALLS")" -gt "$LOST" ] && echo "$SAID" ;;
esac
"""


@pytest.mark.parametrize(
    ("lost", "status", "said", "expected", "submitted"),
    [
        (0, 0, "SUCCEEDED", 0, 1),
        (0, 1, "Job entrypoint command failed with exit code 2, last logs", 2, 1),
        (0, 1, "Status for job 'a': STOPPED", 130, 1),
        (0, 1, "Status for job 'a': FAILED, runtime_env setup failed: no such file", 1, 1),
        # The head went, and another one knows nothing of the job.
        (2, 0, "SUCCEEDED", 0, 3),
        (1, 1, "Job entrypoint command failed with exit code 1, last logs", 1, 2),
    ],
)
def test_a_lost_job_is_submitted_again_and_a_failed_one_is_not(
    tmp_path: Path, lost: int, status: int, said: str, expected: int, submitted: int
) -> None:
    for name, text in render(CPU, "ray").items():
        (tmp_path / name).write_text(text)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "ray").write_text(RAY)
    (bin_dir / "ray").chmod(0o755)
    shorten_pauses(bin_dir)
    calls = tmp_path / "calls"
    environment = {**base_environment(bin_dir), "CALLS": str(calls), "SAID": said}
    done = subprocess.run(
        ["bash", str(tmp_path / "submit.sh")],
        env={**environment, "LOST": str(lost), "STATUS": str(status)},
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expected, done.stderr
    jobs = [
        line.split() for line in calls.read_text().splitlines() if line.startswith("job submit")
    ]
    assert len(jobs) == submitted
    names = [words[words.index("--submission-id") + 1] for words in jobs]
    assert len(set(names)) == submitted, "an id is never used twice"
    assert all(words[-3:] == ["--", "sh", "start.sh"] for words in jobs)
