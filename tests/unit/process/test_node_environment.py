"""Environments of jobs are taken as launchers set them, or refused with a remedy before anything
starts."""

import shlex

import pytest

from paceline.errors import BadInput
from paceline.process.torchrun_environment import torchrun_place, without_place
from paceline_launcher.launch.job import node_place
from tests.fixtures.golden import Golden

GOLDEN = Golden("places")
OPTIONS = {"--node-rank": "rank", "--nodes": "nodes", "--master": "master"}


def told(case: str) -> str:
    """The place of a node with its options, or of a rank in a replica of four, in the environment
    that stands before it."""
    words = shlex.split(case)
    at = next(at for at, word in enumerate(words) if "=" not in word)
    environ = dict(word.split("=", 1) for word in words[:at])
    what, *options = words[at:]
    given = {
        OPTIONS[name]: int(value) if value.isdigit() else value
        for name, value in zip(options[::2], options[1::2], strict=True)
    }
    try:
        if what == "node":
            return str(node_place(environ, **given))
        return str(torchrun_place(environ, 4))
    except BadInput as error:
        return f"refused: {error}"


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_the_place_of_a_node_or_rank_is_that_of_its_environment_or_none(case: str) -> None:
    GOLDEN.check(case, told(case))


def test_what_a_launcher_of_ours_starts_is_no_rank_of_the_job_around_it() -> None:
    left = {"PATH": "/bin", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert without_place(left | place) == left
