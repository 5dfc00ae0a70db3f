// The ideals that a given number of accelerators and CPUs can hold, each with its least load: a hash table that
// compares bits, not hashes alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mpipipe::placement {

using Word = uint64_t;
constexpr int word_bits = 64;

inline bool has(const Word* set, int item) { return set[item / word_bits] >> (item % word_bits) & 1; }
inline void flip(Word* set, int item) { set[item / word_bits] ^= Word{1} << (item % word_bits); }
inline int words_for(int n_items) { return (n_items + word_bits - 1) / word_bits; }

// Of one item; the hash of a set is the exclusive or of its items' (Zobrist 1970). The mixer is splitmix64's.
inline Word item_hash(int item) {
    Word z = static_cast<Word>(item + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

struct State {
    Word hash;
    double load;       // of the most loaded device so far
    int32_t parent;    // the state that the last device began from, in its layer
    bool parent_cpu;   // that device is a CPU
};

class Layer {
  public:
    explicit Layer(int n_items) : words_(words_for(n_items)), slots_(first_slots, none) {}

    static constexpr int32_t none = -1;
    int32_t size() const { return static_cast<int32_t>(states_.size()); }
    const State& state(int32_t index) const { return states_[index]; }
    const Word* ideal(int32_t index) const { return &bits_[static_cast<size_t>(index) * words_]; }
    int32_t find(const Word* ideal, Word hash) const;             // or none
    std::vector<int32_t> largest_first() const;                   // every state, by the size of its ideal
    bool offer(const Word* ideal, const State& state);            // false: known with no higher load

  private:
    static constexpr size_t first_slots = 64;  // a power of two
    size_t slot_of(const Word* ideal, Word hash) const;  // where it is, or the free slot where it belongs
    void grow();

    int words_;
    std::vector<Word> bits_;
    std::vector<State> states_;
    std::vector<int32_t> slots_;  // open addressing, linear probing
};

}  // namespace mpipipe::placement
