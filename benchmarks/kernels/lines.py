"""What `python -m benchmarks.kernels` says of a case: the line as JSON, and for people.

Every line has kernel, case, threads, ratio, aim, bar, met and limit. `bar` is `aim` on the processor for
which it was set, null on others; `limit` is null where there is none. By its kind it has more:

    a kernel       bytes, flops; achieved beside limit
    a whole step   achieved and limit are ratios; over torch as it comes also routing, what that alone gains
    a call         us, torch_us: microseconds; bar is the most of ours
    memory         ours_bytes, theirs_bytes
    not measured   ratio null, reason
"""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.harness import Case, Compared, Skipped
from benchmarks.kernels.limits import Limits
from benchmarks.kernels.memory import Memory, Taken
from mpipipe.planner.sizes import counted

Line = dict[str, Any]
_IN_SECONDS = "as fast as", "faster than", "is faster"
_IN_MEMORY = "as much memory as", "less memory than", "takes less"


def lines(case: Case, found: Compared, threads: int, limit: Limits, barred: bool) -> list[Line]:
    """Of what took turns. A case with a floor is limited by it, any other by the machine."""
    if case.call:
        return [_of_call(case, found, threads, barred)]
    line = _head(case, threads, found.ratio, barred) | _measured(case, found, limit)
    return [line, *([_of_stock(case, found, threads, barred)] if found.stock else [])]


def of_memory(case: Memory, found: Taken, threads: int) -> Line:
    """The bar is for any processor: all take the same bytes."""
    return _head(case, threads, found.ratio, True) | {
        "best": found.best,
        "ours_bytes": found.ours_bytes,
        "theirs_bytes": found.theirs_bytes,
        "rounds": 1,
    }


def of_skipped(case: Skipped, threads: int, barred: bool) -> Line:
    return _head(case, threads, None, barred) | {"reason": case.reason, "rounds": 0}


def _head(
    case: Case | Memory | Skipped, threads: int, ratio: float | None, barred: bool, of_route: float = 1.0
) -> Line:
    """of_route: what the aim is multiplied with."""
    aim = None if case.bar is None else case.bar * of_route
    bar = aim if barred else None
    return {
        "kernel": case.kernel,
        "case": case.case,
        "threads": threads,
        "ratio": None if ratio is None else round(ratio, 3),
        "aim": aim,
        "bar": bar,
        "met": None if bar is None or ratio is None else ratio >= bar,
        "limit": None,
    }


def _measured(case: Case, found: Compared, limit: Limits) -> Line:
    if found.at_most is None:
        rates = Limits(case.bytes / found.ours_s / 1e9, case.flops / found.ours_s / 1e9)
        sizes = {"bytes": case.bytes, "flops": case.flops}
        beside = sizes | {"achieved": rates.of(False), "limit": limit.of(case.bf16)}
    else:
        beside = _beside(found.ratio, found.at_most)
    return _turns(found) | beside


def _turns(found: Compared) -> Line:
    return {
        "quartiles": [round(q, 3) for q in found.quartiles],
        "ours_s": found.ours_s,
        "best": found.best,
        "ratios": {name: round(ratio, 3) for name, ratio in found.ratios.items()},
        "unmeasured": found.unmeasured,
        "rounds": found.rounds,
    }


def _beside(ratio: float, at_most: float) -> Line:
    return {"achieved": {"ratio": round(ratio, 3)}, "limit": {"ratio": round(at_most, 3)}}


def _of_stock(case: Case, found: Compared, threads: int, barred: bool) -> Line:
    """Of torch as it comes, over which the route gains, too: that much higher is the bar."""
    stock = found.stock
    assert stock is not None
    line = _head(case, threads, stock.ratio, barred, stock.routing) | _turns(found)
    line |= {
        "case": f"{case.case}, over torch as it comes",
        "quartiles": [round(q, 3) for q in stock.quartiles],
        "best": "torch as it comes",
        "ratios": {"torch as it comes": round(stock.ratio, 3)},
        "routing": round(stock.routing, 3),
    }
    return line | (_beside(stock.ratio, stock.at_most) if stock.at_most is not None else {})


def _of_call(case: Case, found: Compared, threads: int, barred: bool) -> Line:
    us = 1e6 * found.ours_s
    line = _head(case, threads, found.ratio, barred)
    line["met"] = None if line["bar"] is None else us <= line["bar"]
    return line | {"us": round(us, 2), "torch_us": round(us * found.ratio, 2)} | _turns(found)


def said(line: Line) -> str:
    """For people."""
    at = f"{line['kernel']}, {line['case']}, {counted(line['threads'], 'thread')}: "
    if line["ratio"] is None:
        return f"{at}not measured: {line['reason']}"
    if "us" in line:
        us = f"{line['us']:.1f} us a call{_bar(line, ' us')}; {_torchs(line)} {line['torch_us']:.1f} us"
        return f"{at}{us}, {_against(line)}"
    if "ours_bytes" in line:
        ours, best = line["ours_bytes"], line["theirs_bytes"][line["best"]]
        megabytes = f"{ours / 1e6:.0f} MB against {best / 1e6:.0f}"
        return f"{at}{_against(line)}{_bar(line)}; {megabytes}"
    return f"{at}{_against(line)}{_bar(line)}; {line['ours_s'] * 1e3:.3g} ms, {_most(line)}"


def _against(line: Line) -> str:
    """Which side is better and by how much, and between which ratios the middle half of the rounds was."""
    ratio, best, half = line["ratio"], _torchs(line), ""
    if "quartiles" in line:
        low, high = line["quartiles"]
        half = f" ({low:.2f} to {high:.2f})"
    equal, more, less = _IN_MEMORY if "ours_bytes" in line else _IN_SECONDS
    if f"{ratio:.2f}" == "1.00":
        return f"x1.00{half}, {equal} {best}"
    return f"x{ratio:.2f}{half} {more} {best}" if ratio > 1 else f"x{ratio:.2f}{half}: {best} {less}"


def _torchs(line: Line) -> str:
    """torch's best way, by name: torch (add, norm)."""
    best: str = line["best"]
    return best if best.startswith("torch") else f"torch ({best})"


def _bar(line: Line, unit: str = "") -> str:
    if line["bar"] is not None:
        return f", bar {line['bar']:.2f}{unit}: {'met' if line['met'] else 'MISSED'}"
    return "" if line["aim"] is None else f", aim {line['aim']:.2f}{unit}"


def _most(line: Line) -> str:
    achieved, limit = line["achieved"], line["limit"]
    if "ratio" not in limit:
        rates = f"{achieved['gf_s']:.1f} of {limit['gf_s']:.0f} GF/s"
        return f"{achieved['gb_s']:.1f} of {limit['gb_s']:.0f} GB/s, {rates}"
    routing = f", {line['routing']:.2f} times by the route alone" if "routing" in line else ""
    share = f"{100 / limit['ratio']:.0f} % of {line['best']}'s seconds"
    return f"at most {limit['ratio']:.2f}, as the products alone take {share}{routing}"
