"""Weights are built one by one, on the rank that needs them, and are the same whoever builds them."""

from __future__ import annotations

import inspect
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MODELS, Case, capture, even_cuts, full_but, plan_of
from torch import Tensor, nn
from torch.nn.init import trunc_normal_

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import CaptureError, ConfigError
from mpipipe.graph.source import ModelSource
from mpipipe.runtime.trainer import Trainer


class ManyInits(nn.Module):
    """Every way to start a weight that is likely to be met, some of them not parameter by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        self.between = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 25), std=0.02, a=-0.03, b=0.03))
        self.far = nn.Parameter(trunc_normal_(torch.empty(64, dtype=torch.bfloat16), 0.0, 1.0, 2.0, 3.0))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        rates = [float(rate) for rate in torch.linspace(0, 0.5, 3)]  # reads values, but none that are random
        self.rates = nn.Parameter(torch.tensor(rates) + (torch.ones(2, 2).sum() > 3.0).int())
        self.cut_off = nn.Parameter(torch.empty(5, 7).normal_(std=0.02).clamp_(-0.04, 0.04))
        self.uniform = nn.Parameter(nn.init.xavier_uniform_(torch.empty(4, 8), gain=2.0))
        self.copy = nn.Parameter(self.uniform.detach().clone() * 2.0 + 1.0)
        self.turned = nn.Parameter(self.orthogonal.detach().t().clone())  # not contiguous
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
@pytest.mark.slow
def test_any_part_is_as_in_the_whole_and_torch_s_generator_is_not_read(model: str) -> None:
    source, names = build(FACTORIES[model])
    whole, draw = source.materialise(names), random.Random(1)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for size in (1, len(names) // 2, len(names)):
        part = draw.sample(names, min(size, len(names)))
        own, _ = build(FACTORIES[model])  # another rank: its own source
        made = own.materialise(part)
        assert list(made) == part
        assert [n for n in part if not torch.equal(made[n], whole[n])] == []
    assert torch.equal(torch.get_rng_state(), state)
    for name, t in whole.items():
        assert (t.shape, t.dtype) == (source.tensor(name).shape, source.tensor(name).dtype), name
        assert t.is_contiguous()


@pytest.mark.slow
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
    assert torch.equal(source.materialise(["rates"])["rates"], torch.tensor([1.0, 1.25, 1.5]))
    assert torch.equal(made["frequencies"], 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))


def test_weights_are_drawn_as_the_author_wrote() -> None:
    source, _ = build(MODELS["gpt"][0])
    names = ["blocks.1.mlp.fc.weight", "blocks.1.mlp.fc.bias", "ln_f.weight"]
    weight, bias, norm = source.materialise(names).values()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
    assert abs(float(weight.mean())) < 0.002
    assert bias.abs().sum() == 0
    assert (norm == 1).all()


def test_truncated_normals_are_drawn_by_torch_itself() -> None:
    """One operator of the tape, so its draws are those that torch makes from the same generator."""
    source, _ = build(ManyInits)
    between, far = source.materialise(["between", "far"]).values()
    assert float(between.min()) >= -0.03 < 0.03 >= float(between.max())
    assert 0.012 < float(between.std()) < 0.018  # of the normal distribution cut at 1.5 deviations: 0.0149
    assert far.dtype == torch.bfloat16
    assert 2.0 <= float(far.min()) <= float(far.max()) <= 3.0
    assert not torch.equal(between, build(ManyInits, seed=8)[0].materialise(["between"])["between"])
    assert nn.init.trunc_normal_(torch.empty(3)).isfinite().all()  # as ever, outside of a factory


@pytest.mark.parametrize("model", full_but(["thrice"], ["gpt", "conv and norm", "thrice"]))
@pytest.mark.slow
def test_first_weights_do_not_depend_on_the_cut(model: str) -> None:
    case = Case(model)
    source = case.variants.source
    names = {*source.params, *source.buffers}

    def body(comm: Communicator) -> dict[str, Tensor]:
        variants = capture(model)  # as a real rank: nothing shared
        plan = plan_of(case, "1f1b", even_cuts(variants.graph.groups, comm.size))
        return Trainer(comm, variants, plan, case.settings, case.dataset).state_dict()

    whole = source.materialise(names)
    parts = run_local(3, body)
    assert sum(map(len, parts)) == len(names)  # each is built by its owner alone
    for name, t in (item for part in parts for item in part.items()):
        assert torch.equal(t, whole[name]), name


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


def test_layers_that_a_constructor_copies_are_made_without_a_warning() -> None:
    def made() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "layers.1.norm1.weight" in ModelSource(made, 0).params


def test_a_tensor_that_is_neither_parameter_nor_buffer_has_its_values() -> None:
    def make() -> nn.Module:
        model = nn.Linear(2, 3)
        model.table = torch.arange(6.0).view(2, 3).t() * 2  # type: ignore[assignment]
        model.drawn = torch.rand(2)  # type: ignore[assignment]
        return model

    source = ModelSource(make, 0)
    assert torch.equal(source.constant(source.module.table), torch.tensor([[0.0, 6], [2, 8], [4, 10]]))
    with pytest.raises(CaptureError, match=r"drawn at random .* register it"):
        source.constant(source.module.drawn)


# -- a model that is there already, and a list of layers -----------------------------------------------


class Tied(nn.Module):
    """Two names for one weight, a frozen layer, flat LSTM weights, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(self.embed(tokens))[0]))


