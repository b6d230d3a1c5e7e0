#!/usr/bin/env bash
# Train on nodes with six Intel Max 1550 GPUs, twelve tiles, under PBS: the shape of Aurora. Each tile is a device.
#
#   RUN_ARGS="conf/llama3_8b.yaml run.dir=/shared/runs/llama3_8b" qsub -V -l select=8 cluster/aurora.sh
#
# Settings of PBS, the resubmission and all else are those of pbs.sh. Not run on such a machine by the project yet.
#PBS -N raytrain
#PBS -l place=scatter:exclhost
#PBS -l walltime=06:00:00
#PBS -j oe
#PBS -r n
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

# --- environment ------------------------------------------------------------------------------------------------------
# A torch with XPU and XCCL, and this package beside it:
# module load frameworks; source /shared/venv/bin/activate

export ZE_FLAT_DEVICE_HIERARCHY=FLAT # a tile is a device of its own
unset ZE_AFFINITY_MASK               # each worker gets its own
export NUM_GPUS=12                   # Ray finds GPUs of Intel only where the package dpctl is installed
# oneCCL without an MPI launcher: Ray starts the processes, oneCCL finds out which ranks share a node, and libfabric's
# provider for Slingshot carries the data.
export CCL_PROCESS_LAUNCHER=${CCL_PROCESS_LAUNCHER:-none} CCL_ATL_TRANSPORT=${CCL_ATL_TRANSPORT:-ofi}
export FI_PROVIDER=${FI_PROVIDER:-cxi}
: "${RUN_ARGS:?set RUN_ARGS to the arguments of raytrain-hpc train, and use qsub -V}"
case $RUN_ARGS in *cluster.device=*) ;; *) # else this is the first of the jobs that continue each other
    # Ray does not know the type of GPUs that it was told the number of.
    export RUN_ARGS="$RUN_ARGS cluster.device=xpu cluster.network_interface=${NETWORK_INTERFACE:-hsn0}" ;;
esac
exec bash cluster/pbs.sh
