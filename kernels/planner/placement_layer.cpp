#include "placement_layer.h"

#include <algorithm>
#include <bitset>
#include <numeric>

namespace mpipipe::placement {

size_t Layer::slot_of(const Word* wanted, Word hash) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = hash & mask;
    for (; slots_[slot] != none; slot = (slot + 1) & mask) {
        const int32_t index = slots_[slot];
        if (states_[index].hash == hash && std::equal(wanted, wanted + words_, ideal(index))) break;
    }
    return slot;
}

int32_t Layer::find(const Word* wanted, Word hash) const { return slots_[slot_of(wanted, hash)]; }

bool Layer::offer(const Word* wanted, const State& state) {
    const size_t slot = slot_of(wanted, state.hash);
    if (slots_[slot] != none) {
        State& known = states_[slots_[slot]];
        if (known.load <= state.load) return false;
        known = state;
        return true;
    }
    slots_[slot] = size();
    states_.push_back(state);
    bits_.insert(bits_.end(), wanted, wanted + words_);
    if (2 * states_.size() > slots_.size()) grow();
    return true;
}

std::vector<int32_t> Layer::largest_first() const {
    std::vector<int> count(states_.size());
    for (size_t word = 0; word < bits_.size(); ++word)
        count[word / words_] += static_cast<int>(std::bitset<word_bits>(bits_[word]).count());
    std::vector<int32_t> order(states_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return count[a] > count[b]; });
    return order;
}

void Layer::grow() {
    slots_.assign(2 * slots_.size(), none);
    const size_t mask = slots_.size() - 1;
    for (int32_t index = 0; index < size(); ++index) {
        size_t slot = states_[index].hash & mask;
        while (slots_[slot] != none) slot = (slot + 1) & mask;
        slots_[slot] = index;
    }
}

}  // namespace mpipipe::placement
