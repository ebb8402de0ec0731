import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.runs.arrow import column, scalar

whole = st.integers(-(2**63), 2**63 - 1)
KINDS = [
    (pa.int64(), whole),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.list_(pa.int64()), st.lists(whole, max_size=4).map(tuple)),
    (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    (
        pa.list_(pa.struct([("file", pa.string()), ("key", pa.string())])),
        st.lists(st.fixed_dictionaries({"file": st.text(max_size=3), "key": st.text(max_size=3)})),
    ),
    (
        pa.map_(pa.string(), pa.string()),
        st.dictionaries(st.text(max_size=3), st.text(max_size=3)).map(lambda d: list(d.items())),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
@settings(max_examples=40)
@given(data=st.data())
def test_column_equals_that_of_pyarrow(kind, values, data):
    found = data.draw(st.lists(st.none() | values, max_size=20))
    ours = column(found, kind)
    ours.validate(full=True)
    assert ours.equals(pa.array(found, kind))


@given(st.text())
def test_scalar_equals_that_of_pyarrow(text):
    assert scalar(text, pa.string()) == pa.scalar(text, pa.string())


def test_rejects_number_that_does_not_fit():
    with pytest.raises(OverflowError):
        column([1 << 70], pa.int64())


@pytest.mark.slow
def test_neither_writing_nor_reading_a_run_imports_pandas(tmp_path):
    program = f"""
import sys
import numpy as np, tensortap as tap
path = tap.init({str(tmp_path)!r})
for step in range(3):
    tap.step(step)
    tap.catch(step * 0.5, "loss")
    tap.catch(np.zeros(100_000) + step, "big")
    tap.catch(np.arange(3.0), "small")
assert tap.flush(60)
still = tap.open(path)
assert still.get("loss", step=1) == 0.5
assert still.get("big", step=2)[0] == 2
tap.finish()
run = tap.open(path)
assert run.names() == ["loss", "big", "small"], run.names()
assert run.get("loss", step=1) == 0.5
assert len(run.get_all("big")) == 3
assert [r.step for r in run.follow()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
assert run.missing() == []
table = run.table()
from tensortap.table.columns import exponents
exponents(table, table.rows(kind="Value")), table.column("rm2"), table.alerts()
assert "pandas" not in sys.modules
assert "plotly" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
