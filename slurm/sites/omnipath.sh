# Omni-Path with Open MPI and libfabric.   . slurm/sites/omnipath.sh; sbatch slurm/train.sh config.yaml
# Tested: no; written from the manuals of Open MPI and libfabric. See what comes out: python -m mpipipe doctor.
# Once:   module load openmpi; make setup MPI=site
export MPIPIPE_MODULES="openmpi"
export OMPI_MCA_pml=cm OMPI_MCA_mtl=ofi                      # messages are matched by the provider
export OMPI_MCA_mtl_ofi_provider_include=opx,psm2            # opx: Omni-Path Express; psm2: older libraries
