"""The code of a stage on another device: "meta" stands for it, whose tensors mix with none of main memory."""

from __future__ import annotations

import pytest
import torch
from tiny import SHAPES, captured
from torch import Tensor

from mpipipe.graph.capture import autocast
from mpipipe.graph.cut import Code
from mpipipe.graph.place import placed
from mpipipe.graph.variants import Variants

META = torch.device("meta")


def arguments(variants: Variants, code: Code) -> list[object]:
    """Of `code.forward`, on META."""
    anatomy = variants.primary
    c = anatomy.captured
    batch = {key: n.meta["val"] for n, key in c.inputs.items()}
    buffers = {name: n.meta["val"] for n, name in c.buffer.items()}
    like: list[Tensor] = [batch[key] for key in code.inputs]
    like += [anatomy.node_of_param[name].meta["val"] for name, _ in code.leaves]
    like += [buffers[name] for name in code.buffers]
    received = [
        torch.empty_strided(p.spec.shape, p.stride, dtype=getattr(torch, p.spec.dtype), device=META)
        for p in code.received
    ]
    there = [torch.empty(t.shape, dtype=t.dtype, device=META) for t in like]
    return [*received, *there, *((0, 0) if code.random else ())]


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.slow
def test_every_stage_computes_where_its_arguments_are(model: str) -> None:
    variants = captured(model, 2)
    groups = variants.graph.groups
    for cuts in ((), (groups[len(groups) // 2],)):
        for stage in range(len(cuts) + 1):
            code = variants.code("train", variants.first, cuts, stage)
            there = placed(code, META)
            with autocast(variants.precision, "cpu"):
                sent, statistics = there.forward(*arguments(variants, code))
            assert sent
            assert {t.device for t in (*sent, *statistics) if t is not None} == {META}
            assert [tuple(t.shape) for t in sent] == [p.spec.shape for p in code.sent]


def test_code_stays_as_it_is_for_the_processor_and_is_moved_once_for_another_device() -> None:
    variants = captured("gpt", 2)
    code = variants.code("train", variants.first, (), 0)
    before = str(code.forward.graph)
    assert placed(code, torch.device("cpu")) is code
    assert placed(code, META) is placed(code, META)
    assert str(code.forward.graph) == before
