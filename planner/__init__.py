"""Decides, with integers: the standard library only; no clock, randomness, thread, file or environment."""
