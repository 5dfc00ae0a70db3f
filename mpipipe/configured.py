"""What a config means in the words of `Pipeline`: one reading for those who train and those who plan."""

from __future__ import annotations

from mpipipe.config import Config
from mpipipe.own_schedules import make_known
from mpipipe.runtime.optimizer import OptimizerSettings


def schedule_name(config: Config) -> str:
    """The name of the schedule; one of the user's own is made known under its dotted path or
    its file."""
    name = config.pipeline.schedule
    make_known("pipeline.schedule", name)
    return name


def optimizer_settings(config: Config) -> OptimizerSettings:
    t = config.train
    return OptimizerSettings(
        kind=t.optimizer, lr=t.lr, betas=t.betas, eps=t.eps, momentum=t.momentum, weight_decay=t.weight_decay,
        warmup=t.warmup, min_lr_ratio=t.min_lr_ratio, steps=t.steps, clip=t.clip,
        bits=t.bits,
    )  # fmt: skip
