"""Computes, with tensors: one process, one device; knows a step, never a client."""
