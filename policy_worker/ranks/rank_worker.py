"""Rank 1 and above of a policy replica: ``python -m policy_worker.ranks.rank_worker``, started by
rank 0."""

from __future__ import annotations

from paceline.process.lifetime import leave_after
from paceline.process.user_code import search_start_directory_last
from paceline.process.worker_command import without_collection
from policy_worker.ranks.follower_bootstrap import die_with_parent


def main() -> int:
    rank = die_with_parent().rank
    search_start_directory_last()
    # Slow imports come after it: rank 0 may die meanwhile.
    with without_collection():
        import json

        from paceline.config.schema import Config
        from paceline.process import structured_log
        from policy_worker.ranks.following import follow, local_device
        from policy_worker.ranks.rank_group import join_ranks

    replica, settings_json = join_ranks()
    settings = json.loads(settings_json)
    structured_log.setup(f"{settings['worker_id']}.{rank}")
    config = Config.model_validate(settings["config"])
    follow(replica, config, local_device(config, rank))
    return 0


if __name__ == "__main__":
    # Rank 0 would wait seconds for an interpreter full of torch to be taken apart, and for ever if
    # one of its threads is stuck in a collective.
    leave_after(main, "policy_worker")
