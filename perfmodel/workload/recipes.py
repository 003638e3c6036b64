"""Recipes of products in 8 and 4 bits: low-precision copies of their operands, and how they are stored and moved.

All three products of a linear operator run in low precision. Embedding, output matrix, router, norms, attention core and loss do not, nor
do master weights, gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from perfmodel.foundation.dtypes import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Scaling and storage of operands.

    product         dtype of the products
    needs           dtype in which the chip must have a FLOP rate to support these scales
    copy_bytes      bytes of an element of one copy, scales included
    weight_copies   low-precision copies of a weight in addition to the 16-bit one: a second where products need another operand order
                    or scales along the other dim
    activation_copies, gradient_copies   copies that a cast writes: for the product, and for the gradient of the weight
    sends_rows      a row may be sent to its experts in the cast format with its scales, because each scale is within the row
    gathers_weights one copy of a weight serves all its products, so that only this copy is gathered
    is_order_alone  copies differ only in operand order: one is enough on chips that take either order
    row_multiple    rows of an expert are padded to a multiple of it before grouped GEMMs
    reads_twice     a cast first reads its tensor once for the absolute maximum
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
        """Return the recipe on a chip, whose products take operands in either order or not."""
        if not (any_operand_order and self.is_order_alone):
            return self
        return replace(self, weight_copies=1, activation_copies=1, gradient_copies=1)


#: Linear operators that stay in 16 bits or more: their outputs decide the routing.
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
