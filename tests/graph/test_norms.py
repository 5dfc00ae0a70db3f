"""BatchNorm: its statistics where it is used twice, who else may read them, and micro-batches that are too
small for it."""

from __future__ import annotations

import inspect

import pytest
import torch
from by_hand import every_cut, specs_of, variants_of
from torch import Tensor, nn

from mpipipe.checks import notes_of_parts
from mpipipe.errors import CaptureError
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.values import TensorSpec

BATCH = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(5))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return outputs.sum(), 1.0


class Shared(nn.Module):
    """One BatchNorm after each of two layers, one of its own after a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.shared, self.own = nn.BatchNorm1d(8, momentum=0.3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, [self.shared, None, self.shared, self.own], strict=True):
            x = torch.tanh(layer(x)) if norm is None else torch.tanh(norm(layer(x)))
        return x


@pytest.mark.slow
def test_a_batch_norm_used_twice_has_the_statistics_of_eager_torch() -> None:
    variants = variants_of(Shared, loss, BATCH)
    source = variants.source
    first = source.materialise([*source.params, *source.buffers])
    eager = Shared()
    eager.load_state_dict(first)
    batches = [BATCH["x"], BATCH["x"] * 2.0 + 1.0]
    for x in batches:
        eager(x)
    seen = []
    for cuts in every_cut(variants, 8):
        buffers = {n: first[n].clone() for n in source.buffers}
        owners: dict[str, set[int]] = {n: set() for n in source.buffers}
        for x in batches:
            sent: list[Tensor] = [x]
            for stage in range(len(cuts) + 1):
                code = variants.code("train", specs_of(BATCH), cuts, stage)
                sent, statistics = code.forward(*sent, *(first[n] for n, _ in code.leaves))
                for update, value in zip(code.updates, statistics, strict=True):
                    owners[update.buffer].add(stage)
                    buffer = buffers[update.buffer]
                    if value is None:
                        buffer.add_(1)
                    else:
                        buffer.mul_(1.0 - update.momentum).add_(value.detach(), alpha=update.momentum)
        assert all(len(stages) == 1 for stages in owners.values()), "one stage has all updates of a buffer"
        assert {n: min(stages) for n, stages in owners.items()} == {
            n: s for n, s in variants.stage_of_param(cuts).items() if n in owners
        }
        seen.append(buffers)
    for name, buffer in eager.named_buffers():  # torch blends in double precision, from unrounded variances
        torch.testing.assert_close(seen[0][name], buffer, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(other[name], seen[0][name]) for other in seen), "the same wherever it is cut"
    assert int(seen[0]["shared.num_batches_tracked"]) == 4
    assert len(variants.graph.groups) > 2, "it may be cut before and after"


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm1d(3)])

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, 4, 4) -> (B, 3)
        x = self.norms[0](self.conv(x)).flatten(1)  # four values for each channel, also of one image
        return self.norms[1](self.fc(x))


def sized(rows: int) -> dict[str, TensorSpec]:
    return {"x": TensorSpec((rows, 1, 4, 4), "float32")}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.slow
def test_a_micro_batch_that_is_too_small_is_refused_by_name(listed: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Images()) if listed else Images()

    variants = Variants(ModelSource(make, 0), loss, sized, 2, "fp32")
    assert variants.graph.groups
    path = "0.norms.1" if listed else "norms.1"
    says = (
        rf"'{path}', a BatchNorm1d, gets a micro-batch of shape \[1, 3\].*pipeline.micro_batches.*LayerNorm"
    )
    with pytest.raises(CaptureError, match=says):
        variants.anatomy("train", sized(1))  # a ragged one
    variants.anatomy("eval", sized(1))
    with pytest.raises(CaptureError, match=says):
        _ = Variants(ModelSource(make, 0), loss, sized, 1, "fp32").graph


# -- other readers of what changes ---------------------------------------------------------------------


class Reads(nn.Module):
    """The statistics are read elsewhere: in training, or in the modes that a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.bn(self.a(x)))
        return y + self.bn.running_mean  # here


