# Slingshot (HPE Cray EX) with Cray MPICH.   . slurm/sites/slingshot.sh; sbatch slurm/train.sh config.yaml
# Tested: no; written from the manuals of Cray MPICH and libfabric. See what comes out: python -m mpipipe doctor.
# Once, with the compiler wrapper of the site:   MPICC=cc make setup MPI=site
export MPIPIPE_MODULES="cray-mpich"
export MPIPIPE_LAUNCHER="srun --mpi=cray_shasta" # `srun --mpi=list` shows what yours is called
export MPICH_OFI_NIC_POLICY=NUMA                 # each rank by the adapter that is nearest to its cores
export FI_CXI_RX_MATCH_MODE=hybrid               # messages are matched in software when the adapter's list is full
