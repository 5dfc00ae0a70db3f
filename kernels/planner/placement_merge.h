// Smaller problems with the same optimum.
#pragma once

#include <vector>

#include "placement.h"

namespace mpipipe::placement {

struct Merged {
    Problem problem;
    std::vector<int> item_of;  // (n,) the item of `problem` that an item became part of
};

// Items with the same label become one; the labels must leave the graph acyclic. Tensors with the same pins become
// one, items are numbered in a topological order.
Merged contract(const Problem& problem, const std::vector<int>& label);

// Joins an item to its only successor or only predecessor wherever moving it there never makes a device's load
// higher: it takes no CPU time and no bytes that count, and its own time and other tensors cost no more than the
// tensors between the two. Contiguous placements stay contiguous.
Merged merge_for_free(const Problem& problem);

// A problem that is no harder: the least load of a contiguous placement is the same or lower. Joins items without
// predecessors or without successors as above, but also where this is not free. Their CPU time, up to `cpu_loss_s`
// each or a fifth of the partner's, is forgotten; their own time beyond the tensors to the partner, up to `loss_s`
// each, is cut off: whoever takes the partner pays at least the tensors or the time.
Merged relax(const Problem& problem, double loss_s, double cpu_loss_s);

// The same problem with items numbered along `order`.
Merged renumber(const Problem& problem, const std::vector<int>& order);

}  // namespace mpipipe::placement
