#include "placement_expand.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mpipipe::placement {

namespace {
constexpr double rounding = 1e-12;       // relative
constexpr int64_t steps_per_look = 512;  // at the clock
constexpr double infinite = std::numeric_limits<double>::infinity();
}  // namespace

Expansion::Expansion(const Problem& problem, const Budget& budget)
    : problem_(problem), budget_(budget), gain_s_(problem.accelerator_s), inside_(problem.n_tensors()),
      chain_s_(problem.n_items()), tail_s_(problem.n_items()), all_tail_s_(problem.n_items()),
      is_reached_(problem.n_items()), gone_(problem.n_items()), in_set_(problem.n_tensors()),
      outside_(problem.n_tensors()), set_(words_for(problem.n_items())) {
    for (double& seconds : gain_s_)
        if (std::isinf(seconds)) seconds = 0;
    for (int item = 0; item < problem.n_items(); ++item) {
        all_s_ += gain_s_[item];
        all_bytes_ += problem.nbytes[item];
    }
}

void Expansion::enter(const Word* ideal) {
    ideal_ = ideal;
    remaining_s_ = all_s_;
    remaining_bytes_ = all_bytes_;
    std::fill(inside_.begin(), inside_.end(), 0);
    for (int item = 0; item < problem_.n_items(); ++item) {
        if (!has(ideal, item)) continue;
        remaining_s_ -= gain_s_[item];
        remaining_bytes_ -= problem_.nbytes[item];
        for (int t : problem_.tensors_of[item]) ++inside_[t];
    }
    crossing_s_ = 0;
    for (int t = 0; t < problem_.n_tensors(); ++t)
        if (inside_[t] > 0 && inside_[t] < size(t))
            crossing_s_ += problem_.tensor_cost[t];
}

bool Expansion::is_free(int item) const {
    if (std::isinf(problem_.accelerator_s[item])) return true;  // a CPU will take it, which pays no tensor
    double begins_s = 0, saved_s = problem_.accelerator_s[item];
    for (int t : problem_.tensors_of[item]) {
        if (inside_[t] == 0) begins_s += problem_.tensor_cost[t];
        if (inside_[t] + 1 == size(t)) saved_s += problem_.tensor_cost[t];
    }
    return begins_s <= saved_s * (1 + rounding);
}

// What is free stays free when more is inside, so any order that works will do: several passes along the items.
bool Expansion::is_free_to_grow(const Word* larger) {
    std::vector<int> left, added;
    for (int item = 0; item < problem_.n_items(); ++item)
        if (has(larger, item) && !has(ideal_, item)) left.push_back(item);
    std::copy(ideal_, ideal_ + set_.size(), set_.begin());
    for (size_t before = left.size() + 1; !left.empty() && left.size() < before;) {
        before = left.size();
        const auto grown = std::remove_if(left.begin(), left.end(), [&](int item) {
            const auto& sources = problem_.before[item];
            if (!std::all_of(sources.begin(), sources.end(), [&](int p) { return has(set_.data(), p); })) return false;
            if (!is_free(item)) return false;
            flip(set_.data(), item);
            for (int t : problem_.tensors_of[item]) ++inside_[t];
            added.push_back(item);
            return true;
        });
        left.erase(grown, left.end());
    }
    for (int item : added)
        for (int t : problem_.tensors_of[item]) --inside_[t];
    return left.empty();
}

// An item is beyond reach where the heaviest chain that leads to it is too heavy for the next device.
void Expansion::open_window() {
    window_.clear();
    std::fill(in_set_.begin(), in_set_.end(), 0);
    std::fill(outside_.begin(), outside_.end(), 0);
    for (int item = 0; item < problem_.n_items(); ++item) {
        if (has(ideal_, item)) continue;
        double before_s = 0;
        for (int p : problem_.before[item])
            if (!has(ideal_, p)) before_s = std::max(before_s, chain_s_[p]);
        chain_s_[item] = before_s + time_s(item);
        gone_[item] = chain_s_[item] >= limits_.target;
        if (gone_[item]) {
            for (int t : problem_.tensors_of[item])
                if (outside_[t]++ == 0 && inside_[t] > 0) sums_.crossing_s += problem_.tensor_cost[t];
        } else {
            window_.push_back(item);
            sums_.open_work_s += time_s(item);
            sums_.open_gain_s += gain_s_[item];
            sums_.open_bytes += problem_.nbytes[item];
        }
    }
    if (!on_cpu_)
        for (int t = 0; t < problem_.n_tensors(); ++t)
            if (undecided(t) > 0) sums_.may_pay_s += problem_.tensor_cost[t];
}