class ReadsView(Reads):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.bn.running_var[:1]  # here
        return self.b(self.bn(self.a(x))) * scale


class ReadsCounter(Reads):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x) / (1 + self.count)  # here


class ReadsFrozen(Reads):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.a(x))
        return nn.functional.batch_norm(x, self.bn.running_mean, self.bn.running_var)  # here


class Instances(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.norm(x[..., None].expand(-1, -1, 2))[..., 0])  # here


class Elsewhere(Reads):
    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.bn.running_mean.abs(), self.bn.running_var
        return nn.functional.batch_norm(x, mean, var, training=True)  # here


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Reads, "reads 'bn.running_mean', which a BatchNorm or a counter changes"),
        (ReadsView, "reads 'bn.running_var', which"),
        (ReadsCounter, "reads 'count', which"),
        (ReadsFrozen, "reads 'bn.running_mean', which"),
        (Instances, "aten::instance_norm keeps running statistics.*track_running_stats=False"),
        (Elsewhere, "aten::batch_norm keeps running statistics"),
    ],
)
@pytest.mark.slow
def test_what_changes_at_the_end_of_a_step_has_no_other_reader(model: type[nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){says}") as caught:
        assert variants_of(model, loss, BATCH).primary
    source, start = inspect.getsourcelines(model)
    line = start + next(i for i, text in enumerate(source) if "# here" in text)
    assert f'File "{__file__}", line {line}' in str(caught.value)


class InEvaluation(Reads):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.bn(self.a(x)))
        return y if self.training else y + self.bn.running_mean.abs()


@pytest.mark.slow
def test_evaluation_may_read_them_on_the_stage_that_owns_them() -> None:
    variants = variants_of(InEvaluation, loss, BATCH)
    specs, groups = specs_of(BATCH), variants.graph.groups
    assert variants.code("eval", specs, (), 0).buffers
    before = next(g for g in groups if g.startswith("bn/"))
    assert set(variants.code("eval", specs, (before,), 1).buffers) == {"bn.running_mean", "bn.running_var"}
    after = next(g for g in groups if g.startswith("b/"))
    assert variants.code("train", specs, (after,), 1).buffers == ()
    says = r"(?s)line \d+.*'bn.running_mean' on stage 1 .* in mode eval, but training changes it on stage 0"
    with pytest.raises(CaptureError, match=says):
        variants.code("eval", specs, (after,), 1)


class Tuned(nn.Module):
    """A part of it is in eval mode, as where its statistics are not to move."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.body.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.body(x)))


@pytest.mark.slow
@pytest.mark.parametrize("made", [Tuned, Tuned()], ids=["function", "instance"])
def test_parts_in_eval_mode_stay_so_in_training(made: nn.Module) -> None:
    variants = variants_of(made, loss, BATCH)  # type: ignore[arg-type]
    captured = variants.primary.captured
    assert list(variants.source.in_eval) == ["body", "body.0", "body.1", "body.2"]
    assert {u.buffer.split(".")[0] for u in captured.updates} == {"norm"}
    assert captured.rng
    assert [captured.name[n] for n in captured.rng[0].users] == ["drop/dropout.0"]
    variants.anatomy("eval", specs_of(BATCH))
    again = variants.anatomy("train", {"x": TensorSpec((4, 8), "float32")}).captured
    assert [u.buffer for u in again.updates] == [u.buffer for u in captured.updates]


def test_a_model_in_eval_mode_is_trained_all_of_it() -> None:
    variants = variants_of(Tuned().eval(), loss, BATCH)  # type: ignore[arg-type]
    assert not variants.source.in_eval
    assert len(variants.primary.captured.updates) == 6


def test_a_note_names_the_parts_that_stay_in_eval_mode() -> None:
    assert notes_of_parts(ModelSource(nn.Linear(1, 1), 0), {}) == []
    (note,) = notes_of_parts(ModelSource(Tuned(), 0), {})
    assert note.split("; ")[0].endswith(" given: 'body'")
