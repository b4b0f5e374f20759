#!/usr/bin/env bash
# A run on a Ray cluster that is up, from any machine that reaches its dashboard:
#
#   RAY_API_SERVER_ADDRESS=http://head:8265 examples/cluster/submit.sh /shared/ppo.yaml num_steps=10
#
# raypo is installed on the nodes; config, models, prompts and storage_path are paths that they know.
# A cluster that asks for a token wants the one that `ray get-auth-token` prints on its head node, as
# RAY_AUTH_TOKEN or in ~/.ray/auth_token.
set -euo pipefail
if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
fi
printf -v run '%q ' "$@"
exec ray job submit -- bash -c "raypo train $run"
