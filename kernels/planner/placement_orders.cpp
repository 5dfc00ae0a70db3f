#include "placement_orders.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

namespace mpipipe::placement {

namespace {

constexpr double unreached = std::numeric_limits<double>::infinity();
constexpr int rounds = 8;  // of random orders

struct Step {
    double load = unreached;
    int begin = -1;      // of the last device's piece
    bool cpu = false;
};

// The pieces order[begin:end] that grow from one begin.
class Piece {
  public:
    explicit Piece(const Problem& problem)
        : problem_(problem), before_(problem.n_tensors()), held_(problem.n_tensors()) {}

    void restart() {
        for (int t : touched_) held_[t] = 0;
        touched_.clear();
        accelerator_s = cpu_s = bytes = cut_s = owed_s = 0;
    }
    void add(int item) {
        accelerator_s += problem_.accelerator_s[item];
        cpu_s += problem_.cpu_s[item];
        bytes += problem_.nbytes[item];
        for (int t : problem_.tensors_of[item]) {
            const double cost = problem_.tensor_cost[t];
            if (held_[t]++ == 0) {
                touched_.push_back(t);
                cut_s += cost;
                if (before_[t] > 0) owed_s += cost;
            }
            if (held_[t] == static_cast<int>(problem_.pins[t].size())) cut_s -= cost;
        }
    }
    void pass(int item) {
        for (int t : problem_.tensors_of[item]) ++before_[t];
    }

    double accelerator_s = 0, cpu_s = 0, bytes = 0;
    double cut_s = 0;   // tensors that the piece pays
    double owed_s = 0;  // of these, the ones with pins before it: they stay, however far it grows

  private:
    const Problem& problem_;
    std::vector<int> before_, held_;  // (t,)
    std::vector<int> touched_;
};

// The placement of least load below `limit` that cuts `order` into pieces; memory (n + 1) x (k + 1) x (c + 1).
Chain cut_order(const Problem& problem, const std::vector<int>& order, double limit, const Budget& budget) {
    const int n = problem.n_items(), k = problem.n_accelerators, c = problem.n_cpus;
    const int width = (k + 1) * (c + 1);
    const auto at = [&](int accelerators, int cpus) { return accelerators * (c + 1) + cpus; };
    std::vector<Step> steps(static_cast<size_t>(n + 1) * width);
    const auto row = [&](int i) { return &steps[static_cast<size_t>(i) * width]; };
    row(0)[0].load = 0;
    Piece piece(problem);
    const auto offer = [&](Step& step, double load, int begin, bool cpu) {
        if (load < step.load) step = {load, begin, cpu};
    };
    for (int begin = 0; begin < n; ++begin) {
        if (budget.over()) return {unreached, {}, {}};
        if (begin) piece.pass(order[begin - 1]);
        const Step* from = row(begin);
        if (std::none_of(from, from + width, [](const Step& step) { return step.load < unreached; })) continue;
        piece.restart();
        for (int end = begin + 1; end <= n; ++end) {
            piece.add(order[end - 1]);
            const bool accelerator = k && piece.bytes <= problem.capacity && piece.accelerator_s + piece.owed_s < limit;
            const bool cpu = c && piece.cpu_s < limit;
            if (!accelerator && !cpu) break;
            const double load = std::max(0.0, piece.accelerator_s + piece.cut_s);
            for (int f = 0; f <= k; ++f)
                for (int g = 0; g <= c; ++g) {
                    const double so_far = from[at(f, g)].load;
                    if (so_far == unreached) continue;
                    if (f < k && accelerator && load < limit)
                        offer(row(end)[at(f + 1, g)], std::max(so_far, load), begin, false);
                    if (g < c && cpu) offer(row(end)[at(f, g + 1)], std::max(so_far, piece.cpu_s), begin, true);
                }
        }
    }
    int f = 0, g = 0;
    for (int i = 0; i <= k; ++i)
        for (int j = 0; j <= c; ++j)
            if (row(n)[at(i, j)].load < row(n)[at(f, g)].load) f = i, g = j;
    Chain chain{row(n)[at(f, g)].load, {}, {}};
    if (chain.load == unreached) return chain;
    chain.device.resize(n);
    chain.stage.resize(n);
    for (int end = n; end > 0;) {
        const Step& step = row(end)[at(f, g)];
        const int stage = f + g - 1, device = step.cpu ? k + --g : --f;
        for (int i = step.begin; i < end; ++i) chain.device[order[i]] = device, chain.stage[order[i]] = stage;
        end = step.begin;
    }
    return chain;
}

}  // namespace

std::vector<int> topological_order(const Problem& problem, Preference preference, Random& random) {
    const int n = problem.n_items();
    std::vector<int> missing(n), ready, order, held(problem.n_tensors());
    std::vector<double> key(n);
    const auto newly_ready = [&](int item) {
        const double turn = static_cast<double>(order.size());
        key[item] = preference == Preference::oldest ? -turn : turn;
        if (preference == Preference::random) key[item] += random.uniform();
        if (preference == Preference::cut) key[item] += 0.5 * random.uniform();
        ready.push_back(item);
    };
    for (int item = 0; item < n; ++item) {
        missing[item] = static_cast<int>(problem.before[item].size());
        if (!missing[item]) newly_ready(item);
    }
    const auto opened_s = [&](int item) {  // tensors that begin with the item, less those that end
        double seconds = 0;
        for (int t : problem.tensors_of[item]) {
            if (held[t] == 0) seconds += problem.tensor_cost[t];
            if (held[t] + 1 == static_cast<int>(problem.pins[t].size())) seconds -= problem.tensor_cost[t];
        }
        return seconds;
    };
    const bool by_cut = preference == Preference::cut;
    while (!ready.empty()) {
        size_t best = 0;
        double best_cut_s = by_cut ? opened_s(ready[0]) : 0;
        for (size_t i = 1; i < ready.size(); ++i) {
            const double cut_s = by_cut ? opened_s(ready[i]) : 0;
            if (cut_s < best_cut_s || (cut_s == best_cut_s && key[ready[i]] >= key[ready[best]])) {
                best = i;
                best_cut_s = cut_s;
            }
        }
        const int item = ready[best];
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(best));
        order.push_back(item);
        for (int t : problem.tensors_of[item]) ++held[t];
        for (int follower : problem.after[item])
            if (--missing[follower] == 0) newly_ready(follower);
    }
    return order;
}

