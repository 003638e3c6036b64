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

    in_first, in_second, in_output = set(first.dims), set(second.dims), set(output.dims)
    batch = extent(dims, (dim for dim in dims if dim in in_first & in_second & in_output))
    m = extent(dims, (dim for dim in dims if dim in (in_first & in_output) - in_second))
    n = extent(dims, (dim for dim in dims if dim in (in_second & in_output) - in_first))
    summed = tuple(dim for dim in dims if dim not in in_output)
    k = extent(dims, summed)
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
        roles=DimRoles(sums=summed, unsplit=unsplit, padded=padded),
        saved=tuple(saved),
        layer=layer,
    )
