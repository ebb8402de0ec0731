"""The family ``attention``: how large logits get, and how far attention is spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.health.analyses.analysis import Analysis, Give
from tensortap.rooms.health.analyses.attention_stats import HeadStatistics, head_statistics
from tensortap.rooms.health.analyzing import ModuleOutput


class AttentionHeads(Analysis):
    """The largest logit and the mean entropy per head, over all calls of a module in a step."""

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._heads: dict[str, list[HeadStatistics]] = {}
        self._rows: dict[str, str] = {}  # module → its first tensor, which has a row

    def detach(self) -> None:
        super().detach()
        self._heads.clear()
        self._rows.clear()

    def attention(self, name: str, logits: NDArray[np.float64]) -> None:
        self._heads.setdefault(name, []).append(head_statistics(logits))

    def output(self, seen: ModuleOutput) -> None:
        if seen.arrays:
            self._rows[seen.name] = seen.arrays[0].name

    def end_step(self) -> None:
        for name, calls in self._heads.items():
            alike = [each for each in calls if len(each.entropy) == len(calls[0].entropy)]
            largest = np.max([each.max_logit for each in alike], axis=0)
            entropy = np.mean([each.entropy for each in alike], axis=0)
            numbers = {"max_logit": float(largest.max()), "entropy": float(entropy.mean())}
            for head in range(len(entropy)):
                numbers[f"max_logit_{head}"] = float(largest[head])
                numbers[f"entropy_{head}"] = float(entropy[head])
            self.give(Kind.ACTIVATION, self._rows.get(name, name), numbers)
        self._heads.clear()
