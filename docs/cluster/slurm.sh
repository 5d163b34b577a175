#!/bin/bash
# Four hosts with eight GPUs, a process on each: sbatch docs/cluster/slurm.sh
#SBATCH --job-name=train --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32
#SBATCH --time=12:00:00 --signal=TERM@120 --requeue --open-mode=append

# The first task that fails ends the others; they end by themselves, too.
srun --kill-on-bad-exit=1 --wait=60 python docs/cluster/train.py --checkpoint runs/train "$@"
code=$?

# 0: all steps are done. Else it was asked to end (75), or has lost a process: it goes on from its last step.
if ((code != 0 && ${SLURM_RESTART_COUNT:-0} < 50)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
