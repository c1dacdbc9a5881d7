"""Microtome: distributed continuous batching for language models, on Ray and gRPC."""
