"""A schedule of your own, named by a config as `pipeline.schedule: examples.own_schedule:order`.

1F1B with twice as many forwards ahead, so that messages travel while a stage works (eager 1F1B, Zhuang
et al. 2023); it keeps more stashes. 3 stages, 6 micro-batches:

    rank 0   F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    rank 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""


def order(n_stages: int, n_micro: int) -> list[str]:
    """One line per stage: F and B of each micro-batch once, B in ascending order."""
    lines = []
    for stage in range(n_stages):
        ahead = min(2 * (n_stages - 1 - stage), n_micro)
        words = [f"F{micro}" for micro in range(ahead)]
        for micro in range(n_micro):
            words += [f"F{ahead + micro}"] * (ahead + micro < n_micro) + [f"B{micro}"]
        lines.append(" ".join(words))
    return lines
