#include "walk.h"

#include <algorithm>
#include <utility>

namespace mpipipe::planner {
namespace {

// values.py: up to RECV_COPY, and from SEND_SHARD on, SEND and RECV take turns
enum Op : int32_t { SEND_ACT = 4, RECV_COPY = 11, NORM = 12, SEND_SHARD = 14, RECV_SHARD = 15 };

bool is_message(int32_t op) { return (op >= SEND_ACT && op <= RECV_COPY) || op >= SEND_SHARD; }
bool is_send(int32_t op) { return is_message(op) && op % 2 == 0; }
bool is_recv(int32_t op) { return is_message(op) && op % 2 == 1; }
bool is_compute(int32_t op) { return !is_message(op) && op != NORM; }

// -- matching ---------------------------------------------------------------------------------

// The RECVs of one rank in queues, one for each (from rank, tag), in the order of their first RECV. A rank has few
// queues: a table with open addressing finds them.
class Queues {
  public:
    explicit Queues(const Code& code) : table_(16, -1) {
        std::vector<std::pair<int32_t, int32_t>> recvs;  // (queue, index)
        for (int32_t i = 0; i < code.n; ++i) {
            if (is_recv(code.op(i))) recvs.emplace_back(add(key(code.peer(i), code.row(i)[5])), i);
        }
        next_.assign(keys_.size() + 1, 0);
        for (auto [queue, index] : recvs) ++next_[queue + 1];
        for (size_t q = 0; q < keys_.size(); ++q) next_[q + 1] += next_[q];
        end_.assign(next_.begin() + 1, next_.end());
        indices_.resize(recvs.size());
        std::vector<int32_t> place = next_;
        for (auto [queue, index] : recvs) indices_[place[queue]++] = index;
    }

    // Index of the next RECV, -1 if there is none.
    int32_t take(int32_t peer, int32_t tag) {
        const int32_t queue = table_[slot(key(peer, tag))];
        return queue < 0 || next_[queue] == end_[queue] ? -1 : indices_[next_[queue]++];
    }

    // Index of a RECV that nobody took, -1 if there is none.
    int32_t left() const {
        for (size_t q = 0; q < keys_.size(); ++q) {
            if (next_[q] < end_[q]) return indices_[next_[q]];
        }
        return -1;
    }

  private:
    static uint64_t key(int32_t peer, int32_t tag) {
        return uint64_t{static_cast<uint32_t>(peer)} << 32 | static_cast<uint32_t>(tag);
    }

    size_t slot(uint64_t key) const {
        size_t i = (key * 0x9E3779B97F4A7C15) >> 32;
        for (;; ++i) {
            i &= table_.size() - 1;
            if (table_[i] < 0 || keys_[table_[i]] == key) return i;
        }
    }

    int32_t add(uint64_t key) {
        int32_t& found = table_[slot(key)];
        if (found >= 0) return found;
        const auto queue = found = static_cast<int32_t>(keys_.size());
        keys_.push_back(key);
        if (2 * keys_.size() > table_.size()) {
            table_.assign(2 * table_.size(), -1);
            for (int32_t q = 0; q <= queue; ++q) table_[slot(keys_[q])] = q;
        }
        return queue;
    }

