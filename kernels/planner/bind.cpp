// The thin door of the planner's hot loops: numpy arrays in, numpy arrays out. No torch, no threads.
// The callers (mpipipe/planner) own the checks; each function has a reference there that tests compare with.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuts.h"
#include "listed.h"
#include "merged.h"
#include "placement_bind.h"
#include "walk.h"

namespace py = pybind11;
using namespace mpipipe::planner;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
template <typename T>
using Arrays = std::vector<Array<T>>;  // one per rank

Codes codes_of(const Arrays<int32_t>& arrays) {
    Codes codes;
    for (const auto& a : arrays) codes.push_back({a.data(), static_cast<int32_t>(a.shape(0))});
    return codes;
}

template <typename T, typename Source>
std::vector<T*> pointers(const Arrays<Source>& arrays) {
    std::vector<T*> out;
    for (const auto& a : arrays) out.push_back(const_cast<T*>(a.data()));
    return out;
}

// (partner by rank, (kind, rank, index, other) of the first fault)
py::tuple match_messages(const Arrays<int32_t>& arrays) {
    const Codes codes = codes_of(arrays);
    Arrays<int32_t> partner;
    for (const Code& code : codes) {
        partner.emplace_back(code.n);
        std::fill_n(partner.back().mutable_data(), code.n, -1);
    }
    const Partner to = pointers<int32_t>(partner);
    Fault fault;
    {
        py::gil_scoped_release no_gil;
        fault = match(codes, to);
    }
    return py::make_tuple(partner, py::make_tuple(static_cast<int>(fault.kind), fault.rank, fault.index, fault.other));
}

// (whether all end, where each rank ends or stands)
py::tuple prove_program(const Arrays<int32_t>& arrays, const Arrays<int32_t>& partner, int32_t receive_window) {
    const Codes codes = codes_of(arrays);
    const Partner to = pointers<int32_t>(partner);
    std::vector<int32_t> at;
    bool ends;
    {
        py::gil_scoped_release no_gil;
        ends = prove(codes, to, receive_window, at);
    }
    return py::make_tuple(ends, at);
}

// (n, 2) start and end of each rank's instructions; None if the program cannot end
py::object simulate_program(const Arrays<int32_t>& arrays, const Arrays<int32_t>& partner,
                            const Arrays<double>& seconds, double norm_s) {
    const Codes codes = codes_of(arrays);
    const Partner to = pointers<int32_t>(partner);
    Arrays<double> times;
    for (const Code& code : codes) {
        times.emplace_back(std::vector<py::ssize_t>{code.n, 2});
        std::fill_n(times.back().mutable_data(), 2 * int64_t{code.n}, 0.0);
    }
    const auto of = pointers<const double>(seconds);
    const auto out = pointers<double>(times);
    bool ends;
    {
        py::gil_scoped_release no_gil;
        ends = simulate(codes, to, of, norm_s, out);
    }
    return ends ? py::object(py::cast(times)) : py::none();
}

// Of each policy the seconds of its order.
std::vector<double> listed_seconds(const Work& work, int32_t n_micro, const std::vector<Policy>& policies) {
    std::vector<double> seconds;
    for (const Policy& policy : policies) seconds.push_back(listed(work, n_micro, policy).end_s);
    return seconds;
}

// The first of the shortest, and its seconds.
std::pair<size_t, double> listed_shortest(const Work& work, int32_t n_micro, const std::vector<Policy>& policies,
                                          double most_s) {
    std::pair<size_t, double> best{0, std::numeric_limits<double>::infinity()};
    for (size_t i = 0; i < policies.size(); ++i) {
        const double end_s = listed(work, n_micro, policies[i], std::min(most_s, best.second)).end_s;
        if (end_s < best.second) best = {i, end_s};
    }
    return best;
}

