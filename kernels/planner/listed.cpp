#include "listed.h"

#include <algorithm>
#include <limits>

namespace mpipipe::planner {
namespace {

constexpr double kSlack = 1e-9;  // relative: of sums that are taken in another order
constexpr double never = std::numeric_limits<double>::infinity();

struct Next {
    double start_s = never;
    Kind kind = F;
    int32_t stage = 0;
};

class Lister {
  public:
    Lister(const Work& work, int32_t n_micro, const Policy& policy, double most_s)
        : work_(work), policy_(policy), most_s_(most_s * (1.0 + kSlack)),
          n_stages_(static_cast<int32_t>(work.fwd_s.size())), n_micro_(n_micro), ranks_(policy.room.size()),
          forwards_(n_stages_, 0), backwards_(n_stages_, 0), forward_end_(int64_t{n_stages_} * n_micro, never),
          backward_end_(forward_end_), weight_end_(forward_end_) {
        while (leaves_ < ranks_.size()) leaves_ *= 2;
        starts_.assign(leaves_, never);
        first_.resize(2 * leaves_);
        for (size_t rank = 0; rank < leaves_; ++rank) first_[leaves_ + rank] = rank;
        for (size_t pair = leaves_ - 1; pair > 0; --pair) first_[pair] = first_[2 * pair];
        for (int32_t stage = 0; stage < n_stages_; ++stage) {
            Rank& rank = ranks_[work.rank_of_stage[stage]];
            rank.stages.push_back(stage);
            const double backward_s = work.bwd_input_s[stage] + work.bwd_weight_s[stage];
            rank.left_s += n_micro * (work.fwd_s[stage] + (is_whole(stage) ? work.bwd_s[stage] : backward_s));
        }
        for (Rank& rank : ranks_) prefer(rank);
        for (size_t rank = 0; rank < ranks_.size(); ++rank) decide(rank);
    }

    Listed run() {
        Listed found{0.0, std::vector<std::vector<Row>>(ranks_.size())};
        for (;;) {
            const size_t rank = first_[1];  // that can begin first, of several the first one
            if (starts_[rank] == never) break;
            found.order[rank].push_back(act(rank));
            found.end_s = std::max(found.end_s, ranks_[rank].clock_s);
            if (ranks_[rank].clock_s + ranks_[rank].left_s > most_s_) return {never, {}};
        }
        for (const int32_t done : backwards_) {
            if (done < n_micro_) found.end_s = never;
        }
        return found;
    }

  private:
    struct Rank {
        std::vector<int32_t> stages;                      // ascending
        std::vector<std::pair<Kind, int32_t>> preferred;  // of F and I, the first that is ready is done
        std::vector<std::pair<int32_t, int32_t>> owed;    // stage and micro-batch of each W, those done too
        size_t paid = 0;
        int32_t held = 0;
        double clock_s = 0.0, left_s = 0.0;  // of all that it has yet to do
        Next next;
    };

    bool is_whole(int32_t stage) const { return stage == 0 && policy_.first_whole; }

    void prefer(Rank& rank) const {
        const auto add = [&rank](Kind kind, bool last_first) {
            for (size_t i = 0; i < rank.stages.size(); ++i) {
                rank.preferred.emplace_back(kind, rank.stages[last_first ? rank.stages.size() - 1 - i : i]);
            }
        };
        if (policy_.forwards_first) add(F, true);
        add(I, policy_.last_backward_first);
        if (!policy_.forwards_first) add(F, true);
    }

    double end_of(const std::vector<double>& ends, int32_t stage, int32_t micro) const {
        return ends[int64_t{stage} * n_micro_ + micro];
    }

    // When the next F of a stage can begin; never: nobody knows yet, or there is none, or no room for it.
    double forward_s(size_t r, int32_t stage) const {
        const Rank& rank = ranks_[r];
        const int32_t micro = forwards_[stage];
        if (micro == n_micro_) return never;
        int32_t kept = 0;  // for forwards that are due on later stages of the rank
        for (const int32_t other : rank.stages) kept += other > stage && forwards_[other] < micro;
        if (rank.held + kept >= policy_.room[r]) return never;
        return stage ? end_of(forward_end_, stage - 1, micro) + work_.act_s[stage - 1] : 0.0;
    }

