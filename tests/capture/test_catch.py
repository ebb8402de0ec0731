"""Arguments of `catch`."""

from __future__ import annotations

import logging

import pytest

import tensortap as tap
from tensortap.capture.pipeline import pipeline


def test_reports_invalid_every_once(caplog, errors):
    with caplog.at_level(logging.WARNING, "tensortap"):
        for _ in range(2):
            tap.catch(1, "never", every=0)
    assert errors() == 2
    (record,) = caplog.records
    assert "every must be at least 1, got 0" in record.getMessage()


def test_strict_mode_raises(monkeypatch):
    monkeypatch.setattr(pipeline, "strict", True)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        tap.catch(1, "never", every=0)
