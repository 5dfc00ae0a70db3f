"""`no_grad`, `enable_grad`, `autocast` and constants inside forward: bits and gradients of eager torch."""

from __future__ import annotations

import pytest
import torch
from by_hand import differences, every_cut, plain, specs_of, staged, variants_of
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.graph.capture import Batch
from mpipipe.graph.pieces import pieces
from mpipipe.graph.profile import Profiler
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.values import Graph


def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
    return outputs.float().square().sum(), 1.0


BATCH = {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("inv", 1.0 / torch.arange(1.0, 5.0), persistent=False)


class NoGrad(Base):
    """One parameter only ever seen under no_grad, results used again outside, a view among them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            scale = self.second(y).sigmoid()
            same, view = y, y[:, :4]
            with torch.enable_grad():
                z = self.third(y)
        return z * scale + same + torch.cat([view, view], 1)


class Rotary(Base):
    """Tables as HF makes them: no_grad, autocast off, from positions and a buffer."""

    @torch.no_grad()
    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(x.shape[0])
        with torch.autocast(device_type="cpu", enabled=False):
            angle = position.float()[:, None] @ self.inv[None, :].float()
            angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            cos, sin = self.table(x)
            y = layer(x)
            x = y * cos + y.flip(-1) * sin
        return x


class Mixed(Base):
    """A region without autocast and one with it, whatever the run does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = self.second(y.float())
        with torch.autocast("cpu", torch.bfloat16):
            y = self.third(y)
        return y if torch.is_autocast_enabled("cpu") else y * 2.0


class Constants(Base):
    """From lists and numbers; one is written; one decides an index; one is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.linspace(0.5, 4.0, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0])
        shift = torch.tensor([0.5] * 8)
        shift[2:4] = x[0, :2].detach()
        y = self.first(x) * scale + shift
        y = self.second(y)[:, torch.tensor([3, 1, 2, 0, 7, 6, 5, 4])]
        return self.third(y) * scale * torch.tensor(0.25) + self.offset * self.offset[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [NoGrad, Rotary, Mixed, Constants])
@pytest.mark.slow
def test_bits_and_gradients_are_those_of_eager_torch(model: type[nn.Module], precision: str) -> None:
    variants = variants_of(model, loss, BATCH, precision)
    expected = plain(variants, model, BATCH)
    for cuts in every_cut(variants):
        assert differences(expected, staged(variants, cuts, BATCH)) == [], cuts


class ViewApart(Base):
    """A view from under no_grad that crosses cuts."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            view, same = y.view_as(y), y.contiguous()
        return self.third(torch.tanh(self.second(same)) * view)


@pytest.mark.slow
def test_a_view_made_under_no_grad_has_no_gradient() -> None:
    variants = variants_of(ViewApart, loss, BATCH)
    expected = plain(variants, ViewApart, BATCH)
    for cuts in every_cut(variants):
        assert differences(expected, staged(variants, cuts, BATCH)) == [], cuts
    profiler = Profiler(variants.primary, "fp32")
    for piece in pieces(variants.primary, variants.graph, variants.uses):
        profiler.sample(piece)


@pytest.mark.slow
def test_tables_and_constants_are_made_again_where_they_are_needed() -> None:
    for model, width in ((Rotary, 1), (Constants, 1)):
        variants = variants_of(model, loss, BATCH)
        for cuts in every_cut(variants):
            for stage in range(len(cuts)):
                code = variants.code("train", specs_of(BATCH), cuts, stage)
                crosses = [p for p in code.sent if not p.needs_grad]
                assert len(crosses) < width + (model is Constants), [p.name for p in crosses]


@pytest.mark.slow
def test_the_graph_s_hash_knows_regions_and_the_values_of_constants() -> None:
    class Scaled(Base):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.factor != 3.0):
                y = torch.cos(x)
            return self.first(y) * torch.tensor([self.factor] * 8)

    hashes = []
    for Scaled.factor in (1.0, 1.0, 2.0, 3.0):
        hashes.append(variants_of(Scaled, loss, BATCH).graph.hash)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


class Numbers(Base):
    """Each number is one that a user may change between two runs."""

    slope, rate, momentum, turned, smoothing = 0.1, 0.2, 0.3, False, 0.1

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=self.momentum)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.leaky_relu(self.norm(self.first(x)), self.slope)
        y = functional.dropout(y, self.rate)
        return self.second(x) - y if self.turned else y - self.second(x)


def smoothed(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
    labels = outputs.detach().argmax(-1)
    total = functional.cross_entropy(outputs, labels, reduction="sum", label_smoothing=Numbers.smoothing)
    return total, 1.0


@pytest.mark.slow
def test_the_graph_s_hash_knows_numbers_and_not_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph(seed: int = 0) -> Graph:
        return Variants(ModelSource(Numbers, seed), smoothed, lambda _: specs_of(BATCH), 3, "fp32").graph

    first = graph()
    assert graph(seed=1) == first
    assert next(n.settings for n in first.nodes if n.name == "/dropout.0") == "('%0', 0.2, True)"
    hashes = {first.hash}
    changes = {"slope": 0.2, "rate": 0.3, "momentum": 0.4, "turned": True, "smoothing": 0.0}
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(Numbers, name, value)
            hashes.add(graph().hash)
    assert len(hashes) == 1 + len(changes)
