"""Data of this project: pairs, originals, matrices, baselines (no library code)."""
