// Several chunks per device: simulated annealing (Kirkpatrick et al. 1983) over the device of each item. The energy
// is what the loads exceed a goal just below the best load known; a placement without excess becomes the best and
// lowers the goal. Only operations that IEEE 754 rounds correctly are used: every machine walks the same way.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "placement.h"
#include "placement_merge.h"
#include "placement_orders.h"

namespace mpipipe::placement {

namespace {

constexpr double infinite = std::numeric_limits<double>::infinity();
constexpr double progress = 1e-6;           // relative: a new best is better by so much at least
constexpr int temperatures = 256;           // of a round, from hot to cold
constexpr double cooling = 0.97329;         // to the power of `temperatures`: a thousandth
constexpr double hottest = 0.256;           // of the goal
constexpr int64_t moves_per_item = 3'000;    // in a round
constexpr int64_t longest_round = 1'000'000;
constexpr int64_t most_rounds = 24, most_moves = 8'000'000;  // the budget where time does not end it
constexpr double memory_weight = 3;         // of a device over its capacity, in goals

class Annealer {
  public:
    Annealer(const Problem& problem, const Budget& budget, uint64_t seed, const std::vector<int>& start)
        : problem_(problem), budget_(budget), random_(seed), n_devices_(problem.n_devices()),
          bound_(divided_work_bound(problem)), device_(start), goal_(upper_limit(problem)),
          held_pins_(static_cast<size_t>(problem.n_tensors()) * n_devices_), load_(n_devices_), bytes_(n_devices_),
          seen_(problem.n_items()) {
        if (start.empty()) scatter();
        rebuild();
        keep_if_better();
    }

    void run() {
        const int64_t n = problem_.n_items();
        const int64_t per_round = std::min(moves_per_item * n, longest_round);
        const int64_t rounds = std::min(most_rounds, most_moves / per_round);
        for (int64_t round = 0; round < rounds && !done(); ++round) {
            if (round > 0) restart();
            if (!cool(per_round / temperatures)) return;
        }
    }
    const std::vector<int>& best() const { return best_; }
    double bound() const { return bound_; }

  private:
    bool done() const { return best_load_ <= bound_ * (1 + progress); }
    bool may_hold(int d, int item) const { return !std::isinf(problem_.time_s(d, item)); }
    int& pins_on(int t, int d) { return held_pins_[static_cast<size_t>(t) * n_devices_ + d]; }

    void scatter() {
        device_.assign(problem_.n_items(), 0);
        for (int item = 0; item < problem_.n_items(); ++item)
            do device_[item] = random_.below(n_devices_);
            while (!may_hold(device_[item], item));
    }

    void rebuild() {
        std::fill(held_pins_.begin(), held_pins_.end(), 0);
        std::fill(bytes_.begin(), bytes_.end(), 0.0);
        for (int item = 0; item < problem_.n_items(); ++item) {
            bytes_[device_[item]] += problem_.nbytes[item];
            for (int t : problem_.tensors_of[item]) ++pins_on(t, device_[item]);
        }
        load_ = loads(problem_, device_);
    }

    double excess(int d) const {
        const double over = std::max(0.0, load_[d] - goal_);
        if (d >= problem_.n_accelerators || bytes_[d] <= problem_.capacity) return over;
        return over + memory_weight * goal_ * (bytes_[d] - problem_.capacity) / std::max(problem_.capacity, 1.0);
    }

    // A tensor of two pins or more: a device never goes from none of them to all, or back, in one step.
    void move(int item, int to) {
        const int from = device_[item];
        for (int t : problem_.tensors_of[item]) {
            const double cost = problem_.tensor_cost[t];
            const int all = static_cast<int>(problem_.pins[t].size());
            int &here = pins_on(t, from), &there = pins_on(t, to);
            if (from < problem_.n_accelerators) load_[from] += here == all ? cost : here == 1 ? -cost : 0;
            if (to < problem_.n_accelerators) load_[to] += there == 0 ? cost : there == all - 1 ? -cost : 0;
            --here;
            ++there;
        }
        load_[from] -= problem_.time_s(from, item);
        load_[to] += problem_.time_s(to, item);
        bytes_[from] -= problem_.nbytes[item];
        bytes_[to] += problem_.nbytes[item];
        device_[item] = to;
    }

