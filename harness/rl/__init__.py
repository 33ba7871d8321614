"""One RL post-training run: the named stages, the loop that orders them, and what they are made of."""
