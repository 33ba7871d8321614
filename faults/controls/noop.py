"""A fault that does nothing."""

from harness.catalogue import fault
from harness.seams import Stage


@fault(seam=Stage.LOSS, seen_in=[], expects=[], control=True)
def noop(clean):
    """Wakes on schedule, runs, and changes nothing: the control of the injector itself.

    What breaks: nothing.
    In the wild: it is the answer that a harness must give when nothing is wrong.
    Looks like: every metric of the faulted arm equals its clean twin's bit for bit.
    """

    def faulty(ctx, forward):
        return clean(ctx, forward)

    return faulty
