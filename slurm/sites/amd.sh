# Nodes with two AMD EPYC of 64 cores, four NUMA domains each (NPS4).
#   . slurm/sites/amd.sh; sbatch -N 4 --ntasks-per-node=8 --cpus-per-task=16 slurm/train.sh config.yaml pipeline.threads=16
# Tested: no. A rank per NUMA domain keeps its memory near; with these options pipeline.threads=auto takes the same number.
# PyTorch's MKL takes slower instructions on these processors; kernels.gemm=auto, the default, measures oneDNN beside it.
export SBATCH_EXCLUSIVE=exclusive SBATCH_HINT=nomultithread # one CPU of Slurm is one core
