"""Eviction policies: which cached KV block goes first."""