    double backward_s(int32_t stage) const {
        const int32_t micro = backwards_[stage];
        if (micro == n_micro_ || micro >= forwards_[stage]) return never;
        const double own_s = end_of(forward_end_, stage, micro);
        if (stage == n_stages_ - 1) return own_s;
        const double after_s = end_of(backward_end_, stage + 1, micro) + work_.grad_s[stage + 1];
        return std::max({own_s, after_s, is_whole(stage) ? uses_s(stage, micro) : 0.0});
    }

    // When the gradients of other uses of what a stage owns are there.
    double uses_s(int32_t stage, int32_t micro) const {
        double last_s = 0.0;
        for (const auto& [user, owner, sent_s] : work_.tied) {
            if (owner == stage) last_s = std::max(last_s, end_of(weight_end_, user, micro) + sent_s);
        }
        return last_s;
    }

    void decide(size_t r) {
        ranks_[r].next = next_of(r);
        starts_[r] = ranks_[r].next.start_s;
        for (size_t pair = (leaves_ + r) / 2; pair > 0; pair /= 2) {
            const size_t left = first_[2 * pair], right = first_[2 * pair + 1];
            first_[pair] = starts_[right] < starts_[left] ? right : left;
        }
    }

    Next next_of(size_t r) const {
        const Rank& rank = ranks_[r];
        Next first;
        for (const auto& [kind, stage] : rank.preferred) {
            const double ready_s = kind == F ? forward_s(r, stage) : backward_s(stage);
            if (ready_s <= rank.clock_s) return {rank.clock_s, kind, stage};
            if (ready_s < first.start_s) first = {ready_s, kind, stage};
        }
        if (rank.paid < rank.owed.size()) {
            const auto [stage, micro] = rank.owed[rank.paid];
            const double start_s = std::max(rank.clock_s, uses_s(stage, micro));
            if (start_s < never && first.start_s - start_s >= policy_.least_gap * work_.bwd_weight_s[stage]) {
                first = {start_s, W, stage};
            }
        }
        return first;
    }

    Row act(size_t r) {
        Rank& rank = ranks_[r];
        const auto [start_s, kind, stage] = rank.next;
        Row row{kind, stage, 0};
        double took_s = work_.bwd_weight_s[stage];
        if (kind == F) {
            row[2] = forwards_[stage]++;
            ++rank.held;
            took_s = work_.fwd_s[stage];
            forward_end_[int64_t{stage} * n_micro_ + row[2]] = start_s + took_s;
        } else if (kind == W) {
            row[2] = rank.owed[rank.paid++].second;
            --rank.held;
            weight_end_[int64_t{stage} * n_micro_ + row[2]] = start_s + took_s;
        } else {
            row[2] = backwards_[stage]++;
            if (is_whole(stage)) {
                row[0] = B;
                --rank.held;
            } else {
                rank.owed.emplace_back(stage, row[2]);
            }
            took_s = (is_whole(stage) ? work_.bwd_s : work_.bwd_input_s)[stage];
            backward_end_[int64_t{stage} * n_micro_ + row[2]] = start_s + took_s;
        }
        rank.clock_s = start_s + took_s;
        rank.left_s -= took_s;
        decide(r);
        if (kind == W) {
            for (const auto& [user, owner, sent_s] : work_.tied) {
                if (user == stage) decide(work_.rank_of_stage[owner]);
            }
            return row;
        }
        const int32_t told = kind == F ? stage + 1 : stage - 1;
        if (told >= 0 && told < n_stages_) decide(work_.rank_of_stage[told]);
        return row;
    }

    const Work& work_;
    const Policy& policy_;
    const double most_s_;
    const int32_t n_stages_, n_micro_;
    std::vector<Rank> ranks_;
    std::vector<int32_t> forwards_, backwards_;  // by stage, how many are done
    std::vector<double> forward_end_, backward_end_, weight_end_;
    // A tournament: of each pair of ranks, and of pairs of pairs, the one that begins first; [1] of all.
    size_t leaves_ = 1;
    std::vector<size_t> first_;
    std::vector<double> starts_;  // of what each rank does next
};

}  // namespace

Listed listed(const Work& work, int32_t n_micro, const Policy& policy, double most_s) {
    return Lister(work, n_micro, policy, most_s).run();
}

}  // namespace mpipipe::planner
