"""Where a model may be cut, and what crosses the cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from by_hand import specs_of, variants_of
from tiny import SHAPES, captured, cross_entropy, even_cuts, full_but
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.errors import CaptureError, PlanError
from mpipipe.graph.anatomy import Anatomy
from mpipipe.graph.cut import Code, Port, stage_code, stage_table, stages_of
from mpipipe.graph.groups import boundaries, group_of
from mpipipe.graph.program import Mode
from mpipipe.graph.rewrite import mutated_inputs
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.ops.embedding import embedding
from mpipipe.runtime.transport import Form, as_bytes
from mpipipe.values import Graph, TensorSpec

VARIANTS = [("train", 2), ("train", 3), ("train", 5), ("eval", 3), ("predict", 1)]


def some_cuts(groups: tuple[str, ...], n: int = 12) -> Iterator[tuple[str, ...]]:
    """All stages but one as small as can be, at either end; then some at random."""
    yield groups[1:4]
    yield groups[-3:]
    draw = random.Random(3)
    for _ in range(n):
        places = draw.sample(range(1, len(groups)), min(draw.randint(1, 3), len(groups) - 1))
        yield tuple(groups[i] for i in sorted(places))


def codes(variants: Variants, cuts: tuple[str, ...], mode: str = "train", rows: int = 2) -> list[Code]:
    return [variants.code(mode, variants.specs(rows), cuts, s) for s in range(len(cuts) + 1)]  # type: ignore[arg-type]


# -- groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.slow
def test_no_boundary_parts_tuples_views_or_later_writes(model: str) -> None:
    """Stated anew over the operators: what is alive at a boundary, and who touches its memory later."""
    anatomy = captured(model, 2).primary
    starts = boundaries(anatomy)
    assert starts[0] == 0
    assert len(starts) > 3
    for start in starts[1:]:
        before, after = anatomy.order[:start], set(anatomy.order[start:])
        alive = [n for n in before if not after.isdisjoint(n.users)]
        written_later = {anatomy.root(t) for n in after for t in mutated_inputs(n)}
        assert alive
        for node in alive:
            name = anatomy.captured.name[node]
            assert isinstance(node.meta["val"], Tensor), f"{name} is a tuple"
            assert anatomy.root(node) not in written_later, f"{name} is written after the cut"


@pytest.mark.slow
def test_what_a_kernel_may_fuse_stays_together() -> None:
    anatomy = captured("gpt", 2).primary
    group = {anatomy.captured.name[n]: g for n, g in group_of(anatomy).items()}
    together = [
        ("blocks.0.mlp.fc/linear.0", "blocks.0.mlp.act/gelu.0"),
        ("blocks.0.mlp.proj/linear.0", "blocks.0.mlp.drop/dropout.0"),
        ("blocks.0.mlp.proj/linear.0", "blocks.0/add.1"),
        ("head/linear.0", "loss/cross_entropy_loss.0"),
    ]
    assert [pair for pair in together if group[pair[0]] != group[pair[1]]] == []
    assert group["blocks.0/add.1"] < group["blocks.1.ln_1/layer_norm.0"]


class Convolves(nn.Module):
    """A linear layer first, then convolutions, the last of which is the head."""

    def __init__(self, convolution: type[nn.Conv1d]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(convolution(2, 2, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize(
    ("convolution", "dims"),
    [
        (nn.Conv1d, 1),
        (nn.Conv3d, 3),
        (nn.ConvTranspose1d, 1),
        (nn.ConvTranspose2d, 2),
        (nn.ConvTranspose3d, 3),
    ],
)
@pytest.mark.slow
def test_a_head_may_be_any_convolution(convolution: type[nn.Conv1d], dims: int) -> None:
    def specs(rows: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((rows, 2, *[8] * dims), "float32")}

    source = ModelSource(lambda: Convolves(convolution), 0)
    v = Variants(source, lambda y, _: (y.square().sum(), 1.0), specs, 2, "fp32")
    assert [name.split("/")[0] for name in v.graph.groups] == ["first", *(f"layers.{i}" for i in range(4))]


@pytest.mark.slow
def test_groups_are_the_same_for_any_batch_size() -> None:
    assert captured("gpt", 5).graph.groups == captured("gpt", 2).graph.groups


# -- cuts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", full_but(["gpt", "conv and norm"], SHAPES))
@pytest.mark.slow
def test_one_statement_of_a_cut_means_the_same_in_every_variant(model: str) -> None:
    variants = captured(model, 2)
    for cuts in some_cuts(variants.graph.groups, 4):
        table = stage_table(variants.graph, cuts)
        for mode, rows in VARIANTS:
            anatomy = variants.anatomy(mode, variants.specs(rows))  # type: ignore[arg-type]
            found = {anatomy.captured.name[n]: s for n, s in stages_of(anatomy, table).items()}
            assert {n: s for n, s in found.items() if table.get(n, s) != s} == {}, (mode, rows)
            parts = codes(variants, cuts, mode, rows)
            for before, after in pairwise(parts):
                assert before.sent == after.received
            assert parts[0].received == ()


def live(graph: Graph, first_group: int) -> set[str]:
    """Made before a group and used in it or later: brute force over the plain value."""
    made = {n.name for n in graph.nodes if 0 <= n.group < first_group}
    return {name for n in graph.nodes if n.group >= first_group for name in n.inputs if name in made}


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.slow
def test_what_crosses_is_what_is_alive(model: str) -> None:
    variants = captured(model, 2)
    graph, anatomy = variants.graph, variants.primary
    name_of = {n.name: anatomy.captured.name[n] for n in anatomy.order}
    for cuts in some_cuts(graph.groups):
        for code, cut in zip(codes(variants, cuts)[1:], cuts, strict=True):
            assert {name_of[p.name] for p in code.received} == live(graph, graph.groups.index(cut))


@pytest.mark.slow
def test_a_skip_is_relayed_through_the_stages_between() -> None:
    variants = captured("skips", 2)
    parts = codes(variants, even_cuts(variants.graph.groups, 5))
    passed_on = [{p.name for p in code.received} & {p.name for p in code.sent} for code in parts[1:-1]]
    assert passed_on[0] & passed_on[1], "one passes two stages that do not use it"


@pytest.mark.slow
def test_batch_inputs_never_cross_each_stage_loads_its_own() -> None:
    for model in SHAPES:
        variants = captured(model, 2)
        keys = {n.name for n in variants.primary.captured.inputs}
        for cuts in some_cuts(variants.graph.groups, 4):
            for code in codes(variants, cuts):
                assert not keys & {p.name for p in code.received + code.sent}
    parts = codes(captured("skips", 2), even_cuts(captured("skips", 2).graph.groups, 4))
    assert [code.inputs for code in parts] == [("x",), (), (), ("x", "y")]


class Masked(nn.Module):
    """A mask of integers and constants, used by two layers that a cut may part: it is T x T, what
    crosses otherwise T x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("window", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 8)
        place = torch.arange(tokens.shape[1])
        mask = (place[:, None] >= place) & (place[:, None] - place < self.window)
        mask = mask & (tokens != 0)[:, None, :]
        x = self.embed(tokens)
        for layer in (self.one, self.two):
            y = layer(x)
            x = x + functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)
        return self.head(x)


