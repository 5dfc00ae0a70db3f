#include "scan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

namespace mpipipe::planner {
namespace {

constexpr double kSlack = 1e-9;  // relative: of sums that are taken in another order
constexpr double kEndless = 1e300;

// The first i in [low, high) that is so, where all after it are; else high.
template <typename IsSo>
int64_t first_where(int64_t low, int64_t high, IsSo is_so) {
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (is_so(middle)) high = middle;
        else low = middle + 1;
    }
    return low;
}

}  // namespace

Cutter::Cutter(Problem problem) : problem_(std::move(problem)), words_(n_stages() / 64 + 1) {
    const Problem& p = problem_;
    least_memory_ = *std::min_element(p.memory_bytes.begin(), p.memory_bytes.end());
    most_live_ = *std::max_element(p.live.begin(), p.live.end());
    fastest_ = *std::max_element(p.speed.begin(), p.speed.end());
    set_uses();
    set_sums();
    set_roomy();
    set_classes();
    reached_.resize((p.n_groups + 1) * words_), fresh_.resize(words_);
    low_.resize(p.n_groups + 1), high_.resize(p.n_groups + 1);
}

void Cutter::set_uses() {
    const Problem& p = problem_;
    const int64_t n = p.n_groups;
    std::vector<std::vector<Use>> uses(p.ties.empty() ? 0 : n);
    for (size_t t = 0; t < p.ties.size(); ++t) {
        const Tied& tie = p.ties[t];
        uses[tie.groups[0]].push_back({Use::kFirst, 0, t});
        for (size_t i = 1; i < tie.groups.size(); ++i) {
            uses[tie.groups[i - 1]].push_back({Use::kBefore, tie.groups[i], t});
            uses[tie.groups[i]].push_back({Use::kLater, static_cast<int64_t>(i), t});
        }
        tied_bytes_ += tie.nbytes * static_cast<int64_t>(tie.groups.size()) * std::max<int64_t>(1, p.tied_repeats);
    }
    tie_offset_.assign(n + 1, 0);
    for (size_t g = 0; g < uses.size(); ++g) {
        uses_.insert(uses_.end(), uses[g].begin(), uses[g].end());
        tie_offset_[g + 1] = static_cast<int32_t>(uses_.size());
    }
}

void Cutter::set_sums() {
    const Problem& p = problem_;
    const int64_t n = p.n_groups, stages = n_stages();
    params_before_.assign(n + 1, 0), stash_before_.assign(n + 1, 0), casts_before_.assign(n + 1, 0);
    std::partial_sum(p.param_bytes, p.param_bytes + n, params_before_.begin() + 1);
    std::partial_sum(p.stash_bytes, p.stash_bytes + n, stash_before_.begin() + 1);
    std::partial_sum(p.cast_bytes, p.cast_bytes + n, casts_before_.begin() + 1);
    before_s_.assign(n + 1, 0.0);
    for (int64_t g = 0; g < n; ++g) before_s_[g + 1] = before_s_[g] + (p.fwd_s[g] + p.bwd_input_s[g] + p.bwd_weight_s[g]);
    speed_before_.assign(stages + 1, 0.0), links_before_ = squares_before_ = speed_before_;
    std::vector<double> cheapest(1 + *std::max_element(p.link_in.begin(), p.link_in.end()), 0.0);  // row 0: no link
    for (size_t link = 1; link < cheapest.size() && n > 1; ++link) {
        const double* row = p.crossing_s + link * (n + 1);
        cheapest[link] = *std::min_element(row + 1, row + n);
    }
    for (int64_t s = 0; s < stages; ++s) {
        const double link_s = cheapest[p.link_in[s]] + cheapest[p.link_out[s]];
        speed_before_[s + 1] = speed_before_[s] + p.speed[s];
        links_before_[s + 1] = links_before_[s] + p.speed[s] * link_s;
        squares_before_[s + 1] = squares_before_[s] + p.speed[s] * p.speed[s];
        link_s_.push_back(link_s);
    }
}

