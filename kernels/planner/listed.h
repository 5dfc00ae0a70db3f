// Orders of forwards and backwards by list scheduling: what mpipipe/planner/schedules/listed.py says in Python, with the
// same orders and the same seconds, to the bit.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

namespace mpipipe::planner {

// The stage of a user, that of its owner, seconds of its message (fill.py: Use).
using Use = std::tuple<int32_t, int32_t, double>;

// Of an action (values.py: Op).
enum Kind : int32_t { F = 0, B = 1, I = 2, W = 3 };

// Seconds by stage, and the rank of each (fill.py: Work).
struct Work {
    std::vector<int32_t> rank_of_stage;
    std::vector<double> fwd_s, bwd_input_s, bwd_weight_s, bwd_s, act_s, grad_s;
    std::vector<Use> tied;
};

// listed.py: Policy.
struct Policy {
    bool forwards_first, last_backward_first, first_whole;
    double least_gap;
    std::vector<int32_t> room;
};

// Rows of kind, stage and micro-batch, as values.py numbers them.
using Row = std::array<int32_t, 3>;

struct Listed {
    double end_s;  // infinite: no order, for lack of room, or it takes more than `most_s`
    std::vector<std::vector<Row>> order;  // by rank
};

// Ends early where some rank cannot be done by `most_s`.
Listed listed(const Work& work, int32_t n_micro, const Policy& policy,
              double most_s = std::numeric_limits<double>::infinity());

}  // namespace mpipipe::planner
