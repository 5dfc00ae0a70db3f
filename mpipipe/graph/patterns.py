"""Parts of a captured graph for which there is one operator of our own.

    scaled_dot_product_attention         -> flash_attention
    linear + gelu                        -> linear without bias + bias_gelu
    silu * up                            -> swiglu
    layer_norm, rms_norm, and the latter written out; with the residual add before it
    batch_norm in training, on its own; with the ReLU after it, or a residual add and then that
    linear + reshape + cross_entropy     -> linear_cross_entropy; with what multiplies the output
    linear                               -> the same, adding its weight's gradient in place
    embedding                            -> likewise
    max_pool2d
    unbind, split, chunk of q, k and v   -> parts

Embeddings and pools have the bits of torch on a processor, and are used whatever they are to be.

Found from the graph alone, on every machine alike, whether they are used or not: groups are formed around
them. A match is one group, so no cut parts it; but for a norm and the residual add or ReLU beside it, whose
fused form has the bits of the parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mpipipe.graph.match import Match
from mpipipe.graph.means import equal
from mpipipe.graph.nodes import (
    CAST,
    FLOATS,
    VIEWS,
    Shape,
    all_alike,
    dtype_of,
    evaluate,
    is_op,
    only_user,
    product_of,
    same_dtype,
    times_read,
    val,
)
from mpipipe.graph.regions import region_of
from mpipipe.graph.rewrite import arguments_of, item, schema_name
from mpipipe.ops import fused
from mpipipe.ops.batch_norm import batch_norm, batch_norm_with_statistics
from mpipipe.ops.embedding import embedding
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.linear import linear
from mpipipe.ops.max_pool2d import max_pool2d
from mpipipe.ops.parts import parts
from mpipipe.ops.swiglu import swiglu

if TYPE_CHECKING:
    from mpipipe.graph.anatomy import Anatomy

_MASK_ELEMENTS = 1 << 26  # of a constant mask that is made to see what it is
_AND = ("aten::__and__", "aten::bitwise_and", "aten::logical_and")
_SAME = ("aten::expand", "aten::contiguous", "aten::clone", "aten::alias", CAST)  # of a mask: it, broadcast
_FILL = "aten::masked_fill"
_SCALES = ("aten::mul", "aten::div", _FILL)
_PARTS = ("aten::unbind", "aten::split", "aten::split_with_sizes", "aten::chunk")
_TURNS = ("aten::transpose", "aten::permute")  # views, too
Seen = tuple[bool, tuple[fx.Node, ...]]  # whether only keys up to a query are, and masks of keys


def matches(anatomy: Anatomy) -> tuple[Match, ...]:
    """All of them; of two that overlap, the one that is to be preferred comes first."""
    find = _Finder(anatomy)
    found = [m for rule in find.rules for node in anatomy.order for m in [find.by(rule, node)] if m]
    norms = [find.with_residual(m) for m in found if m.op in (layer_norm, rms_norm)]
    norms += [find.with_relu(m) for m in found if m.op is batch_norm]
    return (*(m for m in norms if m), *found)


class _Finder:
    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.outputs = anatomy, set(anatomy.captured.outputs)
        self.kept = {u.statistic for u in anatomy.captured.updates}
        self.training = anatomy.captured.mode == "train"
        self.position = {n: i for i, n in enumerate(anatomy.captured.graph.nodes)}
        self.masks: dict[tuple[fx.Node, int, int], Seen | None] = {}
        self.rules = (
            self.head_loss, self.linear_gelu, self.linear_gelu_new, self.swiglu, self.rms_written_out,
            self.attention, self.layer_norm, self.rms_norm, self.batch_norm, self.linear, self.embedding,
            self.max_pool2d, self.parts,
        )  # fmt: skip

    def by(self, rule: Callable[[fx.Node], Match | None], node: fx.Node) -> Match | None:
        """What a rule finds that ends in `node`, if it may be replaced."""
        match = rule(node) if "key" not in node.kwargs else None  # whose numbers are drawn: no plain form
        return match if match is not None and self.replaceable(match) else None

    def replaceable(self, match: Match) -> bool:
        """Plain operators of this group order, whose inner results nobody else reads, and nothing of which is
        ever written in place, or where that does not matter."""
        a, inside = self.anatomy, set(match.nodes)
        for n in match.nodes:
            if n not in a.index or not region_of(n).plain:
                return False
            others = any(u in a.needed and u not in inside for u in n.users)
            if n not in match.results and (others or n in self.outputs or n in self.kept):
                return False
        if not match.keeps_values:  # what it reads may be written before it, and its result
            return all(a.last_write.get(a.root(n), -1) < a.index[match.first] for n in match.inputs)
        return not any(a.root(n) in a.last_write for n in (*match.inputs, *match.nodes))

    # -- whole layers --------------------------------------------------------------------------

    def head_loss(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::cross_entropy_loss":
            return None
        g, chain = arguments_of(node), [node]
        x = g["self"]
        while is_op(x, *VIEWS, CAST, _FILL):
            chain.append(x)
            x = x.args[0]
        matrix = product_of(x)
        labels = g["target"]
        if matrix is None or matrix[3] or g["weight"] is not None or g["reduction"] == 0:
            return None
        width = val(x).shape[-1]
        if (
            any(val(n).shape[-1] != width for n in chain[1:])
            or any(is_op(n, CAST) and val(n).dtype != torch.float32 for n in chain)  # in which ours computes
            or val(node).dtype not in FLOATS
            or val(g["self"]).dim() != 2
            or val(labels).dim() != 1
        ):
            return None
        values, weight, bias, _ = matrix
        form = f"linear_cross_entropy {val(values).shape[-1]}x{width} {dtype_of(x)}"
        output = self._scaled_output(node)
        after, then = output or ((), ())
        masks, zero = ([n.args[1] for n in some if is_op(n, _FILL)] for some in (chain, after))
        if not all(mask in self.anatomy.free and any(equal(mask, z) for z in zero) for mask in masks):
            return None  # where one of them is true, these logits count for nothing, and no others may
        dtype = val(node).dtype
        # read after backward only, and no rounded copy of what is made there
        late = self.training and output is not None and dtype == torch.float32
        settings = (g["ignore_index"], g["label_smoothing"], g["reduction"] == 1, dtype, late, then)
        args = (values, weight, bias, labels, *settings)
        nodes = (x, *reversed(chain), *after)
        return Match(fused.head_loss, form, nodes, nodes[-1:], args, product=_product_form(values, x))

    def _scaled_output(self, loss: fx.Node) -> tuple[Sequence[fx.Node], Sequence[tuple[Any, ...]]] | None:
        """The operators between a loss and the output, and each with the other arguments as `head_loss` takes
        them, where all they do is to multiply by numbers that need no gradient; or None."""
        nodes, then, last = list[fx.Node](), list[tuple[Any, ...]](), loss
        while not (last in self.outputs and len(last.users) == 1):
            user = only_user(last)
            if user is None or not is_op(user, *VIEWS, CAST, *_SCALES) or _form(user) != _form(last):
                return None
            if not is_op(user, *VIEWS, CAST):
                others = _others(user, last)
                if others is None:
                    return None
                then.append((user.target, *others))
            nodes.append(user)
            last = user
        return nodes, tuple(then)

    def linear_gelu(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::gelu":
            return None
        return self._gelu(node, node.args[0], [node], arguments_of(node)["approximate"])

    def linear_gelu_new(self, node: fx.Node) -> Match | None:
        """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written out (Hendrycks & Gimpel 2016)."""
        m = Shape()
        x = m.any()
        cube = m.op("mul", m.op("pow", x, 3.0), 0.044715)
        inner = m.op("mul", m.op("add", x, cube), math.sqrt(2 / math.pi))
        whole = m.op("mul", m.op("mul", x, 0.5), m.op("add", m.op("tanh", inner), 1.0))
        if not m.fits((whole, node)):
            return None
        return self._gelu(node, m.of[x], sorted(m.seen, key=self._place), "tanh")

    def _gelu(self, node: fx.Node, x: Any, nodes: list[fx.Node], approximate: str) -> Match | None:
        views: list[fx.Node] = []
        while is_op(x, *VIEWS):
            views.insert(0, x)
            x = x.args[0]
        matrix = product_of(x)
        if matrix is None or matrix[2] is None or val(node).shape[-1] != val(x).shape[-1]:
            return None
        values, weight, bias, transposed = matrix
        form = f"bias_gelu {val(x).shape[-1]} {dtype_of(node)}"
        shape = tuple(val(node).shape)
        args = (values, weight, bias, approximate, transposed, shape)
        product = _product_form(values, x, transposed)
        return Match(fused.linear_gelu, form, (x, *views, *nodes), (node,), args, product=product)

    def swiglu(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::mul":
            return None
        for gate, up in (node.args, node.args[::-1]):
            if not is_op(gate, "aten::silu") or not isinstance(up, fx.Node) or gate is up:
                continue
            x = gate.args[0]
            if isinstance(x, fx.Node) and all_alike(x, up, node):
                form = f"swiglu {val(node).shape[-1]} {dtype_of(node)}"
                return Match(swiglu, form, (gate, node), (node,), (x, up))
        return None

    # -- norms ---------------------------------------------------------------------------------

    def layer_norm(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::layer_norm":
            return None
        g = arguments_of(node)
        x, weight, bias = g["input"], g["weight"], g["bias"]
        if list(g["normalized_shape"]) != list(val(x).shape[-1:]) or not same_dtype(node, x, weight, bias):
            return None
        form = f"layer_norm {val(x).shape[-1]} {dtype_of(x)}"
        return Match(layer_norm, form, (node,), (node,), (x, weight, bias, g["eps"]))

    def rms_norm(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::rms_norm":
            return None
        g = arguments_of(node)
        x, weight, eps = g["input"], g["weight"], g["eps"]
        if list(g["normalized_shape"]) != list(val(x).shape[-1:]) or not same_dtype(node, x, weight):
            return None
        eps = torch.finfo(torch.float32).eps if eps is None else eps  # bfloat16 is computed in float32
        return self._rms(node, [node], x, weight, eps)

    def rms_written_out(self, node: fx.Node) -> Match | None:
        """weight * to(x * rsqrt(mean(x^2) + eps)), x perhaps cast to float32 before."""
        m = Shape()
        x, weight, eps = m.any(), m.any(), m.any()
        mean = m.op("mean", m.op("pow", x, 2), [-1], True)
        scaled = m.op("mul", x, m.op("rsqrt", m.op("add", mean, eps)))
        if not m.fits((m.op("mul", weight, m.cast(scaled)), node)):
            return None
        wide, w = m.of[x], m.of[weight]
        nodes = sorted(m.seen, key=self._place)
        values = wide
        if is_op(wide, CAST) and val(wide.args[0]).dtype == val(node).dtype != val(wide).dtype:
            values, nodes = wide.args[0], [wide, *nodes]
        fits = isinstance(w, fx.Node) and tuple(val(w).shape) == tuple(val(values).shape[-1:])
        if not fits or not isinstance(m.of[eps], float) or not same_dtype(node, values, w):
            return None
        return self._rms(node, nodes, values, w, m.of[eps])

    def _rms(self, node: fx.Node, nodes: list[fx.Node], x: Any, weight: Any, eps: float) -> Match:
        form = f"rms_norm {val(x).shape[-1]} {dtype_of(x)}"
        return Match(rms_norm, form, tuple(nodes), (node,), (x, weight, eps))

    def with_residual(self, norm: Match) -> Match | None:
        """The norm, and the sum that it is of, where one other reads that: the gradient of a sum with more
        readers would be added up in another order."""
        total, casts = norm.args[0], list[fx.Node]()
        while is_op(total, CAST) and val(total).dtype == val(total.args[0]).dtype and len(total.users) > 0:
            casts.insert(0, total)
            total = total.args[0]
        if not is_op(total, "aten::add"):
            return None
        a, b = total.args[:2]
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or total.kwargs or len(total.args) > 2:
            return None
        if val(a).dtype != val(total).dtype:
            a, b = b, a  # under autocast: the stream, in float32, and a branch in bfloat16
        branch = val(b)
        if (
            not all_alike(a, total)
            or branch.shape != val(total).shape
            or branch.dtype not in (val(total).dtype, torch.bfloat16)
        ):
            return None
        read = norm.args[0]
        others = [u for u in read.users if u not in norm.nodes]
        if len(others) != 1 or read in self.outputs:
            return None
        scale = [n for n in norm.args[1:] if isinstance(n, fx.Node)]
        if any(self.position[n] > self.position[read] for n in scale):
            return None  # made after the sum, in whose place the operator would run
        whole, args = (total, *casts, *norm.nodes), (a, *norm.args[1:], b)
        match = Match(norm.op, norm.form, whole, (norm.results[0], read), args, atomic=False)
        return match if self.replaceable(match) else None

    def batch_norm(self, node: fx.Node) -> Match | None:
        if node.target is not batch_norm_with_statistics:
            return None
        x, weight, bias, _ = args = tuple[Any, ...](node.args)
        shape, weights = val(x).shape, [t for t in (weight, bias) if t is not None]
        parts: dict[Any, fx.Node] = {u.args[1]: u for u in node.users if u.target is item}
        if len(shape) < 3 or val(x).dtype not in FLOATS or parts.keys() != {0, 1, 2}:
            return None
        if any(val(t).dtype != torch.float32 for t in weights):
            return None
        form = f"batch_norm {shape[1]}x{math.prod(shape[2:])} {dtype_of(x)}"
        results = tuple(parts[i] for i in range(3))
        return Match(batch_norm, form, (node, *results), results, args, atomic=False)

    def with_relu(self, norm: Match) -> Match | None:
        """The BatchNorm, the ReLU of its result, and an addition between them, where that and the norm read
        nothing that more than one other reads: the gradient of what has more readers would be added up in
        another order."""
        y, *statistics = norm.results
        read, chain, residual = [norm.args[0]], [y], None
        user = only_user(y)
        if is_op(user, "aten::add") and len(user.args) == 2 and not user.kwargs:
            residual = next((a for a in user.args if a is not y), None)
            if not isinstance(residual, fx.Node) or not all_alike(y, residual, user):
                return None
            read, chain = [*read, residual], [*chain, user]
            user = only_user(user)
        if not is_op(user, "aten::relu") or any(times_read(n) > 2 for n in read):
            return None
        nodes, results = (norm.nodes[0], *chain, user, *statistics), (user, *statistics)
        args = (*norm.args, True, residual)
        match = Match(batch_norm, norm.form, nodes, results, args, atomic=False)
        return match if self.replaceable(match) else None

    # -- single operators ----------------------------------------------------------------------

    def attention(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::scaled_dot_product_attention":
            return None
        g = arguments_of(node)
        q, k, v, mask = g["query"], g["key"], g["value"], g["attn_mask"]
        causal = g["is_causal"]
        four = all(val(t).dim() == 4 and val(t).dtype in FLOATS for t in (q, k, v))
        if not four or g["dropout_p"] or val(q).shape[-1] != val(v).shape[-1] or 0 in val(q).shape:
            return None
        (batch, heads, tokens, width), (samples, kv_heads, keys, _) = val(q).shape, val(k).shape
        alike = val(node).shape == val(q).shape and val(k).shape == val(v).shape and samples == batch
        if not alike or not kv_heads or heads % kv_heads:
            return None  # torch's would broadcast
        masks: tuple[fx.Node, ...] = ()
        if mask is not None:
            seen = self._seen(mask, tokens, keys)
            if seen is None:
                return None
            causal, masks = seen
        kind = "-".join(word for word, is_so in (("causal", causal), ("masked", masks)) if is_so) or "full"
        form = f"flash_attention {heads}/{kv_heads}x{tokens}x{keys}x{width} {kind} {dtype_of(node)}"
        args = (q, k, v, masks, causal, g["scale"], val(node).dtype)
        return Match(fused.attention, form, (node,), (node,), args)

    def _seen(self, mask: fx.Node, queries: int, keys: int) -> Seen | None:
        key = mask, queries, keys
        if key not in self.masks:
            self.masks[key] = self._seen_by(*key)
        return self.masks[key]

    def _seen_by(self, mask: fx.Node, queries: int, keys: int) -> Seen | None:
        """Where those parts of a mask that the model makes of nothing hide together nothing, or all keys
        behind the query, and each other part is alike for all queries and heads."""
        value = val(mask)
        if value.dtype != torch.bool or value.dim() != 4:
            return None
        made_of = {part: self.anatomy.made_by(part) for part in self._parts(mask)}
        fixed = [part for part, of in made_of.items() if of <= self.anatomy.free]
        of_keys = tuple(part for part in made_of if part not in fixed)
        size = math.prod(torch.broadcast_shapes(*(val(part).shape for part in fixed)))
        if size > _MASK_ELEMENTS or not all(_is_of_keys(part, keys) for part in of_keys):
            return None
        needed = set[fx.Node]().union(*(made_of[part] for part in fixed))
        real = evaluate(n for n in self.anatomy.operators if n in needed)
        seen = torch.ones((), dtype=torch.bool)
        for part in fixed:
            seen = seen & real[part]
        if bool(seen.all()):
            return False, of_keys
        whole = seen.shape[-2:] == (queries, keys)  # else it is broadcast
        return (True, of_keys) if whole and bool((seen == torch.ones_like(seen).tril()).all()) else None

    def _parts(self, mask: fx.Node) -> list[fx.Node]:
        """Masks of which it is the `and`, each broadcast to its shape. Nothing writes into a free one."""
        parts, todo = list[fx.Node](), [mask]
        while todo:
            n = todo.pop()
            args = n.args if is_op(n, *_AND) else n.args[:1] if is_op(n, *_SAME) else ()
            if n in self.anatomy.free and args and all(_is_mask(a) for a in args):
                todo += args
            elif n not in parts:
                parts.append(n)
        return parts

    def linear(self, node: fx.Node) -> Match | None:
        matrix = product_of(node)
        if not self.training or matrix is None or not self._learns(matrix[1]):
            return None
        x, weight, bias, transposed = matrix
        form = f"linear {val(x).shape[-1]}x{val(node).shape[-1]} {dtype_of(node)}"
        args, product = (x, weight, bias, transposed), _product_form(x, node, transposed)
        return Match(linear, form, (node,), (node,), args, contested=False, product=product)

    def embedding(self, node: fx.Node) -> Match | None:
        if not self.training or schema_name(node) != "aten::embedding":
            return None
        g = arguments_of(node)
        weight, padding = g["weight"], g["padding_idx"]
        if not self._learns(weight) or g["scale_grad_by_freq"] or g["sparse"]:
            return None
        rows, width = val(weight).shape
        form = f"embedding {rows}x{width} {dtype_of(node)}"
        args = (g["indices"], weight, None if padding < 0 else padding)
        return Match(embedding, form, (node,), (node,), args, contested=False, same_bits=True)

    def max_pool2d(self, node: fx.Node) -> Match | None:
        if schema_name(node) != "aten::max_pool2d":
            return None
        args = tuple(arguments_of(node).values())
        form = f"max_pool2d {'x'.join(map(str, val(node).shape[-3:]))} {dtype_of(node)}"
        return Match(
            max_pool2d, form, (node,), (node,), args, contested=False, same_bits=True, keeps_values=False
        )

    def parts(self, node: fx.Node) -> Match | None:
        """Three equal ones that `flash_attention` may read, and nothing else: q, k and v in any order."""
        if not self.training or not is_op(node, *_PARTS):
            return None
        of = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if len(node.users) != len(of) or len(val(node)) != 3 or of.keys() != {0, 1, 2}:
            return None
        results = of[0], of[1], of[2]
        if len({val(n).shape for n in results}) != 1:
            return None
        readers = {_reader(n) for n in results}
        if len(readers) != 1 or (reader := readers.pop()) is None or not self.by(self.attention, reader):
            return None
        x, dim = node.args[0], arguments_of(node)["dim"]
        size = None if is_op(node, "aten::unbind") else val(results[0]).shape[dim]
        form = f"parts {dtype_of(x)}"
        return Match(parts, form, (node, *results), results, (x, dim, size), atomic=False, contested=False)

    def _learns(self, weight: Any) -> bool:
        learning, param = self.anatomy.learning, self.anatomy.captured.param
        return isinstance(weight, fx.Node) and param.get(weight) in learning

    def _place(self, node: fx.Node) -> int:
        return self.anatomy.index.get(node, -1)


# -- looking at nodes ----------------------------------------------------------------------------


def _reader(node: fx.Node) -> fx.Node | None:
    """What reads it, and nothing else, through views."""
    reader = only_user(node)
    while is_op(reader, *VIEWS, *_TURNS):
        reader = only_user(reader)
    return reader


def _is_mask(node: Any) -> bool:
    return isinstance(node, fx.Node) and val(node).dtype == torch.bool


def _is_of_keys(mask: fx.Node, keys: int) -> bool:
    """Whether it is (B or 1, 1 or H, 1 or T, S), alike for all heads and queries."""
    shape, stride = val(mask).shape, val(mask).stride()
    return len(shape) == 4 and shape[3] == keys and all(shape[i] == 1 or not stride[i] for i in (1, 2))


def _product_form(x: fx.Node, node: fx.Node, transposed: bool = False) -> str:
    """Of a product that the kernel `gemm` serves; that of a head is of all logits, which come in tiles."""
    if dtype_of(node) != "float32":
        return ""
    return f"gemm {val(x).shape[-1]}x{val(node).shape[-1]} float32{' transposed' if transposed else ''}"


def _others(node: fx.Node, value: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of one of `_SCALES` but `value`, where it multiplies that by what has no gradient."""
    first, *others = node.args[::-1] if node.args[0] is not value and is_op(node, "aten::mul") else node.args
    filled = not is_op(node, _FILL) or others[1:] == [0]
    known = all(not isinstance(a, fx.Node) or not val(a).requires_grad for a in others)
    return tuple(others) if first is value and filled and known and not node.kwargs else None


def _form(node: fx.Node) -> tuple[Any, ...]:
    return tuple(val(node).shape), val(node).dtype
