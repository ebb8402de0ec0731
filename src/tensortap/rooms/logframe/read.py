"""Read LogFrames, pandas frames of tensor statistics, and draw them like a run.

Its columns have two levels. Below ``metadata`` is what a row is about, below ``scalar_stats`` any
numbers, below ``exponent_counts`` how many values had ``2**n <= |x| < 2**(n+1)``: one column per
`n`, and two for what lies below (``-inf``) and above (``+inf``) the range that was counted.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tensortap.core.arguments import checked
from tensortap.core.errors import SchemaError, TensortapError, UntrustedFile
from tensortap.core.files import plain
from tensortap.core.limits import format_size, has_room
from tensortap.runs.arrow import read_groups
from tensortap.runs.rows import EXPONENTS, schema
from tensortap.table.kinds import KINDS, need_pandas, tensor_type

if TYPE_CHECKING:
    import pandas as pd

    from tensortap.table.sources import Integers, RowBlock

TOP = ("metadata", "scalar_stats", "exponent_counts")
METADATA = ("name", "type", "tensor_type", "step", "dtype")
PLACES = ("rank", "call")  # metadata beyond the schema; a strict frame has them as statistics
_NUMBERS = ("step", *PLACES)
_SMALL, _EXPANSION = 1 << 25, 30  # bytes, and times its size, that a compressed file may become


@checked
def read_logframe(path: str | Path, *, trust: bool = False) -> pd.DataFrame:
    """Read a LogFrame from a ``.parquet`` or, if trusted, ``.pkl`` file.

    The file may come from ``to_parquet`` or ``to_pickle`` of any program whose frame has the
    schema. Reading a pickle may run code, so it requires ``trust=True``.
    """
    need_pandas("tap.viz.read_logframe()")
    path = Path(path)
    name = path.name.lower()
    is_pickle = re.search(r"\.(pkl|pickle)(\.\w+)?$", name)
    if is_pickle and not trust:
        raise UntrustedFile(
            f"{path.name} is a pickle, which may run code when read: pass trust=True if it is "
            "yours, or save the frame with to_parquet()"
        )
    if not is_pickle and not name.endswith((".parquet", ".pq")):
        raise TensortapError(f"{path.name}: a LogFrame must be a .parquet or .pkl file")
    if not stat.S_ISREG(path.stat().st_mode):
        raise TensortapError(f"{path.name} is not a regular file")
    try:
        return _normal(_read_pickle(path) if is_pickle else _read_parquet(path))
    except SchemaError as error:
        raise SchemaError(f"{path.name}: {plain(str(error))}") from None
    except Exception as error:  # what pandas wrote beside the columns may be anything
        said = plain(f"{type(error).__name__}: {error}")
        raise SchemaError(f"{path.name} cannot be read: {said}") from None


def validate_logframe(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a normalized copy of a LogFrame; raise `SchemaError` if it violates the schema.

    Spellings of other tools are accepted (``Weights``, ``torch.float32``, ``"+inf"`` as text).
    Missing columns get defaults: ``rank`` is 0, and no value was outside the counted range. In a
    strict frame (``logframe(strict=True)``), rank and call become metadata again.
    """
    need_pandas("tap.validate_logframe()")
    return _normal(frame)


def exponent(label: Hashable) -> int | float:
    """Return the exponent that a column label names: an int, or an infinity.

    >>> exponent("-3"), exponent("+inf"), exponent(4.0)
    (-3, inf, 4)
    """
    value = float(label)  # type: ignore[arg-type]  # the caller handles ValueError and TypeError
    if math.isinf(value):
        return value
    if not value.is_integer():
        raise ValueError(label)
    return int(value)


def has_finfo(dtype: str) -> bool:
    """Return whether `ml_dtypes.finfo` knows a dtype, which then is a float.

    >>> has_finfo("float8_e4m3fn"), has_finfo("int64")
    (True, False)
    """
    import ml_dtypes

    try:
        ml_dtypes.finfo(dtype)
    except (ValueError, TypeError):
        return False
    return True


# -- checking ------------------------------------------------------------------------------


