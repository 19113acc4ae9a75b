"""What inductor is told: options of compiled blocks, and what avoids a fault of Triton from torch 2.14 on."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

R = TypeVar("R")
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN._scaled_mm}
_VIEWS = {_ATEN.view, _ATEN.reshape, _ATEN._unsafe_view}
_PARTS = {*_VIEWS, _ATEN.permute, _ATEN.slice, _ATEN.select, _ATEN.expand, _ATEN.unsqueeze}
_MOVES = {*_PARTS, _ATEN.clone, _ATEN.cat, _ATEN.slice_scatter, _ATEN.full, torch.ops.prims.convert_element_type}
"""What inductor computes as it does pointwise operations."""
_PLACES_OF_DTYPE = {"aten._scaled_mm.default": 6, "lightning_lowprec.block_product.default": 4}
"""Products that may write float32, and which of their arguments says it."""
_FAULTY_FROM = (2, 14)
"""The first version of torch whose code has the instructions."""


@functools.cache
def block_options() -> dict[str, object]:
    """Return the arguments of ``torch.compile`` for blocks with converted layers, as far as this torch knows them.

    Values of up to 60 operations, not 30, are computed again where they are read, instead of written and read. GB per
    block of the 8B-shaped stack (`make ledger`): rowwise 13.8 -> 12.3, rowwise-gw-hp 11.2 -> 10.6, int8 11.9 -> 11.3,
    MS-AMP 11.7 -> 10.8; tensorwise, 128-blocks and MXFP8 as they were. Sums of a residual are written once
    (:func:`_save_sums`), and some largest values are found without a tensor of their own (:func:`_find_largest`).
    """
    from torch._inductor import list_options

    chosen = {
        "realize_opcount_threshold": 60,
        "joint_custom_post_pass": _pass_of(_save_sums),
        "post_grad_custom_post_pass": _pass_of(_after_autograd),
        "static_launch_user_defined_triton_kernels": True,  # of `numerics/kernels.py`, as inductor launches its own
    }
    return {"options": {name: value for name, value in chosen.items() if name in list_options()}}


def _pass_of(change: Callable[[Graph], None]) -> object:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    @final
    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            change(graph)

        def uuid(self) -> object:
            return get_hash_for_files((__file__,), change.__name__)

    return Pass()


def _after_autograd(graph: Graph) -> None:
    _find_largest(graph)
    _add_in_products(graph)
    _end_in_float32(graph)


def _save_sums(graph: Graph) -> None:
    """Let sums of a residual live until the backward, in the graph of forward and backward.

    ``x + layer(...)`` is read by the next norm and its casts, by the next residual, and in the backward. Left alone,
    inductor keeps ``x`` and the layer's output, and adds again in each kernel. The sum is kept in place of the output,
    in as many bytes, or twice as many where the residual is in float32. It is rounded to its dtype, as eager code does.
    """
    for node in graph.nodes:
        if _is_residual(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _find_largest(graph: Graph) -> None:
    """Find the largest absolute value of a tensor together with its sum, and in what the tensor is computed from.

    A gradient is read for its largest value, then for its codes, and where the layer has a bias for its sum over the
    rows. So the largest value goes along the rows first, and one kernel finds both: 0.3 of 2.8 GB per block of GPT-2.
    And a gradient behind a rotation (RoPE) would be written before it is read: if it is made of no more bytes, each
    kernel computes it, 0.16 GB less per block of the 8B-shaped stack. Both hold for tensorwise scales and MS-AMP.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in places:
        looks = [user for user in node.users if _is_look(user)]
        sums = [user for user in node.users if user.target is _ATEN.sum.dim_IntList and user.args[1] == [0]]
        if sums:
            _go_along_rows(graph, looks)
        if looks and len(node.users) > len(looks) and (made := _made_of(node)) is not None:
            for user in (*looks, *sums):
                copies: dict[Node, Node] = {}
                with graph.inserting_before(user):
                    for part in sorted(made, key=places.__getitem__):
                        copies[part] = graph.node_copy(part, lambda old: copies.get(old, old))  # noqa: B023
                user.replace_input_with(node, copies[node])


