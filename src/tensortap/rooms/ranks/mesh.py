"""The places of ranks in the mesh of a run, and a tree of groups that people can fold."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tensortap.table.table import Table

_MOST_SIBLINGS = 32  # groups in a row; more are put together in blocks
_PARAMETERS = ("Weight", "Weight_Gradient", "Optimiser_State")


class MeshLayout(NamedTuple):
    """The dimensions of a mesh, outermost first, and the coordinates of each rank."""

    dims: tuple[str, ...]
    coordinates: dict[int, tuple[int, ...]]

    def place(self, rank: int) -> str:
        """Return where a rank is: ``dp 3, tp 1``; "" if only its number is known."""
        if len(self.dims) < 2 and self.dims[0] == "rank":
            return ""
        pairs = zip(self.dims, self.coordinates[rank], strict=True)
        return ", ".join(f"{dim} {index}" for dim, index in pairs)


_NUMBERED = ("rank",)  # the dimensions of a job without a mesh
_known: weakref.WeakKeyDictionary[Table, tuple[int, MeshLayout]] = weakref.WeakKeyDictionary()


def mesh_layout(table: Table) -> MeshLayout:
    """Return the mesh of a run as its records tell it; without one, ranks are only numbered."""
    with table.lock:
        ranks, (version, known) = table.ranks(), _known.get(table, (-1, MeshLayout(_NUMBERED, {})))
        # parameters, which tell the mesh, may come later than other records
        is_old = known.dims == _NUMBERED and version != table.version
        if is_old or len(known.coordinates) != len(ranks):
            known = _read_layout(table, ranks)
            _known[table] = table.version, known
        return known


def _read_layout(table: Table, ranks: list[int]) -> MeshLayout:
    numbered = MeshLayout(_NUMBERED, {rank: (rank,) for rank in ranks})
    places: dict[int, tuple[int, ...]] = {}
    meshes = set()
    for rank, text in _mesh_tags(table, len(ranks)).items():
        found = re.findall(r"(\S+)=(\d+)/(\d+)", text)  # such as dp=0/2 tp=1/4
        places[rank] = tuple(int(index) for _, index, _ in found)
        meshes.add(tuple((dim, size) for dim, _, size in found))
    mesh = meshes.pop() if meshes else ()
    if not mesh or meshes or len(set(places.values())) < len(ranks):
        return numbered
    return MeshLayout(tuple(dim for dim, _ in mesh), dict(sorted(places.items())))


def _mesh_tags(table: Table, ranks: int) -> dict[int, str]:
    """Return the tag ``mesh`` of one parameter of each rank, of as few parameters as possible."""
    whole, found = table.index(), dict[int, str]()
    series = [(kind, name) for kind in _PARAMETERS for name in table.layers(kind)]
    for is_new in (True, False):  # first those of whose lowest rank nothing is known
        for kind, name in series:
            first = whole.series(kind, name)[:1]
            if len(found) == ranks or (is_new and int(whole.rank[first[0]]) in found):
                continue
            few = table.near([(kind, name)])
            rows = few.series(kind, name, ordered=False)
            rows = rows[np.unique(few.rank[rows], return_index=True)[1]]
            tags = few.take(rows, ["tags"]).column("tags").to_pylist()
            for rank, each in zip(few.rank[rows].tolist(), tags, strict=True):
                found.setdefault(rank, dict(each or ()).get("mesh", ""))
    return found


class RankGroup(NamedTuple):
    """A row of the tree: one rank, or the ranks of a group."""

    key: str  # the path in the mesh, such as ``3.1``; that of a block of siblings is ``3.0-7``
    label: str
    depth: int
    ranks: tuple[int, ...]
    is_open: bool = False
    is_leaf: bool = False


def rank_tree(mesh: MeshLayout, opened: Collection[str], most: int) -> list[RankGroup]:
    """Return the visible rows: groups of a mesh, and what is below those that are open.

    Groups stay closed once there are `most` rows.

    >>> mesh = MeshLayout(("dp", "tp"), {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)})
    >>> [(row.label, row.depth) for row in rank_tree(mesh, {"0"}, 99)]
    [('dp 0', 0), ('tp 0 · rank 0', 1), ('tp 1 · rank 1', 1), ('dp 1', 0)]
    """
    return list(_rows(mesh, sorted(mesh.coordinates), (), 0, opened, [most]))


def group_keys(mesh: MeshLayout) -> set[str]:
    """Return the keys of all groups."""
    rows = _rows(mesh, sorted(mesh.coordinates), (), 0, None, [1 << 60])
    return {row.key for row in rows if not row.is_leaf}


def _rows(
    mesh: MeshLayout,
    ranks: Sequence[int],
    path: tuple[int, ...],
    depth: int,
    opened: Collection[str] | None,
    room: list[int],
    in_block: bool = False,
) -> Iterator[RankGroup]:
    """Yield the groups below a path in the mesh, in blocks if there are many."""
    name, is_last = mesh.dims[len(path)], len(path) == len(mesh.dims) - 1
    places: dict[int, list[int]] = {}
    for rank in ranks:
        places.setdefault(mesh.coordinates[rank][len(path)], []).append(rank)
    order = sorted(places)
    size = 1 if in_block else math.ceil(len(order) / _MOST_SIBLINGS)
    for start in range(0, len(order), size):
        block = order[start : start + size]
        inside = [rank for place in block for rank in places[place]]
        below, span = (path, f"{block[0]}-{block[-1]}") if size > 1 else ((*path, block[0]), "")
        label = f"{name} {block[0]} – {block[-1]}" if span else f"{name} {block[0]}"
        is_leaf = is_last and size == 1
        if is_leaf and name != "rank":
            label += f" · rank {inside[0]}"
        key = ".".join(map(str, (*below, span) if span else below))
        room[0] -= 1
        is_open = not is_leaf and (opened is None or key in opened) and room[0] > 0
        yield RankGroup(key, label, depth, tuple(inside), is_open, is_leaf)
        if is_open:
            yield from _rows(mesh, inside, below, depth + 1, opened, room, bool(span))
