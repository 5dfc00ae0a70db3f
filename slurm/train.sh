#!/bin/bash
# Train on the nodes of a Slurm job:   sbatch slurm/train.sh config.yaml [key=value ...]
#
# One task is one rank. The resources below are defaults; sbatch's options, given before the script, win:
#   sbatch -N 4 --ntasks-per-node=8 --cpus-per-task=4 --mem=0 -t 8:00:00 slurm/train.sh config.yaml pipeline.threads=4
# Python environment: $MPIPIPE_VENV, else the active venv or conda environment, else .venv of the repository.
# Launcher: the one that fits the environment's MPI; $MPIPIPE_LAUNCHER names another ("srun --mpi=pmix").
#SBATCH --job-name=mpipipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
set -euo pipefail
fail() { printf 'train.sh: %s\n' "$@" >&2; exit 2; }
[ $# -gt 0 ] || fail "which config?   sbatch slurm/train.sh config.yaml [key=value ...]"
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is not a Slurm job: submit it with sbatch, or on one machine: make train"

# Slurm runs a copy from its spool folder: only the job's record knows where this script was.
script=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.* Command=\([^ ]*\).*/\1/p')
repo=$(dirname "$(dirname "$script")")

# The first environment that has both mpi4py and mpipipe; asking for the version does not start MPI.
probe='import mpi4py, importlib.util as u; mpi4py.rc.initialize = False; from mpi4py import MPI
assert u.find_spec("mpipipe"); print(" ".join(MPI.Get_library_version().split()[:3]).strip(" ,\0"))'
tried=()
for env in "${MPIPIPE_VENV:-}" "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$SLURM_SUBMIT_DIR/.venv" "$repo/.venv"; do
    [ -z "$env" ] || tried+=("$env")
    [ -x "$env/bin/python" ] && mpi=$("$env/bin/python" -c "$probe" 2>/dev/null) && break
done
[ -n "${mpi:-}" ] || fail "no Python environment with mpi4py and mpipipe (tried: ${tried[*]})" "run make setup, or set MPIPIPE_VENV"

n=${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES} pmi=pmi2
case $mpi in "Open MPI"*) pmi=pmix ;; esac
own=$(compgen -G "$env/bin/mpirun" || compgen -G "$env/bin/mpiexec" || true)
if [ -n "${MPIPIPE_LAUNCHER:-}" ]; then launch=$MPIPIPE_LAUNCHER why='MPIPIPE_LAUNCHER says so'
elif [ -n "$own" ]; then launch=$own why='the environment brings its own launcher'
elif srun --mpi=list 2>&1 | grep -qw "$pmi"; then launch="srun --mpi=$pmi" why="this Slurm speaks the site's MPI"
else launch=$(command -v mpirun || command -v mpiexec) || fail "no launcher for $mpi: no mpirun, and srun has no $pmi"
    why="this srun has no $pmi"; fi
echo "train.sh: $env has $mpi; starting $n ranks on $SLURM_JOB_NUM_NODES nodes with '$launch': $why"

export PRTE_MCA_hwloc_default_binding_policy=none          # ranks have threads, and a node may claim cores it lacks
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}        # srun forgets --cpus-per-task
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec $launch -n "$n" "$env/bin/python" -m mpipipe.train "$@" # exec: signals of Slurm reach the launcher