def _normal(frame: Any) -> pd.DataFrame:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise SchemaError(f"a LogFrame is a pandas.DataFrame, not a {type(frame).__name__}")
    if frame.columns.nlevels != 2:
        raise SchemaError(
            f"a LogFrame has columns of two levels, {', '.join(TOP)} on top; found "
            f"{frame.columns.nlevels} level with {_few(frame.columns)}"
        )
    if not frame.columns.is_unique:
        duplicates = frame.columns[frame.columns.duplicated()].unique()
        raise SchemaError(f"duplicate columns: {_few(duplicates)}")
    present = list(dict.fromkeys(frame.columns.get_level_values(0)))
    lacking = [top for top in TOP if top not in present]
    if lacking:
        raise SchemaError(f"no columns below {_few(lacking)}; found {_few(present)} on top")
    metadata, statistics = frame["metadata"], frame["scalar_stats"]
    moved = [name for name in PLACES if name in statistics.columns and name not in metadata.columns]
    metadata = metadata.assign(**{name: statistics[name] for name in moved})
    parts: dict[tuple[str, Any], Any] = {
        ("metadata", name): column for name, column in _metadata(metadata).items()
    }
    for label, column in statistics.drop(columns=moved).items():
        parts["scalar_stats", label] = _numeric(column, f"('scalar_stats', {label!r})")
    for label, column in _counts(frame["exponent_counts"]).items():
        parts["exponent_counts", label] = column
    normal = pd.concat(list(parts.values()), axis=1)
    normal.columns = pd.MultiIndex.from_tuples(list(parts))
    normal.attrs = dict(frame.attrs)
    return normal


def _metadata(frame: Any) -> dict[str, Any]:
    import pandas as pd

    lacking = [name for name in METADATA if name not in frame.columns]
    if lacking:
        hint = "; fill type with empty strings if you have none" if "type" in lacking else ""
        raise SchemaError(
            f"no column {_few([('metadata', name) for name in lacking])}; found "
            f"{_few(frame.columns)} below metadata{hint}"
        )
    columns: dict[str, Any] = {}
    for name in [*METADATA, *(c for c in frame.columns if c not in METADATA)]:
        column = frame[name]
        if name in _NUMBERS:
            column = _integers(column, f"('metadata', {name!r})")
        elif name in METADATA:
            column = column.astype(object).where(column.notna(), "").astype(str)
        columns[name] = column
    columns["tensor_type"] = _translate(
        columns["tensor_type"],
        tensor_type,
        f"unknown tensor_type {{}}; known are {', '.join(k.value for k in KINDS)}",
    )
    columns["dtype"] = _translate(
        columns["dtype"], _dtype, "ml_dtypes.finfo does not know dtype {}"
    )
    if "rank" not in columns:
        columns["rank"] = pd.Series(0, index=frame.index, dtype="int64")
    return columns


def _dtype(text: str) -> str | None:
    name = text.rpartition(".")[2]  # torch.float32
    return name if has_finfo(name) else None


def _translate(column: Any, spell: Callable[[str], str | None], message: str) -> Any:
    """Return a column with each of its texts in our spelling."""
    spellings = {text: spell(text) for text in column.unique()}
    unknown = [text for text, ours in spellings.items() if ours is None]
    if unknown:
        raise SchemaError(message.format(_few(unknown)))
    return column.map(spellings) if any(k != v for k, v in spellings.items()) else column


def _counts(frame: Any) -> dict[int | float, Any]:
    import pandas as pd

    columns: dict[int | float, Any] = {}
    for label, column in frame.items():
        try:
            n = exponent(label)
        except (ValueError, TypeError):
            raise SchemaError(
                f"('exponent_counts', {label!r:.80}) is not an integer, -inf or +inf"
            ) from None
        if math.isfinite(n) and abs(n) > EXPONENTS:
            raise SchemaError(f"no number has the exponent {label!r:.80}")
        if n in columns:
            raise SchemaError(f"exponent {n} has two columns")
        columns[n] = _integers(column, f"('exponent_counts', {label!r})")
    if not any(isinstance(n, int) for n in columns):
        raise SchemaError(f"no exponent below exponent_counts; found {_few(frame.columns)}")
    for n in (-math.inf, math.inf):
        if n not in columns:
            columns[n] = pd.Series(0, index=frame.index, dtype="int64")
    return dict(sorted(columns.items()))


def _numeric(column: Any, name: str) -> Any:
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column.dtype) or len(column) == 0:
        return column
    try:
        return pd.to_numeric(column)
    except (ValueError, TypeError):
        raise SchemaError(f"{name} must hold numbers, found {_few(column.head(3))}") from None


def _integers(column: Any, name: str) -> Any:
    column = _numeric(column, name)
    if column.dtype.kind == "c":
        raise SchemaError(f"{name} must hold integers, found complex numbers")
    if len(column) and column.dtype.kind not in "iub":
        empty = int(column.isna().sum())
        if empty:
            raise SchemaError(f"{name} has {empty} empty cells")
        fractions = column[column % 1 != 0]
        if len(fractions):
            raise SchemaError(f"{name} must hold integers, found {_few(fractions.head(3))}")
    if len(column) and not -(2**63) <= column.min() <= column.max() < 2**63:
        raise SchemaError(f"{name} must hold integers of 64 bits")
    return column.astype("int64")


