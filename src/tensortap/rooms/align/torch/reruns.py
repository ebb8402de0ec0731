"""Reasons that are tried on a copy of the trainer's model: one forward pass each.

The pass changes what an engine might do differently. If its log-probabilities come close to those
of the engine, the reason is found. Attention is changed where it calls
`torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tensortap.rooms.align.reasons import least
from tensortap.rooms.align.result import Alignment, Reason

if TYPE_CHECKING:
    from tensortap.rooms.align.contexts import Floats, Integers
    from tensortap.rooms.align.reasons import Hypotheses

_SEQUENCES = 32  # that are run again
_LENGTH = 4096  # tokens of each
_OFFSETS = (1, -1, 2, -2)
_LAYERS = 64
_SCALES = np.geomspace(1 / 16, 16, 17)  # factors to the scale of attention
_attention = torch.nn.functional.scaled_dot_product_attention


class _Sequence(NamedTuple):
    """Tokens of B for a rerun, and their entries in its table."""

    tokens: Integers
    entries: Integers
    ahead: int  # tokens before the first entry: padding, or other sequences
    is_padded: bool  # which of both
    positions: Integers  # as they were given; empty if they were not
    decoded: int  # at which place decoding begins


class _Rerun(NamedTuple):
    """A reason, and the change of the rerun that tests it."""

    name: str
    evidence: str
    within: Callable[[_Sequence], Any] = lambda _: contextlib.nullcontext()
    positions: Callable[[_Sequence], Integers | None] = lambda _: None
    ahead: bool = False


class Reruns:
    """A copy of a model, run on the sequences of B."""

    def __init__(self, model: Any, found: Alignment) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        assert found.runs is not None
        self._model = copy.deepcopy(model).eval()
        if hasattr(self._model, "set_attn_implementation"):  # transformers: one that can be changed
            self._model.set_attn_implementation("sdpa")
        self._first = "" if found.first is None else found.first.name
        self._run = found.runs[1]
        self._inputs = inspect.signature(self._model.forward).parameters
        self._chosen = list(self._sequences())

    def _sequences(self) -> Iterator[_Sequence]:
        """Yield the longest sequences of B."""
        table = self._run.table
        starts, sizes = np.unique(table.first, return_counts=True)
        for each in np.argsort(-sizes, kind="stable")[:_SEQUENCES].tolist():
            entries = np.arange(starts[each], starts[each] + min(int(sizes[each]), _LENGTH))
            ahead, is_padded, positions = self._ahead(int(starts[each]), len(entries))
            decoded = np.flatnonzero(table.decoded[entries])
            begin = int(decoded[0]) if len(decoded) else len(entries)
            tokens = np.concatenate([ahead, table.token[entries]])
            yield _Sequence(tokens, entries, len(ahead), is_padded, positions, begin)

    def _ahead(self, entry: int, count: int) -> tuple[Integers, bool, Integers]:
        """Return what is before a sequence in its row of the batch, and the positions of both."""
        batch = self._run.batches[int(self._run.table.batch[entry])]
        tokens = batch["tokens"]
        rows = tokens.reshape(-1, tokens.shape[-1])
        begin = self._run.begins[entry]
        start = begin - begin % rows.shape[1]
        ahead = rows.reshape(-1)[start:begin].astype(np.int64)
        mask = np.broadcast_to(batch.get("mask", 1), rows.shape).reshape(-1)
        is_padded = not mask[start:begin].all()
        if "positions" not in batch:
            return ahead, is_padded, np.empty(0, np.int64)
        given = np.broadcast_to(batch["positions"], rows.shape).reshape(-1)
        stored = given[start : begin + count].astype(np.int64)
        missing = len(ahead) + count - len(stored)  # later batches have decoded them
        return ahead, is_padded, np.concatenate([stored, stored[-1] + 1 + np.arange(missing)])

    # -- runs ------------------------------------------------------------------------------

    def _outputs(self, change: _Rerun) -> Iterator[tuple[_Sequence, torch.Tensor]]:
        """Yield the logits of each sequence under a change."""
        device = next(self._model.parameters()).device
        for each in self._chosen:
            tokens = each.tokens if change.ahead else each.tokens[each.ahead :]
            options: dict[str, Any] = {}
            given = change.positions(each)
            if given is not None:
                options["position_ids"] = torch.from_numpy(given)[None].to(device)
            if "use_cache" in self._inputs:
                options["use_cache"] = False
            if "attention_mask" in self._inputs:  # else transformers tells packs by positions
                ones = torch.ones(1, len(tokens), dtype=torch.long)
                options["attention_mask"] = ones.to(device)
            with torch.no_grad(), change.within(each):
                output = self._model(torch.from_numpy(tokens)[None].to(device), **options)
            if not torch.is_tensor(output):
                output = output[0] if isinstance(output, tuple) else output.logits
            yield each, output[0, each.ahead if change.ahead else 0 :].double().cpu()

    def _predict(self, change: _Rerun) -> Floats:
        """Return the log-probability of each entry of B; NaN where nothing was run."""
        table = self._run.table
        found = np.full(len(table.identity), np.nan)
        for each, logits in self._outputs(change):
            drawn = torch.from_numpy(table.token[each.entries[1:]])[:, None]
            found[each.entries[1:]] = logits.log_softmax(-1)[:-1].gather(-1, drawn)[:, 0].numpy()
        return found

    def logits(self, tried: Hypotheses) -> tuple[Floats, Integers] | None:
        """Return the model's logits before tokens of B, and the compared rows of these tokens."""
        row_of = np.full(len(self._run.table.identity), -1, np.int64)
        row_of[tried.entry_b] = np.arange(len(tried.entry_b))
        values, rows = [], []
        for each, logits in self._outputs(_Rerun("", "")):
            row = row_of[each.entries[1:]]
            values.append(logits[:-1].numpy()[row >= 0])
            rows.append(row[row >= 0])
        joined = np.concatenate(rows) if rows else np.empty(0, np.int64)
        return (np.concatenate(values), joined) if len(joined) else None

    # -- reasons ---------------------------------------------------------------------------

    def reasons(self, tried: Hypotheses) -> Iterator[Reason]:
        """Yield the changes that bring the model close to B."""
        plain = self._predict(_Rerun("", ""))[tried.entry_b]  # raises if the model cannot run
        if next(tried.explains("", "", plain), None):
            return  # B has what the model computes, and A has not: so would any harmless change
        for change in (*self._layouts(), *self._attention(tried), *self._precision()):
            try:
                predicted = self._predict(change)
            except (RuntimeError, TypeError, IndexError):
                continue  # it cannot run with this change, so no engine did
            yield from tried.explains(change.name, change.evidence, predicted[tried.entry_b])

    def _layouts(self) -> Iterator[_Rerun]:
        """Yield other positions, and tokens that see what is before them in their row."""
        has_positions = "position_ids" in self._inputs
        for offset in _OFFSETS if has_positions else ():
            words = f"a run with positions {offset:+d}"
            shifted = functools.partial(_moved, offset, False)
            yield _Rerun("positions shifted", words, positions=shifted)
            if self._decodes:
                later = functools.partial(_moved, offset, True)
                yield _Rerun("RoPE offset", f"{words} of decoded tokens", positions=later)
        if not any(each.ahead for each in self._chosen):
            return
        name, what = "packed sequences attend to each other", "sequences"
        if any(each.is_padded for each in self._chosen):
            name, what = "padding is attended to", "padding"
        words = f"a run in which tokens see the {what}"
        yield _Rerun(name, words, ahead=True)
        if has_positions and any(len(each.positions) for each in self._chosen):
            words += ", with the positions of B"
            yield _Rerun(name, words, positions=lambda each: each.positions, ahead=True)

    @property
    def _decodes(self) -> bool:
        return any(each.decoded < len(each.entries) for each in self._chosen)

    def _attention(self, tried: Hypotheses) -> Iterator[_Rerun]:
        def changed(function: Callable[..., Any], *given: Any) -> Callable[[_Sequence], Any]:
            return lambda each: _Attention(functools.partial(function, each, *given))

        def scaled(factor: float) -> _Rerun:
            words = f"a run with {factor:.3g} times the attention scale"
            return _Rerun("another attention scale", words, changed(_scaled, factor))

        def rest(factor: float) -> float:
            predicted = self._predict(scaled(factor))[tried.entry_b]
            return float(np.nansum(np.abs(predicted - tried.y)))

        yield scaled(least(rest, _SCALES, 10))
        keys = ("its own key", "the key before it") if self._decodes else ()
        for lag, words in enumerate(keys):
            words = f"a run in which each decoded token does not see {words}"
            yield _Rerun("cache one token late", words, changed(_late, lag))

    def _precision(self) -> Iterator[_Rerun]:
        """Run one layer in a coarser dtype: the first one that differs, or each of few."""
        modules = dict(self._model.named_modules())
        lists = [name for name, each in modules.items() if isinstance(each, torch.nn.ModuleList)]
        parents = {*lists, *(name.rpartition(".")[0] for name in lists)}
        layers = [name for name in modules if name and name.rpartition(".")[0] in parents]
        path = self._first.split(".")  # what it is a part of, too; the largest part is no layer
        layers += [".".join(path[:n]) for n in range(len(path), 1, -1)]
        layers += [name for name in modules if name.endswith("lm_head")]
        known = [name for name in dict.fromkeys(layers) if name in modules and name not in lists]
        for name in known[:_LAYERS]:
            for dtype in (torch.bfloat16, torch.float16):
                words = f"a run with {name} in {str(dtype)[6:]}"
                within = functools.partial(_coarse, modules[name], dtype)
                yield _Rerun("one layer in another precision", words, within)


