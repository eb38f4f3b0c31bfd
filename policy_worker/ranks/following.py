"""Following: what a rank above 0 does from the moment at which it has joined its replica."""

from __future__ import annotations

import argparse

import torch

from paceline.config.schema import Config
from paceline.process import structured_log
from paceline.process.torchrun_environment import TorchrunPlace
from paceline.rpc.addresses import own_address
from policy_worker.model.policy_model import pick_device
from policy_worker.ranks.outside_ranks import OutsideRank
from policy_worker.ranks.rank_group import RankGroup
from policy_worker.trainer import Trainer


def follow(replica: RankGroup, config: Config, device: torch.device) -> None:
    """Executes what rank 0 announces until it announces the end."""
    Trainer(config, device, replica=replica).follow()
    replica.close()


def follow_from_outside(config: Config, place: TorchrunPlace, options: argparse.Namespace) -> int:
    """A rank above 0 that torchrun, or a launcher like it, has started. Returns the exit status."""
    structured_log.setup(f"{options.id}.{place.rank}")
    torch.set_num_threads(config.fleet.policy_threads)
    device = local_device(config, place.local_rank)
    host = options.tensor_host or own_address(options.controllers[0])
    replica, worker_id = OutsideRank(place, config, options.id, host).join(device.type)
    structured_log.setup(f"{worker_id}.{place.rank}")
    follow(replica, config, device)
    return 0


def local_device(config: Config, number: int) -> torch.device:
    """The device of the rank with that number on its host; of CUDA devices it becomes the current
    one."""
    device = pick_device(config.model.device)
    if device.type == "cuda" and number < torch.cuda.device_count():
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device
