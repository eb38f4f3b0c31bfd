"""Rank 1 and above of a policy replica: ``python -m policy_worker.ranks.rank_worker``, started by rank 0."""

from __future__ import annotations

import os
import sys

from paceline.process.user_code import search_start_directory_last
from policy_worker.ranks.follower_bootstrap import die_with_parent


def main() -> int:
    rank = die_with_parent()
    search_start_directory_last()
    # Only now what is slow to import: the leader may die meanwhile.
    import json

    import torch

    from paceline.config.schema import Config
    from paceline.process import structured_log
    from policy_worker.model import pick_device
    from policy_worker.ranks.rank_group import follow
    from policy_worker.trainer import Trainer

    replica, settings_json = follow()
    settings = json.loads(settings_json)
    structured_log.setup(f"{settings['worker_id']}.{rank}")
    config = Config.model_validate(settings["config"])
    device = pick_device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    trainer = Trainer(config, device, replica=replica)
    trainer.obey()
    replica.close()
    return 0


if __name__ == "__main__":
    status = main()
    # Nothing is left to be done, and to take an interpreter full of torch apart takes seconds, for
    # which rank 0 would wait.
    sys.stderr.flush()
    os._exit(status)
