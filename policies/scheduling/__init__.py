"""Scheduling policies: who runs in the next step of a replica."""
