"""What waits of a captured model in a backward in two, and how it is made then."""

from __future__ import annotations

import pytest
import torch
from built_in_tiny import captured

from mpipipe.graph.split import LATERS
from mpipipe.ops.deferred import Deferred
from mpipipe.ops.linear import linear

ATEN = torch.ops.aten
LINEAR, CONV = ATEN.linear.default, ATEN.conv2d.default
WITHOUT_GRAPH = {
    ("vgg", "torch"): {LINEAR, CONV},
    ("unet", "torch"): {CONV, ATEN.conv_transpose2d.input},
    ("llama", "torch"): {LINEAR},
    ("llama", "fast"): {linear},
}


@pytest.mark.parametrize(("model", "bits"), WITHOUT_GRAPH)
def test_layers_as_they_are_captured_wait_without_a_graph(model: str, bits: str) -> None:
    """With the call of their operator. A computed bias, or weights that are read twice, would forbid it."""
    variants = captured(model, 2, "fp32", bits)
    code = variants.training_code(variants.specs(2), (), 0, in_two=True)
    deferred = [n.target for n in code.forward.graph.nodes if isinstance(n.target, Deferred)]
    assert {d.op for d in deferred if d.later is not None} == WITHOUT_GRAPH[model, bits]
    assert all(d.later is LATERS.get(d.op) for d in deferred)