def _is_look(node: Node) -> bool:
    """Return whether a node leads to the largest absolute value of a whole tensor, and to nothing else."""
    return node.target is _ATEN.abs.default and all(
        user.target is _ATEN.max.default or (user.target is _ATEN.amax.default and len(user.args) == 1)
        for user in node.users
    )


def _go_along_rows(graph: Graph, looks: list[Node]) -> None:
    for look in looks:
        for largest in list(look.users):
            with graph.inserting_before(largest):
                of_columns = graph.call_function(_ATEN.amax.default, (look, [0]))
                of_all = graph.call_function(_ATEN.amax.default, (of_columns,))
            of_columns.meta["val"] = look.meta["val"].amax(0)
            of_all.meta.update(largest.meta)
            largest.replace_all_uses_with(of_all)
            graph.erase_node(largest)


def _made_of(node: Node) -> list[Node] | None:
    """Return the pointwise nodes that make ``node`` of tensors with at most a tenth more bytes; None: it has more."""
    made, inputs, left = dict.fromkeys([node]), dict[Node, int](), [node]
    while left:
        part = left.pop()
        target = part.target
        if isinstance(target, torch._ops.OpOverload) and (
            target.overloadpacket in _MOVES or torch.Tag.pointwise in target.tags
        ):
            made[part] = None
            left += [argument for argument in part.all_input_nodes if argument not in made]
        else:
            inputs[part] = _bytes(part)
    sizes = [*inputs.values(), _bytes(node)]
    known = all(isinstance(size, int) for size in sizes)  # where shapes are dynamic, a comparison would fix them
    return [*made] if known and node not in inputs and sum(inputs.values()) <= 1.1 * sizes[-1] else None


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _add_in_products(graph: Graph) -> None:
    """Let a product in FP8 add the bias of its layer, where attention or the block's output would need a kernel for it.

    A kernel that reads the sum anyway, as GELU's or the next norm's does, adds the bias while it reads. Elsewhere the
    output is read and written once more, and rounded once more, which ``bf16-mixed`` does not do either: 0.16 of 2.2 GB
    per block of a ViT-L.
    """
    for product in graph.find_nodes(op="call_function", target=_ATEN._scaled_mm.default):
        chain, total = _views_of(product)
        if total is None or total.target is not _ATEN.add.Tensor or total.args[0] is not chain[-1] or total.kwargs:
            continue
        bias, values = total.args[1], product.meta["val"]
        fits = isinstance(bias, Node) and _kind(bias) == (values.shape[-1:], values.dtype)
        takes = product.args[4] is None and _kind(product.args[2])[1] == torch.float32
        if fits and takes and not _is_computed_from(total):
            _replace(chain, total)[0].update_arg(4, bias)


def _end_in_float32(graph: Graph) -> None:
    """Let a product in FP8 write float32, where its output is a gradient of a float32 weight and nothing else.

    It was written in bf16, read, and written in float32: one rounding less, and 1.3 of 10.5 GB per block of the
    8B-shaped stack. With a scale per row cuBLASLt writes bf16 only.
    """
    for product in graph.nodes:
        place = _PLACES_OF_DTYPE.get(str(product.target))
        if place is None or (place == 6 and (product.args[4] is not None or not _has_one_scale(product))):
            continue
        chain, cast = _views_of(product)
        if cast is None or _packet(cast) is not torch.ops.prims.convert_element_type:
            continue
        if _kind(cast)[1] == torch.float32 and {user.op for user in cast.users} == {"output"}:
            copies = _replace(chain, cast)
            copies[0].update_arg(place, torch.float32)
            for part in copies:
                part.meta["val"] = part.meta["val"].float()


def _views_of(product: Node) -> tuple[list[Node], Node | None]:
    """Return a product with the only views of it, and the only other node that reads them."""
    chain = [product]
    while len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if _packet(user) not in _VIEWS:
            return chain, user
        chain.append(user)
    return chain, None


