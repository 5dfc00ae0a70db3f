#pragma once

#include <pybind11/pybind11.h>

namespace mpipipe::placement {
void bind(pybind11::module_& m);
}