def _few(values: Iterable[object]) -> str:
    words = [repr(value) for value in values]
    return (
        ", ".join(word[:80] for word in words[:8])
        + (f" … ({len(words)})" if len(words) > 8 else "")
        or "nothing"
    )


# -- files ----------------------------------------------------------------------------------


def _check_room(path: Path, expanded: int, in_memory: int) -> None:
    """Raise if a file would take far more memory than its size tells, or than there is."""
    if expanded > _SMALL + _EXPANSION * path.stat().st_size:
        size = format_size(path.stat().st_size)
        raise SchemaError(
            f"{size} become {format_size(expanded)} or more; pass the frame if that is right"
        )
    if not has_room(in_memory):
        raise SchemaError(f"reading it needs about {format_size(in_memory)} of memory")


def _read_pickle(path: Path) -> Any:
    import pandas as pd

    try:
        return pd.read_pickle(path)  # noqa: S301  the user trusts it
    except Exception as error:  # a pickle may raise anything
        raise SchemaError(f"it cannot be unpickled: {type(error).__name__}: {error}") from None


def _read_parquet(path: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow
        _normal(_two_levels(columns.empty_table().to_pandas()))
        # a text is a Python object
        row = sum(8 if pa.types.is_primitive(column.type) else 64 for column in columns)
        _check_room(path, row * file.metadata.num_rows, 2 * row * file.metadata.num_rows)
        limit = _SMALL + _EXPANSION * path.stat().st_size
        table = read_groups(file, list(range(file.metadata.num_row_groups)), None, limit)
        return _two_levels(table.replace_schema_metadata(columns.metadata).to_pandas())


def _two_levels(frame: pd.DataFrame) -> pd.DataFrame:
    """Restore pairs of labels, which pandas writes to Parquet as texts if there is no index."""
    import pandas as pd

    pairs = [re.fullmatch(r"\('(\w+)', '(.*)'\)", str(name)) for name in frame.columns]
    if frame.columns.nlevels == 1 and pairs and all(pairs):
        frame.columns = pd.MultiIndex.from_tuples([p.groups() for p in pairs if p])
    return frame


# -- rows of a table -------------------------------------------------------------------------


class FrameSource:
    """The rows of a LogFrame, as it is now."""

    bounded = outdated = is_large = False
    names: Sequence[str] = ()
    clipped = True

    def __init__(self, frame: Any) -> None:
        metadata, statistics, counts = (validate_logframe(frame)[top] for top in TOP)
        self.blocks: Sequence[RowBlock] = (self,)
        self.statistics = [str(name) for name in statistics]
        # Optimiser_State.exp_avg is a kind, and a suffix of the name
        kinds = metadata["tensor_type"].str.partition(".")
        names = metadata["name"].where(kinds[2] == "", metadata["name"] + "." + kinds[2])
        # infinities are counted above the range, and also as what they are
        infinities = sum(statistics[n] for n in ("posinfs", "neginfs") if n in statistics)
        self._columns = {
            **{str(name): column.to_numpy(np.float64) for name, column in statistics.items()},
            "name": names.to_numpy(),
            "kind": kinds[0].to_numpy(),
            **{name: metadata[name].to_numpy() for name in ("dtype", "step", "rank")},
            "call": np.asarray(metadata.get("call", np.zeros(len(metadata), np.int64))),
            "seq": np.arange(len(metadata)),
            "below": counts[-np.inf].to_numpy(np.int64),
            "above": (counts[np.inf] - infinities).to_numpy(np.int64),
        }
        self._counts = counts[[label for label in counts if isinstance(label, int)]]

    def refresh(self) -> None:
        """Do nothing: the frame was copied."""

    def __len__(self) -> int:
        return len(self._counts)

    def read(self, columns: list[str], start: int) -> pa.Table:
        return self.take(np.arange(start, len(self)), columns)

    def take(self, rows: Integers, columns: list[str]) -> pa.Table:
        return pa.table({name: self._cells(name, rows) for name in columns})

    def _cells(self, name: str, rows: Integers) -> Any:
        if name in ("number", "value", "tags"):  # it has statistics, no values and no tags
            return pa.nulls(len(rows), schema().field(name).type)
        if name not in ("first_bin", "bins"):
            return self._columns[name][rows]
        low, high = min(self._counts), max(self._counts)
        if name == "first_bin":
            return np.full(len(rows), low)
        dense = np.zeros((len(rows), high - low + 1), np.int64)
        for exponent, counts in self._counts.items():
            dense[:, exponent - low] = counts.to_numpy(np.int64)[rows]
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(dense.shape[1])
        return pa.ListArray.from_arrays(offsets, dense.ravel())
