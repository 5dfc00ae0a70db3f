#include "placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace mpipipe::placement {

namespace {
constexpr double longest_s = 1e9;  // of a budget: thirty years; an infinite one would overflow the clock
}

void Problem::add_edge(int source, int dest) {
    after[source].push_back(dest);
    before[dest].push_back(source);
}

void Problem::add_tensor(double cost, std::vector<int> members) {
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
    if (cost <= 0 || members.size() < 2) return;
    for (int item : members) tensors_of[item].push_back(n_tensors());
    tensor_cost.push_back(cost);
    pins.push_back(std::move(members));
}

void Problem::forget_duplicate_edges() {
    for (auto* side : {&after, &before})
        for (auto& list : *side) {
            std::sort(list.begin(), list.end());
            list.erase(std::unique(list.begin(), list.end()), list.end());
        }
}

Budget::Budget(double seconds, int64_t limit) : states(limit), start_(Clock::now()) {
    const std::chrono::duration<double> span(std::min(seconds, longest_s));
    end_ = start_ + std::chrono::duration_cast<Clock::duration>(span);
}

std::vector<double> loads(const Problem& problem, const std::vector<int>& device) {
    std::vector<double> load(problem.n_devices(), 0.0);
    for (int item = 0; item < problem.n_items(); ++item) load[device[item]] += problem.time_s(device[item], item);
    std::vector<int> holders;
    for (int t = 0; t < problem.n_tensors(); ++t) {
        holders.clear();
        for (int item : problem.pins[t]) holders.push_back(device[item]);
        std::sort(holders.begin(), holders.end());
        holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
        if (holders.size() < 2) continue;
        for (int d : holders)
            if (d < problem.n_accelerators) load[d] += problem.tensor_cost[t];
    }
    return load;
}

bool supported(const Problem& problem, const std::vector<int>& device) {
    for (int item = 0; item < problem.n_items(); ++item)
        if (std::isinf(problem.time_s(device[item], item))) return false;
    return true;
}

bool fits(const Problem& problem, const std::vector<int>& device) {
    std::vector<double> held(problem.n_devices(), 0.0);
    for (int item = 0; item < problem.n_items(); ++item) held[device[item]] += problem.nbytes[item];
    if (!supported(problem, device)) return false;
    return std::all_of(held.begin(), held.begin() + problem.n_accelerators,
                       [&](double bytes) { return bytes <= problem.capacity; });
}

double most_loaded(const Problem& problem, const std::vector<int>& device) {
    const std::vector<double> load = loads(problem, device);
    return *std::max_element(load.begin(), load.end());
}

double absorbed_s(const Problem& problem, double cpu_s, double limit, bool tensors) {
    std::vector<int> order;
    std::vector<double> worth_s = problem.accelerator_s;
    double absorbed = 0;
    for (int item = 0; item < problem.n_items(); ++item) {
        if (problem.cpu_s[item] >= limit) continue;
        if (std::isinf(worth_s[item])) worth_s[item] = 0;
        if (tensors)
            for (int t : problem.tensors_of[item]) worth_s[item] += problem.tensor_cost[t];
        if (problem.cpu_s[item] > 0) order.push_back(item);
        else absorbed += worth_s[item];
    }
    const auto rate = [&](int item) { return worth_s[item] / problem.cpu_s[item]; };
    std::sort(order.begin(), order.end(), [&](int a, int b) { return rate(a) > rate(b); });
    for (int item : order) {
        const double part = std::min(1.0, cpu_s / problem.cpu_s[item]);
        absorbed += part * worth_s[item];
        cpu_s -= part * problem.cpu_s[item];
        if (cpu_s <= 0) break;
    }
    return absorbed;
}

double divided_work_bound(const Problem& problem) {
    double work = 0, cpu_only = 0, largest = 0, everything = 0;
    for (int item = 0; item < problem.n_items(); ++item) {
        const double here = problem.n_accelerators ? problem.accelerator_s[item] : INFINITY;
        const double there = problem.n_cpus ? problem.cpu_s[item] : INFINITY;
        largest = std::max(largest, std::min(here, there));
        if (std::isinf(here)) cpu_only += there;
        else work += here;
        everything += std::min(here, there);
    }
    if (std::isinf(largest)) return INFINITY;
    // The least load at which accelerators and CPUs together can do all the work, by bisection from below.
    const auto enough = [&](double load) {
        const double cpu_s = problem.n_cpus * load - cpu_only;
        if (cpu_s < 0) return false;
        const double taken = problem.n_cpus ? absorbed_s(problem, cpu_s, INFINITY, false) : 0.0;
        return work <= problem.n_accelerators * load + taken;
    };
    double low = largest, high = std::max(everything, largest);
    if (enough(low)) return low;
    for (int step = 0; step < 50; ++step) {
        const double middle = 0.5 * (low + high);
        (enough(middle) ? high : low) = middle;
    }
    return low;
}

}  // namespace mpipipe::placement
