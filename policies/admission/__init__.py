"""Admission policies: which requests may enter the cluster."""
