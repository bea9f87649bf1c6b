"""All benchmarks, one after the other: `python -m tests.benchmarks` (`make bench`)."""

import subprocess
import sys

for name in ("bench_fast_engine", "bench_simulate"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
