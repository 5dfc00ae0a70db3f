#include "scan.h"

#include <limits>

namespace mpipipe::planner {
namespace {

constexpr double endless = std::numeric_limits<double>::infinity();

}  // namespace

// With recomputation, and what waits for W: `times` in problem.py, for one end.
class Cutter::ModeScan : public Cutter::Scan {
  public:
    ModeScan(const Cutter& cutter, int64_t end, int64_t low) : Scan(cutter, end, low), parts_(p_.modes.size()) {}

    bool grow() {
        if (!Scan::grow()) return false;
        const bool last = first == end - 1;
        const int64_t late_grads = p_.waiting_grads[end - 1];
        const int64_t missing = cutter_.stash_before_[end] - cutter_.stash_before_[first + 1];
        const int64_t with_stash = p_.at_work_bytes[first] + (last ? 0 : p_.grad_in[first]) - missing;
        at_work_ = std::max(at_work_, with_stash);
        in_two_ = std::max(in_two_, with_stash + waiting_ - (last ? 0 : late_grads));
        waiting_ += p_.waiting_bytes[first];
        at_once_ += p_.at_once_bytes[first];
        late_bytes_ = std::max<int64_t>(0, waiting_ - late_grads - p_.waiting_received[first]);
        const int64_t stash = cutter_.stash_before_[end] - cutter_.stash_before_[first];
        for (size_t m = 0; m < parts_.size(); ++m) {
            const Mode& mode = p_.modes[m];
            Part& part = parts_[m];
            part.bwd_input_s += mode.bwd_input_s[first];
            part.remade += mode.remade_bytes[first];
            part.seconds = fwd_s_ + part.bwd_input_s + bwd_weight_s_;
            part.whole_bytes = stash - part.remade + mode.held_in[first] - p_.act_in[first];
            part.once_bytes = part.remade - mode.received[first];
        }
        once_bytes_ = -1;
        return true;
    }

    // Seconds on a stage in the fastest mode that fits; endless where none does, or where it takes more than `most_s`.
    double seconds(int64_t stage, double most_s) {
        const double* in = p_.crossing_s + p_.link_in[stage] * (p_.n_groups + 1);
        const double* out = p_.crossing_s + p_.link_out[stage] * (p_.n_groups + 1);
        double least = endless;
        for (const Part& part : parts_) {
            const double time = part.seconds / p_.speed[stage] + in[first] + out[end];
            if (time < least && time <= most_s && bytes(part, stage) <= p_.memory_bytes[stage]) least = time;
        }
        return least;
    }

  private:
    struct Part {
        double bwd_input_s = 0.0, seconds = 0.0;
        int64_t remade = 0, whole_bytes = 0, once_bytes = 0;
    };

    int64_t bytes(const Part& part, int64_t stage) {
        if (once_bytes_ < 0) once_bytes_ = Scan::bytes(0);
        int64_t held = std::numeric_limits<int64_t>::min(), most = 0, late = 0;
        for (const Kept& k : p_.kept[stage]) {
            held = std::max(held, k.whole * part.whole_bytes + k.late * late_bytes_);
            most = std::max(most, k.whole + k.late);
            late = std::max(late, k.late);
        }
        const int64_t in_two = late ? std::max<int64_t>(0, in_two_ - at_work_) : 0;
        return once_bytes_ + held + most * p_.act_in[first] + late * p_.grad_in[end - 1] + part.once_bytes + in_two +
               p_.blocks_ahead[stage] * at_once_;
    }

    std::vector<Part> parts_;
    int64_t at_work_ = 0, in_two_ = 0;  // the most of any group, at least 0
    int64_t waiting_ = 0, at_once_ = 0, late_bytes_ = 0;
    int64_t once_bytes_ = -1;  // of any mode; negative: not asked for yet
};

Swept Cutter::sweep(const std::vector<int64_t>& lows, std::optional<double> most_s) const {
    const int64_t n = problem_.n_groups, stages = n_stages(), width = stages + 1;
    Swept found{std::vector<double>((n + 1) * width, endless), {}};
    std::vector<int64_t> from((n + 1) * width, 0);
    found.best[0] = 0.0;
    for (int64_t end = 1; end <= n; ++end) {
        double* after = &found.best[end * width];
        for (ModeScan scan(*this, end, lows[end - 1]); scan.grow();) {
            const double* before = &found.best[scan.first * width];
            for (int64_t s = 0; s < stages; ++s) {
                if (before[s] == endless || before[s] > after[s + 1]) continue;
                const double time = scan.seconds(s, most_s.value_or(after[s + 1]));
                const double value = most_s ? before[s] + time * time : std::max(before[s], time);
                if (value == endless || value > after[s + 1]) continue;
                after[s + 1] = value;  // of equals, the one that begins first
                from[end * width + s + 1] = scan.first;
            }
        }
    }
    for (int64_t s = stages, end = n; s > 1; --s) {
        end = from[end * width + s];
        found.cuts.push_back(end);
    }
    std::reverse(found.cuts.begin(), found.cuts.end());
    return found;
}

}  // namespace mpipipe::planner
