"""The real engine: a decoder in torch over the paged KV cache, driven by the simulator's scheduler.

The scheduler, the KV cache and the policies are `sim.engine`'s own; this package only executes the
steps they plan. On the CPU attention is torch's, on NVIDIA GPUs it is the kernels of `kernels/`.
"""
