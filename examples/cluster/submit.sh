#!/usr/bin/env bash
# A run on a Ray cluster that is up, from any machine that reaches its dashboard:
#
#   RAY_API_SERVER_ADDRESS=http://head:8265 examples/cluster/submit.sh /shared/ppo.yaml num_steps=10
#
# raypo is installed on the nodes; config, models, prompts and storage_path are paths that they know.
set -euo pipefail
printf -v run '%q ' "$@"
exec ray job submit -- bash -c "raypo train $run"
