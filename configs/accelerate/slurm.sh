#!/bin/bash
# Heads on the nodes of a Slurm job; what stands behind the script's name goes to train-heads:
#   sbatch --nodes 2 configs/accelerate/slurm.sh --config configs/llama-3.1-8b.yaml \
#     --per_device_train_batch_size 1 --gradient_accumulation_steps 1
# LAUNCH names another launch file than ddp_nodes.yaml. Submit it in the repository's folder, which
# all nodes share, with medusa-heads installed in the environment that the job inherits.
#SBATCH --job-name=train-heads
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
# Each task is a launcher, which starts a process for each GPU. Before the time is up, SIGTERM lets
# the run write a checkpoint, and the job that is queued again goes on from there.
set -euo pipefail

LAUNCH=${LAUNCH:-configs/accelerate/ddp_nodes.yaml}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}
sizes=()
if grep -q '^parallelism_config:' "$LAUNCH"; then # a copy of the target in each node
  sizes=(--parallelism_config_dp_replicate_size "$SLURM_NNODES"
    --parallelism_config_dp_shard_size "$SLURM_GPUS_ON_NODE")
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Of the 300 seconds of --signal; torch's launcher would kill after 30 what has not ended.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}
# bash before 4.4 takes an empty array for one that was never set.
# SLURM_NODEID is each node's own: it must be read there, not here.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' _ \
  --config_file "$LAUNCH" \
  --num_machines "$SLURM_NNODES" \
  --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \
  --main_process_ip "$first" \
  --main_process_port "$((20000 + SLURM_JOB_ID % 10000))" \
  ${sizes[@]+"${sizes[@]}"} \
  -m medusa_heads.cli.train_heads --resume_from_checkpoint auto "$@"
