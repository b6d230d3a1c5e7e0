#!/usr/bin/env bash
# Train on a PBS allocation: Ray on every node, the driver on the first, a checkpoint before the time limit.
#
#   RUN_ARGS="conf/llama3_8b.yaml run.dir=/shared/runs/llama3_8b" qsub -V -l select=8:ncpus=64:ngpus=4 cluster/pbs.sh
#
# The shape above is that of Polaris (four A100 per node). Put site-specific settings (queue, account, file systems,
# modules) on the qsub line or below "environment". NUM_GPUS: of a node, where Ray does not find them itself. With RESUBMIT=cluster/pbs.sh next to RUN_ARGS, a run that stopped
# before its time limit is submitted again and resumes from the checkpoint.
#PBS -N raytrain
#PBS -l place=scatter:exclhost
#PBS -l walltime=06:00:00
#PBS -j oe
#PBS -r n
set -euo pipefail
: "${RUN_ARGS:?set RUN_ARGS to the arguments of raytrain-hpc train, and use qsub -V}"
cd "${PBS_O_WORKDIR:-.}"

# --- environment ------------------------------------------------------------------------------------------------------
# module load cudatoolkit; source /shared/venv/bin/activate

# --- Ray --------------------------------------------------------------------------------------------------------------
# This script runs on the first node, which becomes the head. The other nodes must reach its address: if that is not the
# first one of `hostname --all-ip-addresses`, set HEAD_IP.
head_ip=${HEAD_IP:-$(hostname --all-ip-addresses | awk '{print $1}')}
address="$head_ip:${RAY_PORT:-6379}"
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
cpus=${NCPUS:-$(nproc)}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # one secret per job: other users of the network cannot use this Ray
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
unset RAY_ADDRESS

# --- the run ----------------------------------------------------------------------------------------------------------
# The run saves and stops before the end of the job (run.deadline): the time at which this script started, plus this limit
# in seconds, which Torque sets and PBS Professional does not.
export PBS_WALLTIME=${PBS_WALLTIME:-$(qstat -f "$PBS_JOBID" | awk '/Resource_List.walltime/ {split($3, t, ":"); print t[1] * 3600 + t[2] * 60 + t[3]}')}
read -r -a words <<<"$RUN_ARGS"
export STATUS_FILE # for the exit code of the run: that of mpiexec also depends on the other nodes
STATUS_FILE=$(mktemp)
trap 'rm -f "$STATUS_FILE"' EXIT

# symmetric-run starts the head here and a worker on every other node, and runs the command after -- on the head only.
status=0
# shellcheck disable=SC2016  # the inner shell is the one to expand it
mpiexec -n "$nodes" --ppn 1 \
    ray symmetric-run --address "$address" --min-nodes "$nodes" --num-cpus "$cpus" ${NUM_GPUS:+--num-gpus "$NUM_GPUS"} -- \
    bash -c 'raytrain-hpc train "$@"; status=$?; echo "$status" >"$STATUS_FILE"; exit "$status"' \
    raytrain-hpc "${words[@]}" "cluster.address=$address" || status=$?

[ ! -s "$STATUS_FILE" ] || status=$(cat "$STATUS_FILE")
if [ "$status" -eq 3 ] && [ -n "${RESUBMIT:-}" ]; then # saved, and not done
    echo "stopped in time: submitting again"
    qsub -V "$RESUBMIT"
    exit 0
fi
exit "$status"