void Cutter::set_classes() {
    const Problem& p = problem_;
    const int64_t stages = n_stages();
    const auto kind = [&p](int64_t s) { return std::tie(p.speed[s], p.memory_bytes[s], p.link_in[s], p.link_out[s]); };
    std::vector<int64_t> order(stages);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return kind(a) < kind(b); });
    class_of_.resize(stages);
    for (int64_t s : order) {
        if (class_stage_.empty() || kind(class_stage_.back()) != kind(s)) {
            class_stage_.push_back(s);
            class_mask_.emplace_back(words_, 0);
        }
        class_of_[s] = static_cast<int32_t>(class_stage_.size() - 1);
        class_mask_.back()[s / 64] |= Word{1} << (s % 64);
    }
    lives_ = p.live;
    std::sort(lives_.begin(), lives_.end());
    lives_.erase(std::unique(lives_.begin(), lives_.end()), lives_.end());
    live_mask_.assign(lives_.size() + 1, std::vector<Word>(words_, 0));
    for (int64_t s = 0; s < stages; ++s) {
        for (size_t k = std::lower_bound(lives_.begin(), lives_.end(), p.live[s]) - lives_.begin(); k < lives_.size();
             ++k) {
            live_mask_[k + 1][s / 64] |= Word{1} << (s % 64);
        }
    }
}

// From which first group on every rank has room, with the largest of everything.
void Cutter::set_roomy() {
    const Problem& p = problem_;
    const int64_t n = p.n_groups;
    const int64_t act = *std::max_element(p.act_in, p.act_in + n), grad = *std::max_element(p.grad_in, p.grad_in + n);
    const int64_t rest = *std::max_element(p.workspace_bytes, p.workspace_bytes + n) + most_live_ * act +
                         p.window * act + (p.window + 1) * grad + std::max(act, grad) + 2 * tied_bytes_ +
                         p.batch_of_first + p.batch_of_last;
    roomy_.assign(n + 1, 0);
    for (int64_t end = 1, roomy = 0; end <= n; ++end) {
        const auto most_bytes = [&](int64_t from) {
            return weights(params_before_[end] - params_before_[from]) + casts_before_[end] - casts_before_[from] +
                   most_live_ * (stash_before_[end] - stash_before_[from]) + rest;
        };
        while (roomy < end && most_bytes(roomy) > least_memory_) ++roomy;
        roomy_[end] = roomy;
    }
}

// The earliest group at which a stage with this end can begin, for the memory of one of these stages.
int64_t Cutter::earliest(int64_t end, int64_t stage, int64_t last) const {
    int64_t live = problem_.live[stage], memory = problem_.memory_bytes[stage];
    for (int64_t s = stage + 1; s <= last; ++s) {
        live = std::min(live, problem_.live[s]);
        memory = std::max(memory, problem_.memory_bytes[s]);
    }
    return first_where(0, end, [&](int64_t first) { return least_bytes(first, end, live) <= memory; });
}

// No stage that has these groups holds less, nor one that has more.
int64_t Cutter::least_bytes(int64_t first, int64_t end, int64_t live) const {
    const int64_t held = params_before_[end] - params_before_[first] - tied_bytes_;
    return weights(std::max<int64_t>(0, held)) + live * (stash_before_[end] - stash_before_[first]);
}

int64_t Cutter::weights(int64_t held) const {
    return static_cast<int64_t>(std::ceil(static_cast<double>(held) * problem_.bytes_per_param_byte));
}

double Cutter::seconds(const Scan& scan, int64_t stage) const {
    const double* in = problem_.crossing_s + problem_.link_in[stage] * (problem_.n_groups + 1);
    const double* out = problem_.crossing_s + problem_.link_out[stage] * (problem_.n_groups + 1);
    return scan.seconds() / problem_.speed[stage] + in[scan.first] + out[scan.end];
}

bool Cutter::fits(const Scan& scan, int64_t stage) const {
    return scan.bytes(problem_.live[stage]) <= problem_.memory_bytes[stage];
}

// -- least bottleneck ---------------------------------------------------------------------------

