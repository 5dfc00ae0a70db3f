# Nodes on Ethernet, with the Open MPI of a wheel: what `make setup` installs needs no module.
#   . slurm/sites/ethernet.sh; sbatch slurm/train.sh config.yaml
# Tested: yes, on a Slurm of three virtual nodes; tests/slurm runs this file.
export OMPI_MCA_btl_tcp_if_include=${OMPI_MCA_btl_tcp_if_include:-eth0} # the network that all nodes are on