// Where leaving an item out leaves too much to the rest, S must hold it, and so all that leads to it: most of the
// window is decided by this alone. What the others take along is small, so that walking over it is cheap.
void Expansion::weigh_tails() {
    const double enough = sums_.open_gain_s - least_gain_s() + slack_s_;
    for (size_t i = window_.size(); i-- > 0;) {
        const int item = window_[i];
        tail_s_[item] = all_tail_s_[item] = gain_s_[item];
        int n_followers = 0;
        for (int follower : problem_.after[item]) {
            if (gone_[follower]) continue;
            ++n_followers;
            if (problem_.before[follower].size() == 1) tail_s_[item] += tail_s_[follower];
            all_tail_s_[item] = std::max(all_tail_s_[item], gain_s_[item] + all_tail_s_[follower]);
        }
        if (n_followers > 1 && all_tail_s_[item] <= enough) all_tail_s_[item] = followers_s(item, enough);
        if (all_tail_s_[item] > enough) all_tail_s_[item] = infinite;
    }
}

// Accelerator seconds of an item and of all in the window that it leads to; more than `enough` is infinite.
double Expansion::followers_s(int item, double enough) {
    double seconds = 0;
    reached_.assign(1, item);
    is_reached_[item] = 1;
    for (size_t head = 0; head < reached_.size() && seconds <= enough; ++head) {
        seconds += gain_s_[reached_[head]];
        for (int follower : problem_.after[reached_[head]]) {
            if (gone_[follower] || is_reached_[follower]) continue;
            is_reached_[follower] = 1;
            reached_.push_back(follower);
        }
    }
    for (int each : reached_) is_reached_[each] = 0;
    return seconds <= enough ? seconds : infinite;
}

// What S must take off so that the rest can do what is left.
double Expansion::least_gain_s() const {
    return remaining_s_ - std::min(rest_.capacity_s, rest_.tensor_capacity_s - sums_.crossing_s);
}

bool Expansion::may_lead_on() const {
    if (load_s() >= limits_.target) return false;
    if (sums_.work_s + sums_.open_work_s + sums_.may_pay_s < sums_.full_s) return false;
    if (!on_cpu_ && sums_.bytes > problem_.capacity) return false;
    if (remaining_bytes_ - sums_.bytes - sums_.open_bytes > rest_.bytes * (1 + rounding)) return false;
    double most_s = sums_.gain_s + sums_.open_gain_s;
    if (!on_cpu_) most_s = std::min(most_s, limits_.target - sums_.paid_s);
    return least_gain_s() <= most_s + slack_s_;
}

bool Expansion::gains_enough(double less_s) const {
    return least_gain_s() <= sums_.gain_s + sums_.open_gain_s - less_s + slack_s_;
}

// A cheap test that spares most calls of leave_out: the items that follow this one alone go with it, and so do all
// that follow it, less what has gone before.
bool Expansion::may_leave_out(int item) const {
    const double gone_s = open_s_ - sums_.gain_s - sums_.open_gain_s;
    return gains_enough(std::max(tail_s_[item], all_tail_s_[item] - gone_s));
}

// What one more item adds to the load of S; with further items in S it never adds more (cuts are submodular).
double Expansion::added_s(int item) const {
    double seconds = time_s(item);
    if (on_cpu_) return seconds;
    for (int t : problem_.tensors_of[item]) {
        if (in_set_[t] + 1 < size(t)) seconds += problem_.tensor_cost[t];
        if (in_set_[t] > 0) seconds -= problem_.tensor_cost[t];
    }
    return seconds;
}

// Taking it adds nothing to this device, now or after further items, nor to any later one.
bool Expansion::costs_nothing(int item) const {
    return (on_cpu_ || problem_.nbytes[item] == 0) && added_s(item) <= 0 && is_free(item);
}

void Expansion::take(int position) {
    const int item = window_[position];
    decisions_.push_back({position, left_out_.size(), refused_.size(), sums_, true, costs_nothing(item)});
    flip(set_.data(), item);
    hash_ ^= item_hash(item);
    sums_.work_s += time_s(item);
    sums_.gain_s += gain_s_[item];
    sums_.bytes += problem_.nbytes[item];
    sums_.open_work_s -= time_s(item);
    sums_.open_gain_s -= gain_s_[item];
    sums_.open_bytes -= problem_.nbytes[item];
    for (int t : problem_.tensors_of[item]) {
        const bool in_ideal = inside_[t] > in_set_[t];
        if (!on_cpu_ && in_set_[t] == 0 && (in_ideal || outside_[t] > 0)) sums_.paid_s += problem_.tensor_cost[t];
        if (inside_[t] == 0 && outside_[t] > 0) sums_.crossing_s += problem_.tensor_cost[t];
        ++inside_[t];
        if (++in_set_[t] == size(t) && !on_cpu_) sums_.may_pay_s -= problem_.tensor_cost[t];
    }
}