// Counts of stages that can be before each end, at most from `low` to `high`: the first ones, each as long as the limit
// and its memory let it, come so far, and so do the last ones from the other side; and no stage is empty.
// without_last: whatever the last ones can do.
void Cutter::set_bands(double limit, bool without_last) {
    const Problem& p = problem_;
    const int64_t n = p.n_groups, stages = n_stages();
    std::vector<int64_t> far(stages + 1, 0), near(stages + 1, n);
    const auto can = [&](int64_t stage, int64_t first, int64_t end) {
        const double most_s = (limit - link_s_[stage]) * p.speed[stage] + kSlack * before_s_[n] / 16;
        return before_s_[end] - before_s_[first] <= most_s &&
               least_bytes(first, end, p.live[stage]) <= p.memory_bytes[stage];
    };
    for (int64_t s = 0; s < stages; ++s) {
        far[s + 1] = first_where(far[s] + 1, n + 1, [&](int64_t end) { return !can(s, far[s], end); }) - 1;
    }
    for (int64_t s = stages - 1; s >= 0 && !without_last; --s) {
        near[s] = first_where(0, near[s + 1], [&](int64_t first) { return can(s, first, near[s + 1]); });
    }
    int64_t low = 0, high = 0;
    low_[0] = high_[0] = 0;
    for (int64_t end = 1; end <= n; ++end) {
        while (low < stages && far[low] < end) ++low;
        while (high < stages && (without_last || near[high + 1] <= end)) ++high;
        low_[end] = std::max({low, int64_t{1}, stages - (n - end)});
        high_[end] = far[low] < end ? -1 : std::min({high, end, end < n ? stages - 1 : stages});
    }
}

// Fills reached_ and says whether all stages reach the last end.
bool Cutter::feasible(double limit, bool without_last) {
    const int64_t n = problem_.n_groups;
    set_bands(limit, without_last);
    std::fill(reached_.begin(), reached_.end(), 0);
    reached(0)[0] = 1;
    const double longest = limit * fastest_ * (1.0 + kSlack);
    for (int64_t end = 1; end <= n; ++end) {
        const int64_t low = low_[end], high = high_[end];
        if (low > high) continue;
        wanted_.assign(words_, 0);
        for (int64_t count = low; count <= high; ++count) wanted_[count / 64] |= Word{1} << (count % 64);
        const auto all = [&] {
            return std::equal(&wanted_[low / 64], &wanted_[high / 64] + 1, reached(end) + low / 64);
        };
        for (Scan scan(*this, end, earliest(end, low - 1, high - 1)); !all() && scan.grow();) {
            if (scan.seconds() > longest) break;
            extend(scan, limit);
        }
    }
    return is_reached(n, n_stages());
}

// One more stage, the groups of the scan, behind every count that reaches its first group. What it takes is asked only
// where that would be a count that is not there yet.
void Cutter::extend(const Scan& scan, double limit) {
    const int64_t from = std::max(low_[scan.first], low_[scan.end] - 1);
    const int64_t to = std::min(high_[scan.first], high_[scan.end] - 1);
    if (from > to) return;
    const Word *before = reached(scan.first), *after = reached(scan.end);
    Word any = 0;
    for (int64_t w = from / 64; w <= to / 64; ++w) {  // as counts before this stage
        const Word next = w + 1 < words_ ? (wanted_[w + 1] & ~after[w + 1]) << 63 : 0;
        fresh_[w] = before[w] & ((wanted_[w] & ~after[w]) >> 1 | next);
        any |= fresh_[w];
    }
    if (any == 0) return;
    const bool roomy = scan.is_roomy();
    if (to - from + 1 < static_cast<int64_t>(class_stage_.size())) {  // few counts and many kinds of ranks
        for (int64_t stage = from; stage <= to; ++stage) {
            const bool is_fresh = fresh_[stage / 64] >> (stage % 64) & 1;
            if (!is_fresh || seconds(scan, stage) > limit || !(roomy || fits(scan, stage))) continue;
            reached(scan.end)[(stage + 1) / 64] |= Word{1} << ((stage + 1) % 64);
        }
        return;
    }
    for (size_t kind = 0; kind < class_stage_.size(); ++kind) {
        if (seconds(scan, class_stage_[kind]) <= limit) extend_class(scan, kind, roomy, from, to);
    }
}

