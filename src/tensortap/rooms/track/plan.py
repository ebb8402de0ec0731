"""The plan of a tracker: what each step looks at, as the program said or a session has changed."""

from __future__ import annotations

from typing import NamedTuple

from tensortap.core.patterns import TypedPattern
from tensortap.core.probes import ProbeRequest
from tensortap.core.record import Kind
from tensortap.rooms.track.budget import Budget
from tensortap.rooms.track.options import Patterns, kind_named


class Setting(NamedTuple):
    """A period: a name is looked at in each n-th step from `first` on; 0 is never."""

    every: int
    first: int = 0
    tensors: bool = False

    def selects(self, step: int) -> bool:
        return self.every > 0 and (step - self.first) % self.every == 0


class _Change(NamedTuple):
    setting: Setting
    pattern: TypedPattern
    kinds: frozenset[Kind]
    last: int | None  # the step from which it no longer holds
    is_about_all: bool


class LookPlan:
    """The settings of all names; `on` says whether the current step looks at any of them."""

    def __init__(self, patterns: Patterns, every: int, budget: Budget | None = None) -> None:
        self.base = Setting(every)
        self.budget = budget
        self.prefix = ""  # of the names that sessions see
        self.changed = False  # whether hooks are not yet as it says
        self.on = False
        self.tensors = False  # whether any name is kept whole in this step
        self._patterns = patterns
        self._changes: list[_Change] = []
        self._settings: dict[tuple[Kind, str], Setting] = {}
        self._step = 0

    @property
    def is_plain(self) -> bool:
        """Return whether everything is as the program said."""
        return not self._changes and self.budget is None

    @property
    def skips(self) -> bool:
        """Return whether a budget has chosen nothing for this step."""
        return self.budget is not None and not self.on and not self._changes

    @property
    def idle(self) -> bool:
        """Return whether no step will look at anything."""
        if not self._changes:
            return not self.base.every
        return not any(setting.every for setting in self._all_settings())

    def _all_settings(self) -> list[Setting]:
        found = []
        for change in reversed(self._changes):
            found.append(change.setting)
            if change.is_about_all:  # what was said before does not count
                return found
        return [*found, self.base]

    def restart(self, every: int, first: int) -> None:
        """Look at each n-th step from `first` on, as the program says."""
        self.base = Setting(every, first)
        self._settings.clear()

    def begin_step(self, step: int) -> None:
        self._step = step
        if not self._changes:
            base, budget = self.base, self.budget
            self.on = base.every > 0 and (
                base.selects(step) if budget is None else budget.begin_step(step)
            )
            self.tensors = False
            return
        if any(change.last is not None and change.last <= step for change in self._changes):
            self._changes = [c for c in self._changes if c.last is None or c.last > step]
            self.changed = True
            self._settings.clear()
        selected = [setting for setting in self._all_settings() if setting.selects(step)]
        in_budget = self.budget is not None and self.base.every and self.budget.begin_step(step)
        if self.budget is not None:
            selected = [setting for setting in selected if setting is not self.base]
        self.on = bool(selected or in_budget)
        self.tensors = any(setting.tensors for setting in selected)

    def change(self, request: ProbeRequest, step: int) -> None:
        """Take a request that holds from this step on."""
        if request.action == "reset":
            self._changes.clear()
        else:
            kinds = frozenset(kind_named("kind", each) for each in request.kind)
            setting = Setting(request.every, step, request.tensors)
            last = step + request.steps if request.steps else None
            pattern = TypedPattern(request.pattern)
            is_about_all = not (request.pattern or kinds)
            kinds = kinds or frozenset(Kind)
            self._changes.append(_Change(setting, pattern, kinds, last, is_about_all))
        self._settings.clear()
        self.changed = True

    def setting(self, kind: Kind, name: str) -> Setting:
        """Return the setting of a name: that of the newest change about it."""
        found = self._settings.get((kind, name))
        if found is None:
            found = self._settings[kind, name] = self._find(kind, name)
        return found

    def _find(self, kind: Kind, name: str) -> Setting:
        for change in reversed(self._changes):
            if kind in change.kinds and change.pattern.search(self.prefix + name):
                return change.setting
        return self.base if self._patterns.wants(kind, name) else Setting(0)

    def wants(self, kind: Kind, name: str) -> bool:
        """Return whether the current step looks at a name."""
        setting = self.setting(kind, name)
        if setting is self.base and self.budget is not None:
            return self.budget.everything or (kind, name) in self.budget.chosen
        return setting.selects(self._step)

    def chosen(self, kind: Kind) -> list[str] | None:
        """Return the names of a kind that a budget has chosen; None if others may be wanted."""
        if self._changes or self.budget is None or self.budget.everything:
            return None
        return [name for each, name in self.budget.chosen if each is kind]

    def keeps(self, kind: Kind, name: str) -> bool:
        """Return whether the current step keeps a name whole."""
        return self.tensors and self.setting(kind, name).tensors and self.wants(kind, name)
