"""Rank 1 and above of a policy replica: started by rank 0 as ``python -m policy_worker.follower``,
or by torchrun, or a launcher like it, as ``python -m policy_worker``.
"""

from __future__ import annotations

import argparse

from paceline.config.schema import Config
from paceline.process.lifetime import leave_after
from paceline.process.torchrun_environment import TorchrunPlace
from paceline.process.user_code import search_start_directory_last
from paceline.process.worker_command import without_collection
from policy_worker.ranks.child_ranks import die_with_parent


def main() -> int:
    """A rank that rank 0 has started. Returns the exit status."""
    settings_of_rank = die_with_parent()
    search_start_directory_last()
    # Slow imports come after it: rank 0 may die meanwhile.
    with without_collection():
        import json

        from paceline.process import structured_log
        from paceline.process.compute_device import pick_device
        from policy_worker.ranks.rank_group import join_ranks
        from policy_worker.trainer import follow

    # Before the ranks join: their group makes a context on the current device.
    device = pick_device(settings_of_rank.device, settings_of_rank.rank)
    replica, settings_json = join_ranks()
    settings = json.loads(settings_json)
    structured_log.setup(f"{settings['worker_id']}.{settings_of_rank.rank}")
    follow(replica, Config.model_validate(settings["config"]), device)
    return 0


def follow_from_outside(config: Config, place: TorchrunPlace, options: argparse.Namespace) -> int:
    """A rank that was started from outside. Returns the exit status."""
    with without_collection():
        import torch

        from paceline.process import structured_log
        from paceline.process.compute_device import pick_device
        from paceline.rpc.addresses import own_address
        from policy_worker.ranks.outside_ranks import OutsideRank
        from policy_worker.trainer import follow

    structured_log.setup(f"{options.id}.{place.rank}")
    torch.set_num_threads(config.fleet.policy_threads)
    device = pick_device(config.model.device, place.local_rank)
    host = options.tensor_host or own_address(options.controllers[0])
    replica, worker_id = OutsideRank(place, config, options.id, host).join(device.type)
    structured_log.setup(f"{worker_id}.{place.rank}")
    follow(replica, config, device)
    return 0


if __name__ == "__main__":
    # Rank 0 would wait seconds for an interpreter full of torch to be taken apart, and for ever if
    # one of its threads is stuck in a collective.
    leave_after(main, "policy_worker")
