"""Which device holds which operator of a whole graph, where `planner.partition` cuts one linear order."""

from mpipipe.planner.placement.problem import Loads, Operator, Problem, check, is_contiguous, loads
from mpipipe.planner.placement.replicas import Layer, Profile, Replicated, replicate
from mpipipe.planner.placement.solve import Placement, place

__all__ = [
    "Layer", "Loads", "Operator", "Placement", "Problem", "Profile", "Replicated", "check", "is_contiguous",
    "loads", "place", "replicate",
]  # fmt: skip