void Cutter::extend_class(const Scan& scan, size_t kind, bool roomy, int64_t from, int64_t to) {
    const Word* of_class = class_mask_[kind].data();
    const Word* fitting = live_mask_.back().data();
    if (!roomy) {
        const int64_t memory = problem_.memory_bytes[class_stage_[kind]];
        const int64_t fixed = scan.bytes(0), stash = scan.bytes(1) - fixed;
        const auto fits = [&](int64_t live) { return fixed + live * stash <= memory; };
        fitting = live_mask_[std::partition_point(lives_.begin(), lives_.end(), fits) - lives_.begin()].data();
    }
    Word* after = reached(scan.end);
    for (int64_t w = from / 64; w <= to / 64; ++w) {
        const Word stages = fresh_[w] & of_class[w] & fitting[w];
        after[w] |= stages << 1;
        if (stages >> 63) after[w + 1] |= 1;
    }
}

// A cut within the limit, after `feasible(limit)`: each stage takes about its share of what is before its end, and
// rather a place with little to send.
Cuts Cutter::walk_back(double limit) const {
    Cuts found{0.0, {}, false};
    int64_t end = problem_.n_groups;
    for (int64_t stage = n_stages() - 1; stage >= 0; --stage) {
        const double share = before_s_[end] / speed_before_[stage + 1];
        double best = std::numeric_limits<double>::infinity(), taken = 0.0;
        int64_t first = -1;
        for (Scan scan(*this, end, earliest(end, stage, stage)); scan.grow();) {
            const double alone = scan.seconds() / problem_.speed[stage];
            if (alone > limit) break;
            const double time = seconds(scan, stage), off = std::abs(alone - share) + (time - alone);
            if (off < best && time <= limit && is_reached(scan.first, stage) && fits(scan, stage)) {
                best = off, taken = time, first = scan.first;
            }
        }
        found.bottleneck_s = std::max(found.bottleneck_s, taken);
        if (stage > 0) found.cuts.push_back(first);
        end = first;
    }
    std::reverse(found.cuts.begin(), found.cuts.end());
    return found;
}

std::optional<Cuts> Cutter::best(double guess, int64_t most_work) {
    double below = guess * (1.0 - kSlack), limit = kEndless;  // no cut is within `below`
    for (double more = 0.0625;; more *= 4.0) {
        limit = more < 64.0 && guess > 0.0 ? guess * (1.0 + more) : kEndless;
        if (feasible(limit)) break;
        if (limit == kEndless) return std::nullopt;
        below = limit;
    }
    Cuts found = walk_back(limit);
    for (bool last_step = false;; last_step = !last_step) {  // halve what is left, or try whether it is the least
        const double next = std::nextafter(found.bottleneck_s, -kEndless);
        if (next <= below) break;
        const bool near = found.bottleneck_s - below < 1e-3 * found.bottleneck_s;
        const double middle = below + (found.bottleneck_s - below) / 2;
        const double tried = (near && last_step) || middle <= below ? next : std::min(middle, next);
        if (feasible(tried)) {
            found = walk_back(tried);
        } else {
            below = tried;
        }
    }
    feasible(found.bottleneck_s);
    found = walk_back(found.bottleneck_s);
    found.least_squares = least_squares(found.bottleneck_s, most_work, found);
    return found;
}

// -- least squares ------------------------------------------------------------------------------

