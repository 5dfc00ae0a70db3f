// The thin door of the planner's hot loops: numpy arrays in, numpy arrays out. No torch, no threads.
// The callers (mpipipe/planner) own the checks; each function has a reference there that tests compare with.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "placement_bind.h"

namespace py = pybind11;

PYBIND11_MODULE(_planner, m) {
    m.doc() = "Hot loops of mpipipe.planner.";
    m.attr("version") = "2";  // of the functions below; mpipipe/planner/native.py asks for the same one
    mpipipe::placement::bind(m);
}