// By rank, (n, 3) kind, stage and micro-batch.
Arrays<int32_t> arrays_of(const std::vector<std::vector<Row>>& order) {
    Arrays<int32_t> arrays;
    for (const auto& rows : order) {
        arrays.emplace_back(std::vector<py::ssize_t>{static_cast<py::ssize_t>(rows.size()), 3});
        if (!rows.empty()) std::copy_n(rows.data()->data(), 3 * rows.size(), arrays.back().mutable_data());
    }
    return arrays;
}

Arrays<int32_t> listed_order(const Work& work, int32_t n_micro, const Policy& policy) {
    return arrays_of(listed(work, n_micro, policy).order);
}

// (the order, its seconds)
py::tuple merged_order(const Work& work, int32_t n_micro, const Arrays<int32_t>& order, int64_t most) {
    std::vector<std::vector<Row>> rows;
    for (const auto& array : order) {
        rows.emplace_back(array.shape(0));
        if (!rows.back().empty()) std::copy_n(array.data(), 3 * array.shape(0), rows.back().data()->data());
    }
    Listed found;
    {
        py::gil_scoped_release no_gil;
        found = merged(work, n_micro, std::move(rows), most);
    }
    return py::make_tuple(arrays_of(found.order), found.end_s);
}

// A Cutter with the arrays that it borrows.
struct Partition {
    std::vector<py::array> arrays;
    Cutter cutter;
};

Partition partition_of(const Array<double>& fwd_s, const Array<double>& bwd_input_s, const Array<double>& bwd_weight_s,
                       const Array<int64_t>& param_bytes, const Array<int64_t>& stash_bytes,
                       const Array<int64_t>& workspace_bytes, const Array<int64_t>& act_in,
                       const Array<int64_t>& held_in, const Array<int64_t>& grad_in, const Array<double>& crossing_s,
                       std::vector<double> speed, std::vector<int64_t> memory_bytes, std::vector<int64_t> live,
                       std::vector<int32_t> link_in, std::vector<int32_t> link_out,
                       const std::vector<std::tuple<std::vector<int64_t>, int64_t, int64_t>>& ties, int64_t window,
                       int64_t tied_window, int64_t tied_repeats, double bytes_per_param_byte,
                       double state_per_param_byte, int64_t batch_of_first, int64_t batch_of_last,
                       const std::vector<std::tuple<Array<double>, Array<int64_t>, Array<int64_t>, Array<int64_t>>>&
                           modes,
                       const Array<int64_t>& at_work_bytes, const Array<int64_t>& waiting_bytes,
                       const Array<int64_t>& waiting_grads, const Array<int64_t>& waiting_received,
                       const Array<int64_t>& at_once_bytes, const Array<int64_t>& cast_bytes,
                       std::vector<int64_t> blocks_ahead, const Array<int64_t>& kept) {
    Problem p;
    p.n_groups = fwd_s.size();
    p.fwd_s = fwd_s.data(), p.bwd_input_s = bwd_input_s.data(), p.bwd_weight_s = bwd_weight_s.data();
    p.param_bytes = param_bytes.data(), p.stash_bytes = stash_bytes.data();
    p.workspace_bytes = workspace_bytes.data(), p.act_in = act_in.data(), p.held_in = held_in.data();
    p.grad_in = grad_in.data(), p.cast_bytes = cast_bytes.data();
    p.crossing_s = crossing_s.data();
    p.speed = std::move(speed), p.memory_bytes = std::move(memory_bytes), p.live = std::move(live);
    p.link_in = std::move(link_in), p.link_out = std::move(link_out);
    for (const auto& [groups, nbytes, rows_bytes] : ties) p.ties.push_back({groups, nbytes, rows_bytes});
    p.window = window, p.tied_window = tied_window, p.tied_repeats = tied_repeats;
    p.bytes_per_param_byte = bytes_per_param_byte, p.state_per_param_byte = state_per_param_byte;
    p.batch_of_first = batch_of_first, p.batch_of_last = batch_of_last;
    std::vector<py::array> arrays{fwd_s, bwd_input_s, bwd_weight_s, param_bytes, stash_bytes, workspace_bytes, act_in,
                                  held_in, grad_in, crossing_s, at_work_bytes, waiting_bytes, waiting_grads,
                                  waiting_received, at_once_bytes, cast_bytes};
    for (const auto& [into_s, remade, held, received] : modes) {
        p.modes.push_back({into_s.data(), remade.data(), held.data(), received.data()});
        arrays.insert(arrays.end(), {into_s, remade, held, received});
    }
    p.at_work_bytes = at_work_bytes.data(), p.waiting_bytes = waiting_bytes.data();
    p.waiting_grads = waiting_grads.data(), p.waiting_received = waiting_received.data();
    p.at_once_bytes = at_once_bytes.data(), p.blocks_ahead = std::move(blocks_ahead);
    for (py::ssize_t stage = 0; stage < kept.shape(0); ++stage) {  // (stages, mixes, 2)
        auto& mixes = p.kept.emplace_back();
        for (py::ssize_t i = 0; i < kept.shape(1); ++i) mixes.push_back({kept.at(stage, i, 0), kept.at(stage, i, 1)});
    }
    return {std::move(arrays), Cutter(std::move(p))};
}

