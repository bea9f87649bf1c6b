"""From measured points to a profile: reading, fitting, hold-out tests."""
