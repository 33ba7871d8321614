"""Weight of the grouped matmul not transposed in the backward pass."""

from harness.catalogue import fault
from harness.claims import Falls, Stays
from harness.seams import Operator


@fault(
    seam=Operator("npu_grouped_matmul", side="trainer", direction="backward"),
    seen_in=[
        "https://github.com/modelscope/ms-swift/issues/8207",
        "https://github.com/hiyouga/LlamaFactory/issues/10248",
        "https://github.com/hiyouga/LlamaFactory/issues/10512",
    ],
    expects=[Falls("grad_norm"), Stays("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["gating_weights_detached"],
)
def grouped_matmul_grad_untransposed(clean):
    """The gradient of the experts' input is a product with the weight's memory, read without its transposition.

    What breaks: dx should be dy @ W^T; the kernel reads the buffer of W as if it were laid out as W^T, so everything
        below an expert gets a gradient of the right size and a wrong direction. The weights' own gradient is right.
    In the wild: torch_npu registers no derivative for its grouped matmul, so everybody writes one; a port to weights
        that lie the other way round (views of a transposed buffer) passed the forward and broke in the backward.
    Looks like: the loss of the first step is right and the gradient is not; gradient norms by group show it at once.
    """

    def faulty(ctx, call, *grads):
        good = clean(call, *grads)
        (x,), (weight,) = call.args
        misread = weight.contiguous().view(weight.shape[0], weight.shape[2], weight.shape[1])
        ends = call.kwargs["group_list"]
        ends = ends.cumsum(0) if call.kwargs.get("group_list_type", 0) == 1 else ends
        dx, start = grads[0].new_zeros(x.shape), 0
        for end, matrix in zip(ends.tolist(), misread, strict=True):
            dx[start:end] = grads[0][start:end] @ matrix
            start = end
        return good._replace(inputs=(dx, *good.inputs[1:]))

    return faulty
