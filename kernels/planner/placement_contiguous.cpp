// The contiguous optimum: a dynamic programme over ideals, layer by layer of used devices, that keeps only ideals
// from which a placement below a target can still be completed. The target rises from the proven bound, so that the
// expensive searches are those near the optimum, and each one that finds nothing proves its target as a bound.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "placement_expand.h"
#include "placement_layer.h"
#include "placement_merge.h"
#include "placement_orders.h"

namespace mpipipe::placement {

namespace {

constexpr double tolerance = 1e-9;   // relative; a placement better by less is not looked for
constexpr double growth = 1.5;       // of the steps from one target to the next
constexpr int first_targets = 64;    // the first one lies this fraction of the gap above the bound
constexpr double rounding = 1e-12;   // relative
constexpr double largest_loss = 1e-3, largest_cpu_loss = 2e-2;  // of the bound: what relax may cut off an item
constexpr double infinite = std::numeric_limits<double>::infinity();

// The devices of the items that became `item_of`; nothing from nothing.
std::vector<int> expanded(const std::vector<int>& device, const std::vector<int>& item_of) {
    std::vector<int> all;
    if (!device.empty())
        for (int item : item_of) all.push_back(device[item]);
    return all;
}

class Search {
  public:
    Search(const Problem& problem, const Budget& budget, Limits limits);

    // The placement of least load below the target, where there is one; see finished().
    std::optional<std::vector<int>> run();
    bool finished() const { return finished_; }  // false: the budget ended before all was searched
    int64_t states() const;

  private:
    Layer& layer(int accelerators, int cpus) { return layers_[accelerators * (problem_.n_cpus + 1) + cpus]; }
    Rest rest(int accelerators, int cpus) const;
    bool is_useful(int accelerators, int cpus, const State& state, const Word* ideal);
    struct Kept {
        int32_t index;
        double remaining_s, crossing_s;  // see Expansion
    };
    bool is_dominated(const Layer& within, const std::vector<Kept>& kept, const State& state, const Word* ideal);
    bool expand(int accelerators, int cpus);
    bool try_device(int accelerators, int cpus, int32_t index, bool on_cpu);
    void offer_all(int accelerators, int cpus, int32_t index, bool on_cpu);
    void look_for_the_end(int accelerators, int cpus);
    std::vector<int> placement();

