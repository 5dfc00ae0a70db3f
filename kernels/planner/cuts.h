// The partition of mpipipe/planner/problem.py for many groups and stages: the same cuts, to the bit.
//
//   bottleneck   Bisection. Whether stages of at most `limit` seconds cover the groups is one pass over the ends, with
//                the set of counts of stages that reach each: one bit a count, so that one word answers for 64 stages
//                that are alike. Only counts between what the seconds before and behind an end ask for are looked at.
//   squares      Dynamic programming over (end, count), without the states that no cut can have that is as even as one
//                found by walking back: t stages that share w seconds have squares of at least w * w / t.
//
// Both without recomputation and for whole backwards. With these, sweeps.cpp has the sweeps themselves.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace mpipipe::planner {

struct Tied {
    std::vector<int64_t> groups;  // one per use, ascending
    int64_t nbytes, rows_bytes;
};

// Of recomputation; (n_groups,) each: seconds with what is made again, what that is, what counts of the received, and
// how much of that the first group makes again itself.
struct Mode {
    const double* bwd_input_s;
    const int64_t *remade_bytes, *held_in, *received;
};

struct Kept {
    int64_t whole, late;  // micro-batches
};

// What the fields mean: Ranges in stages.py, Problem in problem.py. Pointers are borrowed.
struct Problem {
    int64_t n_groups = 0;
    const double *fwd_s = nullptr, *bwd_input_s = nullptr, *bwd_weight_s = nullptr;  // (n_groups,), as those below
    const int64_t *param_bytes = nullptr, *stash_bytes = nullptr, *workspace_bytes = nullptr;
    const int64_t *act_in = nullptr, *held_in = nullptr, *grad_in = nullptr, *cast_bytes = nullptr;
    const double* crossing_s = nullptr;  // (links, n_groups + 1); row 0 is no link
    std::vector<double> speed;           // by stage, as those below
    std::vector<int64_t> memory_bytes, live;
    std::vector<int32_t> link_in, link_out;  // rows of crossing_s
    std::vector<Tied> ties;
    int64_t window = 0, tied_window = 0, tied_repeats = 1;
    double bytes_per_param_byte = 0.0, state_per_param_byte = 0.0;
    int64_t batch_of_first = 0, batch_of_last = 0;
    // Of the sweeps alone:
    std::vector<Mode> modes;
    const int64_t *at_work_bytes = nullptr, *waiting_bytes = nullptr, *waiting_grads = nullptr;  // (n_groups,)
    const int64_t *waiting_received = nullptr, *at_once_bytes = nullptr;
    std::vector<int64_t> blocks_ahead;  // by stage
    std::vector<std::vector<Kept>> kept;  // by stage: all mixes that no other one exceeds
};

struct Cuts {
    double bottleneck_s;
    std::vector<int64_t> cuts;
    bool least_squares;  // false: finding them takes more than `most_work` steps; these are even, not the evenest
};

// best: (n_groups + 1, stages + 1), of the first stages up to each end. cuts: of its last corner.
struct Swept {
    std::vector<double> best;
    std::vector<int64_t> cuts;
};

struct Misfit {
    int64_t stage, first, end, short_bytes;
};

class Cutter {
  public:
    explicit Cutter(Problem problem);

    // guess: no bottleneck is below it. Nothing where no cut fits into memory.
    std::optional<Cuts> best(double guess, int64_t most_work);

    // `sweep` in sweep.py: of the slowest stage, or of the squares of stages of at most `most_s`. No stage that ends at
    // `end` begins before lows[end - 1].
    Swept sweep(const std::vector<int64_t>& lows, std::optional<double> most_s) const;

    // The first stage that no cut lets begin and end, and its groups that lack least bytes (then the first of these).
    // To be asked where `best` finds nothing.
    Misfit misfit();

    // The least number of stages of at most `memory` bytes; live_from_end[k]: of the stage with k stages after it,
    // ascending, so that fewer stages after one are never worse for it.
    std::optional<int64_t> least_stages(const std::vector<int64_t>& live_from_end, int64_t memory) const;

  private:
    class Scan;
    class ModeScan;
    using Word = uint64_t;

    int64_t n_stages() const { return static_cast<int64_t>(problem_.speed.size()); }
    Word* reached(int64_t end) { return &reached_[end * words_]; }
    bool is_reached(int64_t end, int64_t count) const {
        return low_[end] <= count && count <= high_[end] && reached_[end * words_ + count / 64] >> (count % 64) & 1;
    }
    void set_uses();
    void set_sums();
    void set_roomy();
    void set_classes();
    int64_t earliest(int64_t end, int64_t stage, int64_t last) const;
    int64_t least_bytes(int64_t first, int64_t end, int64_t live) const;
    int64_t weights(int64_t held) const;
    double seconds(const Scan& scan, int64_t stage) const;
    bool fits(const Scan& scan, int64_t stage) const;
    void set_bands(double limit, bool without_last);
    bool feasible(double limit, bool without_last = false);
    void extend(const Scan& scan, double limit);
    void extend_class(const Scan& scan, size_t kind, bool roomy, int64_t from, int64_t to);
    Cuts walk_back(double limit) const;
    bool least_squares(double limit, int64_t most_work, Cuts& cuts) const;

    Problem problem_;
    std::vector<int32_t> tie_offset_;  // (n_groups + 1,): the uses in each group, in uses_
    struct Use {
        enum { kFirst, kBefore, kLater } kind;
        int64_t next;  // kBefore: the use after this one; kLater: its own place among the uses
        size_t tie;
    };
    std::vector<Use> uses_;
    std::vector<int64_t> params_before_, stash_before_, casts_before_;  // sums of the first groups
    std::vector<int64_t> roomy_;                                        // by end: see set_roomy
    int64_t words_;  // of a set of counts
    int64_t tied_bytes_ = 0, least_memory_ = 0, most_live_ = 0;
    double fastest_ = 0.0;
    std::vector<double> before_s_;                                      // sums of the first groups
    std::vector<double> link_s_;                                        // the least on the links of each stage
    std::vector<double> speed_before_, links_before_, squares_before_;  // of the first stages: speed, speed times the
                                                                        // least seconds on links, speed * speed
    std::vector<int32_t> class_of_;                 // stages of one class have the same speed, memory and links
    std::vector<int64_t> class_stage_;              // one stage of each
    std::vector<std::vector<Word>> class_mask_;     // its stages
    std::vector<int64_t> lives_;                    // distinct, ascending
    std::vector<std::vector<Word>> live_mask_;      // [k]: stages of less than lives_[k]; last: all
    std::vector<Word> reached_, wanted_, fresh_;    // by end: counts of stages; of the end at work; not there yet
    std::vector<int64_t> low_, high_;               // by end: counts that can be on a cut within the limit
};

}  // namespace mpipipe::planner