    std::vector<int32_t> table_;  // key -> queue
    std::vector<uint64_t> keys_;
    std::vector<int32_t> next_, end_, indices_;
};

}  // namespace

Fault match(const Codes& codes, const Partner& partner) {
    const auto n_ranks = static_cast<int32_t>(codes.size());
    std::vector<Queues> queues(codes.begin(), codes.end());
    for (int32_t rank = 0; rank < n_ranks; ++rank) {
        for (int32_t index = 0; index < codes[rank].n; ++index) {
            const int32_t* send = codes[rank].row(index);
            if (!is_send(send[0])) continue;
            const int32_t peer = send[4], tag = send[5];
            const int32_t other = peer < 0 || peer >= n_ranks ? -1 : queues[peer].take(rank, tag);
            if (other < 0) return {Fault::no_recv, rank, index, -1};
            const int32_t* recv = codes[peer].row(other);
            if (recv[0] != send[0] + 1 || recv[1] != send[3] || recv[2] != send[2] || recv[3] != send[1]) {
                return {Fault::other_value, rank, index, other};
            }
            partner[rank][index] = other;
            partner[peer][other] = index;
        }
    }
    for (int32_t rank = 0; rank < n_ranks; ++rank) {
        if (const int32_t index = queues[rank].left(); index >= 0) return {Fault::no_send, rank, index, -1};
    }
    return {Fault::none, -1, -1, -1};
}

// -- walking ----------------------------------------------------------------------------------

namespace {

// Takes every rank as far as the rules let it (walk.py: walk). Each rank is ready, waits for one other, stands at
// a NORM, or is at its end; `next` chains those that wait for the same one.
template <typename Rules>
bool walk(const Codes& codes, Rules& rules, std::vector<int32_t>& at) {
    const auto n_ranks = static_cast<int32_t>(codes.size());
    std::vector<int32_t> first(n_ranks, -1), next(n_ranks, -1), ready(n_ranks);
    for (int32_t rank = 0; rank < n_ranks; ++rank) ready[rank] = rank;
    int32_t in_norm = 0;
    while (!ready.empty()) {
        const int32_t rank = ready.back(), before = at[rank];
        const Code& code = codes[rank];
        ready.pop_back();
        int32_t peer = -1;
        for (int32_t& i = at[rank]; i < code.n && code.op(i) != NORM; ++i) {
            if ((peer = rules.waits_for(rank, i)) >= 0) break;
            rules.passed(rank, i);
        }
        if (peer >= 0) {
            next[rank] = first[peer];
            first[peer] = rank;
        } else if (at[rank] < code.n) {
            ++in_norm;
        }
        if (at[rank] > before) {
            for (int32_t waiter = std::exchange(first[rank], -1); waiter >= 0; waiter = next[waiter]) {
                ready.push_back(waiter);
            }
        }
        if (in_norm == n_ranks) {
            rules.norm();
            in_norm = 0;
            for (int32_t r = 0; r < n_ranks; ++r) {
                ++at[r];
                ready.push_back(r);
            }
        }
    }
    for (int32_t rank = 0; rank < n_ranks; ++rank) {
        if (at[rank] < codes[rank].n) return false;
    }
    return true;
}

// prove.py: _NoBuffering. `posted[rank]` is the first RECV that is not posted yet: `receive_window` RECVs after the
// one that comes next.
class NoBuffering {
  public:
    NoBuffering(const Codes& codes, const Partner& partner, int32_t window, const std::vector<int32_t>& at)
        : codes_(codes), partner_(partner), at_(at), posted_(codes.size(), -1) {
        for (size_t rank = 0; rank < codes.size(); ++rank) {
            for (int32_t k = 0; k <= window && posted_[rank] < codes[rank].n; ++k) post(rank);
        }
    }

    int32_t waits_for(int32_t rank, int32_t index) const {
        const int32_t op = codes_[rank].op(index);
        if (!is_message(op) || (is_send(op) && op >= SEND_SHARD)) return -1;
        const int32_t peer = codes_[rank].peer(index), other = partner_[rank][index];
        const bool ahead = is_send(op) && codes_[peer].micro(other) >= 0 && other < posted_[peer];
        return at_[peer] >= other || ahead ? -1 : peer;
    }

    void passed(int32_t rank, int32_t index) {
        if (is_recv(codes_[rank].op(index)) && posted_[rank] < codes_[rank].n) post(rank);
    }

    void norm() {}

  private:
    void post(size_t rank) {
        int32_t& i = posted_[rank];
        do ++i;
        while (i < codes_[rank].n && !is_recv(codes_[rank].op(i)));
    }

