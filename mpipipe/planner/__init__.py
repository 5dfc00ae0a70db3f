"""Numbers only: costs in, plan out. Neither torch nor MPI, neither files nor environment."""

from mpipipe.planner.lower import lower, max_tag
from mpipipe.planner.partition import Partition, partition
from mpipipe.planner.prediction import predict
from mpipipe.planner.programs import cut_indices, program_for
from mpipipe.planner.prove import prove
from mpipipe.planner.schedules import SCHEDULES, check, forward_only, live_micro_batches
from mpipipe.planner.search import make_plan
from mpipipe.planner.simulate import simulate
from mpipipe.planner.stages import StageTie, stage_costs, stage_ties

__all__ = [
    "SCHEDULES", "Partition", "StageTie", "check", "cut_indices", "forward_only", "live_micro_batches",
    "lower", "make_plan", "max_tag", "partition", "predict", "program_for", "prove", "simulate",
    "stage_costs", "stage_ties",
]  # fmt: skip
