#!/bin/bash
# Train on the nodes of a Slurm job:   sbatch slurm/train.sh config.yaml [key=value ...]
#
# The resources below are defaults; sbatch's options, given before the script, win: -N 2-8 -t 8:00:00 --no-kill.
# Ranks per node, threads and binding: `plan --from-allocation`; --ntasks-per-node and --cpus-per-task decide instead.
# Environment: $MPIPIPE_MODULES is loaded; then $MPIPIPE_CONTAINER (an Apptainer image), $MPIPIPE_VENV, the active
# venv or conda environment, or .venv. MPIPIPE_STAGE=archive copies it to each node's own disk first.
# Launcher: the one that fits the environment's MPI; $MPIPIPE_LAUNCHER names another ("srun --mpi=pmix").
#SBATCH --job-name=mpipipe --nodes=2
#SBATCH --exclusive --requeue --open-mode=append --signal=B:USR1@180
set -euo pipefail
began=$(date +%FT%T)
fail() { printf 'train.sh: %s\n' "$@" >&2; exit 2; }
[ $# -gt 0 ] || fail "which config?   sbatch slurm/train.sh config.yaml [key=value ...]"
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is not a Slurm job: submit it with sbatch; on one machine: make train"
[ -z "${MPIPIPE_MODULES:-}" ] || module load $MPIPIPE_MODULES

# Slurm runs a copy from its spool folder: only the job's record knows where this script was.
# Of a task of an array SLURM_JOB_ID may be the id of the whole array.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} id=${id:-$SLURM_JOB_ID}
script=$(scontrol show job -o "$id" 2>/dev/null | sed -n 's/.* Command=\([^ ]*\).*/\1/p' || true)
repo=$(dirname "$(dirname "$script")") python=() tried=()
find='import importlib.util as u; assert all(map(u.find_spec, ("mpi4py", "mpipipe", "torch")))'
[ -z "${MPIPIPE_CONTAINER:-}" ] || python=(apptainer exec "$MPIPIPE_CONTAINER" python3)
for env in "${MPIPIPE_VENV:-}" "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$SLURM_SUBMIT_DIR/.venv" "$repo/.venv"; do
    [ -n "$env" ] && [ ${#python[@]} = 0 ] || continue
    tried+=("$env")
    ! "$env/bin/python" -c "$find" 2>/dev/null || python=("$env/bin/python")
done
[ ${#python[@]} -gt 0 ] || fail "none of these has mpi4py and mpipipe: ${tried[*]}" "run make setup, or set MPIPIPE_VENV"
on_nodes() { timeout "$1" srun -N "$SLURM_JOB_NUM_NODES" -n "$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 sh -c "$2"; }
if [ "${MPIPIPE_STAGE:-}" = archive ] && [ -z "${MPIPIPE_CONTAINER:-}" ]; then # one file, not thousands per rank
    own=${TMPDIR:-/tmp}/mpipipe-$SLURM_JOB_ID python=("${python[0]%/bin/python}")
    printf -v there %q "$own" # for the shells of the nodes
    clean() { trap - EXIT; rm -f "$own.tar"; on_nodes 60 "rm -rf $there $there.copy" || true; }
    trap clean EXIT
    tar -C "${python[0]}" -cf "$own.tar" . && sbcast -f "$own.tar" "$own.copy" && rm "$own.tar" &&
        on_nodes 3600 "mkdir -p $there && tar -C $there -xf $there.copy && rm $there.copy" ||
        fail "the archive did not reach the disk of each node: is there room in ${own%/*}?"
    python=("$own/bin/python")
fi

# mpirun kills its ranks within a second of a SIGTERM, but hands SIGUSR1 on: they stop after the current step.
# A child that does not catch (or, as srun, block) it yet would die of it: its signal waits for up to 10 s.
early= child= again=1 asked= assignment=$(TMPDIR=/tmp mktemp --suffix=.json) # containers see /tmp
ask() {
    [ -n "$child" ] || { early=1; return; }
    for _ in {1..100}; do
        masks=$(sed -n 's/^Sig\(Blk\|Cgt\):.*\(...\)$/0x\2/p' "/proc/$child/status" 2>/dev/null) || break
        (((${masks/$'\n'/|}) & 0x200)) && break || sleep 0.1
    done
    kill -USR1 "$child" || true
}
trap 'asked=--asked; ask' USR1
trap 'again=; ask' TERM INT
echo "train.sh: ${python[*]}, start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID"
"${python[@]}" -m mpipipe plan "$@" --from-allocation -o "$assignment"
line=$("${python[@]}" -m mpipipe launch "$@" --assignment "$assignment")
[ -z "$early" ] || fail "asked to stop before the training began" "give the job more time: sbatch -t"
eval "exec $line" & child=$!
[ -z "$early" ] || ask
while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal ends a wait
wait "$child" && rc=0 || rc=$?
trap - USR1 TERM INT
# A preemption with GraceTime sends SIGTERM to the steps alone: under srun the ranks have saved, and ended with 0.
preempted=$(SLURM_TIME_FORMAT=standard scontrol show job -o "$id" 2>/dev/null | sed -n 's/.* PreemptTime=\([0-9][^ ]*\).*/\1/p' || true)
[[ $preempted < $began ]] || asked=--asked # not that of an earlier start
[ -n "$again" ] && [ $rc = 0 -o -n "$asked" ] || exit "$rc"
folder=$("${python[@]}" -m mpipipe launch "$@" $asked --unfinished) || exit "$rc"
[ -z "${own:-}" ] || clean # no step can begin in a job that is queued again
echo "train.sh: the time of the job is over before the run: it is queued again"
scontrol requeue "$id" || fail "that was refused; submit the same line again with run.dir=$folder: it resumes"