namespace {

// Further random orders, near the best and far from it, as long as the budget lasts.
void improve(const Problem& problem, const Budget& budget, Random& random, BestOrder& best) {
    for (int round = 0; round < rounds && !budget.over(); ++round) {
        const bool near = round % 4 >= 2;
        auto order = topological_order(problem, round % 2 ? Preference::cut : Preference::random, random);
        if (near)  // the stages of the best, each in a new order: the pieces may then move
            std::stable_sort(order.begin(), order.end(),
                             [&](int a, int b) { return best.chain.stage[a] < best.chain.stage[b]; });
        Chain chain = cut_order(problem, order, best.chain.load, budget);
        if (chain.load < best.chain.load) best = {std::move(chain), std::move(order)};
    }
}

}  // namespace

double upper_limit(const Problem& problem) {
    double limit = 1;
    for (int item = 0; item < problem.n_items(); ++item)
        for (double seconds : {problem.accelerator_s[item], problem.cpu_s[item]})
            if (!std::isinf(seconds)) limit += seconds;
    for (double cost : problem.tensor_cost) limit += cost;
    return limit;
}

BestOrder best_order(const Problem& problem, double lower_bound, const Budget& budget, Random& random) {
    BestOrder best{{unreached, {}, {}}, {}};
    const double most = upper_limit(problem);
    // Short pieces first: a low limit makes the dynamic programme fast, and it is nearly always high enough.
    for (double limit = std::max(1.5 * lower_bound, most / 1024); best.order.empty() && !budget.over(); limit *= 2) {
        for (const Preference preference : {Preference::newest, Preference::cut, Preference::oldest}) {
            const auto order = topological_order(problem, preference, random);
            Chain chain = cut_order(problem, order, std::min(limit, best.chain.load), budget);
            if (!chain.device.empty()) best = {std::move(chain), order};
        }
        if (limit > most) break;
    }
    if (!best.order.empty()) improve(problem, budget, random, best);
    return best;
}

}  // namespace mpipipe::placement