// Replaces the cuts by those of least squares, after `feasible(limit)`; false where that takes too long.
bool Cutter::least_squares(double limit, int64_t most_work, Cuts& found) const {
    const int64_t n = problem_.n_groups, stages = n_stages();
    const double inf = std::numeric_limits<double>::infinity();
    const auto &squares = squares_before_, &links = links_before_;
    double most = 0.0;  // squares of the cuts that are known
    for (int64_t s = stages - 1, end = n; s >= 0; --s) {
        const int64_t first = s ? found.cuts[s - 1] : 0;
        Scan scan(*this, end, first);
        while (scan.grow()) continue;
        const double time = seconds(scan, s);
        most += time * time;
        end = first;
    }
    most *= 1.0 + kSlack;

    std::vector<int64_t> low(n + 1, 1), high(n + 1, 0), offset(n + 2, 0);
    int64_t work = 0, begin = 0;
    for (int64_t end = 0; end <= n; ++end) {
        const double before = before_s_[end], behind = before_s_[n] - before;
        for (int64_t s = low_[end]; s <= high_[end]; ++s) {
            if (!is_reached(end, s)) continue;
            const double x = before + links[s], y = behind + links[stages] - links[s];
            const double head = s ? x * x / squares[s] : 0.0;
            const double tail = s < stages ? y * y / (squares[stages] - squares[s]) : 0.0;
            if (head + tail > most) continue;
            if (low[end] > high[end]) low[end] = s;
            high[end] = s;
        }
        const int64_t states = std::max<int64_t>(0, high[end] - low[end] + 1);
        while ((before - before_s_[begin]) / fastest_ > limit * (1.0 + kSlack)) ++begin;
        offset[end + 1] = offset[end] + states;
        work += states * (end - begin);
    }
    if (work > most_work) return false;

    std::vector<double> best(offset[n + 1], inf), time(class_stage_.size());
    std::vector<int32_t> from(offset[n + 1], -1);
    std::vector<int64_t> timed(class_stage_.size(), -1);  // of which pair `time` is
    int64_t pair = 0;
    best[0] = 0.0;
    for (int64_t end = 1; end <= n; ++end) {
        if (low[end] > high[end]) continue;
        for (Scan scan(*this, end, earliest(end, low[end] - 1, high[end] - 1)); scan.grow(); ++pair) {
            if (scan.seconds() > limit * fastest_ * (1.0 + kSlack)) break;
            const int64_t first = scan.first;
            const bool roomy = scan.is_roomy();
            for (int64_t s = std::max(low[first], low[end] - 1); s <= std::min(high[first], high[end] - 1); ++s) {
                const int32_t kind = class_of_[s];
                if (timed[kind] != pair) {
                    timed[kind] = pair;
                    time[kind] = seconds(scan, s);
                }
                const double value = best[offset[first] + s - low[first]] + time[kind] * time[kind];
                double& least = best[offset[end] + s + 1 - low[end]];
                if (time[kind] > limit || value > least || value == inf || !(roomy || fits(scan, s))) continue;
                least = value;  // of equals, the one that begins first
                from[offset[end] + s + 1 - low[end]] = static_cast<int32_t>(first);
            }
        }
    }
    for (int64_t s = stages, end = n; s > 1; --s) {
        end = from[offset[end] + s - low[end]];
        found.cuts[s - 2] = end;
    }
    return true;
}

// -- where nothing fits -------------------------------------------------------------------------

Misfit Cutter::misfit() {
    feasible(kEndless, true);
    const int64_t n = problem_.n_groups, stages = n_stages();
    const auto ends = [&](int64_t count) {
        for (int64_t end = count; end <= n; ++end) {
            if (is_reached(end, count)) return true;
        }
        return false;
    };
    int64_t stage = 0;
    while (stage < stages - 1 && ends(stage + 1)) ++stage;
    const int64_t later = stages - 1 - stage, memory = problem_.memory_bytes[stage];
    auto found = std::make_tuple(std::numeric_limits<int64_t>::max(), n, n);
    for (int64_t end = later ? stage + 1 : n; end <= n - later; ++end) {
        for (Scan scan(*this, end, 0); scan.grow();) {
            if (least_bytes(scan.first, end, problem_.live[stage]) - memory > std::get<0>(found)) break;
            if (!is_reached(scan.first, stage)) continue;
            const int64_t lacks = scan.bytes(problem_.live[stage]) - memory;
            found = std::min(found, std::make_tuple(lacks, scan.first, end));
        }
    }
    return {stage, std::get<1>(found), std::get<2>(found), std::get<0>(found)};
}

std::optional<int64_t> Cutter::least_stages(const std::vector<int64_t>& live_from_end, int64_t memory) const {
    const int64_t n = problem_.n_groups, none = static_cast<int64_t>(live_from_end.size());
    std::vector<int64_t> least(n + 1, none + 1);  // by first group: stages that cover all from it on
    least[n] = 0;
    for (int64_t end = n; end > 0; --end) {
        if (least[end] >= none) continue;
        const int64_t live = live_from_end[least[end]];
        const auto can = [&](int64_t first) { return least_bytes(first, end, live) <= memory; };
        for (Scan scan(*this, end, first_where(0, end, can)); scan.grow();) {
            if (scan.bytes(live) <= memory) least[scan.first] = std::min(least[scan.first], least[end] + 1);
        }
    }
    return least[0] <= none ? std::optional(least[0]) : std::nullopt;
}

}  // namespace mpipipe::planner
