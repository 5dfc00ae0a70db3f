"""Weights are built one by one, on the rank that needs them, and are the same whoever builds them."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from tiny import MODELS, Case, capture, even_cuts, plan_of
from torch import Tensor, nn

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import CaptureError
from mpipipe.graph.source import ModelSource
from mpipipe.runtime.trainer import Trainer


class ManyInits(nn.Module):
    """Every way to start a weight that is likely to be met, some of them not parameter by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        self.cut_off = nn.Parameter(torch.empty(5, 7).normal_(std=0.02).clamp_(-0.04, 0.04))
        self.uniform = nn.Parameter(nn.init.xavier_uniform_(torch.empty(4, 8), gain=2.0))
        self.copy = nn.Parameter(self.uniform.detach().clone() * 2.0 + 1.0)
        self.turned = nn.Parameter(self.orthogonal.detach().t())  # not contiguous
        self.rows = nn.Parameter(torch.randn(3, 4)[1:])
        both = torch.rand(8)
        self.left, self.right = nn.Parameter(both[:4].clone()), nn.Parameter(both[4:].clone())
        self.zeroed = nn.Embedding(5, 3, padding_idx=2)
        self.ruled = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.lstm, self.conv = nn.LSTM(3, 4), nn.Conv2d(2, 3, 3)
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))


FACTORIES = {**{name: factory for name, (factory, _) in MODELS.items()}, "many inits": ManyInits}


def build(factory: object, seed: int = 7) -> tuple[ModelSource, list[str]]:
    source = ModelSource(factory, seed)  # type: ignore[arg-type]
    return source, [*source.params, *source.buffers]


@pytest.mark.parametrize("model", FACTORIES)
def test_any_part_is_as_in_the_whole_and_torch_s_generator_is_not_read(model: str) -> None:
    source, names = build(FACTORIES[model])
    whole, draw = source.materialise(names), random.Random(1)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for size in (1, 2, len(names) // 2, len(names)):
        part = draw.sample(names, min(size, len(names)))
        own, _ = build(FACTORIES[model])  # another rank: its own source
        made = own.materialise(part)
        assert list(made) == part
        assert [n for n in part if not torch.equal(made[n], whole[n])] == []
    assert torch.equal(torch.get_rng_state(), state)
    for name, t in whole.items():
        assert (t.shape, t.dtype) == (source.tensor(name).shape, source.tensor(name).dtype), name
        assert t.is_contiguous()


def test_the_seed_and_the_name_decide() -> None:
    source, names = build(MODELS["gpt"][0])
    again, other = build(MODELS["gpt"][0])[0], build(MODELS["gpt"][0], seed=8)[0]
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(source.materialise([name])[name], again.materialise([name])[name])
    assert not torch.equal(source.materialise([name])[name], other.materialise([name])[name])
    weights = [t.flatten()[:16] for t in source.materialise(names).values() if t.dim() == 2]
    assert len({tuple(w.tolist()) for w in weights}) == len(weights)  # no two draw the same numbers


def test_what_depends_on_another_is_built_with_it() -> None:
    source, _ = build(ManyInits)
    made = source.materialise(["copy", "turned", "left", "right", "zeroed.weight", "frequencies"])
    uniform, orthogonal = source.materialise(["uniform", "orthogonal"]).values()
    assert torch.equal(made["copy"], uniform * 2.0 + 1.0)
    assert torch.equal(made["turned"], orthogonal.t())
    torch.testing.assert_close(orthogonal @ orthogonal.t(), torch.eye(6))
    assert not torch.equal(made["left"], made["right"])
    assert made["zeroed.weight"][2].abs().sum() == 0
    assert torch.equal(made["frequencies"], 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))


def test_weights_are_drawn_as_the_author_wrote() -> None:
    source, _ = build(MODELS["gpt"][0])
    names = ["blocks.1.mlp.fc.weight", "blocks.1.mlp.fc.bias", "ln_f.weight"]
    weight, bias, norm = source.materialise(names).values()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
    assert abs(float(weight.mean())) < 0.002
    assert bias.abs().sum() == 0
    assert (norm == 1).all()


@pytest.mark.parametrize("model", ["gpt", "conv and norm", "thrice"])
def test_first_weights_do_not_depend_on_the_cut(model: str) -> None:
    case = Case(model)
    source = case.variants.source
    names = {*source.params, *source.buffers}

    def body(comm: Communicator) -> dict[str, Tensor]:
        variants = capture(model)  # as a real rank: nothing shared
        plan = plan_of(case, "1f1b", even_cuts(variants.graph.groups, comm.size))
        return Trainer(comm, variants, plan, case.settings, case.dataset.batch).state_dict()

    whole = source.materialise(names)
    for n_stages in (1, 3):
        parts = run_local(n_stages, body)
        assert sum(map(len, parts)) == len(names)  # each is built by its owner alone
        for name, t in (item for part in parts for item in part.items()):
            assert torch.equal(t, whole[name]), (n_stages, name)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"returned int, not a torch\.nn\.Module"):
        ModelSource(lambda: 3, 0)  # type: ignore[arg-type, return-value]


class Foreign(nn.Module):
    def __init__(self, made_outside: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) * made_outside)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        if self.weight.sum() > 0:
            self.bias = nn.Parameter(torch.zeros(3))


def test_weights_made_from_a_tensor_of_outside_are_its_values() -> None:
    outside = torch.arange(3.0)
    made = ModelSource(lambda: Foreign(outside), 0).materialise(["weight"])
    assert torch.equal(made["weight"], outside)


def test_an_initialisation_that_reads_values_is_refused_with_the_user_s_line() -> None:
    line = inspect.getsourcelines(Looks)[1] + 4
    with pytest.raises(CaptureError, match="reads the values of a tensor while the model is made") as caught:
        ModelSource(Looks, 0)
    assert f'File "{__file__}", line {line}' in str(caught.value)
