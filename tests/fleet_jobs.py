"""Functions that the fleet's tests run in worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import UsageError


def work(payload: dict[str, Any], report: Callable[[int, int], None]) -> Any:
    """Do what the payload says."""
    what = payload["do"]
    if what == "square":
        report(1, 2)
        return payload["x"] ** 2
    if what == "pid":
        return os.getpid(), os.environ["OMP_NUM_THREADS"]
    if what == "raise":
        raise ValueError("on purpose")
    if what == "refuse":
        raise UsageError("cannot be done")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "die once":
        marker = Path(payload["marker"])
        if not marker.exists():
            marker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return "second try"
    if what == "sleep":
        time.sleep(payload["seconds"])
        return "slept"
    if what == "read":
        return Path(payload["file"]).read_text()
    if what == "write":
        Path(payload["file"]).write_text("written")
    return None
