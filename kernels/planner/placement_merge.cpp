#include "placement_merge.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace mpipipe::placement {

namespace {

// Numbers for 0.. `count` labels in a topological order of the graph between them (Kahn 1962).
std::vector<int> topological_numbers(const Problem& problem, const std::vector<int>& label, int count) {
    std::vector<std::vector<int>> after(count);
    std::vector<int> missing(count), order, number(count);
    for (int item = 0; item < problem.n_items(); ++item)
        for (int follower : problem.after[item]) {
            if (label[item] == label[follower]) continue;
            after[label[item]].push_back(label[follower]);
            ++missing[label[follower]];
        }
    for (int l = 0; l < count; ++l)
        if (!missing[l]) order.push_back(l);
    for (size_t head = 0; head < order.size(); ++head) {
        number[order[head]] = static_cast<int>(head);
        for (int follower : after[order[head]])
            if (--missing[follower] == 0) order.push_back(follower);
    }
    return number;
}

Merged relabelled(const Problem& problem, std::vector<int> item_of, int count) {
    Merged merged{{}, std::move(item_of)};
    Problem& to = merged.problem;
    const auto& of = merged.item_of;
    to.n_accelerators = problem.n_accelerators;
    to.n_cpus = problem.n_cpus;
    to.capacity = problem.capacity;
    for (auto* numbers : {&to.accelerator_s, &to.cpu_s, &to.nbytes}) numbers->assign(count, 0.0);
    for (auto* lists : {&to.after, &to.before, &to.tensors_of}) lists->resize(count);
    for (int item = 0; item < problem.n_items(); ++item) {
        to.accelerator_s[of[item]] += problem.accelerator_s[item];
        to.cpu_s[of[item]] += problem.cpu_s[item];
        to.nbytes[of[item]] += problem.nbytes[item];
        for (int follower : problem.after[item])
            if (of[item] != of[follower]) to.add_edge(of[item], of[follower]);
    }
    to.forget_duplicate_edges();
    std::map<std::vector<int>, double> cost_of;
    for (int t = 0; t < problem.n_tensors(); ++t) {
        std::vector<int> members;
        for (int item : problem.pins[t]) members.push_back(of[item]);
        std::sort(members.begin(), members.end());
        members.erase(std::unique(members.begin(), members.end()), members.end());
        cost_of[std::move(members)] += problem.tensor_cost[t];
    }
    for (const auto& [members, cost] : cost_of) to.add_tensor(cost, members);
    return merged;
}

constexpr double cpu_share = 0.2;  // of a partner's CPU time: what relax may forget beside it

struct Costs {
    double between = 0, other = 0;
};

// Of the tensors of `item`: what joining it to `partner` saves for certain, and what it may add.
Costs costs_of_joining(const Problem& problem, int item, int partner) {
    Costs costs;
    for (int t : problem.tensors_of[item]) {
        const auto& pins = problem.pins[t];
        if (!std::binary_search(pins.begin(), pins.end(), partner)) costs.other += problem.tensor_cost[t];
        else if (pins.size() == 2) costs.between += problem.tensor_cost[t];
    }
    return costs;
}

bool bytes_may_bind(const Problem& problem) {
    return std::accumulate(problem.nbytes.begin(), problem.nbytes.end(), 0.0) > problem.capacity;
}

bool may_join_for_free(const Problem& problem, bool bytes_count, int item, int partner) {
    if (problem.n_cpus && problem.cpu_s[item] > 0) return false;
    if (bytes_count && problem.nbytes[item] > 0) return false;
    const Costs costs = costs_of_joining(problem, item, partner);
    return problem.accelerator_s[item] + costs.other <= costs.between;
}

// Joins items to partners as long as `may_join(problem, item, partner)`; `on_join(problem, item, partner)` may first
// change what the item brings along.
template <typename May, typename Joined>
Merged join_neighbours(const Problem& problem, const May& may_join, const Joined& on_join) {
    std::vector<int> whole(problem.n_items());
    std::iota(whole.begin(), whole.end(), 0);
    Merged merged = contract(problem, whole);
    for (bool joined = true; joined;) {
        joined = false;
        Problem& now = merged.problem;
        std::vector<int> label(now.n_items());
        std::iota(label.begin(), label.end(), 0);
        std::vector<char> moved(now.n_items()), target(now.n_items());
        for (int item = 0; item < now.n_items(); ++item)
            for (const auto* side : {&now.after[item], &now.before[item]}) {
                if (side->size() != 1 || moved[item] || target[item]) continue;
                const int partner = side->front();
                if (moved[partner] || !may_join(now, item, partner)) continue;
                on_join(now, item, partner);
                label[item] = partner;
                moved[item] = target[partner] = 1;
                joined = true;
            }
        if (!joined) break;
        Merged next = contract(now, label);
        for (int& item : merged.item_of) item = next.item_of[item];
        merged.problem = std::move(next.problem);
    }
    return merged;
}

}  // namespace

Merged contract(const Problem& problem, const std::vector<int>& label) {
    std::vector<int> labels = label;
    std::sort(labels.begin(), labels.end());
    labels.erase(std::unique(labels.begin(), labels.end()), labels.end());
    std::vector<int> dense(label.size());
    for (size_t i = 0; i < label.size(); ++i)
        dense[i] = static_cast<int>(std::lower_bound(labels.begin(), labels.end(), label[i]) - labels.begin());
    const int count = static_cast<int>(labels.size());
    const std::vector<int> number = topological_numbers(problem, dense, count);
    for (int& l : dense) l = number[l];
    return relabelled(problem, std::move(dense), count);
}

Merged renumber(const Problem& problem, const std::vector<int>& order) {
    std::vector<int> position(order.size());
    for (size_t i = 0; i < order.size(); ++i) position[order[i]] = static_cast<int>(i);
    return relabelled(problem, std::move(position), problem.n_items());
}

Merged merge_for_free(const Problem& problem) {
    const bool bytes_count = bytes_may_bind(problem);
    return join_neighbours(
        problem,
        [&](const Problem& now, int item, int partner) {
            return may_join_for_free(now, bytes_count, item, partner);
        },
        [](Problem&, int, int) {});
}

Merged relax(const Problem& problem, double loss_s, double cpu_loss_s) {
    const bool bytes_count = bytes_may_bind(problem);
    const auto kept_s = [](const Problem& now, int item, int partner) {
        const Costs costs = costs_of_joining(now, item, partner);
        return std::min(now.accelerator_s[item], costs.between - costs.other);
    };
    return join_neighbours(
        problem,
        [&](const Problem& now, int item, int partner) {
            if (!now.before[item].empty() && !now.after[item].empty()) return false;
            if (bytes_count && now.nbytes[item] > 0) return false;
            if (problem.n_cpus && now.cpu_s[item] > std::max(cpu_loss_s, cpu_share * now.cpu_s[partner])) return false;
            const double kept = kept_s(now, item, partner);
            return kept >= 0 && now.accelerator_s[item] - kept <= loss_s;
        },
        [&](Problem& now, int item, int partner) {
            now.accelerator_s[item] = kept_s(now, item, partner);
            now.cpu_s[item] = 0;
        });
}

}  // namespace mpipipe::placement
