"""Write the provenance of this process into a run folder, and keep it up to date.

The files are ``runtime_info.json``, ``packages.json``, ``git_info.json`` and, if there are
uncommitted changes, ``project.patch``; `stored` describes what happens to older versions.
Nothing raises into training: an error is logged once and the other files are written.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.rooms.provenance import stored
from tensortap.rooms.provenance.git import Git, collect_git
from tensortap.rooms.provenance.modifications import Finder
from tensortap.rooms.provenance.redact import Redactor
from tensortap.rooms.provenance.runtime import (
    comparable,
    packages_info,
    project_folder,
    runtime_info,
)

if TYPE_CHECKING:
    from tensortap.runs.init import OpenRun

log = logging.getLogger("tensortap")


def collect(
    folder: Path | str, *, start: Path | None = None, modifications: bool | None = None
) -> None:
    """Write everything now, and return when it is done.

    `start` is a folder of the project (default: that of the main script, or the working
    directory). `modifications` says whether to search for monkey patches; by default that is
    done unless TENSORTAP_MODIFICATIONS is 0::

        collect("experiments/20261115_181530")
    """
    collector = ProvenanceCollector(Path(folder), start, modifications)
    collector.write_runtime()
    collector.write_rest()


class ProvenanceCollector:
    """Looks at the process and writes what has changed since the last look."""

    def __init__(self, folder: Path, start: Path | None, modifications: bool | None = None) -> None:
        self._folder = folder
        self.stopped = False  # a check that is running ends without writing
        self.pause = 0.0
        self.is_intact: Callable[[], bool] = lambda: True
        self._start = start or project_folder()
        if modifications is None:
            modifications = os.environ.get("TENSORTAP_MODIFICATIONS", "") != "0"
        self._modifications = modifications
        self._finder: Finder | None = None
        self.doing = ""  # what the check that runs is busy with
        self._logged: set[str] = set()
        self._strict = os.environ.get("TENSORTAP_STRICT", "") not in ("", "0")

    def write_runtime(self) -> None:
        """Write runtime_info.json, which takes a few milliseconds."""
        self._guard("runtime_info.json", self._runtime)

    def write_rest(self) -> None:
        """Write packages.json, git_info.json and the patches."""
        self._guard("packages.json", self._packages)
        self._guard("git_info.json", self._git)

    def _may_write(self) -> bool:
        return not self.stopped and self.is_intact()

    def _guard(self, name: str, write: Callable[[], None]) -> None:
        try:
            if self._may_write():
                write()
        except Exception as error:
            if self._strict:
                raise
            if name not in self._logged and self.is_intact():
                self._logged.add(name)
                log.warning("cannot write %s to %s: %s", name, self._folder, error)

    def _runtime(self) -> None:
        info = runtime_info()
        before = stored.read_version(self._folder, "runtime_info")
        if before is None or comparable(before) != comparable(info):
            stored.write(self._folder, "runtime_info", info, keep=before is not None)

    def _packages(self) -> None:
        self.doing = "listing the packages"
        info = packages_info()
        before = stored.read_version(self._folder, "packages")
        if before != info:
            # a package that was imported in the meantime is no new version
            keep = before is not None and not _only_adds(before, info)
            stored.write(self._folder, "packages", info, keep=keep)

    def _git(self) -> None:
        self.doing = "reading the uncommitted changes"
        before = stored.read_version(self._folder, "git_info")
        packages = stored.read_version(self._folder, "packages") or {}
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".provenance-") as scratch:
            info = collect_git(
                Path(scratch),
                start=self._start,
                packages=packages.get("packages"),
                skip=(self._folder,),
                redactor=Redactor(),
            )
            patch = Path(scratch) / "project.patch"
            info |= {"runtime_modifications": {}, "runtime_modifications_checked": False}
            if self._modifications:
                if before is None:  # the search takes long; until it ends, this is what is known
                    self._write_git(info, patch, is_first=True)
                self.doing = "searching for monkey patches"
                info["runtime_modifications"] = self._find_modifications()
                info["runtime_modifications_checked"] = True
            if before != info:
                self._write_git(info, patch, is_first=before is None)

    def _find_modifications(self) -> dict[str, Any]:
        if self._finder is None:
            top = Git(self._start).ask("rev-parse", "--show-toplevel")
            self._finder = Finder(Path(top or self._start), lambda: time.sleep(self.pause))
        return {where: each._asdict() for where, each in self._finder.find().items()}

    def _write_git(self, info: dict[str, Any], patch: Path, *, is_first: bool) -> None:
        """Archive the old version, move the patch, then write the file that refers to it."""
        if not self._may_write():
            return
        target = self._folder / patch.name
        if not is_first:
            stored.archive(self._folder, "git_info", patch.name)
        if patch.exists():
            os.replace(patch, target)
        stored.write(self._folder, "git_info", info, keep=False)
        if not info["project_git_info"]["git_diff"]:
            target.unlink(missing_ok=True)


def _only_adds(before: dict[str, Any], info: dict[str, Any]) -> bool:
    """Return whether a packages.json differs only in packages that were imported since."""
    packages = info["packages"]
    return {**before, "packages": packages} == info and all(
        packages.get(name) == described for name, described in before["packages"].items()
    )


def keep_provenance(run: OpenRun) -> Keeper | None:
    """Write the provenance of a run that was opened: on rank 0, for all ranks."""
    return None if run.rank else Keeper(run.path, is_intact=run.sink.is_intact)


class Keeper:
    """Provenance that follows the program: it writes a new version when something has changed.

    Creating one writes ``runtime_info.json``; a background thread writes the rest. Checks run
    there, no more often than every few seconds, and write nothing if nothing has changed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        interval: float = 5.0,
        start: Path | None = None,
        is_intact: Callable[[], bool] = lambda: True,
    ) -> None:
        """`interval` is the least time between two checks, in seconds.

        Nothing is written while `is_intact` returns False.
        """
        self._folder = Path(folder)
        self._collector = ProvenanceCollector(self._folder, start)
        self._collector.is_intact = is_intact
        self._interval = interval
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._requested = True
        self._urgent = True  # do not wait for the interval
        self._busy = False
        self._closed = False
        self.checks = 0
        self._collector.write_runtime()
        # Seconds per module that is searched for monkey patches. A thread that computes keeps the
        # interpreter lock until another thread has waited for it five milliseconds: training would
        # feel that for as long as the search takes.
        self._collector.pause = 0.001
        self._thread = threading.Thread(target=self._run, name="tensortap-provenance", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Request a check, unless one is waiting for the interval."""
        if self._requested or self._closed or os.getpid() != self._pid:
            return
        with self._changed:
            self._requested = True
            self._changed.notify_all()

    def update_now(self, timeout: float = 60.0) -> bool:
        """Check now and wait for it; return False if that takes longer."""
        if self._closed or os.getpid() != self._pid:
            return True
        with self._changed:
            self._requested = self._urgent = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: not (self._requested or self._busy), timeout)
        if not is_done:
            log.warning("tensortap: the provenance of %s is still being collected", self._folder)
        return is_done

    def close(self, timeout: float = 30.0) -> bool:
        """Finish the requested checks without pauses; return False if it took too long."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._closed = True
            self._collector.pause = 0.0
            self._changed.notify_all()
        self._thread.join(timeout)
        self._collector.stopped = True
        if self._thread.is_alive():
            log.warning(
                "tensortap: the provenance of %s is not complete: %s took more than %.0f s",
                self._folder, self._collector.doing, timeout,
            )  # fmt: skip
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = 0.0
        while True:
            with self._changed:
                while not (self._requested or self._closed):
                    self._changed.wait()
                while not (self._urgent or self._closed) and (left := due - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._requested:
                    return
                self._requested = self._urgent = False
                self._busy = True
            began = time.monotonic()
            try:
                if self.checks:  # the constructor has already written the first one
                    self._collector.write_runtime()
                self._collector.write_rest()
            except Exception:
                log.exception("provenance")  # only with TENSORTAP_STRICT
            took = time.monotonic() - began
            # while a check runs, training may be slower by a third: it costs one percent at most
            due = time.monotonic() + max(self._interval, 50 * took)
            with self._changed:
                self.checks += 1
                self._busy = False
                self._changed.notify_all()
