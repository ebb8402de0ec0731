"""Messages about mistakes name what was meant."""

from __future__ import annotations

import logging
import pydoc

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.api import session as live
from tensortap.core.errors import NotFound, TensortapError
from tests.commands import type_in


@pytest.fixture
def trained():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_rules_have_names(trained):
    with pytest.raises(ValueError, match="no rule is called 'nann'; did you mean 'nan'"):
        tap.track(*trained, alerts=["nann"])
    with tap.track(*trained, alerts=["nan", tap.alerts.inf()]) as tracker:
        trained[0](torch.tensor([[1.0, torch.nan]])).sum().backward()
        tracker.step()
    assert {alert.rule for alert in tracker.alerts} == {"nan"}


@pytest.mark.parametrize("module", [tap, tap.alerts])
def test_modules_know_what_was_meant(module):
    with pytest.raises(AttributeError, match="has no attribute 'ops_'") as caught:
        module.ops_
    assert (caught.value.name, caught.value.obj) == ("ops_", module)


def test_model_and_optimizer_that_are_swapped(trained):
    model, optimizer = trained
    with pytest.raises(TypeError, match=r"^model and optimizer are swapped: tap.track\(model, opt"):
        tap.track(optimizer, model)
    with pytest.raises(TypeError, match=r"^the model is missing"):
        tap.track(optimizer)
    with pytest.raises(TypeError, match=r"or a list of them, got Linear$"):
        tap.track(model, model)


def test_names_of_statistics_and_formats(open_run, trained):
    with tap.track(*trained) as tracker:
        trained[0](torch.ones(1, 2)).sum().backward()
        tracker.step()
    tap.flush()
    run = tap.open(open_run)
    with pytest.raises(NotFound, match="no statistic is called 'rms'; did you mean 'rm2'"):
        tap.viz.scalar_global_heatmap(run, scalar_metric="rms")
    with pytest.raises(NotFound, match="no float format is called 'fp8'; there are float8_e"):
        run.formats("fp8")


def test_the_option_that_was_wrong(tmp_path):
    code, _, said = type_in("view", "127.0.0.1:99999", "--port", "2876", "--no-browser")
    assert (code, said) == (2, "tensortap: port must be a number from 0 to 65535, got '99999'\n")


def test_a_session_listens_where_the_training_program_looks(monkeypatch):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.2:0")
    server = live.start(memory="1MB")
    assert server.address.host == "127.0.0.2"
    server.close()
    monkeypatch.setenv("TENSORTAP_SERVER", "no.such.host.invalid:4000")
    with pytest.raises(TensortapError, match=r"cannot listen on no\.such\.host\.invalid:4000"):
        live.start(memory="1MB")


def test_optimizer_steps_without_steps_of_the_tracker(trained, caplog):
    model, optimizer = trained
    caplog.set_level(logging.WARNING, "tensortap")
    with tap.track(model, optimizer):
        for _ in range(50):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert caplog.text.count("20 steps of the optimizer are recorded as one step") == 1
    assert "call tracker.step() after each optimizer.step()" in caplog.text


def test_help_lists_the_options_of_track_one_per_line():
    lines = [line.strip() for line in pydoc.render_doc(tap.track).splitlines()]
    for option in ("kind", "every", "tensors", "stash", "digests", "alerts", "on_alert", "to"):
        assert any(line.startswith(f"- `{option}`: ") for line in lines), option
    assert np.all([len(line) <= 100 for line in lines[4:]])
