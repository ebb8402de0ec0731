"""Records whose statistics or digest a device is still computing."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tensortap.core.record import Record
from tensortap.rooms.track.observing import Explain
from tensortap.values.protocol import PendingDigest, PendingSummary


class PendingRecord(NamedTuple):
    """A record that waits for a device; `explain` returns tags if it is not finite."""

    record: Record
    nbytes: int
    summary: PendingSummary | None
    explain: Explain | None = None
    digest: PendingDigest | None = None

    def ready(self) -> bool:
        """Return whether the device has computed everything."""
        return all(each is None or each.ready() for each in (self.summary, self.digest))

    def resolve(self, prefix: str) -> Record | None:
        """Wait for the device and return the record; None if the program took another branch.

        `prefix` is put before the names in new tags.
        """
        record, tags, stats = self.record, self.record.tags, self.record.stats
        if self.digest is not None:
            record = msgspec.structs.replace(record, digest=self.digest.resolve())
        if self.summary is not None:
            stats = self.summary.resolve()
            if stats is None:
                return None
            if self.explain and stats.finite != stats.count:
                tags = {**tags, **prefixed_tags(self.explain(stats), prefix)}
        return msgspec.structs.replace(record, stats=stats, tags=tags)


def prefixed_tags(tags: dict[str, str], prefix: str) -> dict[str, str]:
    """Return tags with a prefix before the names in them.

    >>> prefixed_tags({"module": "fc", "call": "2"}, "model2.")
    {'module': 'model2.fc', 'call': '2'}
    """
    named = ("module", "parameter", "shared", "origin", "behind")
    return {
        key: " ".join(prefix + name for name in text.split()) if key in named else text
        for key, text in tags.items()
    }
