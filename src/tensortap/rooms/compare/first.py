"""Find where two runs begin to differ, and on which ranks."""

from __future__ import annotations

import itertools
from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind
from tensortap.rooms.compare.compared_run import RecordPart, batch_of, part_of, whole
from tensortap.rooms.compare.pairs import Sides, compare_pair
from tensortap.rooms.compare.plan import RecordPair
from tensortap.rooms.compare.report import Difference, Key
from tensortap.rooms.compare.tasks import Found, Judged
from tensortap.rooms.compare.values import compare_with
from tensortap.runs.assemble import Disagreement

Items = dict[Key, RecordPair]


def culprit(
    first: Difference | None,
    items: Items,
    found: list[Found],
    bitwise: Difference | None,
    sides: Sides,
) -> tuple[str, tuple[int, ...]]:
    """Return a sentence on the origin of the first difference, and the ranks that are wrong.

    `items` are the pairs that differ, and the one whose bits differ first.
    """
    if first is None:
        return "", ()
    text = _origin(first, items, found, bitwise, sides)
    ranks, told_by = _faulty_ranks(first, items, sides)
    if ranks and text:
        plural = "s" if len(ranks) > 1 else ""
        text = f"{text}; on rank{plural} {', '.join(map(str, ranks))}, by {told_by}"
    return text, ranks


def _origin(
    first: Difference,
    items: Items,
    found: list[Found],
    bitwise: Difference | None,
    sides: Sides,
) -> str:
    """Return where the first difference came from, in words.

    Records are in the order of execution: if the first that differs is the output of a module,
    everything that it was computed from agrees. An input was computed by code before the module:
    by the module around it.
    """
    name, kind, step = first.key.name, first.key.kind, first.key.step
    item = items[first.key]
    tags = item.a[0].record.tags
    # other ranks add up in another order, which changes the last bits
    is_earlier = bitwise is not None and items[bitwise.key].order < item.order
    if bitwise is not None and is_earlier and sides[0].ranks == sides[1].ranks:
        place = f"{bitwise.key.name} ({bitwise.key.kind}) at step {bitwise.key.step}"
        if bitwise.key.kind == Kind.OP.value:
            place = f"{_operation(items[bitwise.key])}, at step {bitwise.key.step}"
        return f"culprit: probably {place}, whose bits differ first; {name} exceeds the tolerance"
    if kind == Kind.OP.value:
        return f"culprit: {_operation(item)}"
    if "input" in tags:
        around = _module_around(tags.get("module", ""), items)
        if not around:
            return f"{name} is the input of the model: the batches differ"
        return f"culprit: {around}: its code computes {name}; everything before it agrees"
    if kind == Kind.ACTIVATION.value:
        if any(
            each.equal or any(
                place[1] == kind and (place[2], seq) < (step, item.seq)
                for place, (seq, _) in each.sizes.items()
            )
            for each in found
        ):  # fmt: skip
            return f"culprit: {name}: everything before it agrees, its output does not"
        return f"{name} is the first recorded output"
    if kind == Kind.GRADIENT.value:
        return f"culprit: the backward pass behind {name}; all outputs agree until then"
    if "buffer" in tags:
        return f"culprit: the buffer {name} differs before any output does"
    if kind in (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value):
        return f"culprit: {name} ({kind}) differs before any output does"
    return ""


def _module_around(module: str, items: Items) -> str:
    """Return the module whose code calls another one; empty for the model itself.

    The model goes by its class, and containers such as a ModuleList have no output.
    """
    outputs = {
        key.name: pair.a[0].record
        for key, pair in items.items()
        if key.kind == Kind.ACTIVATION.value and "input" not in pair.a[0].record.tags
    }
    models = [name for name, record in outputs.items() if record.type.endswith(f".{name}")]
    if module in models:
        return ""
    while "." in module:
        module = module.rpartition(".")[0]
        if module in outputs:
            return module
    return models[0] if models else "the model"


def _operation(item: RecordPair) -> str:
    """Return an operation in words: its name, its lines, and whether its inputs agree."""
    one, other = (parts[0].record.tags for parts in (item.a, item.b))
    lines = [tags.get("line", "") for tags in (one, other)]
    place = f" at {lines[0]}" if lines[0] else ""
    if lines[1] and lines[1] != lines[0]:
        place += f" (in B {lines[1]})"
    agree = one.get("inputs") == other.get("inputs")
    inputs = "its inputs agree, its output does not" if agree else "its inputs differ already"
    return f"{item.key.name}{place}: {inputs}"


def bits_differ(judged: Judged) -> Difference:
    """Return the first pair whose bits differ, close or not."""
    item, outcome = judged
    said = (_operation(item),) if item.key.kind == Kind.OP.value else ()
    return Difference(item.key, outcome.comparison, outcome.by, said)


# -- ranks -----------------------------------------------------------------------------------


def _faulty_ranks(first: Difference, items: Items, sides: Sides) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose part of the first difference is wrong, and the tensor that tells.

    If it is the output of a module, the weights of the module tell more: a wrong weight of one
    rank makes the output of all ranks wrong. Without ranks, nobody can tell, or all differ alike.
    """
    key = first.key
    weights = [
        item for at, item in items.items()
        if (at.kind, at.step) == (Kind.WEIGHT.value, key.step)
        and at.name.startswith(f"{key.name}.")
    ]  # fmt: skip
    for item, mine in itertools.product((*weights, items[key]), (0, 1)):
        if len(sides[mine].ranks) < 2:
            continue
        sizes = _sizes(item, mine, sides)
        # the largest and those half as large: the weights of all ranks differ after a step
        limit = max(sizes.values(), default=0.0) / 2
        ranks = tuple(sorted(rank for rank, size in sizes.items() if limit and size >= limit))
        if ranks and (len(ranks) < len(sizes) or len(sizes) == 1):
            return ranks, item.key.name
    return (), ""


def _sizes(item: RecordPair, mine: int, sides: Sides) -> dict[int, float]:
    """Return how much the part of each rank differs from the same part of the other run."""
    parts, others = (item.a, item.b) if mine == 0 else (item.b, item.a)
    sizes: dict[int, float] = {}
    if len({batch_of(part.record) for part in parts}) > 1:
        return sizes  # which rows of the other run a rank has is not known
    for part in parts:
        size = _size(item, part, others, mine, sides)
        if size is None:
            return {}
        for rank in part.ranks or (part.record.rank,):
            sizes[rank] = max(size, sizes.get(rank, 0.0))
    return sizes


def _size(
    item: RecordPair, part: RecordPart, others: list[RecordPart], mine: int, sides: Sides
) -> float | None:
    same = [other for other in others if _part_place(other) == _part_place(part)]
    try:
        if same:
            pair = [[part], same[:1]] if mine == 0 else [same[:1], [part]]
            comparison = compare_pair(sides, item._replace(a=pair[0], b=pair[1])).comparison
        elif all(each.has_value for each in (part, *others)):
            value: Any = whole(sides[1 - mine], others)
            comparison = compare_with(*part_of(sides[mine], part, value), item.tolerance)
        else:
            return None  # statistics of a whole do not tell which part differs
    except (Disagreement, TensortapError):
        return None
    if comparison.equal:
        return 0.0
    return comparison.max_abs or float(comparison.differing > 0)


def _part_place(part: RecordPart) -> Any:
    """Return the part of the whole that a record is, as both runs spell it."""
    record = part.record
    if record.shard is None:
        return record.shape, (0,) * len(record.shape)
    return record.shape, record.shard.offsets
