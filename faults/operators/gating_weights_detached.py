"""Router without a gradient."""

from harness.catalogue import fault
from harness.claims import Stays, Zero
from harness.seams import Operator


@fault(
    seam=Operator("npu_moe_gating_top_k_softmax", side="trainer"),
    seen_in=[
        "https://github.com/ooples/AiDotNet/issues/1080",
        "https://github.com/TIML-Group/Robust-MoE-Dual-Model/issues/2",
    ],
    expects=[Zero("grad_norm/router"), Stays("logprob_gap")],
    moe=True,
    needs=["router"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.69 [0.64, 0.74]: the interval straddles the bar",
)
def gating_weights_detached(clean):
    """The weights of the chosen experts come out of a fused gating operator that has no derivative.

    What breaks: the router's matrix gets no gradient from the loss and stays where it was; everything else trains.
    In the wild: the fused gating operator is made for inference and registers no derivative; a router whose softmax
        automatic differentiation did not see, one whose gradient was None.
    Looks like: nothing, but for a router gradient of zero; log-probabilities stay with their twin's.
    """

    def faulty(ctx, x, finished=None, k=1):
        return clean(x.detach(), finished, k)

    return faulty
