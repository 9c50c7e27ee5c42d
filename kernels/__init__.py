"""Tensors in, tensors out: attention over a paged cache, cache writes, block copies, sampling."""
