// Backwards in one where halves gain nothing: what mpipipe/planner/schedules/merged.py says in Python, with the same
// orders and the same seconds, to the bit.
#pragma once

#include "listed.h"

namespace mpipipe::planner {

// rows: of an order that ends, by rank. At most `most` micro-batches of stages are tried; none where that is not all.
Listed merged(const Work& work, int32_t n_micro, std::vector<std::vector<Row>> rows, int64_t most);

}  // namespace mpipipe::planner
