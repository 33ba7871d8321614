"""Remedies: changes that make a symptom go away without removing the fault. One file each."""
