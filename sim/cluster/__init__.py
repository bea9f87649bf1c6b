"""Many replicas on one clock: the door, the router, and what became of every request."""