def masked() -> Variants:
    def specs(rows: int) -> dict[str, TensorSpec]:
        return {key: TensorSpec((rows, 16), "int64") for key in ("tokens", "labels")}

    return Variants(ModelSource(Masked, 0), cross_entropy, specs, 2, "fp32")


@pytest.mark.slow
def test_integers_and_constants_are_made_again_where_they_are_needed() -> None:
    variants = masked()
    graph = variants.graph
    free = {n.name for n in graph.nodes if n.group == -1}
    assert {"/arange.0", "/ge.0", "/sub.0", "/__and__.0", "/ne.0"} <= free
    assert not any(s.dtype.startswith("float") for n in graph.nodes if n.group == -1 for s in n.outputs)
    cut = next(g for g in graph.groups if g.startswith("two/"))
    before, after = codes(variants, (cut,))
    for code in (before, after):
        assert "aten.arange.default" in {str(n.target) for n in code.forward.graph.nodes}
        assert code.buffers == ("window",)
        assert "tokens" in code.inputs
    assert {p.spec.dtype for p in before.sent} == {"float32"}
    assert all(p.spec.shape == (2, 16, 4) for p in before.sent)


@pytest.mark.slow
@pytest.mark.parametrize("model", SHAPES)
def test_the_stages_together_are_the_model(model: str) -> None:
    """Every operator that exists once is in one stage, every parameter use in one leaf."""
    variants = captured(model, 2)
    anatomy: Anatomy = variants.primary
    free = {n.name for n in anatomy.free}
    ours = {n: m.op for m in anatomy.lowered(anatomy.order) for n in m.nodes}
    once = sorted(ours[n].__name__ if n in ours else n.name for n in anatomy.order)
    for cuts in some_cuts(variants.graph.groups, 4):
        parts = codes(variants, cuts)
        found = [
            n.target.__name__ if n.target in ours.values() else n.name
            for code in parts for n in code.forward.graph.nodes
            if n.op == "call_function" and n.name not in free
        ]  # fmt: skip
        assert sorted(found) == once
        leaves = [leaf for code in parts for leaf in code.leaves]
        assert len(set(leaves)) == len(leaves)
        owner = variants.stage_of_param(cuts)
        used = {name: s for s, code in reversed(list(enumerate(parts))) for name, _ in code.leaves}
        assert {n: s for n, s in used.items() if owner[n] != s} == {}, "the owner is the first user"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens) + self.table(tokens.flip(1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("one_group", [True, False])
@pytest.mark.slow
def test_gradients_that_autograd_adds_up_first_are_left_to_it(one_group: bool) -> None:
    """Of two look-ups in one group, torch adds the sum of both to what is there."""
    variants = Variants(ModelSource(Twice, 0), cross_entropy, SyntheticTokens(50, 6, 0).specs, 2, "fp32")
    uses = {} if one_group else variants.uses
    code = stage_code(variants.primary, stage_table(variants.graph, ()), uses, 1, 0)
    ours = [n for n in code.forward.graph.nodes if n.target is embedding]
    assert len(ours) == (0 if one_group else 2)


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        (("blocks.7/add.0",), "no such group"),
        (("head/linear.0", "ln_f/layer_norm.0"), "must ascend"),
        (("ln_f/layer_norm.0", "ln_f/layer_norm.0"), "must ascend"),
        (("wte/embedding.0",), "none may be the first group"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(cuts: tuple[str, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        stage_table(captured("gpt", 2).graph, cuts)


# -- parameters that another mode reads elsewhere --------------------------------------------------------


class InEvaluation(nn.Module):
    """In evaluation one trained and one frozen layer are used once more, later."""

    def __init__(self, again: str) -> None:
        super().__init__()
        self.a, self.b, self.again = nn.Linear(4, 4), nn.Linear(4, 4), again
        self.fixed = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.a(self.fixed(x))))
        return y if self.training else getattr(self, self.again)(y)


def in_evaluation(again: str) -> Variants:
    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return outputs.square().sum(), outputs.shape[0]

    return variants_of(lambda: InEvaluation(again), loss, {"x": torch.ones(2, 4)})


@pytest.mark.slow
def test_what_training_leaves_as_it_is_may_be_read_on_any_stage() -> None:
    variants = in_evaluation("fixed")
    cut = next(g for g in variants.graph.groups if g.startswith("b/"))
    assert variants.borrowed("train", variants.first, (cut,)) == {}
    assert variants.borrowed("eval", variants.first, ()) == {}
    found = variants.borrowed("eval", variants.first, (cut,))
    assert {stage: set(names) for stage, names in found.items()} == {1: {"fixed.weight", "fixed.bias"}}
    assert variants.code("eval", variants.first, (cut,), 1).leaves


class EarlyAndFused(nn.Module):
    """Returns what its first layer makes, too; evaluation has an operator of its own on the last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.a(x)
        y = torch.tanh(self.b(torch.tanh(first)))
        return self.c(y) if self.training else y @ self.c.weight.squeeze().t(), first


@pytest.mark.slow
def test_what_reads_a_weight_alone_is_where_training_reads_it() -> None:
    """An output as well: it goes on from there to the last stage."""

    def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return outputs[0].square().sum(), outputs[0].shape[0]

    x = torch.ones(2, 4)
    variants = variants_of(EarlyAndFused, loss, {"x": x})
    cuts = tuple(next(g for g in variants.graph.groups if g.startswith(layer)) for layer in ("b/", "c/"))
    assert variants.borrowed("eval", variants.first, cuts) == {}
    weights, sent = variants.source.materialise(variants.source.params), list[Tensor]()
    for stage, reads in enumerate([{"a.weight", "a.bias"}, {"b.weight", "b.bias"}, {"c.weight"}]):
        code = variants.code("predict", variants.first, cuts, stage)
        assert {name for name, _ in code.leaves} == reads
        sent, _ = code.forward(*sent, *[x for _ in code.inputs], *(weights[name] for name, _ in code.leaves))
    model = EarlyAndFused().eval()
    model.load_state_dict(weights)
    for found, expected in zip(sent, model(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.slow
def test_what_training_changes_on_another_stage_is_refused_on_every_rank(stage: int) -> None:
    variants = in_evaluation("a")
    assert variants.code("eval", variants.first, (), 0).leaves
    cut = next(g for g in variants.graph.groups if g.startswith("b/"))
    says = r"(?s)line \d+.*'a.weight' on stage 1 .* in mode eval, but training changes it on stage 0: .*"
    with pytest.raises(CaptureError, match=says):
        variants.code("eval", variants.first, (cut,), stage)


def test_a_cut_is_checked_for_all_that_was_met() -> None:
    variants = in_evaluation("a")
    cut = next(g for g in variants.graph.groups if g.startswith("b/"))
    variants.check((cut,), [0, 1])  # of training alone
    variants.anatomy("eval", variants.first)
    variants.check((), [0])
    with pytest.raises(CaptureError, match="in mode eval, but training changes it"):
        variants.check((cut,), [0])


# -- what is sent -------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """In training dropout makes the views dense that evaluation sends, and `first` is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.dense = nn.Linear(4, 257), nn.Dropout(0.1), nn.Linear(257, 10)
        self.queries, self.head = nn.Parameter(torch.ones(1, 5, 6)), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        queries = self.drop(self.queries.expand(len(x), -1, -1))
        h = torch.tanh(self.up(x))
        pooled = self.drop(h[:, 0])
        y = torch.tanh(self.dense(pooled))
        return {"logits": self.head(y) + self.head.bias * queries.sum(1)[:, :3], "first": h[:, 1]}


class Conjugate(nn.Module):
    """Circular correlation: conjugates are only marked as such until something is computed with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = (torch.fft.rfft(layer(x).sum(1)) for layer in (self.a, self.b))
        return {"logits": self.head(torch.fft.irfft(a.conj() * b.conj(), n=8))}


def of_logits(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return outputs["logits"].square().sum(), 3.0


def sent_on(t: Tensor, port: Port) -> Tensor:
    """As it arrives at another rank, where there were other numbers before."""
    form = Form.of(port)
    arrived = form.empty()
    as_bytes(arrived)[:] = 255
    as_bytes(arrived)[:] = as_bytes(form.shape_like(t))
    return arrived


@pytest.mark.parametrize("model", [Pooled, Conjugate])
@pytest.mark.parametrize("mode", ["train", "eval", "predict"])
def test_what_is_sent_arrives_as_it_was(model: type[nn.Module], mode: Mode) -> None:
    batch = {"x": torch.randn(33, 7, 4)}  # products of these sizes have other bits without the gaps
    variants = variants_of(model, of_logits, batch)
    weights = variants.source.materialise(variants.source.params)

    def outputs(cuts: tuple[str, ...]) -> list[Tensor]:
        sent: list[Tensor] = []
        for stage in range(len(cuts) + 1):
            code = variants.code(mode, specs_of(batch), cuts, stage)
            received = [sent_on(t, port) for t, port in zip(sent, code.received, strict=True)]
            rest = [*(batch[key] for key in code.inputs), *(weights[name] for name, _ in code.leaves)]
            with torch.no_grad():
                sent = list(code.forward(*received, *rest, *((0, 0) if code.random else ()))[0])
        return sent

    expected, groups = outputs(()), variants.graph.groups
    for cuts in [*((group,) for group in groups[1:]), groups[1:]]:
        found = outputs(tuple(cuts))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), cuts
