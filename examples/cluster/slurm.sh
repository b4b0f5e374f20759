#!/usr/bin/env bash
# A Ray cluster inside a Slurm allocation, and one run on it:
#
#   sbatch examples/cluster/slurm.sh examples/quickstart/ppo.yaml learner.num_workers=16
#
# The environment (.venv), the models and storage_path lie on a file system that all nodes share.
#SBATCH --job-name=raypo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
set -euo pipefail

PORT=${RAY_PORT:-6379}
source .venv/bin/activate
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# srun ends what it has started when this script ends, so nothing is left on the nodes.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --block --node-ip-address="$address" --port="$PORT" --disable-usage-stats &
until ray status --address="$address:$PORT" > /dev/null 2>&1; do sleep 2; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) \
    --exclude="$head" ray start --block --address="$address:$PORT" --disable-usage-stats &
fi
count_nodes='import ray; ray.init("auto"); print(sum(n["Alive"] for n in ray.nodes()))'
until [ "$(RAY_ADDRESS="$address:$PORT" python -W ignore -c "$count_nodes" 2> /dev/null)" = "$SLURM_JOB_NUM_NODES" ]; do
  sleep 2
done

RAY_ADDRESS="$address:$PORT" raypo train "$@"
