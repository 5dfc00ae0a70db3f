# Nodes with an ARM processor of 72 cores with SVE2 and one NUMA domain, next to x86 nodes in the same Slurm.
#   . slurm/sites/arm.sh; sbatch -N 4 --ntasks-per-node=4 --cpus-per-task=18 slurm/train.sh config.yaml pipeline.threads=18
# Tested: no. An environment is of one architecture: make it on such a node, and keep the job on them. Runs do not go
# on with the same bits on the other kind; ranks of both kinds in one job are refused.
export MPIPIPE_VENV=${MPIPIPE_VENV:-$PWD/.venv-aarch64} # make setup VENV=.venv-aarch64
export SBATCH_CONSTRAINT=aarch64                        # the feature of the nodes: sinfo -o '%N %f'
