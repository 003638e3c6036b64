"""Inference under torch: a decoder with a key-value cache, requests that are batched as they come, and what their steps take."""
