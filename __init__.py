"""A distributed multi-GPU serving cluster for large language models, built around KV blocks."""
