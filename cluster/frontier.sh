#!/usr/bin/env bash
# Train on nodes with four AMD MI250X cards, eight dies, under Slurm: the shape of Frontier. Each die is a device.
#
#   sbatch --nodes=8 cluster/frontier.sh conf/llama3_8b.yaml run.dir=/shared/runs/llama3_8b [key=value ...]
#
# All else is as in slurm.sh, also that the job is requeued. Not run on such a machine by the project yet.
#SBATCH --job-name=raytrain
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=56
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

# --- environment ------------------------------------------------------------------------------------------------------
# A torch for ROCm, and this package beside it; the plugin that lets RCCL use Slingshot must be on LD_LIBRARY_PATH, else
# it communicates by TCP:
# module load rocm; source /shared/venv/bin/activate
# export LD_LIBRARY_PATH=/shared/aws-ofi-rccl/lib:$LD_LIBRARY_PATH

# Compiled kernels in a directory of the node: the home directory is shared by all ranks.
export MIOPEN_USER_DB_PATH=${MIOPEN_USER_DB_PATH:-/tmp/miopen-$SLURM_JOB_ID}
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
exec bash cluster/slurm.sh "$@" "cluster.device=cuda" "cluster.network_interface=${NETWORK_INTERFACE:-hsn0}"
