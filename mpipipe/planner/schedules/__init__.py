"""In which order each rank works: functions (n_stages, n_micro, n_ranks) -> Schedule.

Order only: no messages (`lower` writes them in) and no times (`simulate` finds them). With one stage per rank
stage s is on rank s, unless `in_copies` moves it. Backward runs in ascending micro-batch order on every
stage, in every schedule: that is the order in which gradients are added, and so it decides the bits.
"""

from mpipipe.planner.schedules.check import check, check_ends
from mpipipe.planner.schedules.grid import grid
from mpipipe.planner.schedules.orders import (
    in_copies,
    kept_micro_batches,
    live_micro_batches,
    live_stages,
    stages_of_ranks,
    stashes,
)
from mpipipe.planner.schedules.plain import forward_only
from mpipipe.planner.schedules.planned import (
    homes_of,
    planned_by_room,
    policies,
    room_for,
    work_of,
    zb_planned,
)
from mpipipe.planner.schedules.registry import (
    BY_HAND,
    FILLED,
    PLAIN,
    PLANNED,
    SCHEDULES,
    build,
    check_name,
    is_of_file,
    register,
    register_text,
    stages_on,
)
from mpipipe.planner.schedules.text import from_text, to_lines, to_text

__all__ = [
    "BY_HAND", "FILLED", "PLAIN", "PLANNED", "SCHEDULES", "build", "check", "check_ends", "check_name",
    "forward_only", "from_text", "grid", "homes_of", "in_copies", "is_of_file", "kept_micro_batches",
    "live_micro_batches", "live_stages", "planned_by_room", "policies", "register",
    "register_text", "room_for", "stages_of_ranks", "stages_on", "stashes", "to_lines", "to_text",
    "work_of", "zb_planned",
]  # fmt: skip
