#!/usr/bin/env bash
# Train on a Slurm allocation: Ray on every node, the driver on the first, a checkpoint before the time limit.
#
#   sbatch --nodes=8 cluster/slurm.sh conf/llama3_8b.yaml run.dir=/shared/runs/llama3_8b [key=value ...]
#
# Put site-specific settings (partition, account, modules) on the sbatch line or below "environment".
#SBATCH --job-name=raytrain
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# --- environment ------------------------------------------------------------------------------------------------------
# module load cuda; source /shared/venv/bin/activate

# --- Ray --------------------------------------------------------------------------------------------------------------
# This script runs on the first node, which becomes the head. The other nodes must reach its address: if that is not the
# first one of `hostname --all-ip-addresses`, set HEAD_IP.
head_ip=${HEAD_IP:-$(hostname --all-ip-addresses | awk '{print $1}')}
address="$head_ip:${RAY_PORT:-6379}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # one secret per job: other users of the network cannot use this Ray
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
unset RAY_ADDRESS

# --- the run ----------------------------------------------------------------------------------------------------------
# The run saves and stops before the end of the job (run.deadline), a Unix time that recent Slurm sets.
export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(date +%s --date="$(squeue --noheader --job "$SLURM_JOB_ID" --format=%e)")}
export STATUS_FILE # for the exit code of the run: that of srun also depends on the tasks of other nodes
STATUS_FILE=$(mktemp)
trap 'rm -f "$STATUS_FILE"' EXIT

# symmetric-run starts the head here and a worker on every other node, and runs the command after -- on the head only.
# --wait, --kill-on-bad-exit: end the other nodes' tasks once the driver has ended. Where Slurm knows the switches of the
# cluster (topology.conf), each node is labelled with its own, and ranks that communicate most are placed on one switch.
status=0
# shellcheck disable=SC2016  # the inner shells are the ones to expand it
srun --wait=60 --kill-on-bad-exit=1 bash -c '
    case ${SLURM_TOPOLOGY_ADDR_PATTERN:-} in *switch*)
        switches=${SLURM_TOPOLOGY_ADDR%.*} # from the top one down to that of this node
        switch=${switches##*.}
        set -- --labels "rack=${switch//[^A-Za-z0-9_-]/_}" "$@" ;;
    esac
    if [ -n "${ROCR_VISIBLE_DEVICES:-}" ]; then # set by Slurm on nodes with AMD GPUs; Ray reads the other one
        export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES
        unset ROCR_VISIBLE_DEVICES
    fi
    exec ray symmetric-run "$@"' ray-on-node \
    --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus "$SLURM_CPUS_PER_TASK" -- \
    bash -c 'raytrain-hpc train "$@"; status=$?; echo "$status" >"$STATUS_FILE"; exit "$status"' \
    raytrain-hpc "$@" "cluster.address=$address" || status=$?

[ ! -s "$STATUS_FILE" ] || status=$(cat "$STATUS_FILE")
if [ "$status" -eq 3 ]; then # saved, and not done
    echo "stopped in time: requeueing"
    scontrol requeue "$SLURM_JOB_ID" # the same command resumes from the checkpoint
    exit 0
fi
exit "$status"
