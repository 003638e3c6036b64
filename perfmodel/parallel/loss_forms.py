"""How the logits of a loss lie in memory (`frameworks/tiles.py` says what each form does)."""

LOSS_FORMS = WHOLE_LOSS, CHUNKED_LOSS, FUSED_LOSS, UPCAST_LOSS = ("whole", "chunked", "fused", "upcast")

UPCAST_SHARE = 1.0 / 8.0
"""The share of the logits that a loss works on at a time which keeps all of them in 16 bits (torchtune 0.5, `CEWithChunkedOutputLoss`)."""