def _replace(chain: list[Node], last: Node) -> list[Node]:
    """Put copies of a chain in the place of the node that reads it, which leaves, and return them."""
    copies: dict[Node, Node] = {}
    with last.graph.inserting_before(last):
        for part in chain:
            copies[part] = last.graph.node_copy(part, lambda old: copies.get(old, old))
    last.replace_all_uses_with(copies[chain[-1]])
    for part in (last, *reversed(chain)):
        last.graph.erase_node(part)
    return [*copies.values()]


def _is_computed_from(node: Node) -> bool:
    """Return whether all that reads a tensor, or a part of it, computes what it needs while it reads."""
    for user in node.users:
        if _packet(user) in {*_PARTS, _ATEN.split, _ATEN.split_with_sizes, operator.getitem}:
            if not _is_computed_from(user):
                return False
        elif not {torch.Tag.pointwise, torch.Tag.reduction} & {*getattr(user.target, "tags", ())}:
            return False
    return True


def _packet(node: Node) -> object:
    return getattr(node.target, "overloadpacket", node.target)


def _is_residual(node: Node) -> bool:
    """Return whether a node of the forward adds the output of a product to another tensor of its shape.

    Where the sum has more bytes than the output, it pays behind products in FP8 with one scale alone.
    """
    if node.target is not _ATEN.add.Tensor or node.meta.get("partitioner_tag") == "is_backward":
        return False
    terms = [term for term in node.args if isinstance(term, Node) and _kind(term)[0] == _kind(node)[0]]
    if len(node.users) < 2 or len(terms) != 2:
        return False
    products = [product for product in map(_product_of, terms) if product is not None]
    return any(_kind(x)[1] == _kind(node)[1] or _has_one_scale(x) for x in products)


def _product_of(node: Node) -> Node | None:
    """Return the matrix product whose output a node is, in another shape or dtype, or with a bias."""
    while isinstance(target := node.target, torch._ops.OpOverload):
        if target.namespace in ("lightning_lowprec", "torchao") or target.overloadpacket in _PRODUCTS:
            return node
        is_biased = target is _ATEN.add.Tensor and _kind(node.args[1])[0] != _kind(node)[0]
        if not (is_biased or target.overloadpacket in {*_VIEWS, torch.ops.prims.convert_element_type}):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


def _has_one_scale(product: Node) -> bool:
    is_scaled = product.target is _ATEN._scaled_mm.default
    return is_scaled and product.args[2].meta["val"].numel() == 1  # type: ignore[union-attr]


def _kind(node: Any) -> tuple[object, object]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return getattr(value, "shape", None), getattr(value, "dtype", None)


def compiled(function: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Return ``torch.compile(function, **options)``, with kernels that store float8 as they should."""
    store_float8_right()
    kernel: Callable[..., R] = torch.compile(function, **options)
    return kernel


def store_float8_right() -> None:
    """Let inductor write minima and maxima without the instructions ``min.NaN`` and ``max.NaN``.

    Beside them Triton stores float8 values of a transposed tensor wrongly, in about a quarter of runs
    (github.com/triton-lang/triton/issues/11111). The values are the same: NaN wins over a number. torchao does the same
    in ``convert_to_float8_training``, which only its own layers go through. Code that is compiled already stays.
    """
    version: Any = torch.__version__  # compares with tuples
    if version < _FAULTY_FROM or not torch.cuda.is_available():
        return
    from torch._inductor.codegen import triton

    overrides: Any = getattr(triton, "TritonOverrides", None)
    if not (hasattr(overrides, "minimum") and hasattr(overrides, "maximum")):
        raise ImportError(
            f"torch {torch.__version__} has moved `TritonOverrides`, so compiled kernels may store wrong float8 values."
            " Install a torch that this version of lightning_lowprec supports."
        )
    overrides.minimum = staticmethod(lambda a, b: f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})")
    overrides.maximum = staticmethod(lambda a, b: f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})")
