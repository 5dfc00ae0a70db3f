// From one ideal J: every set S that the next device may hold (J + S an ideal, load below a target), by branch and
// bound. Items are decided one by one in topological order; leaving one out leaves out all that follow it.
//
//        J            S            undecided        left out, or beyond reach of the next device
//   [ o o o o o ][ o o o o ][ . . . . . . . . . ][ x x x x x ...
//                              ^ take or leave out
#pragma once

#include <algorithm>
#include <vector>

#include "placement.h"
#include "placement_layer.h"

namespace mpipipe::placement {

// What holds for a whole search.
struct Limits {
    double target;  // placements with this load or more are of no interest
    double enough;  // lower loads are all alike
};

// What the devices after the next one can do together.
struct Rest {
    double capacity_s;         // accelerator seconds of items, below the target
    double tensor_capacity_s;  // of items and of the tensors with pins before and after, each paid at least once
    double bytes;              // infinite where a CPU is among them
};

// Sums over J + S or over what is outside it; kept whole, so that taking a decision back brings no rounding.
struct Sums {
    double work_s = 0;       // of S on the next device
    double gain_s = 0;       // of S on an accelerator
    double paid_s = 0;       // tensors that S will certainly pay
    double crossing_s = 0;   // tensors that will certainly have pins inside and outside J + S
    double bytes = 0;        // of S
    double open_work_s = 0;  // of the undecided items on the next device
    double open_gain_s = 0;  // of the undecided items on an accelerator
    double open_bytes = 0;
    double may_pay_s = 0;    // tensors that S pays or may come to pay
    double full_s = 0;       // S with a lower load than this will leave out an item that it could have had for free
};

class Expansion {
  public:
    Expansion(const Problem& problem, const Budget& budget);

    // Speak of J from now on.
    void enter(const Word* ideal);
    double remaining_s() const { return remaining_s_; }  // accelerator seconds outside J
    double crossing_s() const { return crossing_s_; }    // tensors with pins inside and outside J
    // True: `larger`, an ideal that holds J, is no worse than J if reached at no higher cost. Shown item by item.
    bool is_free_to_grow(const Word* larger);

    // Offers J + S to `into` for every S that may be part of a placement of interest. `from` is the state of J,
    // `parent` its index. False: the budget ended.
    bool run(const State& from, int32_t parent, bool on_cpu, const Rest& rest, const Limits& limits, Layer& into);

  private:
    struct Decision {
        int position;  // in window_
        size_t n_left_out, n_refused;  // lengths of the trails before it
        Sums sums;                     // before it
        bool taken;
        bool forced;  // leaving it out leads to nothing better
    };

    // True: J + S + item, reached at the cost of J + S, is no worse. Whatever device takes the item later saves
    // its time and the tensors that end with it, and pays at most those that begin with it.
    bool is_free(int item) const;
    double time_s(int item) const { return on_cpu_ ? problem_.cpu_s[item] : problem_.accelerator_s[item]; }
    double added_s(int item) const;
    double load_s() const { return sums_.work_s + sums_.paid_s; }
    int size(int tensor) const { return static_cast<int>(problem_.pins[tensor].size()); }
    int undecided(int tensor) const { return size(tensor) - inside_[tensor] - outside_[tensor]; }
    double worthless_s() const { return std::max(from_.load, limits_.enough); }  // a lower load of S gains nothing
    void open_window();
    void weigh_tails();
    double followers_s(int item, double enough);
    bool may_lead_on() const;
    bool costs_nothing(int item) const;
    void take(int position);
    void untake(int item);
    bool leave_out(int item);
    bool may_leave_out(int item) const;
    double least_gain_s() const;
    bool gains_enough(double less_s) const;
    void restore(const Decision& decision);
    bool next_alternative();
    bool is_dominated(double load) const;
    void offer(Layer& into) const;

    const Problem& problem_;
    const Budget& budget_;
    std::vector<double> gain_s_;  // (n,) accelerator seconds, 0 where none can run it
    double all_s_ = 0, all_bytes_ = 0;
    int64_t steps_ = 0;

    // of J
    const Word* ideal_ = nullptr;
    std::vector<int> inside_;  // (t,) pins in J + S
    double remaining_s_ = 0, remaining_bytes_ = 0, crossing_s_ = 0;

    // of a run
    State from_{};
    int32_t parent_ = 0;
    bool on_cpu_ = false;
    Rest rest_{};
    Limits limits_{};
    double slack_s_ = 0;             // what rounding may add up to
    double open_s_ = 0;              // accelerator seconds of the window
    int position_ = 0;               // of the next decision
    std::vector<int> window_;        // items that S may reach, in topological order
    std::vector<double> chain_s_;    // (n,) heaviest chain from J up to and with the item
    std::vector<double> tail_s_;     // (n,) accelerator seconds of the items that only this one leads to, and its own
    std::vector<double> all_tail_s_; // (n,) of all items in the window that it leads to; infinite: S must hold it
    std::vector<int> reached_;       // a walk's trail
    std::vector<char> is_reached_;   // (n,) 0 between walks
    std::vector<char> gone_;         // (n,) left out, or beyond the window
    std::vector<int> in_set_;        // (t,) pins in S
    std::vector<int> outside_;       // (t,) pins that J + S will certainly not have
    std::vector<int> left_out_;      // trail of all items left out
    std::vector<int> refused_;       // of these, the ones whose predecessors are all in J + S
    std::vector<Decision> decisions_;
    std::vector<Word> set_;          // J + S
    Word hash_ = 0;
    Sums sums_;
};

}  // namespace mpipipe::placement
