"""Engines under one load: what `bench.peers` runs in processes of their own, each in its engine's environment."""
