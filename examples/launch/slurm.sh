#!/usr/bin/env bash
# One process on each node of a SLURM cluster, which has all GPUs of the node. Submit it from a checkout, in whose
# environment `python3 -c "import transformer_jax"` works, on a file system that all nodes see:
#
#     sbatch --nodes=4 examples/launch/slurm.sh train.py --config=configs/phrases.py --workdir=runs/phrases
#     sbatch --nodes=4 examples/launch/slurm.sh decode.py --model=runs/phrases --input=news.en --output=news.de --shard=auto
#
# Without a command it trains on the built-in phrases. A run that SLURM stops is saved and goes on in the next turn.
#SBATCH --job-name=transformer_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# JAX gives each process of a node one GPU, unless it is told that there is but one process, which takes all.
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
    JAX_LOCAL_DEVICE_IDS=$(seq -s , 0 $((SLURM_GPUS_ON_NODE - 1)))
    export JAX_LOCAL_DEVICE_IDS
fi

status=0
srun python3 "${@:-train.py}" || status=$?
case $status in
    75 | 143) scontrol requeue "$SLURM_JOB_ID" ;; # a node was lost, or the time is up: all is saved
    *) exit "$status" ;;
esac