// (bottleneck_s, cuts, whether they are of least squares), or None where nothing fits
py::object best_cuts(Partition& partition, double guess, int64_t most_work) {
    std::optional<Cuts> found;
    {
        py::gil_scoped_release no_gil;
        found = partition.cutter.best(guess, most_work);
    }
    return found ? py::object(py::make_tuple(found->bottleneck_s, found->cuts, found->least_squares)) : py::none();
}

// (best, by end and count of stages; cuts)
py::tuple sweep(Partition& partition, const std::vector<int64_t>& lows, std::optional<double> most_s) {
    Swept found;
    {
        py::gil_scoped_release no_gil;
        found = partition.cutter.sweep(lows, most_s);
    }
    const auto ends = static_cast<py::ssize_t>(lows.size() + 1);
    const py::ssize_t counts = static_cast<py::ssize_t>(found.best.size()) / ends;
    return py::make_tuple(py::array_t<double>({ends, counts}, found.best.data()), found.cuts);
}

// (stage, first, end, bytes that are missing)
py::tuple misfit(Partition& partition) {
    const Misfit m = partition.cutter.misfit();
    return py::make_tuple(m.stage, m.first, m.end, m.short_bytes);
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    m.doc() = "Hot loops of mpipipe.planner.";
    m.attr("version") = "8";  // of the functions below; mpipipe/planner/native.py asks for the same one
    m.def("match", match_messages);
    m.def("prove", prove_program);
    using Seconds = std::vector<double>;
    py::class_<Work>(m, "Work").def(py::init([](std::vector<int32_t> rank_of_stage, Seconds fwd_s, Seconds bwd_input_s,
                                                Seconds bwd_weight_s, Seconds bwd_s, Seconds act_s, Seconds grad_s,
                                                std::vector<Use> tied) {
        return Work{std::move(rank_of_stage), std::move(fwd_s), std::move(bwd_input_s), std::move(bwd_weight_s),
                    std::move(bwd_s), std::move(act_s), std::move(grad_s), std::move(tied)};
    }));
    py::class_<Policy>(m, "Policy").def(py::init([](bool forwards_first, bool last_backward_first, bool first_whole,
                                                    double least_gap, std::vector<int32_t> room) {
        return Policy{forwards_first, last_backward_first, first_whole, least_gap, std::move(room)};
    }));
    m.def("listed_seconds", listed_seconds, no_gil);
    m.def("listed_shortest", listed_shortest, no_gil);
    m.def("listed_order", listed_order);
    m.def("merged", merged_order);
    m.def("simulate", simulate_program);
    py::class_<Partition>(m, "Partition")
        .def(py::init(&partition_of))
        .def("best", best_cuts)
        .def("sweep", sweep)
        .def("misfit", misfit)
        .def("least_stages", [](const Partition& p, const std::vector<int64_t>& live_from_end, int64_t memory) {
            return p.cutter.least_stages(live_from_end, memory);
        }, no_gil);
    mpipipe::placement::bind(m);
}
