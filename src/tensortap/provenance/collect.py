"""Write the provenance of this process into a run folder, and keep it up to date.

``runtime_info.json``, ``packages.json``, ``git_info.json`` and, if there are uncommitted changes,
``project.patch``; see `versions` for what becomes of older ones. Nothing here raises into
training: what fails is logged once, the rest is written.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tensortap.provenance import versions
from tensortap.provenance.git import collect_git, same
from tensortap.provenance.gitcmd import TIMEOUT, Git
from tensortap.provenance.modifications import Finder
from tensortap.provenance.pace import Pace, Stopped
from tensortap.provenance.packages import packages_info
from tensortap.provenance.patch import UNTRACKED_LIMIT
from tensortap.provenance.project import project_folder
from tensortap.provenance.redact import Redactor
from tensortap.provenance.runtime import comparable, runtime_info

log = logging.getLogger("tensortap")

INTERVAL = 5.0  # seconds between two checks, at least
REST = 10  # and at least so many times as long as the last one took


def collect(
    folder: Path | str,
    *,
    start: Path | None = None,
    modifications: bool = True,
    secrets: Iterable[str] = (),
    limit: int = UNTRACKED_LIMIT,
    timeout: float = TIMEOUT,
) -> None:
    """Write everything now, and return when it is done.

    ``start`` is a folder of the project (else that of the main script, else the working
    directory), ``secrets`` are regular expressions that widen the rule of `redact`, ``limit`` is
    how many bytes of untracked files the patch may have::

        collect("experiments/20261115_181530")
    """
    collector = Collector(
        Path(folder), Pace(rest=0), start=start, secrets=secrets, limit=limit, timeout=timeout
    )
    collector.runtime()
    collector.rest(modifications=modifications)


class Collector:
    """Looks at the process and writes what has changed since the last look."""

    def __init__(
        self,
        folder: Path,
        pace: Pace,
        *,
        start: Path | None,
        secrets: Iterable[str],
        limit: int,
        timeout: float,
    ) -> None:
        self._folder = folder
        self._pace = pace
        self._secrets = tuple(secrets)
        self._limit = limit
        self._timeout = timeout
        self._start = start
        self._finder: Finder | None = None
        self._logged: set[str] = set()
        self.over = False  # nothing is to be written any more
        self._strict = os.environ.get("TENSORTAP_STRICT", "") not in ("", "0")

    def runtime(self) -> None:
        """runtime_info.json; a few milliseconds."""
        self._guard("runtime_info.json", self._runtime)

    def rest(self, *, modifications: bool) -> None:
        """packages.json, git_info.json and the patch, then the modifications."""
        packages: dict[str, Any] = {}

        def keep_packages() -> None:
            packages.update(self._packages())

        self._guard("packages.json", keep_packages)
        self._guard("git_info.json", lambda: self._git(packages.get("packages", {}), modifications))

    def _guard(self, what: str, work: Callable[[], None]) -> None:
        if self.over:
            return
        try:
            work()
        except Stopped:
            return
        except Exception as error:
            if self._strict:
                raise
            if what not in self._logged:
                self._logged.add(what)
                log.warning("%s could not be written to %s: %s", what, self._folder, error)

    def _redactor(self) -> Redactor:
        return Redactor(self._secrets)

    def _runtime(self) -> None:
        info = runtime_info(self._redactor())
        before = versions.current(self._folder, "runtime_info")
        if before is not None and _comparable(before) == comparable(info):
            return
        versions.write(self._folder, "runtime_info", info, pace=self._pace, keep=before is not None)

    def _packages(self) -> dict[str, Any]:
        info = packages_info(pace=self._pace, redactor=self._redactor())
        before = versions.current(self._folder, "packages")
        if before != info:
            # a package that has been imported meanwhile is more to tell, not another state
            more = before is not None and _only_more(before, info)
            keep = before is not None and not more
            versions.write(self._folder, "packages", info, pace=self._pace, keep=keep)
        return info

    def _git(self, packages: dict[str, dict[str, Any]], modifications: bool) -> None:
        before = versions.current(self._folder, "git_info")
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".provenance-") as scratch:
            found = collect_git(
                Path(scratch),
                start=self._start,
                packages=packages,
                skip=(self._folder,),
                limit=self._limit,
                timeout=self._timeout,
                redactor=self._redactor(),
                pace=self._pace,
            )
            self._pace.resume()
            info = found.info
            if before is None and modifications:
                # What git says is written before the long look at all modules.
                self._write_git({**info, **_NOT_LOOKED}, found.patches, None)
                self._look(info)
                if not self.over:
                    versions.write(self._folder, "git_info", info, pace=self._pace, keep=False)
                return
            if modifications:
                self._look(info)
            else:
                info.update(_NOT_LOOKED)
            if self.over:
                return
            if before is None or not same(before, info):
                self._write_git(info, found.patches, before)

    def _look(self, info: dict[str, Any]) -> None:
        if self._finder is None:
            start = self._start or project_folder()
            top = Git(start, timeout=self._timeout).ask("rev-parse", "--show-toplevel")
            self._finder = Finder(Path(top or start), pace=self._pace)
        found = self._finder.find()
        info["runtime_modifications"] = {where: m.as_json() for where, m in found.items()}
        info["runtime_modifications_checked"] = not self._finder.problem
        if self._finder.problem:
            info["runtime_modifications_problem"] = self._finder.problem

    def _write_git(
        self, info: dict[str, Any], patches: dict[str, Path], before: dict[str, Any] | None
    ) -> None:
        """The old version is kept first, then the patches come, then what speaks of them."""
        old = tuple(_patches_of(before)) if before is not None else ()
        if before is not None:
            versions.archive(self._folder, "git_info", old)
        for name, file in patches.items():
            versions.put(file, self._folder / name)
        versions.write(self._folder, "git_info", info, pace=self._pace, keep=False)
        for name in old:
            if name not in patches:
                (self._folder / name).unlink(missing_ok=True)


_NOT_LOOKED = {"runtime_modifications": {}, "runtime_modifications_checked": False}


def _comparable(info: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return comparable(info)
    except (KeyError, AttributeError):
        return None  # not one of ours


def _only_more(before: dict[str, Any], info: dict[str, Any]) -> bool:
    """Whether a packages.json differs only in what has been imported since."""
    if any(before.get(key) != info[key] for key in info if key != "packages"):
        return False
    now = info["packages"]
    return all(now.get(name) == told for name, told in (before.get("packages") or {}).items())


def _patches_of(info: dict[str, Any]) -> Iterable[str]:
    """The patch files that a git_info.json speaks of."""
    project = info.get("project_git_info") or {}
    others = (project.get("submodules") or {}, info.get("packages_git_info") or {})
    for one in (project, *(entry for group in others for entry in group.values())):
        told = one.get("git_diff") or ""
        if told.startswith("See "):
            yield told[4:]


class Keeper:
    """Provenance that follows the program: a new version when something has changed.

    Making one writes ``runtime_info.json``, and the rest in the background. ``update()`` asks for
    a check, which costs the caller next to nothing: it happens in the background, no more often
    than every few seconds, and writes nothing if all is as it was::

        keeper = Keeper(folder)  # on rank 0
        keeper.update()  # after a dump
        keeper.close()  # at the end
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        interval: float = INTERVAL,
        start: Path | None = None,
        secrets: Iterable[str] = (),
        limit: int = UNTRACKED_LIMIT,
        timeout: float = TIMEOUT,
    ) -> None:
        self._pace = Pace()
        self._collector = Collector(
            Path(folder), self._pace, start=start, secrets=secrets, limit=limit, timeout=timeout
        )
        self._interval = interval
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._wanted = True
        self._now = True  # without waiting for the interval
        self._busy = False
        self._closed = False
        self.checks = 0
        rest, self._pace.rest = self._pace.rest, 0.0
        self._collector.runtime()
        self._pace.rest = rest
        self._thread = threading.Thread(target=self._run, name="tensortap-provenance", daemon=True)
        self._thread.start()

    def update(self, force: bool = False) -> None:
        """Ask for a check; ``force`` does not wait for the interval to pass. Returns at once."""
        if (self._wanted and not force) or self._closed or os.getpid() != self._pid:
            return
        with self._changed:
            self._wanted = True
            self._now = self._now or force
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that was asked for has been checked; whether it was, in time."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._now = self._now or self._wanted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._wanted or self._busy), timeout)

    def close(self, timeout: float = 3.0) -> bool:
        """Finish what was asked for, at full speed, and stop; whether it was done in time."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._closed = True
            self._pace.rest = 0.0
            self._changed.notify_all()
        self._thread.join(timeout)
        # a look that is not done by then is not waited for; what was written says so
        self._collector.over = self._pace.stopped = True
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = 0.0
        first = True
        while True:
            with self._changed:
                while not (self._wanted or self._closed):
                    self._changed.wait()
                while not (self._now or self._closed) and (left := due - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._wanted:
                    return
                self._wanted = self._now = False
                self._busy = True
            began = time.monotonic()
            try:
                if not first:  # the first was written by whoever made the keeper
                    self._collector.runtime()
                self._collector.rest(modifications=True)
            except Exception:
                log.exception("provenance")  # only with TENSORTAP_STRICT
            first = False
            took = time.monotonic() - began
            due = time.monotonic() + max(self._interval, REST * took)
            with self._changed:
                self.checks += 1
                self._busy = False
                self._changed.notify_all()
