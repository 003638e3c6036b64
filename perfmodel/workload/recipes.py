"""Recipes of products in 8 and 4 bits: which copies of what they multiply are made, kept and moved.

All three products of a linear operator are low. Embedding, output matrix, router, norms, the core of attention and the loss stay as they
are, and so do master weights, gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from perfmodel.foundation.dtypes import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How operands are scaled and held.

    product         what products are computed in
    needs           what a chip must have a FLOP rate in, for its units to take these scales
    copy_bytes      of an element of one copy, scales included
    weight_copies   copies of a weight that live beside the one in 16 bits: a second one where products want another order of their operands
                    or scales run along the other dim
    activation_copies, gradient_copies   copies that a cast writes: for the product at hand, and for the gradient of the weight
    sends_rows      a row may travel to its experts as it is cast, its scales with it: they are of a part of the row
    gathers_weights one copy of a weight serves all its products, so that it is enough to gather that one
    is_order_alone  copies differ in the order of their entries alone: there is one where products take either
    row_multiple    rows of an expert are padded to a multiple of it before grouped products
    reads_twice     a cast reads its tensor once more before, for the largest entry of it
    """

    name: str
    product: Dtype
    needs: Dtype
    copy_bytes: float
    weight_copies: int
    activation_copies: int
    gradient_copies: int
    row_multiple: int
    is_order_alone: bool
    reads_twice: bool
    sends_rows: bool
    gathers_weights: bool
    source: str

    def on(self, *, any_operand_order: bool) -> Recipe:
        """On a chip whose products take operands in either order, or do not."""
        if not (any_operand_order and self.is_order_alone):
            return self
        return replace(self, weight_copies=1, activation_copies=1, gradient_copies=1)


#: Operators whose weights stay in 16 bits or more though they are products: what they make decides where tokens go.
KEPT_HIGH = ("router", "shared_gate")

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe(
                name="fp8-delayed", product=Dtype.FP8, needs=Dtype.FP8, copy_bytes=1.0, weight_copies=2, activation_copies=2,
                gradient_copies=2, row_multiple=16, is_order_alone=True, reads_twice=False, sends_rows=False, gathers_weights=True,
                source="TransformerEngine, DelayedScaling: one scale for a tensor, of the history of its largest entries; on Hopper both "
                "operands must be row-major in the contraction, hence transposed copies, which Blackwell's units in data centres do "
                "without (`is_non_tn_fp8_gemm_supported`)",
            ),
            Recipe(
                name="fp8-current", product=Dtype.FP8, needs=Dtype.FP8, copy_bytes=1.0, weight_copies=2, activation_copies=2,
                gradient_copies=2, row_multiple=16, is_order_alone=True, reads_twice=True, sends_rows=False, gathers_weights=True,
                source="TransformerEngine, Float8CurrentScaling; torchao float8, tensorwise: the scale is of this very tensor",
            ),
            Recipe(
                name="fp8-block", product=Dtype.FP8, needs=Dtype.FP8, copy_bytes=1.0 + 4.0 / 128.0, weight_copies=2, activation_copies=2,
                gradient_copies=2, row_multiple=16, is_order_alone=False, reads_twice=False, sends_rows=True, gathers_weights=True,
                source="DeepSeek-V3 (arXiv 2412.19437, section 3.3): 1 x 128 for activations and gradients, 128 x 128 for weights, fp32 "
                "scales; row-wise for forward, column-wise for the gradient of the weight",
            ),
            Recipe(
                name="mxfp8", product=Dtype.FP8, needs=Dtype.FP4, copy_bytes=1.0 + 1.0 / 32.0, weight_copies=2, activation_copies=2,
                gradient_copies=2, row_multiple=32, is_order_alone=False, reads_twice=False, sends_rows=True, gathers_weights=False,
                source="OCP Microscaling: 32 entries have one E8M0 scale, along the contraction, so both directions are cast; units that "
                "take such scales came with those for 4 bits",
            ),
            Recipe(
                name="nvfp4", product=Dtype.FP4, needs=Dtype.FP4, copy_bytes=0.5 + 1.0 / 16.0, weight_copies=2, activation_copies=2,
                gradient_copies=2, row_multiple=32, is_order_alone=False, reads_twice=True, sends_rows=False, gathers_weights=False,
                source="TransformerEngine, NVFP4BlockScaling: 16 entries have one E4M3 scale, a tensor one in fp32, of its largest entry",
            ),
        )
    }
)  # fmt: skip


def recipe_named(name: str) -> Recipe | None:
    """Recipe of a precision; None if products use its own dtype."""
    return RECIPES.get(name)
