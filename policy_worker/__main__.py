"""One policy replica: ``python -P -m policy_worker CONFIG --controllers HOST:PORT,... --id
policy-0``.

Under torchrun's environment it is the rank of a replica that the environment names; rank 0 is the
worker that the controller knows. Rank 0 of any other replica starts the ranks above it by this
command, too, without arguments.

Exit status: 0 after the run has ended, 2 for bad input (one line on standard error), 75 for
what can pass, else 1.
"""

import argparse
import json
import os

from paceline.config.schema import Config
from paceline.process import stacks, structured_log
from paceline.process.lifetime import leave_after
from paceline.process.torchrun_environment import TorchrunPlace, torchrun_place
from paceline.process.worker_command import without_collection, worker_command
from paceline.user_code import search_start_directory_last
from policy_worker.ranks.child_ranks import RANK_SETTINGS, die_with_parent


def run(config: Config, options: argparse.Namespace) -> int:
    place = torchrun_place(os.environ, config.fleet.policy_ranks)
    if place is not None and place.rank > 0:
        return follow_from_outside(config, place, options)
    with without_collection():
        from policy_worker.main import run

    return run(config, options, place)


def follow_from_outside(config: Config, place: TorchrunPlace, options: argparse.Namespace) -> int:
    """A rank above 0 that was started from outside. Returns the exit status."""
    with without_collection():
        import torch

        from paceline.process.compute_device import pick_device
        from paceline.rpc.addresses import own_address
        from policy_worker.ranks.outside_ranks import OutsideRank
        from policy_worker.trainer import follow

    structured_log.setup(f"{options.id}.{place.rank}")
    torch.set_num_threads(config.fleet.policy_threads)
    host = options.tensor_host or own_address(options.controllers[0])
    device = pick_device(config.model.device, place.local_rank, host)
    replica, worker_id = OutsideRank(place, config, options.id, host).join(device.type)
    structured_log.setup(f"{worker_id}.{place.rank}")
    follow(replica, config, device)
    return 0


def follow_parent() -> int:
    """A rank above 0 that rank 0 has started. Returns the exit status."""
    place = die_with_parent()
    stacks.install()
    search_start_directory_last()
    # Slow imports come after it: rank 0 may die meanwhile.
    with without_collection():
        from paceline.process.compute_device import pick_device
        from policy_worker.ranks.rank_group import join_ranks
        from policy_worker.trainer import follow

    # Before the ranks join: their group makes a context on the current device.
    device = pick_device(place.device, place.rank)
    replica, settings_json = join_ranks()
    settings = json.loads(settings_json)
    structured_log.setup(f"{settings['worker_id']}.{place.rank}")
    follow(replica, Config.model_validate(settings["config"]), device)
    return 0


if __name__ == "__main__":
    if RANK_SETTINGS in os.environ:
        # Rank 0 would wait seconds for an interpreter full of torch to be taken apart, and for ever
        # if one of its threads is stuck in a collective.
        leave_after(follow_parent, "policy_worker")
    worker_command("policy", run)
