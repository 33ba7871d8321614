"""The training side: what happens from the scaled loss to the changed weights."""
