"""The environment of torchrun is taken as it is or refused with a remedy, before anything
starts."""

import pytest

from paceline.errors import BadInput
from paceline.process.torchrun_environment import TorchrunPlace, torchrun_place, without_place

WHOLE = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_without_the_variables_there_is_no_place() -> None:
    # These two alone are often left over from something else.
    assert torchrun_place({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, 4) is None
    assert torchrun_place({"RANK": "", "PATH": "/bin"}, 4) is None


def test_the_place_of_a_rank_on_the_second_of_two_hosts() -> None:
    assert torchrun_place(WHOLE, 4) == TorchrunPlace(3, 4, 1, "10.0.0.1", 29500, False, "/")


def test_a_launcher_that_serves_the_store_and_starts_again_is_told_apart() -> None:
    agent = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    place = torchrun_place(WHOLE | agent, 4)
    assert place is not None
    assert (place.agent_store, place.attempt) == (True, "job/2")


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_an_incomplete_environment_is_refused_and_names_what_is_missing(name: str) -> None:
    given = {k: v for k, v in WHOLE.items() if k != name}
    with pytest.raises(BadInput, match=f"no {name}. Start every rank with torchrun"):
        torchrun_place(given, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "4"}, "RANK=4, LOCAL_RANK=1 and WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"RANK": "0"}, "RANK=0, LOCAL_RANK=1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        ({"WORLD_SIZE": "8"}, r"WORLD_SIZE=8, but fleet.policy_ranks = 4.*policy_ranks = 8"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(change: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        torchrun_place(WHOLE | change, 4)


def test_what_a_launcher_of_ours_starts_is_no_rank_of_the_job_around_it() -> None:
    assert without_place(WHOLE | {"PATH": "/bin"}) == {
        "PATH": "/bin",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
