"""Waits and translates, on Ray and gRPC: driver, worker, front end, cluster life. Decides nothing."""
