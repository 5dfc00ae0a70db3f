#include "merged.h"

#include <algorithm>
#include <limits>

namespace mpipipe::planner {
namespace {

constexpr double kSlack = 1e-12;  // relative: of sums that are taken in another order
constexpr double kLeast = 1e-9;   // of a backward: what saves less saves nothing
constexpr double never = std::numeric_limits<double>::infinity();
using Rows = std::vector<std::vector<Row>>;

// Until the last action of an order has ended (fill.py: seconds).
class Clock {
  public:
    Clock(const Work& work, int32_t n_micro, size_t n_ranks)
        : work_(work), n_stages_(static_cast<int32_t>(work.fwd_s.size())), n_micro_(n_micro), at_(n_ranks),
          clock_s_(n_ranks) {}

    double operator()(const Rows& rows) {
        for (auto* ends : {&forward_end_, &backward_end_, &weight_end_}) {
            ends->assign(int64_t{n_stages_} * n_micro_, never);
        }
        std::fill(at_.begin(), at_.end(), 0);
        std::fill(clock_s_.begin(), clock_s_.end(), 0.0);
        ready_.clear();
        for (size_t rank = 0; rank < rows.size(); ++rank) ready_.push_back(rank);
        while (!ready_.empty()) {
            const size_t rank = ready_.back();
            ready_.pop_back();
            while (at_[rank] < rows[rank].size() && act(rank, rows[rank][at_[rank]])) ++at_[rank];
        }
        double end_s = 0.0;
        for (size_t rank = 0; rank < rows.size(); ++rank) {
            if (at_[rank] < rows[rank].size()) return never;
            end_s = std::max(end_s, clock_s_[rank]);
        }
        return end_s;
    }

  private:
    int64_t index(int32_t stage, int32_t micro) const { return int64_t{stage} * n_micro_ + micro; }

    // Whether it could begin. Who may have waited for it has another turn.
    bool act(size_t rank, const Row& row) {
        const auto [kind, stage, micro] = row;
        double start_s = clock_s_[rank];
        if (kind == F && stage) {
            start_s = std::max(start_s, forward_end_[index(stage - 1, micro)] + work_.act_s[stage - 1]);
        } else if ((kind == I || kind == B) && stage < n_stages_ - 1) {
            start_s = std::max(start_s, backward_end_[index(stage + 1, micro)] + work_.grad_s[stage + 1]);
        } else if (kind == I || kind == B) {
            start_s = std::max(start_s, forward_end_[index(stage, micro)]);
        }
        if (kind == W || kind == B) {
            for (const auto& [user, owner, sent_s] : work_.tied) {
                if (owner == stage) start_s = std::max(start_s, weight_end_[index(user, micro)] + sent_s);
            }
        }
        if (start_s == never) return false;
        const auto& seconds = kind == F   ? work_.fwd_s
                              : kind == I ? work_.bwd_input_s
                              : kind == W ? work_.bwd_weight_s
                                          : work_.bwd_s;
        clock_s_[rank] = start_s + seconds[stage];
        if (kind == F) {
            forward_end_[index(stage, micro)] = clock_s_[rank];
            if (stage < n_stages_ - 1) ready_.push_back(work_.rank_of_stage[stage + 1]);
        }
        if (kind == I || kind == B) {
            backward_end_[index(stage, micro)] = clock_s_[rank];
            if (stage) ready_.push_back(work_.rank_of_stage[stage - 1]);
        }
        if (kind == W || kind == B) {
            weight_end_[index(stage, micro)] = clock_s_[rank];
            for (const auto& [user, owner, _] : work_.tied) {
                if (user == stage) ready_.push_back(work_.rank_of_stage[owner]);
            }
        }
        return true;
    }

    const Work& work_;
    const int32_t n_stages_, n_micro_;
    std::vector<size_t> at_;  // by rank
    std::vector<double> clock_s_, forward_end_, backward_end_, weight_end_;
    std::vector<size_t> ready_;  // ranks that may have something to do
};

}  // namespace

Listed merged(const Work& work, int32_t n_micro, Rows rows, int64_t most) {
    Clock clock(work, n_micro, rows.size());
    double end_s = clock(rows);
    const auto halves_of = [&work](const std::vector<Row>& row) {
        std::vector<Row> halves;
        for (const Row& each : row) {
            const int32_t s = each[1];
            const double saved_s = work.bwd_input_s[s] + work.bwd_weight_s[s] - work.bwd_s[s];
            if (each[0] == I && saved_s > kLeast * work.bwd_s[s]) halves.push_back(each);
        }
        return halves;
    };
    int64_t all = 0;
    for (const auto& row : rows) all += static_cast<int64_t>(halves_of(row).size());
    for (bool gained = all <= most; gained;) {
        gained = false;
        for (auto& row : rows) {
            for (const Row& half : halves_of(row)) {
                if (!most--) return {end_s, std::move(rows)};
                const Row weight{W, half[1], half[2]}, whole{B, half[1], half[2]};
                const std::vector<Row> before = row;
                const auto first = std::find(row.begin(), row.end(), half) - row.begin();
                const auto last = std::find(row.begin(), row.end(), weight) - row.begin();
                // Those of a stage must ascend, and their weight gradients: the order of addition decides the bits.
                const auto lies_between = [&](Kind kind, int32_t micro) {
                    const auto end = row.begin() + last;
                    return std::find(row.begin() + first, end, Row{kind, half[1], micro}) != end;
                };
                const bool weights_ascend = !lies_between(W, half[2] - 1);
                const bool inputs_ascend = !lies_between(I, half[2] + 1);
                row[first] = whole;  // where its first half was
                row.erase(row.begin() + last);
                const double first_s = weights_ascend ? clock(rows) : never;
                std::rotate(row.begin() + first, row.begin() + first + 1, row.begin() + last);  // its second
                const double last_s = inputs_ascend ? clock(rows) : never;
                if (const double took_s = std::min(first_s, last_s); took_s < end_s * (1.0 - kSlack)) {
                    if (first_s <= last_s) std::rotate(row.begin() + first, row.begin() + last - 1, row.begin() + last);
                    end_s = took_s;
                    gained = true;
                } else {
                    row = before;
                }
            }
        }
    }
    return {end_s, std::move(rows)};
}

}  // namespace mpipipe::planner
