"""The policies that ship with the simulator: one small class each, named in `sim/registry.py`."""
