"""Healthy arms: the null controls, and the fault that does nothing."""
