"""One replica's engine: vLLM V1's scheduler and KV cache on a virtual clock.

`scheduler.py` decides who runs in the next step and `kv_cache.py` what fits, both without a clock.
`plain.py` is the step loop around them: plan, execute (`executor.py`: a cost model, or the real
engine), commit, with as many steps in flight as vLLM has. `fast/` does the same for whole stretches
of steps at once. Policies (`sim.protocols`) reach the scheduler through `rules.py` and see it
through `view.py`.
"""
