"""The compiled hot loops of the planner, or None: then it works with numpy, slower."""

from __future__ import annotations

from mpipipe.native import load

PLANNER_VERSION = "8"  # of the functions that mpipipe/planner calls; kernels/planner/bind.cpp holds the same
compiled = load("_planner", PLANNER_VERSION)