    // exp(-x) nearly, by its series: library functions differ between machines.
    bool accept(double worse, double temperature) {
        if (worse <= 0) return true;
        const double x = worse / temperature;
        return random_.uniform() * (1 + x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4)))) < 1;
    }

    // The device of an item that shares a tensor with it, now and then any.
    int device_near(int item) {
        const auto& tensors = problem_.tensors_of[item];
        if (tensors.empty() || random_.uniform() < 0.15) return random_.below(n_devices_);
        const auto& pins = problem_.pins[tensors[random_.below(static_cast<int>(tensors.size()))]];
        return device_[pins[random_.below(static_cast<int>(pins.size()))]];
    }

    // Connected items of the same device, breadth first from `item`.
    void gather(int item, size_t size) {
        ++visit_;
        group_.assign(1, item);
        seen_[item] = visit_;
        for (size_t head = 0; head < group_.size() && group_.size() < size; ++head)
            for (int t : problem_.tensors_of[group_[head]])
                for (int other : problem_.pins[t]) {
                    if (device_[other] != device_[item] || seen_[other] == visit_ || group_.size() >= size) continue;
                    seen_[other] = visit_;
                    group_.push_back(other);
                }
    }

    void step(double temperature) {
        const int item = random_.below(problem_.n_items()), from = device_[item];
        const double kind = random_.uniform();
        int to, exchanged = -1;
        if (kind < 0.2) {
            exchanged = random_.below(problem_.n_items());
            to = device_[exchanged];
        } else {
            to = device_near(item);
        }
        if (to == from) return;
        gather(item, kind < 0.8 ? 1 : 2 + random_.below(random_.uniform() < 0.5 ? 6 : 40));
        for (int member : group_)
            if (!may_hold(to, member)) return;
        if (exchanged >= 0 && !may_hold(from, exchanged)) return;
        const double before = excess(from) + excess(to);
        for (int member : group_) move(member, to);
        if (exchanged >= 0) move(exchanged, from);
        if (accept(excess(from) + excess(to) - before, temperature)) return;
        if (exchanged >= 0) move(exchanged, to);
        for (size_t i = group_.size(); i-- > 0;) move(group_[i], from);
    }

    bool cool(int64_t moves_per_temperature) {
        double temperature = hottest * goal_ / static_cast<double>(1 << random_.below(9));
        for (int t = 0; t < temperatures; ++t, temperature *= cooling) {
            if (budget_.over()) return false;
            for (int64_t i = 0; i < moves_per_temperature; ++i) {
                step(temperature);
                if (std::all_of(load_.begin(), load_.end(), [&](double load) { return load <= goal_; }))
                    keep_if_better();
            }
            rebuild();  // ends what rounding has gathered
        }
        return !done();
    }

    void keep_if_better() {
        if (!fits(problem_, device_)) return;
        const double load = most_loaded(problem_, device_);
        if (load >= best_load_) return;
        best_load_ = load;
        best_ = device_;
        goal_ = best_load_ * (1 - progress);
    }

    void restart() {
        if (!best_.empty() && random_.uniform() < 0.75) device_ = best_;
        else scatter();
        rebuild();
    }

    const Problem& problem_;
    const Budget& budget_;
    Random random_;
    const int n_devices_;
    const double bound_;
    std::vector<int> device_;  // (n,)
    double goal_;  // until something fits in memory, whatever fits
    std::vector<int> best_;  // (n,) empty: none yet
    double best_load_ = infinite;
    std::vector<int> held_pins_;        // (t, n_devices)
    std::vector<double> load_, bytes_;  // (n_devices,)
    std::vector<int> group_;
    std::vector<int64_t> seen_;  // (n,) the last visit
    int64_t visit_ = 0;
};

// No device can hold the largest item, or all together cannot hold all.
bool is_too_large(const Problem& problem) {
    double bytes = 0;
    for (int item = 0; item < problem.n_items(); ++item) {
        if (problem.n_cpus && !std::isinf(problem.cpu_s[item])) continue;
        if (problem.nbytes[item] > problem.capacity) return true;
        bytes += problem.nbytes[item];
    }
    return bytes > problem.capacity * problem.n_accelerators * (1 + 1e-12);
}

}  // namespace

Solution solve_chunks(const Problem& problem, const Budget& budget, uint64_t seed, const std::vector<int>& start) {
    const double bound = divided_work_bound(problem);
    if (std::isinf(bound) || is_too_large(problem)) return {Status::infeasible, {}, infinite, infinite, 0};
    if (problem.n_items() == 0) return {Status::placed, {}, 0, 0, 0};
    const Merged merged = merge_for_free(problem);
    std::vector<int> from(start.empty() ? 0 : merged.problem.n_items());
    if (!start.empty())
        for (int item = 0; item < problem.n_items(); ++item) from[merged.item_of[item]] = start[item];
    Annealer annealer(merged.problem, budget, seed, from);
    annealer.run();
    std::vector<int> device(problem.n_items());
    double load = infinite;
    if (!annealer.best().empty()) {
        for (int item = 0; item < problem.n_items(); ++item) device[item] = annealer.best()[merged.item_of[item]];
        load = most_loaded(problem, device);
    }
    // A start may part what merging joins; it is never made worse.
    if (!start.empty() && fits(problem, start) && most_loaded(problem, start) <= load) {
        device = start;
        load = most_loaded(problem, start);
    }
    if (std::isinf(load)) return {Status::budget, {}, infinite, bound, 0};
    return {Status::placed, std::move(device), load, std::min(bound, load), 0};
}

}  // namespace mpipipe::placement
