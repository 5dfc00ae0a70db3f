// A program's messages matched, its proof and its times: what mpipipe/planner/{walk,prove,simulate}.py say in
// Python, instruction by instruction, with the same results to the bit.
#pragma once

#include <cstdint>
#include <vector>

namespace mpipipe::planner {

// One rank's instructions: rows of op, stage, micro, other, peer, tag (values.py: Instr).
struct Code {
    const int32_t* rows;
    int32_t n;

    const int32_t* row(int32_t index) const { return rows + 6 * int64_t{index}; }
    int32_t op(int32_t index) const { return row(index)[0]; }
    int32_t micro(int32_t index) const { return row(index)[2]; }
    int32_t peer(int32_t index) const { return row(index)[4]; }
};

using Codes = std::vector<Code>;
using Partner = std::vector<int32_t*>;  // [rank][index]: index at the peer of the other end; -1: no message

struct Fault {
    enum Kind { none, no_recv, other_value, no_send } kind;
    int32_t rank, index, other;  // other: of no meaning but for other_value, the index of the RECV
};

// partner: n entries per rank, all -1. Stops at the first fault, in the order in which walk.py finds it.
Fault match(const Codes& codes, const Partner& partner);

// True if every rank reaches its end without buffering; at: where each one ends or stands.
bool prove(const Codes& codes, const Partner& partner, int32_t receive_window, std::vector<int32_t>& at);

// times[rank]: (n, 2) start and end of each instruction, zeros before. False: it cannot end.
bool simulate(const Codes& codes, const Partner& partner, const std::vector<const double*>& seconds, double norm_s,
              const std::vector<double*>& times);

}  // namespace mpipipe::planner
