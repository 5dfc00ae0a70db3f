// Placing the items of a directed acyclic graph on devices so that the most loaded device is loaded least.
//
// An item has a time on an accelerator, a time on a CPU and a size; a tensor is a hyperedge: its producer and its
// consumers are its pins. The load of an accelerator is the time of its items plus the cost of each tensor of
// which it holds some pins but not all; the load of a CPU is the time of its items alone. Accelerators have
// `capacity` bytes, CPUs have no limit. Objective and graphs: Tarnawski et al., "Efficient Algorithms for Device
// Placement of DNN Graph Operators" (NeurIPS 2020).
//
// Contiguous: the devices have an order in which every precedence edge stays on its device or goes to a later
// one; what the first d devices hold is then an ideal (a set that holds the predecessors of its members).
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace mpipipe::placement {

struct Problem {
    int n_accelerators = 0;
    int n_cpus = 0;
    double capacity = 0;                // bytes of one accelerator
    std::vector<double> accelerator_s;  // (n,) infinite: no accelerator can run it
    std::vector<double> cpu_s;          // (n,) infinite: no CPU can run it
    std::vector<double> nbytes;         // (n,)
    std::vector<std::vector<int>> after, before;  // precedence; items are numbered in a topological order
    std::vector<double> tensor_cost;              // (t,) > 0
    std::vector<std::vector<int>> pins;           // (t,) two or more each, ascending
    std::vector<std::vector<int>> tensors_of;     // (n,) the tensors that an item is a pin of

    int n_items() const { return static_cast<int>(accelerator_s.size()); }
    int n_tensors() const { return static_cast<int>(pins.size()); }
    int n_devices() const { return n_accelerators + n_cpus; }
    double time_s(int device, int item) const { return device < n_accelerators ? accelerator_s[item] : cpu_s[item]; }
    void add_edge(int source, int dest);                    // source < dest
    void add_tensor(double cost, std::vector<int> members);  // no cost or one pin: nobody ever pays, left out
    void forget_duplicate_edges();
};

// Everything a solver may use up; `states` caps what is kept in memory at a time.
class Budget {
  public:
    Budget(double seconds, int64_t states);
    bool over() const { return Clock::now() >= end_; }
    double spent_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
    const int64_t states;

  private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point start_, end_;
};

enum class Status { placed, infeasible, budget };  // budget: it ended before anything was found

struct Solution {
    Status status = Status::budget;
    std::vector<int> device;  // (n,) accelerators 0.. in pipeline order, then the CPUs
    double load = 0;          // of the most loaded device
    double bound = 0;         // no placement of the kind asked for has a lower load
    int64_t ideals = 0;       // states of the exact search
};

// Seconds of each device under a placement, summed afresh: (n_devices,)
std::vector<double> loads(const Problem& problem, const std::vector<int>& device);
bool supported(const Problem& problem, const std::vector<int>& device);  // every item by its device
bool fits(const Problem& problem, const std::vector<int>& device);       // that, and into memory
double most_loaded(const Problem& problem, const std::vector<int>& device);

// A bound on any placement, contiguous or not: work divided at will, tensors free.
double divided_work_bound(const Problem& problem);
// Most accelerator seconds that CPUs can take off the accelerators within `cpu_s` seconds of theirs in total, if
// items could be divided; an item that takes `limit` or more on a CPU stays. With `tensors`: and seconds that they
// spare accelerators for tensors, as if each tensor were spared by each of its pins.
double absorbed_s(const Problem& problem, double cpu_s, double limit, bool tensors);

Solution solve_contiguous(const Problem& problem, const Budget& budget);

// Simulated annealing from `start` (empty: from scratch); the same answer for the same seed unless the budget cuts
// it short. The bound is divided_work_bound.
Solution solve_chunks(const Problem& problem, const Budget& budget, uint64_t seed, const std::vector<int>& start);

}  // namespace mpipipe::placement
