"""Computes, with tensors: one process, one device; knows a step, never a client.

Threads of a forward wait for each other some hundred times. GNU's OpenMP lets them spin for milliseconds by default,
which is a little quicker on an idle machine and ruinous beside other processes: a thread that spins keeps the core from
the one it waits for (measured on two shared cores: a step of 12 ms took over 100; with this, 22). Its runtime reads the
variable once, when torch is loaded, so it is set here, before anything of ours can load torch.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # about 0.1 ms; whoever sets OMP_WAIT_POLICY overrides it
