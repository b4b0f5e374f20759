#!/usr/bin/env bash
# A Ray cluster inside a Slurm allocation, and one run on it:
#
#   sbatch examples/cluster/slurm.sh examples/quickstart/ppo.yaml learner.num_workers=16
#
# The environment (.venv), the models and storage_path lie on a file system that all nodes share.
# RAYPO_HEAD_ADDRESS names the first node where its own name does not lead to the right network.
#SBATCH --job-name=raypo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --mem=0
set -euo pipefail

PORT=${RAY_PORT:-6379}
# shellcheck source=/dev/null
source .venv/bin/activate

# All nodes and the run use one token: other users of the machines must not reach this Ray.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ]; then
  RAY_AUTH_TOKEN=$(ray get-auth-token --generate)
  export RAY_AUTH_TOKEN
fi

# Since Slurm 22.05 srun does not ask for what sbatch did: Ray would have one core of each node.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*} # `| head -n 1` could end scontrol with SIGPIPE, and with it the job
# By its name, which /etc/hosts may have as 127.0.1.1; then by its network interfaces.
addresses() {
  srun --nodes=1 --ntasks=1 --nodelist="$head" \
    bash -c 'hostname --ip-address; hostname --all-ip-addresses' | tr ' ' '\n'
}
address=${RAYPO_HEAD_ADDRESS:-$(addresses | awk '/^[0-9.]+$/ && !/^127/ && !found++')}

# What a command said last is shown if it does not succeed in ten minutes.
wait_for() {
  local said deadline=$((SECONDS + ${RAYPO_WAIT_S:-600}))
  until said=$("$@" 2>&1); do
    if [ "$SECONDS" -gt "$deadline" ]; then
      echo "The Ray cluster is not complete. The last look at it said:" >&2
      echo "$said" >&2
      exit 1
    fi
    sleep 2
  done
}

# srun ends what it has started when this script ends, so nothing is left on the nodes.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --block --node-ip-address="$address" --port="$PORT" --disable-usage-stats &
wait_for ray status --address="$address:$PORT"
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) \
    --exclude="$head" ray start --block --address="$address:$PORT" --disable-usage-stats &
fi
all_nodes='
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
count = sum(node["Alive"] for node in ray.nodes())
sys.exit(0 if count == int(sys.argv[2]) else f"{count} of {sys.argv[2]} nodes have joined")'
wait_for python -W ignore -c "$all_nodes" "$address:$PORT" "$SLURM_JOB_NUM_NODES"

RAY_ADDRESS="$address:$PORT" raypo train "$@"
