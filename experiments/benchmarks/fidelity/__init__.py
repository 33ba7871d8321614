"""The calibration study of the fidelity score: arms are run within a budget, then the stored ones are judged."""
