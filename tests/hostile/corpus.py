"""Runs that a stranger may have written: every one is a damaged or malicious copy of a good run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.core.record import Fields, Items, Kind, Mapping, Number, Opaque, Record, TensorData
from tensortap.rooms.compact.compact import compact_run
from tensortap.rooms.ops.explanation import ChainLink, Operand, OperationExplanation
from tensortap.runs import rows
from tensortap.runs.folders import end_run
from tensortap.runs.run_reader import RunReader
from tensortap.runs.tables import TailFile
from tensortap.stats import summarize_array
from tests.figures.conftest import RunWriter

Hostile = Callable[[Path], None]
CONTROL = "\x1b[2J\x1b]0;owned\x07\r\n\u202e"
DEEP = 100_000


class _Large:
    """Bytes that get a file of their own, as a block of a pool does."""

    def __init__(self, data: bytes) -> None:
        self.view = memoryview(data)
        self.nbytes = len(data)


def records() -> list[Record]:
    """Return records of each kind of value: large and small tensors, numbers, statistics, files."""
    found: list[Record] = []

    def add(name: str, kind: Kind, step: int, **fields: Any) -> None:
        found.append(Record(name, kind, step, 0, len(found), 0, 1, 1_000 + len(found), **fields))

    for step in range(3):
        array = np.arange(64.0 * 64, dtype="f4").reshape(64, 64) + step
        tensor = TensorData("numpy", "float32", array.shape, _Large(array.tobytes()))
        add("w", Kind.VALUE, step, dtype="float32", shape=(64, 64), value=tensor)
        small = TensorData("numpy", "float32", (2,), np.ones(2, "f4").tobytes())
        add("d", Kind.VALUE, step, value=Mapping((("a", small), ("b", Items("list", (1, "t"))))))
        add("x", Kind.METRIC, step, value=0.5 * step)
        stats = summarize_array(array)
        add("layer", Kind.ACTIVATION, step, dtype="float32", shape=(64, 64), stats=stats)
        add("f", Kind.VALUE, step, dtype="float32", shape=(4,), tags={"file": "f.npy"})
    return found


def good_run(folder: Path, *, sealed: bool, compacted: bool = False) -> Path:
    """Write a run; it ends with a tail unless it is sealed."""
    writer = RunWriter(folder)
    writer.write(records())
    np.save(writer.path / "f.npy", np.ones(4, "f4"))
    (writer.path / "git_info.json").write_text(json.dumps({"commit_id": "0" * 40}))
    (writer.path / "packages.json").write_text("{}")
    (writer.path / "runtime_info.json").write_text("{}")
    if sealed:
        writer.close()
        if compacted:
            end_run(writer.path)
            compact_run(RunReader(writer.path))
        return writer.path
    copy = folder / "open"
    shutil.copytree(writer.path, copy)
    writer.close()
    shutil.rmtree(writer.path)
    return copy


# -- how runs are changed --------------------------------------------------------------------


def tail_of(run: Path) -> Path:
    return run / "records" / "00000" / "tail.arrows"


def part_of(run: Path) -> Path:
    return run / "records" / "00000" / "0000.parquet"


def payload_of(run: Path) -> Path:
    return min((run / "tensors" / "00000").glob("*.safetensors"))


def good_rows(run: Path) -> list[list[Any]]:
    with pa.ipc.open_stream(tail_of(run).read_bytes()) as stream:
        table = stream.read_all()
    return [list(row) for row in zip(*(c.to_pylist() for c in table.columns), strict=True)]


def write_tail(run: Path, batches: list[Any], columns: Any = None, part: Any = 0) -> None:
    content = json.dumps({"format": 1, "part": part}).encode()
    schema = (columns or rows.schema()).with_metadata({rows.METADATA_KEY: content})
    tail_of(run).unlink()
    tail = TailFile(tail_of(run), schema.serialize())
    for batch in batches:
        tail.append(batch.serialize())
    tail.close()


def change(run: Path, name: str, /, **cells: Any) -> None:
    """Change cells of all rows of a name."""
    found = good_rows(run)
    for row in found:
        if row[0] == name:
            for column, cell in cells.items():
                row[rows.COLUMNS.index(column)] = cell
    write_tail(run, [rows.batch_of([tuple(row) for row in found], rows.schema())])


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def nested_list(depth: int) -> bytes:
    return b"\x93\xa1i\xa4list\x91" * depth + b"\xc0"


def dump(run: Path, name: str, data: bytes) -> None:
    (run / name).write_bytes(data)
    change(run, "f", tags=[("file", name)])


def header(run: Path, content: Any, length: int | None = None) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    size = len(raw) if length is None else length
    payload_of(run).write_bytes(size.to_bytes(8, "little") + raw + bytes(1 << 14))


def keys_of(run: Path) -> list[str]:
    return [
        row[rows.COLUMNS.index("payloads")][0]["key"] for row in good_rows(run) if row[0] == "w"
    ]


# -- the corpus ------------------------------------------------------------------------------

OPEN: dict[str, Hostile] = {}
SEALED: dict[str, Hostile] = {}

_INFO = {
    "format": 1, "id": "0", "tensortap": "1", "world_size": 1, "started": "2026", "time_zone": "UTC"
}  # fmt: skip


encode = msgspec.msgpack.encode


def _info(content: Any) -> Hostile:
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    raw = text.encode() if isinstance(text, str) else text
    return lambda run: (run / "run.json").write_bytes(raw) and None


OPEN |= {
    f"run.json {name}": _info(content)
    for name, content in {
        "empty": "",
        "garbage": bytes(range(256)),
        "list": [],
        "newer": {**_INFO, "format": 10**30},
        "format is text": {**_INFO, "format": CONTROL},
        "negative": {**_INFO, "world_size": -(2**63)},
        "wrong types": {**_INFO, "started": [CONTROL], "id": {}},
        "deep": "[" * DEEP,
        "deep object": '{"format":1,"id":' + "[" * DEEP + "]" * DEEP + "}",
        "large": {**_INFO, "id": "x" * (8 << 20)},
        "control": {
            **_INFO,
            **dict.fromkeys(("id", "tensortap", "started", "ended"), CONTROL * 50),
        },
        "many digits": '{"format": ' + "9" * 100_000 + "}",
    }.items()
}
OPEN["run.json is a pipe"] = lambda run: fifo(run / "run.json")
OPEN["run.json is missing"] = lambda run: (run / "run.json").unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


OPEN["run.json is a folder"] = lambda run: _folder(run / "run.json")
OPEN["tail is a pipe"] = lambda run: fifo(tail_of(run))
OPEN["tail is a folder"] = lambda run: _folder(tail_of(run))
OPEN["tail is empty"] = lambda run: tail_of(run).write_bytes(b"") and None
OPEN["tail is garbage"] = lambda run: tail_of(run).write_bytes(random.Random(1).randbytes(9999))  # type: ignore[assignment,return-value]


def _cut(run: Path) -> None:
    tail_of(run).write_bytes(tail_of(run).read_bytes()[:-100])


OPEN["tail is cut"] = _cut


def _flipped(seed: int) -> Hostile:
    def flip(run: Path) -> None:
        data, chance = bytearray(tail_of(run).read_bytes()), random.Random(seed)
        for _ in range(1 + seed % 3):
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
        tail_of(run).write_bytes(data)

    return flip


OPEN |= {f"tail with flipped bits {seed}": _flipped(seed) for seed in range(9)}


def _offsets(run: Path) -> None:
    """Let the offsets of the names point far outside of the file."""
    data = bytearray(tail_of(run).read_bytes())
    count = len(good_rows(run))
    start = data.index(struct.pack("<4i", 0, 1, 2, 3))  # one letter each
    struct.pack_into(f"<{count - 2}i", data, start + 8, *[0x7FFF_0000] * (count - 2))
    tail_of(run).write_bytes(data)


OPEN["tail with wild offsets"] = _offsets


def _compressed(run: Path) -> None:
    """Append a batch that is small in the file and half a gigabyte in memory."""
    row = tuple(good_rows(run)[1])
    huge = list(row)
    huge[rows.COLUMNS.index("value")] = bytes(500 << 20)
    batch = rows.batch_of([tuple(huge)], rows.schema())
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema(), options=options) as writer:
        writer.write_batch(batch)
    tail_of(run).write_bytes(sink.getvalue())


OPEN["tail with a compressed bomb"] = _compressed
OPEN["tail with another part"] = lambda run: write_tail(run, [], part=["x"])
OPEN["tail of a negative part"] = lambda run: write_tail(run, [], part=-5)
OPEN["tail with other columns"] = lambda run: write_tail(
    run, [], pa.schema([("name", pa.string())])
)


def _other_type(run: Path) -> None:
    fields = [f if f.name != "step" else pa.field("step", pa.string()) for f in rows.schema()]
    write_tail(run, [], pa.schema(fields))


OPEN["tail with another type"] = _other_type


def _nulls(run: Path) -> None:
    batch = rows.batch_of([tuple(good_rows(run)[0])], rows.schema())
    columns = [
        pa.nulls(1, f.type) if f.name == "name" else batch.column(f.name) for f in batch.schema
    ]
    schema = pa.schema([f.with_nullable(True) for f in batch.schema])
    write_tail(run, [pa.RecordBatch.from_arrays(columns, schema=schema)], schema)


OPEN["tail with names that are null"] = _nulls


def _empty_batches(run: Path) -> None:
    """Append 3,000 batches without rows, and messages without a body."""
    empty = pa.RecordBatch.from_pylist([], rows.schema())
    with tail_of(run).open("ab") as stream:
        stream.write(empty.serialize().to_pybytes() * 3000)
        stream.write((b"\xff" * 4 + bytes(4)) * 100_000)


OPEN["tail with empty batches"] = _empty_batches


def _long_body(run: Path) -> None:
    data = tail_of(run).read_bytes()
    tail_of(run).write_bytes(
        data + b"\xff\xff\xff\xff" + struct.pack("<i", 0x7FFF_FFF8) + b"x" * 64
    )


OPEN["tail with a message of two gigabytes"] = _long_body


def _alert(rule: str, **fields: Any) -> dict[str, Any]:
    """Return the cells of an alert whose texts are all hostile."""
    texts = dict.fromkeys(("message", "module", "origin", "severity"), CONTROL)
    facts = Mapping(((CONTROL, 1.0),))
    found: dict[str, Any] = {**texts, "rule": rule, "kind": "Activation", "facts": facts, **fields}
    return {"kind": "Alert", "value": encode(Mapping(tuple(found.items()))), "number": None}


_OPERATION = OperationExplanation(
    CONTROL, CONTROL, CONTROL, CONTROL, CONTROL, CONTROL, 2, CONTROL, 1, (CONTROL,) * 3,
    (Operand(CONTROL, CONTROL),), (ChainLink(CONTROL, CONTROL, CONTROL, CONTROL, CONTROL),),
)  # fmt: skip
_TAGS = ("module", "op", "phase", "index", "line", "function", "node", "inputs", "parameter")
_CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "alert of a hostile rule": ("x", _alert(CONTROL)),
    "alert of a known rule": ("x", {**_alert("nan"), "name": CONTROL}),
    "verdict with control characters": (
        "x", _alert("why", explanation=msgspec.json.encode(_OPERATION).decode()),
    ),
    "verdict with a deep explanation": ("x", _alert("why", explanation="[" * DEEP)),
    "operation with control characters": (
        "layer", {"kind": "Op", "nans": 3, "tags": [(name, CONTROL) for name in _TAGS]},
    ),
    "tags with control characters": ("layer", {"tags": [(name, CONTROL) for name in _TAGS]}),
    "rank of another rank": ("x", {"rank": 7}),
    "unknown kind": ("x", {"kind": CONTROL}),
    "steps at the end of the range": ("x", {"step": 2**63 - 1}),
    "name with control characters": ("x", {"name": CONTROL}),
    "name of a megabyte": ("x", {"name": "n" * (1 << 20)}),
    "type with control characters": ("w", {"type": CONTROL, "dtype": CONTROL}),
    "value is garbage": ("d", {"value": b"\xc1\xff\x00"}),
    "value is deep": ("d", {"value": nested_list(DEEP)}),
    "value is too deep": ("d", {"value": nested_list(150)}),
    "value with an unhashable key": (
        "d", {"value": encode(Mapping(((Items("list", ()), 1),)))}
    ),
    "value of a class that runs code": (
        "d", {"value": encode(Fields("dataclass", "os:system", ("a",), ("b",)))}
    ),
    "value with an unknown container": ("d", {"value": encode(Items(CONTROL, (1,)))}),
    "value with a huge integer": (
        "d", {"value": encode(Number("int", (), "0x" + "f" * (4 << 20)))}
    ),
    "value with a malformed integer": (
        "d", {"value": encode(Number("int", (), "9" * 100_000))}
    ),
    "value with control characters": ("d", {"value": encode(Opaque(CONTROL, CONTROL))}),
    "first bin far below": ("layer", {"first_bin": -(2**31), "bins": [1]}),
    "first bin far above": ("layer", {"first_bin": 2**31 - 2, "bins": [1, 2]}),
    "a million bins": ("layer", {"first_bin": 0, "bins": [1] * 1_000_000}),
    "negative counts": ("layer", {"count": -5, "nans": -7, "bins": [-(2**63)]}),
    "no statistics but a count": ("layer", {"max_abs": None, "mean": None, "std": None}),
    "whole of a petabyte": (
        "w", {"shard_shape": [2**25, 2**25], "shard_offsets": [0, 0], "shard_placements": ["S"]}
    ),
    "shard with offsets of another length": (
        "w", {"shard_shape": [64, 64], "shard_offsets": [0], "shard_placements": None}
    ),
    "shard outside of the whole": (
        "w", {"shard_shape": [64, 64], "shard_offsets": [2**62, -(2**62)], "shard_placements": []}
    ),
    "shape of a petabyte": ("layer", {"shape": [2**25, 2**25]}),
    "negative shape": ("w", {"shape": [-1, 2**63 - 1]}),
    "payload outside of the run": ("w", {"payloads": [{"file": "../../etc/passwd", "key": "x"}]}),
    "payload with an absolute path": ("w", {"payloads": [{"file": "/etc/passwd", "key": "x"}]}),
    "payload that is missing": ("w", {"payloads": [{"file": "00000/9.safetensors", "key": "x"}]}),
    "payload without a key": ("w", {"payloads": [{"file": None, "key": None}]}),
    "no payload": ("w", {"payloads": None}),
    "file outside of the run": ("f", {"tags": [("file", "../../../../etc/passwd")]}),
    "file of unknown suffix": ("f", {"tags": [("file", f"x{CONTROL}")]}),
    "file that is the folder": ("f", {"tags": [("file", "..")]}),
}  # fmt: skip
for _label, (_name, _cells) in _CELLS.items():
    OPEN[_label] = lambda run, name=_name, cells=_cells: change(run, name, **cells)  # type: ignore[misc]


def _tensor(**fields: Any) -> Hostile:
    good = {"framework": "numpy", "dtype": "float32", "shape": (2,), "data": bytes(8)}
    value = encode(TensorData(**{**good, **fields}))
    return lambda run: change(run, "d", value=value)


OPEN |= {
    "tensor shorter than its shape": _tensor(shape=(1000, 1000)),
    "tensor of a petabyte": _tensor(shape=(2**25, 2**25)),
    "tensor of negative size": _tensor(shape=(-2,)),
    "tensor with 1000 dimensions": _tensor(shape=(1,) * 1000),
    "tensor of an unknown dtype": _tensor(dtype=CONTROL),
    "tensor of objects": _tensor(dtype="object", shape=(1,)),
    "tensor of an unknown framework": _tensor(framework="os"),
    "tensor in another payload": _tensor(data=99),
}


def _offset(begin: Any, end: Any) -> Hostile:
    def build(run: Path) -> None:
        entry = {"dtype": "F32", "shape": [64, 64], "data_offsets": [begin, end]}
        header(run, dict.fromkeys(keys_of(run), entry))

    return build


OPEN |= {
    "payloads are a pipe": lambda run: fifo(payload_of(run)),
    "payloads are empty": lambda run: payload_of(run).write_bytes(b"") and None,
    "payloads are cut": lambda run: os.truncate(payload_of(run), 70_000),
    "payloads with a header of exabytes": lambda run: header(run, {}, 2**63),
    "payloads with a deep header": lambda run: header(run, b"[" * DEEP),
    "payloads with a list as header": lambda run: header(run, []),
    "payloads with negative offsets": _offset(-(2**62), 2**62),
    "payloads with offsets that are text": _offset("0", CONTROL),
    "payloads with offsets outside": _offset(0, 2**50),
}


def _sparse(run: Path) -> None:
    """Claim a tensor of a terabyte in a file that takes no room."""
    size = 1 << 40
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header(run, dict.fromkeys(keys_of(run), entry))
    os.truncate(payload_of(run), size + (1 << 20))
    tensor = TensorData("numpy", "uint8", (size,), 0)
    change(run, "w", value=encode(tensor))


OPEN["payloads with a hole of a terabyte"] = _sparse


# -- dumped files ----------------------------------------------------------------------------


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _npy(shape: Any, descr: str = "<f4") -> bytes:
    stream = io.BytesIO()
    content = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, content)
    return stream.getvalue() + bytes(16)


def _zip_bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(600 << 20))
        archive.writestr("archive/version", "3\n")
    return stream.getvalue()


def dumped_files() -> dict[str, tuple[str, bytes]]:
    return {
        "npy of a petabyte": ("x.npy", _npy((2**25, 2**25))),
        "npy of objects": ("x.npy", _npy((2,), "|O")),
        "npy that is garbage": ("x.npy", b"\x93NUMPY\x01\x00" + b"\xff" * 100),
        "pickle that runs code": ("x.pkl", pickle.dumps(_Call(os.system, "echo owned"))),
        "torch file that is garbage": ("x.pt", b"PK\x03\x04" + bytes(1000)),
    }


for _label, (_file, _data) in dumped_files().items():
    OPEN[_label] = lambda run, file=_file, data=_data: dump(run, file, data)  # type: ignore[misc]
OPEN["torch file that is a bomb"] = lambda run: dump(run, "x.pt", _zip_bomb())
OPEN["file is a pipe"] = lambda run: fifo(run / "f.npy")


# -- provenance ------------------------------------------------------------------------------

_FIELDS = ("commit_id", "branch", "url", "remote", "path", "describe", "status")
_HOSTILE_GIT = {
    "project_git_info": dict.fromkeys(_FIELDS, CONTROL),
    "command": {"argv": [CONTROL]},
    "environment_variables": {f"A{CONTROL}": CONTROL},
    "all_packages": {CONTROL: CONTROL},
    "python": CONTROL,
    "host": [CONTROL],
}


def _link(path: Path, target: str | Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _sparse_file(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 1 << 40)


_MANY_LISTS = b"[" + b"[]," * 2_700_000 + b"[]]"

OPEN["packages.json of many lists"] = lambda run: (
    (run / "packages.json").write_bytes(_MANY_LISTS) and None
)
OPEN["packages.json of a terabyte"] = lambda run: _sparse_file(run / "packages.json")
OPEN["packages.json is a device"] = lambda run: _link(run / "packages.json", "/dev/zero")
OPEN["project.patch is a pipe"] = lambda run: fifo(run / "project.patch")
OPEN["project.patch is a device"] = lambda run: _link(run / "project.patch", "/dev/zero")
OPEN["project.patch of a terabyte"] = lambda run: _sparse_file(run / "project.patch")
OPEN["run.json is a device"] = lambda run: _link(run / "run.json", "/dev/zero")
OPEN["tail is a device"] = lambda run: _link(tail_of(run), "/dev/zero")
OPEN["payloads with a header of many lists"] = lambda run: header(run, _MANY_LISTS)
OPEN["file is a device"] = lambda run: _link(run / "f.npy", "/dev/zero")

for _file in ("git_info.json", "packages.json", "runtime_info.json"):
    OPEN |= {
        f"{_file} is deep": lambda run, f=_file: (run / f).write_text("[" * DEEP) and None,  # type: ignore[misc]
        f"{_file} is a list": lambda run, f=_file: (run / f).write_text("[1]") and None,  # type: ignore[misc]
        f"{_file} is a pipe": lambda run, f=_file: fifo(run / f),  # type: ignore[misc]
        f"{_file} with control characters": lambda run, f=_file: (  # type: ignore[misc]
            (run / f).write_text(json.dumps(_HOSTILE_GIT)) and None
        ),
    }


def _receipt(run: Path) -> None:
    content = {"captured": CONTROL, "dropped": [[]], "seconds": {"a": None}}
    (run / "records" / "00000" / "receipt.json").write_text(json.dumps(content))


OPEN["receipt of other types"] = _receipt
OPEN["rank with many digits"] = lambda run: (run / "records" / ("9" * 200)).mkdir()


# -- sealed tables ---------------------------------------------------------------------------


def _rewritten(contents: Any = None, **cells: Any) -> Hostile:
    """Write the part again with other metadata, or other cells."""

    def build(run: Path) -> None:
        file = pq.ParquetFile(part_of(run))
        table, found = file.read(), dict(file.metadata.metadata)
        for name, cell in cells.items():
            place = table.schema.get_field_index(name)
            column = pa.array([cell] * table.num_rows, table.schema.field(name).type)
            table = table.set_column(place, table.schema.field(name), column)
        known = json.loads(found[rows.METADATA_KEY])
        known["contents"] = {**known["contents"], **contents} if contents else known["contents"]
        raw = json.dumps(known).encode()
        pq.write_table(table.replace_schema_metadata({rows.METADATA_KEY: raw}), part_of(run))

    return build


def _damaged(seed: int) -> Hostile:
    def build(run: Path) -> None:
        data, chance = bytearray(part_of(run).read_bytes()), random.Random(seed)
        for _ in range(20):
            data[chance.randrange(4, len(data) - 8)] ^= 1 << chance.randrange(8)
        part_of(run).write_bytes(data)

    return build


def _large_cells(count: int, size: int) -> Hostile:
    """Write a part whose values are all the same, which Parquet stores once, and compressed."""

    def build(run: Path) -> None:
        file = pq.ParquetFile(part_of(run))
        known = json.loads(file.metadata.metadata[rows.METADATA_KEY])
        known["contents"]["rows"] = count
        table = file.read().take(pa.array([0] * count))
        cells = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [bytes(size)])
        table = table.set_column(table.schema.get_field_index("value"), "value", cells)
        options: Any = {"compression": "zstd", "store_schema": False}
        with pq.ParquetWriter(part_of(run), table.schema, **options) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({rows.METADATA_KEY: json.dumps(known).encode()})

    return build


def _empty_groups(run: Path) -> None:
    """Add 300 row groups without rows."""
    part = pq.ParquetFile(part_of(run))
    table, footer = part.read(), part.metadata.metadata
    with pq.ParquetWriter(part_of(run), rows.schema()) as writer:
        for _ in range(300):
            writer.write_table(table.slice(0, 0), row_group_size=1)
        writer.write_table(table)
        writer.add_key_value_metadata({rows.METADATA_KEY: footer[rows.METADATA_KEY]})


SEALED |= {
    "table with empty row groups": _empty_groups,
    "table that repeats a megabyte": _large_cells(3000, 1 << 20),
    "table that repeats half a gigabyte": _large_cells(8, 500 << 20),
    "table is a pipe": lambda run: fifo(part_of(run)),
    "table is empty": lambda run: part_of(run).write_bytes(b"") and None,
    "table is garbage": lambda run: part_of(run).write_bytes(b"PAR1" * 999) and None,
    "table is cut": lambda run: os.truncate(part_of(run), 2000),
    "table without metadata": lambda run: pq.write_table(
        pq.read_table(part_of(run)).replace_schema_metadata(None), part_of(run)
    ),
    "table with other columns": lambda run: pq.write_table(
        pq.read_table(part_of(run)).drop_columns(["seq", "tags"]), part_of(run)
    ),
    "table that lies about its rows": _rewritten({"rows": 10**12}),
    "table that lies about its names": _rewritten({"names": {CONTROL: {"Value": 10**15}}}),
    "table with names of other types": _rewritten({"names": [1, 2]}),
    "table of another rank": _rewritten(rank=5),
    "table of dropped records": _rewritten(missing=True),
    "table with one name": _rewritten(name=CONTROL),
    "table with values that are garbage": _rewritten(value=b"\xc1"),
    "table with wild bins": _rewritten(first_bin=2**31 - 1, bins=[2**62]),
    "table with wild shards": _rewritten(shard_shape=[2**40], shard_offsets=[2**40]),
    **{f"damaged table {seed}": _damaged(seed) for seed in range(4)},
}


# -- windows ---------------------------------------------------------------------------------

COMPACTED: dict[str, Hostile] = {}


def window_of(run: Path) -> Path:
    return next((run / "compact").iterdir())


def _manifest(**entries: Any) -> Hostile:
    def build(run: Path) -> None:
        file = window_of(run) / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return build


def _in_window(
    build: Callable[[pa.Table], pa.Table], file: str = "records", **more: Any
) -> Hostile:
    """Write a file of the window again; the manifest has its number of rows, or `more`."""

    def change(run: Path) -> None:
        path = window_of(run) / f"{file}.parquet"
        table = build(pq.read_table(path))
        pq.write_table(table, path)
        _manifest(**{{"records": "rows", "whole": "rolled"}[file]: table.num_rows})(run)

    return change


def _with(**cells: Any) -> Callable[[pa.Table], pa.Table]:
    def build(table: pa.Table) -> pa.Table:
        for name, cell in cells.items():
            field = table.schema.field(name)
            column = pa.array([cell] * table.num_rows, field.type)
            table = table.set_column(table.schema.get_field_index(name), field, column)
        return table

    return build


COMPACTED |= {
    f"manifest with {name}": _manifest(**entries)
    for name, entries in {
        "many rows": {"rows": 10**30},
        "few rows": {"rows": 1, "rolled": 0},
        "texts": {"rows": CONTROL},
        "a negative rank": {"parts": {"-5": 1}},
        "negative covered parts": {"covered": {"0": -100}},
        "too many covered parts": {"covered": {"0": 10**30}},
        "huge figures of ranks": {"ranks": {"0": [10**40, -(10**40), 10**40, 10**40]}},
        "a huge rank": {"ranks": {str(10**40): [1, 0, 0, 0]}, "seqs": {"0": -(10**30)}},
        "unknown kinds": {"names": {CONTROL: {CONTROL: 5}}},
        "wrong counts": {"names": {CONTROL: {"Value": 10**15, "Metric": -5}}},
    }.items()
}
COMPACTED |= {
    f"{file} is {name}": lambda run, file=file, build=build: build(window_of(run) / file)  # type: ignore[misc]
    for file in ("records.parquet", "whole.parquet", "manifest.json")
    for name, build in {
        "a pipe": fifo,
        "a device": lambda path: _link(path, "/dev/zero"),
        "a link": lambda path: _link(path, "/etc/passwd"),
        "garbage": lambda path: path.write_bytes(b"PAR1" * 99) and None,
        "missing": Path.unlink,
        "a folder": _folder,
    }.items()
}
for _file in ("records", "whole"):
    COMPACTED |= {
        f"window with {_file} {name}": _in_window(build, _file)
        for name, build in {
            "of another rank": _with(rank=7),
            "of other steps": _with(step=2**62, seq=-5),
            "with control characters": _with(name=CONTROL, type=CONTROL, dtype=CONTROL),
            "of an unknown kind": _with(kind=CONTROL),
            "with wild shards": _with(shard_shape=[2**40], shard_offsets=[2**40]),
            "in another order of columns": lambda t: t.select(t.column_names[::-1]),
            "without columns": lambda t: t.drop_columns(["seq"]),
            "without rows": lambda t: t.slice(0, 0),
        }.items()
    }
COMPACTED["compact is a pipe"] = lambda run: (
    shutil.rmtree(run / "compact"),
    fifo(run / "compact"),
)[1]
COMPACTED["parts with steps far apart"] = _rewritten({"first_step": 0, "last_step": 2**62})
