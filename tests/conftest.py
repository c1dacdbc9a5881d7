"""What every test runs under: a Ray of its own, open, on loopback, in a short private folder; few threads.

The variables are set before anything imports ray or torch: both read them once. A value that the caller's environment
has already set wins for threads only; Ray's are not negotiable, because a test must never join somebody's cluster.
"""

import atexit
import os
import shutil
import signal
import tempfile

THREADS = "2"

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # on Linux too: everything binds to 127.0.0.1
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_DISABLE_TELEMETRY="1",
)
for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
    os.environ.pop(name, None)
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, THREADS)
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as microtome.cuda_runtime has it, which a test may import after torch

folder = tempfile.mkdtemp(prefix="mt-", dir="/tmp")  # short: Ray's socket paths below it must fit in 107 bytes
atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ["RAY_TMPDIR"] = folder  # one for each process of a parallel run

# A shell starts background jobs with Ctrl-C ignored, and that is inherited: the processes that tests interrupt would
# not notice. With a handler here they start with the system's default.
signal.signal(signal.SIGINT, signal.default_int_handler)
