"""The published accelerator counts and times per step, and the ratios they imply (arXiv 2608.10823)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedRow:
    """One published original and proxy: experts, accelerators and seconds per step of each."""

    model: str
    experts: tuple[int, int]
    accelerators: tuple[int, int]
    seconds: tuple[float, float]

    def hours(self, arm: int) -> float:
        """Accelerator-hours per step of the original (0) or the proxy (1)."""
        return self.accelerators[arm] * self.seconds[arm] / 3600

    @property
    def ratio(self) -> float:
        """Accelerator-hours of the original over those of the proxy."""
        return self.hours(0) / self.hours(1)


PUBLISHED = (
    PublishedRow("Qwen3-30B-A3B", (128, 48), (16, 8), (128.93, 114.83)),
    PublishedRow("DeepSeek-V3.2", (256, 16), (512, 64), (3000.0, 720.0)),
)
