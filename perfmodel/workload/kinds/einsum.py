"""Product of two tensors over named dims: linear layers, products of attention, any einsum of two operands."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Product, extent


def einsum(
    name: str,
    first: Operand,
    second: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    second_is_parameter: bool = True,
    first_has_gradient: bool = True,
    second_has_gradient: bool = True,
    grouped: bool = False,
    unsplit: tuple[str, ...] = (),
    padded: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return first[...] * second[...] -> output[...], summed over the dims that the output lacks.

    Forward is one product; backward has one for the gradient of each operand. Dims of both operands and the output are the batch of
    products, those of one operand and the output m or n, those of both operands only k. Each operand is saved for the gradient of the other
    (parameters are in memory anyway). grouped: the batch of products is one call of a grouped GEMM kernel (experts).

    Source: R3 and R4 of the sharding algebra.
    """

    of_batch, of_m, of_n, of_k = list[str](), list[str](), list[str](), list[str]()
    for dim in dims:
        if dim not in output.dims:
            of_k.append(dim)
        elif dim in first.dims and dim in second.dims:
            of_batch.append(dim)
        elif dim in first.dims:
            of_m.append(dim)
        elif dim in second.dims:
            of_n.append(dim)
    batch, m, n, k = extent(dims, of_batch), extent(dims, of_m), extent(dims, of_n), extent(dims, of_k)
    backward, saved = [], []
    if first_has_gradient:
        backward.append(Product(batch=batch, m=m, n=k, k=n, gradient_of=0, is_grouped=grouped))
    if second_has_gradient:
        backward.append(Product(batch=batch, m=k, n=n, k=m, gradient_of=1, is_grouped=grouped))
        saved.append(Data(extent=extent(dims, first.dims), of=0))
    if first_has_gradient and not second_is_parameter:
        saved.append(Data(extent=extent(dims, second.dims), of=1))
    return Operator(
        name=name,
        kind="einsum",
        dims=dims,
        inputs=(first, second),
        output=output,
        forward=(Product(batch=batch, m=m, n=n, k=k, is_grouped=grouped),),
        backward=tuple(backward),
        roles=DimRoles(sums=tuple(of_k), unsplit=unsplit, padded=padded),
        saved=tuple(saved),
        layer=layer,
    )