def _moved(offset: int, decoded: bool, each: _Sequence) -> Integers:
    """Return positions of which all, or those of decoded tokens, are moved."""
    place = np.arange(len(each.entries))
    moved: Integers = np.maximum(place + offset, 0)
    return np.where(place >= each.decoded, moved, place) if decoded else moved


@contextlib.contextmanager
def _coarse(module: torch.nn.Module, dtype: torch.dtype, _: _Sequence) -> Iterator[None]:
    """Run a module in another dtype; it gets and returns what it did before."""
    coarse = copy.deepcopy(module).to(dtype)

    def cast(value: Any, to: torch.dtype) -> Any:
        if torch.is_tensor(value):
            return value.to(to) if value.is_floating_point() else value
        if isinstance(value, (tuple, list)):
            return type(value)(cast(each, to) for each in value)
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if torch.is_tensor(each)]
        before = next(each.dtype for each in given if each.is_floating_point())
        options = {name: cast(value, dtype) for name, value in kwargs.items()}
        return cast(coarse(*cast(args, dtype), **options), before)

    module.forward = run
    try:
        yield
    finally:
        del module.forward


class _Attention(TorchFunctionMode):  # type: ignore[misc]
    """Changes the arguments of every attention."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not _attention:
            return function(*args, **kwargs)
        names = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return function(**{**given, **self._change(given)})


def _scaled(_: _Sequence, factor: float, given: dict[str, Any]) -> dict[str, Any]:
    return {"scale": (given.get("scale") or given["query"].shape[-1] ** -0.5) * factor}


def _late(each: _Sequence, lag: int, given: dict[str, Any]) -> dict[str, Any]:
    """Hide one key from decoded tokens."""
    size, device = given["query"].shape[-2], given["query"].device
    mask = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    rows = torch.arange(max(each.decoded, 1 + lag), size)
    mask[rows, rows - lag] = False
    return {"attn_mask": mask[None, None], "is_causal": False}
