"""Predictions for published deployments, beside what was measured there."""
