"""Inference under torch: a decoder with a KV cache, continuous batching, and measurements of its steps."""
