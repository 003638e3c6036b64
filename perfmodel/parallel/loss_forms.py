"""Forms of a loss by the storage of its logits (`frameworks/tiles.py` has their effects)."""

LOSS_FORMS = WHOLE_LOSS, CHUNKED_LOSS, FUSED_LOSS, UPCAST_LOSS = ("whole", "chunked", "fused", "upcast")

UPCAST_SHARE = 1.0 / 8.0
"""Share of the logits in float32 at a time, of a loss that keeps all logits in 16 bits (torchtune 0.5, `CEWithChunkedOutputLoss`)."""
