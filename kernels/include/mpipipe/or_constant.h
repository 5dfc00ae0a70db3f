// A vector that stands for one that is not there: loops need no second form.
#pragma once

#include <cstddef>
#include <vector>

#include "mpipipe/bf16.h"

namespace mpipipe {

// p[i] = given[i], or `value` for i in [0, d) where `given` is null.
template <typename T>
class OrConstant {
  public:
    OrConstant(const T* given, float value, size_t d)
        : own_(given ? 0 : d, narrow<T>(value)), p(given ? given : own_.data()) {}
    OrConstant(const OrConstant&) = delete;

  private:
    const std::vector<T> own_;

  public:
    const T* const p;
};

}  // namespace mpipipe
