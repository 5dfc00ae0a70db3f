#!/bin/bash
# Train on the nodes of a Slurm job:   sbatch slurm/train.sh config.yaml [key=value ...]
#
# One task is one rank. The resources below are defaults; sbatch's options, given before the script, win:
#   sbatch -N 4 --ntasks-per-node=8 --cpus-per-task=4 -t 8:00:00 slurm/train.sh config.yaml pipeline.threads=4
# Python environment: $MPIPIPE_VENV, else the active venv or conda environment, else .venv of the repository.
# Launcher: the one that fits the environment's MPI; $MPIPIPE_LAUNCHER names another ("srun --mpi=pmix").
#SBATCH --job-name=mpipipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
set -euo pipefail
fail() { printf 'train.sh: %s\n' "$@" >&2; exit 2; }
[ $# -gt 0 ] || fail "which config?   sbatch slurm/train.sh config.yaml [key=value ...]"
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is not a Slurm job: submit it with sbatch; on one machine: make train"

# Slurm runs a copy from its spool folder: only the job's record knows where this script was.
script=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.* Command=\([^ ]*\).*/\1/p' || true)
repo=$(dirname "$(dirname "$script")")

# The first environment that has both mpi4py and mpipipe. Asking for the version does not start MPI.
probe='import mpi4py, importlib.util as u; mpi4py.rc.initialize = False; from mpi4py import MPI
assert u.find_spec("mpipipe") and u.find_spec("torch"); print(" ".join(MPI.Get_library_version().split()[:3]).strip(" ,\0"))'
mpi='' tried=()
for env in "${MPIPIPE_VENV:-}" "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$SLURM_SUBMIT_DIR/.venv" "$repo/.venv"; do
    [ -n "$env" ] || continue
    tried+=("$env")
    [ -x "$env/bin/python" ] && mpi=$("$env/bin/python" -c "$probe" 2>/dev/null) && break
done
[ -n "$mpi" ] || fail "none of these has mpi4py and mpipipe: ${tried[*]}" "run make setup, or set MPIPIPE_VENV"

pmi=pmi2 own=$(compgen -G "$env/bin/mpirun" || compgen -G "$env/bin/mpiexec" || true)
case $mpi in "Open MPI"*) pmi=pmix ;; esac
if [ -n "${MPIPIPE_LAUNCHER:-}" ]; then read -ra launch <<<"$MPIPIPE_LAUNCHER"; why="MPIPIPE_LAUNCHER says so"
elif [ -n "$own" ]; then launch=("$own") why="the environment brings its own launcher"
elif srun --mpi=list 2>&1 | grep -qw "$pmi"; then why="this Slurm starts the site's MPI itself"
    launch=(srun "--mpi=$pmi" ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}) # else forgotten
elif site=$(command -v mpirun || command -v mpiexec); then launch=("$site") why="this srun has no $pmi"
else fail "no launcher for $mpi: no mpirun on the PATH, and srun has no $pmi" "module load the MPI, or set MPIPIPE_LAUNCHER"; fi
n=${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}
echo "train.sh: $env has $mpi; $n ranks on $SLURM_JOB_NUM_NODES nodes start with: ${launch[*]} ($why)"

export PRTE_MCA_hwloc_default_binding_policy=none # ranks have threads, and a node may claim cores it has not
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# mpirun kills its ranks within a second of a SIGTERM, but hands SIGUSR1 on: they stop after the current step.
"${launch[@]}" -n "$n" "$env/bin/python" -m mpipipe.train "$@" & child=$!
trap 'kill -USR1 $child' TERM INT USR1
while wait "$child" && rc=0 || rc=$?; do kill -0 "$child" 2>/dev/null || exit "$rc"; done
