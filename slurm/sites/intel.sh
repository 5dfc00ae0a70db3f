# Nodes with two Intel Xeon of 48 cores and AMX, two NUMA domains each (SNC2).
#   . slurm/sites/intel.sh; sbatch -N 4 --ntasks-per-node=4 --cpus-per-task=24 slurm/train.sh config.yaml pipeline.threads=24
# Tested: no. train.precision=bf16 is several times as fast with AMX; doctor says how much. kernels.gemm=auto sees
# that oneDNN's fp32 products round to bfloat16 there, and leaves them to MKL.
export SBATCH_EXCLUSIVE=exclusive SBATCH_HINT=nomultithread # one CPU of Slurm is one core