void Expansion::untake(int item) {
    flip(set_.data(), item);
    hash_ ^= item_hash(item);
    for (int t : problem_.tensors_of[item]) {
        --in_set_[t];
        --inside_[t];
    }
}

// With all that follow it; false, and stopped midway: too much has gone.
bool Expansion::leave_out(int item) {
    gone_[item] = 1;
    size_t head = left_out_.size();
    for (left_out_.push_back(item); head < left_out_.size(); ++head) {
        if (!gains_enough(0)) {
            for (; left_out_.size() > head; left_out_.pop_back()) gone_[left_out_.back()] = 0;
            return false;
        }
        const int left = left_out_[head];
        sums_.open_work_s -= time_s(left);
        sums_.open_gain_s -= gain_s_[left];
        sums_.open_bytes -= problem_.nbytes[left];
        for (int t : problem_.tensors_of[left]) {
            ++outside_[t];
            if (!on_cpu_ && in_set_[t] == 0 && undecided(t) == 0) sums_.may_pay_s -= problem_.tensor_cost[t];
            if (outside_[t] > 1) continue;
            if (!on_cpu_ && in_set_[t] > 0 && inside_[t] == in_set_[t]) sums_.paid_s += problem_.tensor_cost[t];
            if (inside_[t] > 0) sums_.crossing_s += problem_.tensor_cost[t];
        }
        for (int follower : problem_.after[left]) {
            if (gone_[follower]) continue;
            gone_[follower] = 1;
            left_out_.push_back(follower);
        }
    }
    return true;
}

void Expansion::restore(const Decision& decision) {
    sums_ = decision.sums;
    refused_.resize(decision.n_refused);
    for (; left_out_.size() > decision.n_left_out; left_out_.pop_back()) {
        gone_[left_out_.back()] = 0;
        for (int t : problem_.tensors_of[left_out_.back()]) --outside_[t];
    }
}

// Takes decisions back up to one that can still go the other way, and lets it; false: there is none.
bool Expansion::next_alternative() {
    while (!decisions_.empty()) {
        Decision& last = decisions_.back();
        restore(last);
        const int item = window_[last.position];
        const bool other_way = last.taken && !last.forced && may_leave_out(item);
        if (last.taken) untake(item);
        if (!other_way) {
            decisions_.pop_back();
            continue;
        }
        last.taken = false;
        // Where it would have fitted in the end, the same set with it is as good: only fuller ones are of interest.
        if ((on_cpu_ || problem_.nbytes[item] == 0) && is_free(item))
            sums_.full_s = std::max(sums_.full_s, worthless_s() - added_s(item));
        if (!leave_out(item)) continue;
        refused_.push_back(item);
        position_ = last.position + 1;
        if (may_lead_on()) return true;
    }
    return false;
}

// J + S + one item, from the same J on the same device, is as cheap and no worse for the rest.
bool Expansion::is_dominated(double load) const {
    for (int item : refused_) {
        if (!on_cpu_ && sums_.bytes + problem_.nbytes[item] > problem_.capacity) continue;
        const double with_s = load_s() + added_s(item);
        if (with_s <= load && with_s < limits_.target && is_free(item)) return true;
    }
    return false;
}

void Expansion::offer(Layer& into) const {
    const double load = std::max(worthless_s(), load_s());
    if (is_dominated(load)) return;
    into.offer(set_.data(), {hash_, load, parent_, on_cpu_});
}

bool Expansion::run(const State& from, int32_t parent, bool on_cpu, const Rest& rest, const Limits& limits,
                    Layer& into) {
    from_ = from;
    parent_ = parent;
    on_cpu_ = on_cpu;
    rest_ = rest;
    limits_ = limits;
    slack_s_ = 1e-9 * limits.target;
    sums_ = {};
    open_window();
    std::copy(ideal_, ideal_ + set_.size(), set_.begin());
    hash_ = from.hash;
    position_ = 0;
    left_out_.clear();
    refused_.clear();
    if (!may_lead_on()) return true;
    open_s_ = sums_.open_gain_s;
    weigh_tails();
    const int n_window = static_cast<int>(window_.size());
    for (;;) {
        if (++steps_ % steps_per_look == 0 && budget_.over()) return false;
        while (position_ < n_window && gone_[window_[position_]]) ++position_;
        bool on = position_ < n_window;
        if (on) {
            take(position_);
            on = may_lead_on();
            ++position_;
        } else {
            offer(into);
            if (into.size() > budget_.states) return false;
        }
        if (!on && !next_alternative()) return true;
    }
}

}  // namespace mpipipe::placement
