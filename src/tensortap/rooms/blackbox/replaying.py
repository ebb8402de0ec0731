"""The program whose steps the black box keeps, restores and repeats."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from tensortap.core import ranks


class Kept(NamedTuple):
    """A copy of the arguments of a step, or of everything that a step changes, and its bytes."""

    content: Any
    nbytes: int


class Training(Protocol):
    """A training program whose steps can be run again."""

    intercepts: bool = False
    """True if only functions that the recorder calls itself are recorded."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return ranks.rank_and_world_size()[0]

    @property
    def world_size(self) -> int:
        """The number of ranks that run the same steps."""
        return ranks.rank_and_world_size()[1]

    def agree(self, *flags: bool) -> list[bool]:
        """Return which flags are set on any rank; every rank has to call this."""
        return list(flags)

    def gather(self, value: str) -> list[str]:
        """Return the texts of all ranks, by rank; every rank has to call this."""
        return [value]

    def keep_state(self, instead: Kept | None = None) -> Kept:
        """Copy parameters, buffers, gradients, and the states of optimizer and others.

        The memory of a copy that nobody needs any more, `instead`, is used again.
        """

    def keep_present(self) -> Kept:
        """Do the same, and remember which tensors hold it, to put everything back as it is."""

    def check(self, kept: Kept) -> None:
        """Raise ValueError if the program has no place for a copy: its model has changed."""

    def restore(self, kept: Kept) -> None:
        """Write a copy back."""

    def keep_moment(self) -> Any:
        """Return the random states and the settings of the optimizer: what may change anywhere."""

    def restore_moment(self, moment: Any) -> None:
        """Set the random states and the settings of the optimizer."""

    def keep_batch(self, batch: Any) -> Kept:
        """Copy the arguments of a step."""

    def batch_of(self, kept: Kept) -> Any:
        """Return fresh copies of the arguments, on their devices."""

    def rows_of(self, kept: Kept) -> int:
        """Return how many rows the batch has; 0 if its tensors do not have the same number."""

    def mixed(self, kept: Kept, other: Kept, rows: frozenset[int]) -> Any:
        """Return the `other` batch with some rows of the first."""

    def is_bad(self, result: Any, whole: bool) -> bool:
        """Return whether the result is not finite or, with `whole`, anything in the state."""

    def digest_of(self, result: Any) -> bytes:
        """Return a digest of the result of a step."""
