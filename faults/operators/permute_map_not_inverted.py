"""Tokens gathered back by the map of the way out."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("npu_moe_token_permute", side="trainer"),
    seen_in=[
        "https://github.com/lablup/mlxcel/issues/1600",
    ],
    expects=[Rises("logprob_gap"), Rises("kl")],
    moe=True,
    needs=["experts"],
    look_alikes=["group_counts_taken_for_cumsum", "swiglu_gate_up_swap"],
)
def permute_map_not_inverted(clean):
    """The experts' outputs are gathered back by the sorting permutation in place of its inverse.

    What breaks: every token is given the expert outputs of other tokens, weighted with its own weights.
    In the wild: npu_moe_token_permute returns the inverse map and the reference in common use the sorting permutation,
        under one name; mixing the two is right only where the permutation is its own inverse.
    Looks like: log-probabilities off by nats at once, KL up; a batch of one expert or one token hides it.
    """

    def faulty(ctx, *args, **kwargs):
        permuted, inverse = clean(*args, **kwargs)
        return permuted, inverse.argsort().int()

    return faulty
