"""The health of a run: in code, in the terminal, in the report and in the page's answer."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.alerts import Alert, default_rules
from tensortap.core.record import Kind
from tensortap.rooms.health.report import REMEDIES, health_of, health_text, looks_for, rows_of
from tests.commands import type_in
from tests.page.conftest import logged_in, serving


def trained(folder, *, bug: bool, **options):
    """Write a run of a small model whose last layer is in no optimizer, if there is a bug."""
    torch.manual_seed(0)
    path = tap.init(folder)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    parameters = model[0].parameters() if bug else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with tap.track(model, optimizer=optimizer, **options) as tracker:
        for step in range(4):
            optimizer.zero_grad()
            batch = torch.randn(3, 4)
            if bug and step == 3:
                batch[0, 0] = float("nan")
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            tracker.step(loss=loss)
    tap.finish()
    return path


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("bad"), bug=True, alerts=True, analyses=["norms"])


def states(path, **options):
    run = tap.open(path)
    return {row.rule: row.state for row in health_of(run.table(), run.reader, **options)}


def test_every_rule_says_what_it_looks_for():
    assert all(looks_for(rule.__name__) for rule in default_rules())


def test_rules_that_found_something_come_first(bad_run):
    run = tap.open(bad_run)
    rows = health_of(run.table(), run.reader)
    assert [(row.rule, row.state) for row in rows[:2]] == [
        ("no_optimizer", "problem"), ("nan", "problem"),
    ]  # fmt: skip
    first = rows[0]
    assert (first.name, first.step, first.alerts, first.rank) == ("2.weight", 2, 2, 0)
    assert "in no optimizer" in first.message
    assert first.remedy == REMEDIES["no_optimizer"]
    assert {row.state for row in rows[2:]} == {"blind", "fine"}


def test_a_rule_that_had_nothing_to_look_at_says_why(bad_run):
    run = tap.open(bad_run)
    rows = {row.rule: row for row in health_of(run.table(), run.reader)}
    assert rows["gradient_discarded"].state == "fine"
    why = {rule: rows[rule].message for rule in ("dropout_in_evaluation", "not_learning")}
    assert why == {
        "dropout_in_evaluation": "the model was not evaluated",
        "not_learning": "the loss shows no labels",
    }
    assert all(row.state == "blind" for rule, row in rows.items() if rule in why)
    shown = health_text(list(rows.values()), all_rules=False).plain
    assert "○ could not look: " in shown
    assert "fine:" not in shown
    assert len(shown.splitlines()) <= 8


@pytest.mark.parametrize("steps", [2, 8, 12])
def test_rules_that_saw_too_few_steps_could_not_look(tmp_path, steps):
    path = tap.init(tmp_path)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with tap.track(net, alerts=True) as tracker:
        for _ in range(steps):
            net(torch.randn(3, 4)).sum().backward()
            tracker.step()
    tap.finish()
    run = tap.open(path)
    rows = {row.rule: row for row in health_of(run.table(), run.reader)}
    assert rows["hardly_changes"].message == "fewer than 31 steps were seen"
    blind = {rule for rule in ("dead", "exploding", "nan") if rows[rule].state == "blind"}
    assert blind == {2: {"dead", "exploding"}, 8: {"exploding"}, 12: set()}[steps]
    if steps < 11:
        seldom = r"(\d+) of \1 tensors were seen in fewer than 11 steps"
        assert re.fullmatch(seldom, rows["exploding"].message)


def test_a_rule_that_was_not_active_is_unknown(tmp_path):
    path = trained(tmp_path, bug=True, alerts=[tap.alerts.dead()])
    assert states(path)["dead"] == "fine"
    assert states(path)["nan"] == "unknown"


def test_a_run_without_alerts_is_checked_now_as_far_as_statistics_tell(tmp_path):
    path = trained(tmp_path, bug=True)
    assert set(states(path).values()) == {"unknown"}
    found = states(path, compute=True)
    assert (found["nan"], found["dead"]) == ("problem", "fine")
    assert found["no_optimizer"] == "unknown"


def test_hints_and_own_rules():
    seen = Alert("unseen", "fc", Kind.ACTIVATION, 0, 0, "fc", "tracking is limited")
    own = Alert("mine", "fc", Kind.ACTIVATION, 3, 1, "fc", "odd")
    why = Alert("why", "fc", Kind.OP, 3, 1, "fc", "log of 0")
    hostile = Alert("\x1b[2J", "\x1b]0;", Kind.ACTIVATION, 3, 1, "", "\x07")
    found = rows_of([seen, own, why, hostile], ["mine", "\x1b[1m"])
    rows = {row.rule: row for row in found}
    assert (rows["unseen"].state, rows["mine"].state) == ("blind", "problem")
    assert "why" not in rows
    assert not [c for c in health_text(found).plain if not c.isprintable() and c != "\n"]


def test_check_prints_and_ends_with_1_if_something_is_wrong(bad_run, tmp_path):
    code, out, _ = type_in("check", bad_run)
    assert code == 1
    assert "2 found a problem" in out
    assert "● no_optimizer: 2.weight, 2.bias since step 2" in out
    assert REMEDIES["nan"] in out
    code, out, _ = type_in("check", bad_run, "--json")
    assert (code, json.loads(out)[0]["rule"]) == (1, "no_optimizer")
    clean = trained(tmp_path, bug=False, alerts=True)
    assert type_in("check", clean)[0] == 0


def test_the_report_begins_with_it(bad_run):
    from tensortap.rooms.report.run_report import RunReport

    parts = list(RunReport(bad_run).parts())
    assert "<h2>Health</h2>" in parts[2]
    assert "it gets gradients, but is in no optimizer" in parts[2]


def test_the_page_has_one_row_per_rule_and_small_lines_per_layer(bad_run):
    with serving(bad_run) as page, logged_in(page) as client:
        rules = client.get("/api/health", params={"run": bad_run.name}).json()["rules"]
        answer = client.get("/api/analyses", params={"run": bad_run.name}).json()
        kinds = client.get("/api/run", params={"run": bad_run.name}).json()["kinds"]
    assert [row["rule"] for row in rules[:2]] == ["no_optimizer", "nan"]
    lines = {each["name"]: each for own in answer["layers"] for each in own["lines"]}
    assert lines["0.weight.weight_norm"]["path"].startswith("M")
    assert "Health" in kinds  # so that a click can open it
    assert answer["total"] == answer["found"] == len(lines)
    assert [own["layer"] for own in answer["layers"]][:4] == ["model", "0", "0.weight", "0.bias"]


def test_rules_of_the_room_are_among_the_alerts():
    assert {"nan", "no_gradient"} <= set(dir(tap.alerts))
    assert tap.alerts.no_gradient(patience=2).__name__ == "no_gradient"
    with pytest.raises(AttributeError, match="no attribute 'no_such_rule'"):
        tap.alerts.no_such_rule
