"""The protocol by which the black box saves, restores and repeats steps of a program."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class KeptState(NamedTuple):
    """A copy of everything that a step changes, and its bytes."""

    content: Any
    nbytes: int


class KeptBatch(NamedTuple):
    """A copy of the arguments of a step in the memory of the host, and its bytes."""

    content: Any
    nbytes: int


class Training(Protocol):
    """A training program whose steps can be run again."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def world_size(self) -> int:
        """The number of ranks that run the same steps."""

    intercepts: bool = False
    """Whether operations are recorded only of functions that a recorder calls itself."""

    def keep_state(self, instead: KeptState | None = None) -> KeptState:
        """Copy parameters, buffers, gradients, and the states of optimizer and others.

        The memory of a copy that nobody needs any more, `instead`, is used again.
        """

    def keep_present(self) -> KeptState:
        """Do the same, and remember which tensors hold it, to put everything back as it is."""

    def check(self, kept: KeptState) -> None:
        """Raise ValueError if the program has no place for a copy: its model has changed."""

    def restore(self, kept: KeptState) -> None:
        """Write a copy back."""

    def keep_moment(self) -> Any:
        """Return the random states and the settings of the optimizer: what may change anywhere."""

    def restore_moment(self, moment: Any) -> None:
        """Set the random states and the settings of the optimizer."""

    def keep_batch(self, batch: Any) -> KeptBatch:
        """Copy the arguments of a step."""

    def batch_of(self, kept: KeptBatch) -> Any:
        """Return fresh copies of the arguments, on their devices."""

    def rows_of(self, kept: KeptBatch) -> int:
        """Return how many rows the batch has; 0 if its tensors do not have the same number."""

    def mixed(self, kept: KeptBatch, other: KeptBatch, rows: frozenset[int]) -> Any:
        """Return the `other` batch with some rows of the first."""

    def is_bad(self, result: Any, whole: bool) -> bool:
        """Return whether the result is not finite or, with `whole`, anything in the state."""

    def digest_of(self, result: Any) -> bytes:
        """Return a digest of the result of a step."""

    def agree(self, *flags: bool) -> list[bool]:
        """Return which flags are set on any rank; every rank has to call this."""

    def gather(self, value: str) -> list[str]:
        """Return the texts of all ranks, by rank; every rank has to call this."""