    const Codes& codes_;
    const Partner& partner_;
    const std::vector<int32_t>& at_;
    std::vector<int32_t> posted_;
};

// simulate.py: _Clock. A SEND writes the arrival into the end of its RECV, which reads it there.
class Clock {
  public:
    Clock(const Codes& codes, const Partner& partner, const std::vector<const double*>& seconds, double norm_s,
          const std::vector<double*>& times, const std::vector<int32_t>& at)
        : codes_(codes), partner_(partner), seconds_(seconds), norm_s_(norm_s), times_(times), at_(at),
          now_(codes.size(), 0.0), came_(codes.size(), 0.0), free_(codes.size()) {}

    int32_t waits_for(int32_t rank, int32_t index) const {
        if (!is_recv(codes_[rank].op(index))) return -1;
        const int32_t peer = codes_[rank].peer(index);
        return at_[peer] > partner_[rank][index] ? -1 : peer;
    }

    void passed(int32_t rank, int32_t index) {
        const int32_t op = codes_[rank].op(index);
        double end = now_[rank];
        if (op == SEND_SHARD && index > 0 && codes_[rank].op(index - 1) == RECV_SHARD) {
            double* time = times_[rank] + 2 * int64_t{index};
            time[0] = time[1] = begins(rank, index);
            send(rank, index, time[0]);
            return;
        }
        if (is_send(op)) {
            send(rank, index, end);
        } else if (is_recv(op)) {
            came_[rank] = times_[rank][2 * int64_t{index} + 1];
            end = std::max(end, came_[rank]);
        } else {
            end += seconds_[rank][index];
        }
        record(rank, index, end);
    }

    void norm() {
        const double end = *std::max_element(now_.begin(), now_.end()) + norm_s_;
        for (size_t rank = 0; rank < now_.size(); ++rank) record(static_cast<int32_t>(rank), at_[rank], end);
    }

  private:
    // The round of an exchange behind the RECV of the one before.
    double begins(int32_t rank, int32_t send) const {
        const double arrives = came_[rank], *times = times_[rank];
        for (int64_t i = send - 1; i >= 0; --i) {
            if (is_compute(codes_[rank].op(i)) && times[2 * i] < arrives) return std::max(arrives, times[2 * i + 1]);
        }
        return arrives;
    }

    void send(int32_t rank, int32_t index, double begins) {
        const int32_t peer = codes_[rank].peer(index);
        auto& ways = free_[rank];  // few peers
        auto way = std::find_if(ways.begin(), ways.end(), [peer](const auto& w) { return w.first == peer; });
        if (way == ways.end()) way = ways.emplace(way, peer, 0.0);
        way->second = std::max(begins, way->second) + seconds_[rank][index];
        times_[peer][2 * int64_t{partner_[rank][index]} + 1] = way->second;
    }

    void record(int32_t rank, int32_t index, double end) {
        double* time = times_[rank] + 2 * int64_t{index};
        time[0] = now_[rank];
        time[1] = now_[rank] = end;
    }

    const Codes& codes_;
    const Partner& partner_;
    const std::vector<const double*>& seconds_;
    const double norm_s_;
    const std::vector<double*>& times_;
    const std::vector<int32_t>& at_;
    std::vector<double> now_, came_;  // [rank]: came_ is when the message of its last RECV did
    std::vector<std::vector<std::pair<int32_t, double>>> free_;  // [rank]: (peer, when the way to it is free)
};

}  // namespace

bool prove(const Codes& codes, const Partner& partner, int32_t receive_window, std::vector<int32_t>& at) {
    at.assign(codes.size(), 0);
    NoBuffering rules(codes, partner, receive_window, at);
    return walk(codes, rules, at);
}

bool simulate(const Codes& codes, const Partner& partner, const std::vector<const double*>& seconds, double norm_s,
              const std::vector<double*>& times) {
    std::vector<int32_t> at(codes.size(), 0);
    Clock clock(codes, partner, seconds, norm_s, times, at);
    return walk(codes, clock, at);
}

}  // namespace mpipipe::planner
