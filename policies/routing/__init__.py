"""Routing policies: which replica serves a request."""
