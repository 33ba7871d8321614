"""Faults of this family."""
