"""Does the proxy fail as the original does? Responses, their noise, their symptoms, a score and a verdict.

The names below are loaded on first use, so that importing the package does not load numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.fidelity.align import ArmSet as ArmSet
    from harness.fidelity.metrics import DEFAULT as DEFAULT
    from harness.fidelity.metrics import Thresholds as Thresholds
    from harness.fidelity.restore import Restoration as Restoration
    from harness.fidelity.restore import restoration as restoration
    from harness.fidelity.symptoms import Symptom as Symptom
    from harness.fidelity.symptoms import holds as holds
    from harness.fidelity.verdict import FidelityReport as FidelityReport
    from harness.fidelity.verdict import compare as compare
    from harness.fidelity.verdict import responses as responses

_HOME = {
    "ArmSet": "align",
    "DEFAULT": "metrics",
    "FidelityReport": "verdict",
    "Restoration": "restore",
    "Symptom": "symptoms",
    "Thresholds": "metrics",
    "compare": "verdict",
    "holds": "symptoms",
    "responses": "verdict",
    "restoration": "restore",
}
__all__ = [
    "DEFAULT",
    "ArmSet",
    "FidelityReport",
    "Restoration",
    "Symptom",
    "Thresholds",
    "compare",
    "holds",
    "responses",
    "restoration",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