@pytest.mark.parametrize("wrapped", [False, True], ids=["instance", "function that returns an instance"])
def test_an_instance_keeps_its_values_and_is_not_touched(wrapped: bool) -> None:
    model = Tied().eval()
    before = {name: (id(t), t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    source = ModelSource((lambda: model) if wrapped else model, 0)
    assert source.module is not model
    assert type(source.module) is Tied
    assert source.alias["head.weight"] == "embed.weight" == next(iter(source.params))
    assert source.module.head.weight is source.module.embed.weight
    assert not source.params["norm.weight"].requires_grad
    made = source.materialise([*source.params, *source.buffers])
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(made) == list(values)
    for name, t in made.items():
        assert torch.equal(t, values[name]), name
        t.add_(1)  # its own memory
    assert all(p.device.type == "cpu" and p.untyped_storage().data_ptr() for p in model.parameters())
    for name, t in model.state_dict(keep_vars=True).items():
        assert (id(t), t._version) == (before[name][0], before[name][2])
        assert torch.equal(t, before[name][1])
    assert not model.training


def test_what_is_saved_is_what_torch_saves() -> None:
    for model in (Tied(), ManyInits(), nn.Sequential(Tied(), nn.BatchNorm1d(3))):
        source, saved = ModelSource(model, 0), model.state_dict()
        assert set(source.persistent) == {source.alias[name] for name in saved}
        assert "scratch" not in "".join(source.persistent)
    assert list(ModelSource(Tied(), 0).persistent)[-3:] == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "convert",
    [nn.Module.double, nn.Module.bfloat16, nn.Module.float, nn.Module.cpu,
     lambda m: m.to("cpu", torch.float64), lambda m: m.half().double()],
    ids=["double", "bfloat16", "float", "cpu", "to", "twice"],
)  # fmt: skip
@pytest.mark.slow
def test_a_factory_may_convert_what_it_makes(convert: Callable[[nn.Module], nn.Module]) -> None:
    plain, source = ModelSource(Tied, 0), ModelSource(lambda: convert(Tied()), 0)
    model = Tied()
    model.load_state_dict(plain.materialise([*plain.params, *plain.persistent]), strict=False)
    model.scratch.copy_(plain.materialise(["scratch"])["scratch"])
    values = {**dict(convert(model).named_parameters()), **dict(model.named_buffers())}
    made = source.materialise([*source.params, *source.buffers])
    assert list(made) == list(values)
    for name, t in made.items():
        assert t.dtype == values[name].dtype, name
        assert torch.equal(t, values[name]), name
    assert source.module.head.weight is source.module.embed.weight
    assert not source.params["norm.weight"].requires_grad


def test_a_layer_that_is_converted_alone_still_shares_its_weight() -> None:
    def make() -> nn.Module:
        model = Tied()
        model.lstm.weight_hh_l0 = model.lstm.weight_ih_l0
        model.head.half()
        model.lstm.double()
        return model

    module = ModelSource(make, 0).module
    assert module.embed.weight is module.head.weight
    assert module.embed.weight.dtype == torch.float16
    assert module.lstm._flat_weights[0] is module.lstm._flat_weights[1] is module.lstm.weight_hh_l0
    assert nn.Linear(2, 2).double().weight.dtype == torch.float64  # as ever, outside of a factory


@pytest.mark.parametrize("as_function", [False, True])
def test_a_list_of_layers_is_a_sequential(as_function: bool) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)]

    source = ModelSource(layers if as_function else layers(), 0)
    assert type(source.module) is nn.Sequential
    assert list(source.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]


