"""The LogFrame: the frame that figures of numerics are drawn from, whoever wrote it.

Its columns have two levels. Below ``metadata`` is what a row is about, below ``scalar_stats`` any
numbers, below ``exponent_counts`` how many values had ``2**n <= |x| < 2**(n+1)``: one column an
`n`, and two for what was below (``-inf``) and above (``+inf``) the range that was kept.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra, SchemaError, TensortapError
from tensortap.record import Kind
from tensortap.runs.pickles import UntrustedFile

if TYPE_CHECKING:
    import pandas as pd

TOP = ("metadata", "scalar_stats", "exponent_counts")
METADATA = ("name", "type", "tensor_type", "step", "dtype")
KINDS = (
    Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT, Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE,
    Kind.VALUE, Kind.LOCAL,
)  # fmt: skip
_NUMBERS = ("step", "rank", "call")
_STATE = Kind.OPTIMISER_STATE.value


def need_pandas(what: str) -> Any:
    """pandas, or an error that says how to get it."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra(f"{what} needs pandas: pip install 'tensortap[view]'") from None
    return pandas


def has_finfo(dtype: str) -> bool:
    """Whether a dtype is a float that `ml_dtypes.finfo` knows.

    >>> has_finfo("float8_e4m3fn"), has_finfo("int64")
    (True, False)
    """
    import ml_dtypes

    try:
        ml_dtypes.finfo(dtype)
    except (ValueError, TypeError):
        return False
    return True


def read_logframe(path: str | Path, *, trust: bool = False) -> pd.DataFrame:
    """The LogFrame in a ``.parquet``, ``.csv`` (also ``.csv.gz``) or, if trusted, ``.pkl`` file.

    It may come from ``to_parquet``, ``to_csv`` or ``to_pickle`` of any program's frame that has
    the schema. Reading a pickle may run code: only with ``trust=True``.
    """
    pd = need_pandas("tap.read_logframe()")
    path = Path(path)
    name = path.name.lower()
    if name.endswith((".parquet", ".pq")):
        frame = _two_levels(pd.read_parquet(path))
    elif name.endswith((".csv", ".csv.gz")):
        frame = _read_csv(path)
    elif re.search(r"\.(pkl|pickle)(\.\w+)?$", name):
        if not trust:
            raise UntrustedFile(
                f"{path.name} is a pickle, which may run code when read: say trust=True if it is "
                "yours, or have it saved with to_parquet()"
            )
        frame = pd.read_pickle(path)  # the caller says that he trusts it
    else:
        raise TensortapError(f"{path.name}: a LogFrame is read from .parquet, .csv or .pkl")
    return _checked(frame, f"{path.name}: ")


def validate_logframe(frame: pd.DataFrame) -> pd.DataFrame:
    """The same frame as figures expect it, or a `SchemaError` that says what is not right.

    Spellings of other tools are taken (``Weights``, ``torch.float32``, ``"+inf"`` as text), and
    what they leave out is added: ``rank`` is 0, nothing was below or above the range.
    """
    need_pandas("tap.validate_logframe()")
    return _checked(frame, "")


def tensor_type(text: str) -> str | None:
    """The tensor type that a text means, or None.

    >>> tensor_type("Weight_Gradients"), tensor_type("Optimizer_State.exp_avg"), tensor_type("x")
    ('Weight_Gradient', 'Optimiser_State.exp_avg', None)
    """
    kind, dot, key = text.partition(".")
    known = (
        kind.strip().replace(" ", "_").replace("-", "_").lower().replace("optimizer", "optimiser")
    )
    found = _TYPES.get(known)
    if found is None or (dot and found != _STATE):
        return None
    return f"{found}.{key}" if key else found


_TYPES = {spelling: k.value for k in KINDS for spelling in (k.value.lower(), f"{k.value.lower()}s")}


def exponent(label: Hashable) -> int | float:
    """The bin that a label of a column names: an int, or an infinity.

    >>> exponent("-3"), exponent("+inf"), exponent(4.0)
    (-3, inf, 4)
    """
    value = float(label)  # type: ignore[arg-type]  # ValueError and TypeError are the caller's
    if math.isinf(value):
        return value
    if not value.is_integer():
        raise ValueError(label)
    return int(value)


# -- checking ------------------------------------------------------------------------------


def _checked(frame: Any, where: str) -> pd.DataFrame:
    import pandas as pd

    try:
        return _normal(frame)
    except SchemaError as error:
        raise SchemaError(f"{where}{error}") from None
    except pd.errors.InvalidIndexError as error:
        raise SchemaError(f"{where}its columns cannot be told apart: {error}") from None


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
        twice = frame.columns[frame.columns.duplicated()].unique()
        raise SchemaError(f"columns that are there twice: {_few(twice)}")
    there = list(dict.fromkeys(frame.columns.get_level_values(0)))
    lacking = [top for top in TOP if top not in there]
    if lacking:
        raise SchemaError(f"no columns below {_few(lacking)}; found {_few(there)} on top")
    parts: dict[tuple[str, Any], Any] = {
        ("metadata", name): column for name, column in _metadata(frame["metadata"]).items()
    }
    for label, column in frame["scalar_stats"].items():
        parts["scalar_stats", label] = _numeric(column, f"('scalar_stats', {label!r})")
    for label, column in _counts(frame["exponent_counts"]).items():
        parts["exponent_counts", label] = column
    made = pd.concat(list(parts.values()), axis=1)
    made.columns = pd.MultiIndex.from_tuples(list(parts))
    made.attrs = dict(frame.attrs)
    return made


