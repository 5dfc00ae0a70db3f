"""The whole configuration, and which legal values do not go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import model_validator

from mpipipe.config.sections import (
    CaptureConfig,
    DataConfig,
    EvalConfig,
    GptConfig,
    KernelsConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    SampleConfig,
    Section,
    TextConfig,
    TrainConfig,
)

ENDLESS_BATCHES = 8  # of an evaluation on data without an end, where nobody says how many
# what each kind of built-in data can feed, by the name of the model
_TOKENS = ("gpt", "llama", "lstm")
_IMAGES = ("vgg", "resnet")
_FEEDS = {"text": _TOKENS, "tokens": _TOKENS, "images": _IMAGES, "digits": _IMAGES}


class Config(Section):
    model: ModelConfig = GptConfig()
    data: DataConfig = TextConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    capture: CaptureConfig = CaptureConfig()
    pipeline: PipelineConfig = PipelineConfig()
    kernels: KernelsConfig = KernelsConfig()
    run: RunConfig = RunConfig()
    sample: SampleConfig = SampleConfig()

    def with_pipeline(self, **changed: Any) -> Config:
        """With other values of these keys of `pipeline`, which are not checked."""
        return self.model_copy(update={"pipeline": self.pipeline.model_copy(update=changed)})

    @property
    def micro_batch(self) -> int | None:
        """Samples per training micro-batch; where they do not divide, later ones have one less. None where
        their number is searched."""
        count = self.pipeline.micro_batches
        return None if count == "auto" else math.ceil(self.train.batch / count)

    @property
    def eval_batch(self) -> int:
        return self.eval.batch or self.train.batch

    @property
    def eval_batches(self) -> int:
        """Of data without an end."""
        return self.eval.batches or ENDLESS_BATCHES

    @model_validator(mode="after")
    def _values_fit(self) -> Config:
        for problem in _misfits(self):
            raise ValueError(problem)
        return self


def _misfits(c: Config) -> Iterator[str]:
    for section in (c.model, c.data, c.pipeline):
        yield from section.misfits()
    model, data, p = c.model.name, c.data.name, c.pipeline
    if ":" not in model and model not in _FEEDS.get(data, (model,)):
        kinds = [name for name, models in _FEEDS.items() if model in models]
        yield (
            f"model.name = {model} cannot read data.name = {data}; "
            f"set data.name to {' or '.join([*kinds, 'synthetic'])}"
        )
    if p.micro_batches != "auto" and c.train.batch < p.micro_batches:
        yield (
            f"train.batch = {c.train.batch} is smaller than pipeline.micro_batches = {p.micro_batches}; "
            "a micro-batch needs a sample: raise the one or lower the other"
        )
    if not c.kernels.compiled and c.train.bits == "fast":
        yield (
            f"kernels = off, and train.bits = {c.train.bits}, which are those of the compiled kernels; set "
            "train.bits to torch, or leave kernels out"
        )
    if c.run.spares and c.run.recover != "mpi":
        yield (
            f"run.spares = {c.run.spares}, and run.recover = {c.run.recover}: a spare takes over in the same "
            "job only; set run.recover to mpi, or run.spares to 0"
        )
    t = c.train
    if t.keep_every and (not t.save_every or t.keep_every % t.save_every):
        yield (
            f"train.keep_every = {t.keep_every} is no multiple of train.save_every = {t.save_every}, so "
            "there would be nothing to keep; change one"
        )
