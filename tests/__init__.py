"""Tests; `python -m pytest` from the root of the repository."""