    const Problem& problem_;
    const Budget& budget_;
    Limits limits_;
    std::vector<double> absorbed_, absorbed_with_tensors_;  // (n_cpus + 1,) see absorbed_s
    std::vector<Layer> layers_;     // (n_accelerators + 1) x (n_cpus + 1)
    Expansion expansion_;
    std::vector<Word> all_;         // the ideal of all items
    Word all_hash_ = 0;
    bool all_run_on_accelerators_ = true;
    bool finished_ = false;
    int end_accelerators_ = -1, end_cpus_ = -1;
};

Search::Search(const Problem& problem, const Budget& budget, Limits limits)
    : problem_(problem), budget_(budget), limits_(limits),
      layers_(static_cast<size_t>(problem.n_accelerators + 1) * (problem.n_cpus + 1), Layer(problem.n_items())),
      expansion_(problem, budget), all_(words_for(problem.n_items())) {
    for (int cpus = 0; cpus <= problem.n_cpus; ++cpus) {
        const double cpu_s = cpus * limits.target, limit = cpus ? limits.target : 0;
        absorbed_.push_back(absorbed_s(problem, cpu_s, limit, false));
        absorbed_with_tensors_.push_back(absorbed_s(problem, cpu_s, limit, true));
    }
    for (int item = 0; item < problem.n_items(); ++item) {
        flip(all_.data(), item);
        all_hash_ ^= item_hash(item);
        if (std::isinf(problem.accelerator_s[item])) all_run_on_accelerators_ = false;
    }
}

int64_t Search::states() const {
    return std::accumulate(layers_.begin(), layers_.end(), int64_t{0},
                           [](int64_t sum, const Layer& layer) { return sum + layer.size(); });
}

Rest Search::rest(int accelerators, int cpus) const {
    const double capacity_s = accelerators * limits_.target;
    return {capacity_s + absorbed_[cpus], capacity_s + absorbed_with_tensors_[cpus],
            cpus ? infinite : accelerators * problem_.capacity};
}

// False: no better placement is missed without it. Enters the expansion.
bool Search::is_useful(int accelerators, int cpus, const State& state, const Word* ideal) {
    if (state.load >= limits_.target || std::equal(all_.begin(), all_.end(), ideal)) return false;
    const auto cheaper = [&](int f, int c) {
        const int32_t index = layer(f, c).find(ideal, state.hash);
        return index != Layer::none && layer(f, c).state(index).load <= state.load;
    };
    if ((accelerators && cheaper(accelerators - 1, cpus)) || (cpus && cheaper(accelerators, cpus - 1))) return false;
    expansion_.enter(ideal);
    const Rest left = rest(problem_.n_accelerators - accelerators, problem_.n_cpus - cpus);
    const double can_s = std::min(left.capacity_s, left.tensor_capacity_s - expansion_.crossing_s());
    return expansion_.remaining_s() <= can_s + tolerance * limits_.target;
}

// An ideal of the same devices that holds J and more, as cheap, where what it holds more is free to take.
bool Search::is_dominated(const Layer& within, const std::vector<Kept>& kept, const State& state,
                          const Word* ideal) {
    // What each item on the way there saves pays for the tensors that begin with it; so in sum, which is seen at once.
    const double most_s = expansion_.remaining_s() + expansion_.crossing_s() + tolerance * limits_.target;
    for (const auto& [index, remaining_s, crossing_s] : kept) {
        if (within.state(index).load > state.load) continue;
        if (all_run_on_accelerators_ && remaining_s + crossing_s > most_s) continue;
        const Word* larger = within.ideal(index);
        bool holds = true;
        for (size_t w = 0; w < all_.size() && holds; ++w) holds = (ideal[w] & ~larger[w]) == 0;
        if (holds && expansion_.is_free_to_grow(larger)) return true;
    }
    return false;
}

// The last device takes everything that is left.
void Search::offer_all(int accelerators, int cpus, int32_t index, bool on_cpu) {
    const Layer& from = layer(accelerators, cpus);
    double load = on_cpu ? 0 : expansion_.crossing_s(), bytes = 0;
    for (int item = 0; item < problem_.n_items(); ++item) {
        if (has(from.ideal(index), item)) continue;
        load += on_cpu ? problem_.cpu_s[item] : problem_.accelerator_s[item];
        bytes += problem_.nbytes[item];
    }
    if (load >= limits_.target || (!on_cpu && bytes > problem_.capacity)) return;
    load = std::max({load, from.state(index).load, limits_.enough});
    layer(accelerators + !on_cpu, cpus + on_cpu).offer(all_.data(), {all_hash_, load, index, on_cpu});
}

bool Search::try_device(int accelerators, int cpus, int32_t index, bool on_cpu) {
    const int more_accelerators = problem_.n_accelerators - accelerators - !on_cpu;
    const int more_cpus = problem_.n_cpus - cpus - on_cpu;
    bool whole = true;
    if (more_accelerators + more_cpus == 0) {
        offer_all(accelerators, cpus, index, on_cpu);
    } else {
        whole = expansion_.run(layer(accelerators, cpus).state(index), index, on_cpu,
                               rest(more_accelerators, more_cpus), limits_,
                               layer(accelerators + !on_cpu, cpus + on_cpu));
    }
    look_for_the_end(accelerators + !on_cpu, cpus + on_cpu);
    return whole;
}

// A complete placement lowers the target for all that follows.
void Search::look_for_the_end(int accelerators, int cpus) {
    const int32_t index = layer(accelerators, cpus).find(all_.data(), all_hash_);
    if (index == Layer::none) return;
    const double load = layer(accelerators, cpus).state(index).load;
    if (load >= limits_.target) return;
    end_accelerators_ = accelerators;
    end_cpus_ = cpus;
    limits_.target = load * (1 - tolerance);
}

bool Search::expand(int accelerators, int cpus) {
    const Layer& from = layer(accelerators, cpus);
    std::vector<Kept> kept;
    for (int32_t index : from.largest_first()) {
        if (budget_.over() || states() > budget_.states) return false;
        if (limits_.target <= limits_.enough) return true;
        const State& state = from.state(index);
        if (!is_useful(accelerators, cpus, state, from.ideal(index))) continue;
        if (is_dominated(from, kept, state, from.ideal(index))) continue;
        kept.push_back({index, expansion_.remaining_s(), expansion_.crossing_s()});
        if (accelerators < problem_.n_accelerators && !try_device(accelerators, cpus, index, false)) return false;
        if (cpus < problem_.n_cpus && !try_device(accelerators, cpus, index, true)) return false;
    }
    return true;
}

std::optional<std::vector<int>> Search::run() {
    const std::vector<Word> nothing(all_.size());
    layer(0, 0).offer(nothing.data(), {0, limits_.enough, Layer::none, false});
    finished_ = true;
    for (int used = 0; used < problem_.n_devices() && finished_; ++used)
        for (int cpus = std::max(0, used - problem_.n_accelerators); cpus <= std::min(used, problem_.n_cpus); ++cpus)
            finished_ = finished_ && expand(used - cpus, cpus);
    if (end_accelerators_ < 0) return std::nullopt;
    return placement();
}

std::vector<int> Search::placement() {
    std::vector<int> device(problem_.n_items());
    int f = end_accelerators_, c = end_cpus_;
    int32_t index = layer(f, c).find(all_.data(), all_hash_);
    while (f + c > 0) {
        const Layer& whole = layer(f, c);
        const State& state = whole.state(index);
        (state.parent_cpu ? c : f) -= 1;
        const Word *now = whole.ideal(index), *before = layer(f, c).ideal(state.parent);
        for (int item = 0; item < problem_.n_items(); ++item)
            if (has(now, item) && !has(before, item))
                device[item] = state.parent_cpu ? problem_.n_accelerators + c : f;
        index = state.parent;
    }
    return device;
}

// The bound, the best placement so far and the searches that bring the two together.
class Rising {
  public:
    Rising(const Problem& problem, const Budget& budget, double bound, double load, std::vector<int> device)
        : problem_(problem), budget_(budget), bound_(bound), load_(load), device_(std::move(device)) {}

