"""Late imports; tests/pipeline/test_interrupted.py has the rest of `tensortap.locks`."""

from __future__ import annotations

from tensortap import locks


def test_waits_for_imports_that_take_long(tmp_path, monkeypatch):
    (tmp_path / "on_a_slow_disk.py").write_text("import time; time.sleep(0.2); here = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(locks, "_PATIENCE", 0.01)
    assert locks.import_late("on_a_slow_disk").here
