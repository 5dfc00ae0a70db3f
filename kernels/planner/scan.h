// One end at a time, all stages that have it: what they take and hold, added up group by group.
#pragma once

#include "cuts.h"

#include <algorithm>
#include <cmath>

namespace mpipipe::planner {

// The stages that end at one group, from the shortest on. Sums are added up from the end, as in Ranges.ending_at.
class Cutter::Scan {
  public:
    Scan(const Cutter& cutter, int64_t end, int64_t earliest)
        : first(end), end(end), earliest_(earliest), cutter_(cutter), p_(cutter.problem_) {}

    // False where `earliest` is reached.
    bool grow() {
        if (first == earliest_) return false;
        --first;
        fwd_s_ += p_.fwd_s[first];
        bwd_input_s_ += p_.bwd_input_s[first];
        bwd_weight_s_ += p_.bwd_weight_s[first];
        workspace_ = std::max(workspace_, p_.workspace_bytes[first]);
        if (!cutter_.uses_.empty()) {
            for (int32_t i = cutter_.tie_offset_[first]; i < cutter_.tie_offset_[first + 1]; ++i) add(cutter_.uses_[i]);
        }
        return true;
    }

    double seconds() const { return fwd_s_ + bwd_input_s_ + bwd_weight_s_; }

    int64_t bytes(int64_t live) const {
        const int64_t received = p_.window * p_.act_in[first] + (p_.window + 1) * p_.grad_in[end - 1];
        const int64_t sent = std::max(end < p_.n_groups ? p_.act_in[end] : 0, first ? p_.grad_in[first - 1] : 0);
        const int64_t stash = cutter_.stash_before_[end] - cutter_.stash_before_[first] + p_.held_in[first];
        const int64_t held = cutter_.params_before_[end] - cutter_.params_before_[first] - shared_;
        const auto state = static_cast<int64_t>(std::ceil(static_cast<double>(elsewhere_) * p_.state_per_param_byte));
        const int64_t batch = (first ? 0 : p_.batch_of_first) + (end < p_.n_groups ? 0 : p_.batch_of_last);
        const int64_t casts = cutter_.casts_before_[end] - cutter_.casts_before_[first];
        const int64_t fixed = cutter_.weights(held) - state + accumulators_ + casts + batch;
        return fixed + live * stash + workspace_ + received + sent + tied_;
    }

    // Whether every rank has the memory.
    bool is_roomy() const {
        return first >= cutter_.roomy_[end] || bytes(cutter_.most_live_) <= cutter_.least_memory_;
    }

    int64_t first, end;

  protected:
    void add(const Use& use) {
        const Tied& tie = p_.ties[use.tie];
        const auto& uses = tie.groups;
        const int64_t n = uses.size();
        if (use.kind == Use::kBefore && use.next < end) {
            if (!tie.rows_bytes) accumulators_ += tie.nbytes;
            if (use.next != first) shared_ += tie.nbytes;
        } else if (use.kind == Use::kLater && (use.next + 1 == n || uses[use.next + 1] >= end)) {
            elsewhere_ += tie.nbytes;  // the last use here; until the first one is here, too
        } else if (use.kind == Use::kFirst) {
            if (n > 1 && uses[1] < end) elsewhere_ -= tie.nbytes;
            accumulators_ += tie.rows_bytes;
            int64_t outside = 0;
            for (int64_t i = 0; i < n; ++i) outside += uses[i] >= end && (i == 0 || uses[i] != uses[i - 1]);
            if (tie.rows_bytes) outside = 0;  // comes into the gradient
            tied_ += std::min(p_.tied_window + outside, outside * p_.tied_repeats) * tie.nbytes;
        }
    }

    const int64_t earliest_;
    const Cutter& cutter_;
    const Problem& p_;
    double fwd_s_ = 0.0, bwd_input_s_ = 0.0, bwd_weight_s_ = 0.0;
    int64_t shared_ = 0, elsewhere_ = 0, workspace_ = 0, accumulators_ = 0, tied_ = 0;
};

}  // namespace mpipipe::planner
