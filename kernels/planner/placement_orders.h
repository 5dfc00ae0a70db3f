// Upper bounds: the best contiguous placement that follows one topological order, by dynamic programming.
#pragma once

#include <cstdint>
#include <vector>

#include "placement.h"

namespace mpipipe::placement {

// Numbers that are the same on every machine (splitmix64; the standard library's distributions are not).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    int below(int n) { return static_cast<int>((next() >> 32) * static_cast<uint64_t>(n) >> 32); }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  private:
    uint64_t state_;
};

struct Chain {
    double load;
    std::vector<int> device;  // (n,) empty: none below the limit
    std::vector<int> stage;   // (n,) position of the device in the pipeline
};

enum class Preference { newest, oldest, random, cut };  // among the items that may come next
std::vector<int> topological_order(const Problem& problem, Preference preference, Random& random);

// The best of several orders; `order` is its topological order. No device: none fits, or the budget ended first.
struct BestOrder {
    Chain chain;
    std::vector<int> order;
};
BestOrder best_order(const Problem& problem, double lower_bound, const Budget& budget, Random& random);
// A load that no placement exceeds.
double upper_limit(const Problem& problem);

}  // namespace mpipipe::placement
