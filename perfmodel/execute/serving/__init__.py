"""Inference under torch: a decoder with a KV cache, and measurements of its steps."""
