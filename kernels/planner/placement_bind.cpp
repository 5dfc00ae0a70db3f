// numpy arrays in, numpy arrays out: the shapes and ranges that the solver relies on are checked here.
#include "placement_bind.h"

#include <pybind11/numpy.h>

#include <cmath>
#include <string>

#include "placement.h"

namespace py = pybind11;

namespace mpipipe::placement {

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

void require(bool good, const std::string& what) {
    if (!good) throw py::value_error(what);
}

std::vector<double> numbers(const Array<double>& values, size_t n, bool may_be_infinite, const std::string& name) {
    require(values.ndim() == 1 && static_cast<size_t>(values.size()) == n,
            name + " has " + std::to_string(values.size()) + " values, not " + std::to_string(n));
    std::vector<double> all(values.data(), values.data() + values.size());
    for (double x : all)
        require(x >= 0 && (may_be_infinite || !std::isinf(x)), name + " has a value that is negative or no number");
    return all;
}

Problem problem_of(int n_devices, int n_cpus, const Array<double>& accelerator_s, const Array<double>& cpu_s,
                   const Array<double>& nbytes, double capacity, const Array<int32_t>& edge_source,
                   const Array<int32_t>& edge_dest, const Array<double>& tensor_cost, const Array<int32_t>& pin_start,
                   const Array<int32_t>& pins) {
    require(n_devices >= 0 && n_cpus >= 0 && n_devices + n_cpus > 0, "there is no device");
    require(capacity >= 0, "capacity is negative or no number");
    Problem problem;
    problem.n_accelerators = n_devices;
    problem.n_cpus = n_cpus;
    problem.capacity = capacity;
    const size_t n = static_cast<size_t>(accelerator_s.size());
    problem.accelerator_s = numbers(accelerator_s, n, true, "accelerator_s");
    problem.cpu_s = numbers(cpu_s, n, true, "cpu_s");
    problem.nbytes = numbers(nbytes, n, false, "nbytes");
    for (auto* lists : {&problem.after, &problem.before, &problem.tensors_of}) lists->resize(n);
    require(edge_source.ndim() == 1 && edge_dest.ndim() == 1 && edge_source.size() == edge_dest.size(),
            "edge_source and edge_dest differ in length");
    for (py::ssize_t e = 0; e < edge_source.size(); ++e) {
        const int source = edge_source.data()[e], dest = edge_dest.data()[e];
        require(source >= 0 && source < dest && dest < static_cast<int>(n),
                "edge " + std::to_string(source) + " -> " + std::to_string(dest) +
                    ": items are not numbered in a topological order");
        problem.add_edge(source, dest);
    }
    problem.forget_duplicate_edges();
    const auto costs = numbers(tensor_cost, static_cast<size_t>(tensor_cost.size()), false, "tensor_cost");
    require(pin_start.ndim() == 1 && static_cast<size_t>(pin_start.size()) == costs.size() + 1 && pins.ndim() == 1,
            "pin_start needs one value more than tensor_cost");
    const int32_t* start = pin_start.data();
    require(start[0] == 0 && start[costs.size()] == pins.size(), "pin_start does not cover pins");
    for (size_t t = 0; t < costs.size(); ++t) {
        require(start[t] <= start[t + 1] && start[t + 1] <= pins.size(), "pin_start falls");
        std::vector<int> members(pins.data() + start[t], pins.data() + start[t + 1]);
        for (int item : members) require(item >= 0 && item < static_cast<int>(n), "a pin is no item");
        problem.add_tensor(costs[t], std::move(members));
    }
    return problem;
}

py::dict answer(const Solution& solution, const Budget& budget) {
    static constexpr const char* names[] = {"placed", "infeasible", "budget"};
    py::dict all;
    all["status"] = names[static_cast<int>(solution.status)];
    all["device"] = py::array_t<int32_t>(static_cast<py::ssize_t>(solution.device.size()), solution.device.data());
    all["load"] = solution.load;
    all["bound"] = solution.bound;
    all["ideals"] = solution.ideals;
    all["seconds"] = budget.spent_s();
    return all;
}

std::vector<int> placement_of(const Problem& problem, const Array<int32_t>& start) {
    std::vector<int> device(start.data(), start.data() + start.size());
    require(device.empty() || static_cast<int>(device.size()) == problem.n_items(),
            "start has not one device per item");
    for (int d : device) require(d >= 0 && d < problem.n_devices(), "start names a device that is not there");
    require(device.empty() || supported(problem, device), "start has an item on a device that does not support it");
    return device;
}

// m.name(arguments of problem_of, budget_s, live_limit, more...): `prepare(problem, more...)` gives what is then solved
// within a budget, without the interpreter's lock.
template <typename... More, typename Prepare, typename... Names>
void def(py::module_& m, const char* name, const Prepare& prepare, const Names&... names) {
    m.def(
        name,
        [prepare](int n_devices, int n_cpus, const Array<double>& accelerator_s, const Array<double>& cpu_s,
                  const Array<double>& nbytes, double capacity, const Array<int32_t>& edge_source,
                  const Array<int32_t>& edge_dest, const Array<double>& tensor_cost, const Array<int32_t>& pin_start,
                  const Array<int32_t>& pins, double budget_s, int64_t live_limit, const More&... more) {
            const Problem problem = problem_of(n_devices, n_cpus, accelerator_s, cpu_s, nbytes, capacity, edge_source,
                                               edge_dest, tensor_cost, pin_start, pins);
            const auto solve = prepare(problem, more...);
            require(budget_s >= 0, "budget_s is negative or no number");
            require(live_limit > 0, "live_limit is not positive");
            const Budget budget(budget_s, live_limit);
            Solution solution;
            {
                const py::gil_scoped_release no_gil;
                solution = solve(budget);
            }
            return answer(solution, budget);
        },
        py::arg("n_devices"), py::arg("n_cpus"), py::arg("accelerator_s"), py::arg("cpu_s"), py::arg("nbytes"),
        py::arg("capacity"), py::arg("edge_source"), py::arg("edge_dest"), py::arg("tensor_cost"),
        py::arg("pin_start"), py::arg("pins"), py::arg("budget_s"), py::arg("live_limit"), names...);
}

}  // namespace

void bind(py::module_& m) {
    def(m, "solve_contiguous", [](const Problem& problem) {
        return [&problem](const Budget& budget) { return solve_contiguous(problem, budget); };
    });
    def<uint64_t, Array<int32_t>>(
        m, "solve_chunks",
        [](const Problem& problem, uint64_t seed, const Array<int32_t>& start) {
            return [&problem, seed, from = placement_of(problem, start)](const Budget& budget) {
                return solve_chunks(problem, budget, seed, from);
            };
        },
        py::arg("seed"), py::arg("start"));
}

}  // namespace mpipipe::placement