class OnDisk:
    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values

    @property
    def names(self) -> list[str]:
        return list(self.values)

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.values[name])


@pytest.mark.parametrize("model", [Tied, Tied()], ids=["factory", "instance"])
def test_initial_values_replace_those_it_has_by_any_name(model: object) -> None:
    plain = ModelSource(model, 3).materialise(["lstm.bias_hh_l0"])  # type: ignore[arg-type]
    initial = OnDisk({"head.weight": torch.ones(5, 4), "norm.running_mean": torch.full((4,), 2.0)})
    source = ModelSource(model, 3, initial)  # type: ignore[arg-type]
    made = source.materialise(["embed.weight", "norm.running_mean", "lstm.bias_hh_l0"])
    assert torch.equal(made["embed.weight"], torch.ones(5, 4))
    assert torch.equal(made["norm.running_mean"], torch.full((4,), 2.0))
    assert torch.equal(made["lstm.bias_hh_l0"], plain["lstm.bias_hh_l0"])
    for name, t in made.items():
        out = torch.zeros(t.numel() + 1)[1:].view(t.shape)
        source.fill(name, out)
        assert torch.equal(out, t)


# -- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: 3, r"the model, or what makes it, is of type int, not a torch\.nn\.Module"),
        (3, r"is of type int, not a torch\.nn\.Module"),
        ([nn.ReLU(), torch.relu], "layer 1 of the list of layers is of type builtin_function"),
        (lambda: [nn.Linear(2, 2), nn.Linear], "layer 1 of the list of layers is of type type"),
        (lambda: nn.LazyLinear(3), "a weight has no shape yet.*number of input features"),
        (lambda: nn.LazyLinear(3).half(), "a weight has no shape yet"),
        (nn.LazyLinear(3), "'weight' has no shape yet.*number of input features"),
        (lambda: nn.Sequential(torch.jit.script(nn.ReLU())), r"'0' was made by torch\.jit.*before torch.jit"),
        (torch.jit.script(nn.Linear(2, 2)), r"'the model' was made by torch\.jit.*give the module itself"),
        (nn.Linear(2, 3, device="meta"), r"'weight' is on the device meta, not on the CPU.*\.to\('cpu'\)"),
    ],
)
def test_what_is_no_model_is_refused(model: object, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        ModelSource(model, 0)  # type: ignore[arg-type]


@pytest.mark.slow  # its first call imports the compiler
def test_what_torch_compile_made_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"what torch\.compile made of one; give the module itself"):
        ModelSource(torch.compile(nn.Linear(2, 2)), 0)  # type: ignore[arg-type]


def test_an_instance_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"a Linear, cannot be copied .* give the function that makes it"):
        ModelSource(model, 0)


