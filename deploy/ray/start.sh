#!/bin/sh
# Entrypoint of the job, on the head of the cluster: Redis and the controllers of the run qwen3-8b.
# Ray starts the workers.
set -eu
umask 077
run_dir=/mnt/data/runs/qwen3-8b
mkdir -p "$run_dir/nodes"
config=$run_dir/ray.toml
cat > "$config.part" << 'END_OF_RUN_TOML'
[run]
name = "qwen3-8b"

[model]
path = "/mnt/data/models/Qwen3-8B"
dtype = "bfloat16"

[data]
path = "/mnt/data/math/train.jsonl"
max_prompt_tokens = 1024
eval_path = "/mnt/data/math/test.jsonl"

[reward]
functions = [
    "math_verify",
]

[train]
steps = 500
groups_per_step = 128
max_staleness = 2

[rollout]
engine = "vllm"
max_tokens = 4096

[fleet]
policy_max = 2
policy_ranks = 8
rollout = 8
rollout_max = 16
provider = "ray"

[ray]
policy_gpus = 8
rollout_gpus = 1

[rest]
port = 8000
END_OF_RUN_TOML
mv "$config.part" "$config"
master=$(python -c 'import ray; print(ray.util.get_node_ip_address())'):7000
exec paceline node "$config" --run-dir "$run_dir" --node-rank 0 --nodes 1 --master "$master"