    void run() {
        const double most = upper_limit(problem_);
        double step = (std::min(load_, most) - bound_) / first_targets;
        bool near = false;  // the last search found something: the optimum is within its step
        while (!finished() && !budget_.over()) {
            const double top = std::min(load_ * (1 - tolerance), most);
            const double target = near || bound_ + step >= bound_ + 0.7 * (top - bound_) ? top : bound_ + step;
            if (!search(target, near ? bound_ : 0.5 * (bound_ + target)) || target >= most) break;
            near = load_ < top;
            step *= growth;
        }
        none_ = device_.empty() && bound_ >= most;
    }
    bool finished() const { return bound_ >= load_ * (1 - 2 * tolerance); }

    Solution solution() const {
        if (none_) return {Status::infeasible, {}, infinite, infinite, ideals_};
        if (device_.empty()) return {Status::budget, {}, infinite, bound_, ideals_};
        return {Status::placed, device_, load_, finished() ? load_ : bound_, ideals_};
    }

  private:
    // Placements with loads from `enough` to the target are told apart, lower ones need not be.
    bool search(double target, double enough) {
        Search search(problem_, budget_, {target, enough});
        const auto found = search.run();
        ideals_ += search.states();
        const double load = found ? most_loaded(problem_, *found) : infinite;
        if (load < load_) load_ = load, device_ = *found;
        if (!search.finished()) return false;
        if (!found) bound_ = std::max(bound_, target);
        else if (load > enough || enough <= bound_) bound_ = load;
        return true;
    }

