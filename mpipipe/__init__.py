"""mpipipe: pipeline-parallel training of PyTorch models over MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mpipipe.errors import MpipipeError as MpipipeError
    from mpipipe.models.hf.build import build as hf_model  # noqa: F401
    from mpipipe.models.losses import from_mean as from_mean
    from mpipipe.pipeline import Pipeline as Pipeline
    from mpipipe.pipeline import Step as Step
    from mpipipe.planner.schedules import register as register_schedule  # noqa: F401
    from mpipipe.runtime.optimizer import OptimizerSettings as OptimizerSettings

# name -> where it is. Loaded when first used: the planner's rooms are imported without torch.
_PUBLIC = {
    "Pipeline": "mpipipe.pipeline:Pipeline",
    "Step": "mpipipe.pipeline:Step",
    "OptimizerSettings": "mpipipe.runtime.optimizer:OptimizerSettings",
    "MpipipeError": "mpipipe.errors:MpipipeError",
    "from_mean": "mpipipe.models.losses:from_mean",
    "hf_model": "mpipipe.models.hf:build",
    "register_schedule": "mpipipe.planner.schedules:register",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mpipipe' has no attribute {name!r}")
    import importlib

    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