class Penalises(nn.Module):
    """Hooks and functions of each way to know the model, of which its copy has none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.kept = nn.Linear(2, 2), list[Tensor]()
        kept, layers, method = self.kept, [self.lin], self.note
        if how == "self":
            self.lin.register_forward_hook(lambda m, i, out: self.kept.append(out))
        elif how == "kept":
            self.lin.register_forward_pre_hook(lambda m, i: kept.append(i[0]))
        elif how == "default":
            self.lin.then = [lambda x, to=self.lin.weight: x @ to]  # type: ignore[assignment]
        elif how == "layers":
            self.then = partial(lambda x, n: layers[n](x), n=0)
        elif how == "method":
            self.then = lambda x: method(x)
        elif how == "partial":  # which is copied with what it is given, as a method is
            self.then = partial(Penalises.note, self)
            self.lin.register_forward_hook(self.hook)

    def note(self, x: Tensor) -> Tensor:
        return self.lin(x)

    def hook(self, *_: object) -> None:
        self.kept.clear()


@pytest.mark.parametrize(
    ("how", "place", "variable"),
    [("self", "hook of 'lin'", "self"), ("kept", "hook of 'lin'", "kept"), ("default", "'lin.then'", "to"),
     ("layers", "'then'", "layers"), ("method", "'then'", "method")],
)  # fmt: skip
def test_a_function_that_knows_the_given_instance_is_refused(how: str, place: str, variable: str) -> None:
    says = f"{place} is or has the function .*lambda.*, which knows '{variable}', a .* give the function that"
    with pytest.raises(CaptureError, match=says):
        ModelSource(Penalises(how), 0)
    assert ModelSource(lambda: Penalises(how), 0).params


def test_what_is_copied_with_the_given_instance_is_not_refused() -> None:
    model = Penalises("partial")
    twin: Any = ModelSource(model, 0).module
    assert twin.then.args[0] is twin
    model.register_forward_hook(lambda m, i, out: torch.relu(out))
    assert ModelSource(model, 0).params


def test_two_parameters_in_one_memory_are_refused() -> None:
    def made(make: Callable[[Tensor], Tensor]) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        model[1].weight = nn.Parameter(make(model[0].weight.detach()))
        return model

    for model in (made(Tensor.t), lambda: made(Tensor.t)):
        with pytest.raises(
            CaptureError, match=r"'0\.weight' and '1\.weight' are two tensors that share memory"
        ):
            ModelSource(model, 0)
    assert ModelSource(made(lambda w: w.t().clone()), 0).params
    assert ModelSource(made(Tensor.t).requires_grad_(False), 0).params, "nothing changes them"
    columns, parts = torch.ones(3, 4), nn.ParameterList()
    parts += [nn.Parameter(columns[:, :2]), nn.Parameter(columns[:, 2:])]
    assert len(ModelSource(parts, 0).params) == 2


def test_an_initialisation_that_reads_draws_is_refused_with_the_user_s_line() -> None:
    line = inspect.getsourcelines(Looks)[1] + 4
    with pytest.raises(CaptureError, match="reads the values of random weights while the model") as caught:
        ModelSource(Looks, 0)
    assert f'File "{__file__}", line {line}' in str(caught.value)


def test_a_file_that_is_read_while_the_model_is_made_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    first = torch.load(tmp_path / "w.pt")

    def inside() -> nn.Module:
        model = nn.Linear(2, 2)
        model.load_state_dict(torch.load(tmp_path / "w.pt"))
        return model

    def before() -> nn.Module:
        model = nn.Linear(2, 2)
        model.load_state_dict(first)
        return model

    with pytest.raises(CaptureError, match="load the file before it and copy from that, give the model itse"):
        ModelSource(inside, 0).materialise(["weight"])
    assert torch.equal(ModelSource(before, 0).materialise(["weight"])["weight"], first["weight"])


def test_what_a_factory_raises_is_named_with_its_line() -> None:
    def made() -> nn.Module:
        raise ValueError("of its own")

    def refuses() -> nn.Module:
        raise ConfigError("as it is")

    line = inspect.getsourcelines(made)[1] + 1
    with pytest.raises(CaptureError, match=r"ValueError: of its own\n.*while the model is made") as caught:
        ModelSource(made, 0)
    assert str(caught.value).startswith(f'File "{__file__}", line {line}')
    with pytest.raises(ConfigError, match=r"^as it is$"):
        ModelSource(refuses, 0)


def test_first_values_are_made_anew_each_time() -> None:
    """torch.tensor(0), which BatchNorm counts from, is a constant of the tape: nobody may count in it."""
    source = ModelSource(lambda: nn.BatchNorm1d(4), 0)
    first = source.materialise(["num_batches_tracked"])["num_batches_tracked"]
    first.add_(5)
    assert source.materialise(["num_batches_tracked"])["num_batches_tracked"] == 0
    assert first == 5