def _metadata(found: Any) -> dict[str, Any]:
    import pandas as pd

    lacking = [name for name in METADATA if name not in found.columns]
    if lacking:
        hint = "; fill type with empty strings if you have none" if "type" in lacking else ""
        raise SchemaError(
            f"no column {_few([('metadata', name) for name in lacking])}; found "
            f"{_few(found.columns)} below metadata{hint}"
        )
    columns: dict[str, Any] = {}
    for name in [*METADATA, *(c for c in found.columns if c not in METADATA)]:
        column = found[name]
        if name in _NUMBERS:
            column = _whole(column, f"('metadata', {name!r})")
        elif name in METADATA:
            column = column.astype(object).where(column.notna(), "").astype(str)
        columns[name] = column
    columns["tensor_type"] = _translate(
        columns["tensor_type"],
        tensor_type,
        f"no tensor_type is called {{}}; there is {', '.join(k.value for k in KINDS)}",
    )
    columns["dtype"] = _translate(
        columns["dtype"], _dtype, "dtype {}: ml_dtypes.finfo knows no such float"
    )
    if "rank" not in columns:
        columns["rank"] = pd.Series(0, index=found.index, dtype="int64")
    return columns


def _dtype(text: str) -> str | None:
    name = text.rpartition(".")[2]  # torch.float32
    return name if has_finfo(name) else None


def _translate(column: Any, spell: Any, complaint: str) -> Any:
    """A column with each of its words in our spelling."""
    words = {word: spell(word) for word in column.unique()}
    unknown = [word for word, meant in words.items() if meant is None]
    if unknown:
        raise SchemaError(complaint.format(_few(unknown)))
    return column.map(words) if any(k != v for k, v in words.items()) else column


def _counts(found: Any) -> dict[int | float, Any]:
    import pandas as pd

    columns: dict[int | float, Any] = {}
    for label, column in found.items():
        try:
            n = exponent(label)
        except (ValueError, TypeError):
            raise SchemaError(
                f"('exponent_counts', {label!r}) is no exponent: there are whole numbers, -inf "
                "and +inf"
            ) from None
        if n in columns:
            raise SchemaError(f"exponent {n} has two columns")
        columns[n] = _whole(column, f"('exponent_counts', {label!r})")
    if not any(isinstance(n, int) for n in columns):
        raise SchemaError(f"no exponent below exponent_counts; found {_few(found.columns)}")
    for n in (-math.inf, math.inf):
        if n not in columns:
            columns[n] = pd.Series(0, index=found.index, dtype="int64")
    return dict(sorted(columns.items()))


def _numeric(column: Any, name: str) -> Any:
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column.dtype) or len(column) == 0:
        return column
    try:
        return pd.to_numeric(column)
    except (ValueError, TypeError):
        raise SchemaError(f"{name} holds no numbers: {_few(column.head(3))}") from None


def _whole(column: Any, name: str) -> Any:
    column = _numeric(column, name)
    if len(column) and column.dtype.kind not in "iub":
        empty = int(column.isna().sum())
        if empty:
            raise SchemaError(f"{name} has {empty} empty cells")
        odd = column[column % 1 != 0]
        if len(odd):
            raise SchemaError(f"{name} holds whole numbers; found {_few(odd.head(3))}")
    return column.astype("int64")


def _few(found: Iterable[object]) -> str:
    words = [repr(word) for word in found]
    return ", ".join(words[:8]) + (f" … ({len(words)})" if len(words) > 8 else "") or "nothing"


# -- files ----------------------------------------------------------------------------------


def _two_levels(frame: pd.DataFrame) -> pd.DataFrame:
    """Parquet has one level: without an index, pandas forgets that names were pairs."""
    import pandas as pd

    pairs = [re.fullmatch(r"\('(\w+)', '(.*)'\)", str(name)) for name in frame.columns]
    if frame.columns.nlevels == 1 and pairs and all(pairs):
        frame.columns = pd.MultiIndex.from_tuples([p.groups() for p in pairs if p])
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    """Two rows of headers; text stays text: a layer may be called NA."""
    import pandas as pd

    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", newline="") as stream:
        rows = csv.reader(stream)
        top, below, first = next(rows, []), next(rows, []), next(rows, [])
    if len(top) != len(below):
        raise SchemaError(f"{path.name}: a LogFrame has two rows of headers, found one")
    # a column of row numbers, which pandas writes unless told otherwise, has no top
    kept = [i for i, word in enumerate(top) if word in TOP]
    if not kept:
        raise SchemaError(
            f"{path.name}: the first row of headers names none of {', '.join(TOP)}; found "
            f"{_few(dict.fromkeys(top))}"
        )
    # a named index has a row of its own, empty otherwise
    named = bool(first) and any(first) and not any(first[i] for i in kept)
    texts = [i for i in kept if top[i] == "metadata" and below[i] not in _NUMBERS]
    frame = pd.read_csv(
        path,
        header=None,
        skiprows=3 if named else 2,
        names=range(len(top)),
        usecols=kept,
        dtype=dict.fromkeys(texts, str),
        keep_default_na=False,
        na_values={i: ["", "nan", "NaN", "NA"] for i in kept if i not in texts},
        **_every_digit(pd.__version__),
    )[kept]
    frame.columns = pd.MultiIndex.from_tuples([(top[i], below[i]) for i in kept])
    return frame


def _every_digit(version: str) -> dict[str, Any]:
    """What makes `read_csv` give floats back as they were; from 3.1 on it does by itself."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return {} if (major, minor) >= (3, 1) else {"float_precision": "round_trip"}
