"""Analytic cost of training an MoE language model and its proxy."""