    const Problem& problem_;
    const Budget& budget_;
    double bound_, load_;
    std::vector<int> device_;
    bool none_ = false;  // proven: nothing fits
    int64_t ideals_ = 0;
};

struct Known {
    double bound;
    double load;
    std::vector<int> device;  // empty: none
};

Solution improve_on(const Problem& problem, const Budget& budget, Known known) {
    Random random(1);
    const BestOrder best = best_order(problem, known.bound, budget, random);
    if (best.chain.load < known.load) known.load = best.chain.load, known.device = best.chain.device;
    // Deciding along a good order finds good placements first.
    std::vector<int> order = best.order;
    if (order.empty()) order = topological_order(problem, Preference::newest, random);
    const Merged numbered = renumber(problem, order);
    std::vector<int> device(known.device.size());
    for (size_t item = 0; item < device.size(); ++item) device[numbered.item_of[item]] = known.device[item];
    Rising rising(numbered.problem, budget, known.bound, known.load, std::move(device));
    rising.run();
    Solution solution = rising.solution();
    solution.device = expanded(solution.device, numbered.item_of);
    return solution;
}

// First some orders without CPUs, with small side branches joined to what they feed; then all devices, joined: that
// bound holds, and often so does the placement. What is still open is left to the problem itself.
Solution solve_merged(const Problem& problem, const Budget& budget) {
    Known known{divided_work_bound(problem) * (1 - rounding), infinite, {}};
    if (std::isinf(known.bound)) return {Status::infeasible, {}, infinite, infinite, 0};
    int64_t ideals = 0;
    const auto consider = [&](const std::vector<int>& of_joined, const std::vector<int>& item_of) {
        std::vector<int> device = expanded(of_joined, item_of);
        if (device.empty() || !fits(problem, device)) return;
        const double load = most_loaded(problem, device);
        if (load < known.load) known.load = load, known.device = std::move(device);
    };
    if (problem.n_cpus && problem.n_accelerators) {
        Problem accelerators = problem;
        accelerators.n_cpus = 0;
        const Merged easier = relax(accelerators, largest_loss * known.bound, 0);
        Random random(1);
        consider(best_order(easier.problem, known.bound, budget, random).chain.device, easier.item_of);
    }
    const Merged relaxed = relax(problem, largest_loss * known.bound, largest_cpu_loss * known.bound);
    if (relaxed.problem.n_items() < problem.n_items()) {
        const Solution easier = improve_on(relaxed.problem, budget, {known.bound, infinite, {}});
        if (easier.status == Status::infeasible) return easier;
        consider(easier.device, relaxed.item_of);
        ideals += easier.ideals;
        known.bound = std::max(known.bound, easier.bound);
    }
    Solution solution = improve_on(problem, budget, std::move(known));
    solution.ideals += ideals;
    return solution;
}

}  // namespace

Solution solve_contiguous(const Problem& problem, const Budget& budget) {
    Merged merged = merge_for_free(problem);
    Problem& small = merged.problem;
    const double all_bytes = std::accumulate(small.nbytes.begin(), small.nbytes.end(), 0.0);
    if (all_bytes <= small.capacity) std::fill(small.nbytes.begin(), small.nbytes.end(), 0.0);  // they never bind
    Solution solution = solve_merged(small, budget);
    if (solution.status != Status::placed) return solution;
    solution.device = expanded(solution.device, merged.item_of);
    const double load = most_loaded(problem, solution.device);
    solution.bound = solution.bound >= solution.load ? load : std::min(solution.bound, load);
    solution.load = load;
    return solution;
}

}  // namespace mpipipe::placement
