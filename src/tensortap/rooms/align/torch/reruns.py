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
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tensortap.rooms.align.result import Alignment, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.rooms.align.reasons import Hypotheses

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]

_SEQUENCES = 32  # that are run again
_LENGTH = 4096  # tokens of each
_OFFSETS = (1, -1, 2, -2)
_LAYERS = 64
_attention = torch.nn.functional.scaled_dot_product_attention


class _Sequence(NamedTuple):
    """Tokens of B as they are run again, and the entries of its table that they are."""

    tokens: Integers
    entries: Integers
    ahead: int  # tokens before the first entry, which are padding or other sequences
    positions: Integers  # as they were given; empty if they were not
    decoded: int  # at which place decoding begins


class Reruns:
    """A copy of a model, run on the sequences of B."""

    def __init__(self, model: Any, found: Alignment) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        assert found.runs is not None
        self.model = copy.deepcopy(model).eval()
        if hasattr(self.model, "set_attn_implementation"):  # transformers: one that can be changed
            self.model.set_attn_implementation("sdpa")
        self.first = found.first
        self.run = found.runs[1]
        self.inputs = inspect.signature(self.model.forward).parameters
        self._chosen = list(self._sequences())
        self._logits: list[torch.Tensor] = []

    def _sequences(self) -> Iterator[_Sequence]:
        """Yield the longest sequences of B."""
        table = self.run.table
        starts, sizes = np.unique(table.first, return_counts=True)
        for each in np.argsort(-sizes, kind="stable")[:_SEQUENCES].tolist():
            entries = np.arange(starts[each], starts[each] + min(int(sizes[each]), _LENGTH))
            ahead, positions = self._ahead(int(starts[each]), len(entries))
            decoded = np.flatnonzero(table.decoded[entries])
            yield _Sequence(
                np.concatenate([ahead, table.token[entries]]), entries, len(ahead), positions,
                int(decoded[0]) if len(decoded) else len(entries),
            )  # fmt: skip

    def _ahead(self, entry: int, count: int) -> tuple[Integers, Integers]:
        """Return what is before a sequence in its row of the batch, and the positions of both."""
        batch = self.run.batches[int(self.run.table.batch[entry])]
        tokens = batch["tokens"]
        rows = tokens.reshape(-1, tokens.shape[-1])
        begin = self.run.begins[entry]
        ahead = rows.reshape(-1)[begin - begin % rows.shape[1] : begin].astype(np.int64)
        if "positions" not in batch:
            return ahead, np.empty(0, np.int64)
        given = np.broadcast_to(batch["positions"], rows.shape).reshape(-1)
        stored = given[begin - len(ahead) : begin - len(ahead) + len(ahead) + count]
        missing = len(ahead) + count - len(stored)
        more = (stored[-1] if len(stored) else -1) + 1 + np.arange(max(missing, 0))
        return ahead, np.concatenate([stored, more])[: len(ahead) + count].astype(np.int64)

    # -- runs ------------------------------------------------------------------------------

    def predict(
        self,
        change: Callable[[_Sequence], contextlib.AbstractContextManager[Any]] | None = None,
        positions: Callable[[_Sequence], Integers | None] | None = None,
        ahead: bool = False,
    ) -> Floats:
        """Return the log-probability of each entry of B; NaN where nothing was run."""
        found = np.full(len(self.run.table.identity), np.nan)
        self._logits = []
        for each in self._chosen:
            tokens = each.tokens if ahead else each.tokens[each.ahead :]
            options = {}
            given = None if positions is None else positions(each)
            if given is not None:
                options["position_ids"] = torch.from_numpy(given)[None]
            if "use_cache" in self.inputs:
                options["use_cache"] = False
            if "attention_mask" in self.inputs:  # else transformers tells packs by positions
                options["attention_mask"] = torch.ones(1, len(tokens), dtype=torch.long)
            device = next(self.model.parameters()).device
            options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
            with torch.no_grad(), change(each) if change else contextlib.nullcontext():
                output = self.model(torch.from_numpy(tokens)[None].to(device), **options)
            logits = output if torch.is_tensor(output) else output[0] if isinstance(
                output, tuple) else output.logits  # fmt: skip
            logits = logits[0, each.ahead if ahead else 0 :].double().cpu()
            self._logits.append(logits)
            picked = logits.log_softmax(-1)[:-1].gather(
                -1, torch.from_numpy(self.run.table.token[each.entries[1:]])[:, None]
            )
            found[each.entries[1:]] = picked[:, 0].numpy()
        return found

    def logits(self, tried: Hypotheses) -> tuple[Floats, Integers] | None:
        """Return the model's logits before tokens of B, and the compared rows of these tokens."""
        self.predict()
        if not self._logits:
            return None
        row_of = np.full(len(self.run.table.identity), -1, np.int64)
        row_of[tried.entry_b] = np.arange(len(tried.entry_b))
        values, rows = [], []
        for each, logits in zip(self._chosen, self._logits, strict=True):
            row = row_of[each.entries[1:]]
            values.append(logits[:-1].numpy()[row >= 0])
            rows.append(row[row >= 0])
        joined = np.concatenate(rows)
        return (np.concatenate(values), joined) if len(joined) else None

    # -- reasons ---------------------------------------------------------------------------

    def reasons(self, tried: Hypotheses) -> Iterator[Reason]:
        for name, evidence, predicted in self._tried():
            yield from tried.explains(name, evidence, predicted[tried.entry_b])

    def _tried(self) -> Iterator[tuple[str, str, Floats]]:
        if "position_ids" in self.inputs:
            yield from self._positions()
        rows = self.run.table
        if any(each.ahead for each in self._chosen):
            name = "padding is attended to"
            if rows.packed.any() and not rows.padded.any():
                name = "packed sequences attend to each other"
            words = f"a run in which tokens see the {'padding' if 'padd' in name else 'sequences'}"
            yield name, words, self.predict(ahead=True)
            if "position_ids" in self.inputs and any(len(each.positions) for each in self._chosen):
                given = self.predict(ahead=True, positions=lambda each: each.positions)
                yield name, f"{words}, with the positions of B", given
        yield from self._attention()
        yield from self._precision()

    def _positions(self) -> Iterator[tuple[str, str, Floats]]:
        def moved(offset: int, decoded: bool) -> Callable[[_Sequence], Integers]:
            def positions(each: _Sequence) -> Integers:
                place = np.arange(len(each.entries))
                chosen = place >= each.decoded if decoded else place >= 0
                return np.maximum(place + offset * chosen, 0)

            return positions

        for offset in _OFFSETS:
            words = f"a run with positions {offset:+d}"
            yield "positions shifted", words, self.predict(positions=moved(offset, False))
            if any(each.decoded < len(each.entries) for each in self._chosen):
                yield (
                    "RoPE offset", f"{words} of decoded tokens",
                    self.predict(positions=moved(offset, True)),
                )  # fmt: skip

    def _attention(self) -> Iterator[tuple[str, str, Floats]]:
        factors: dict[str, Callable[[int], float]] = {
            "1": math.sqrt, "1 / d": lambda d: 1 / math.sqrt(d),
            "2 / √d": lambda d: 2.0, "1 / (2 √d)": lambda d: 0.5,
            "√2 / √d": lambda d: math.sqrt(2), "1 / √(2d)": lambda d: math.sqrt(0.5),
        }  # fmt: skip
        for words, factor in factors.items():
            changed = self.predict(lambda _, factor=factor: _Scaled(factor))  # type: ignore[misc]
            yield "another attention scale", f"a run with an attention scale of {words}", changed
        for lag, words in ((0, "its own key"), (1, "the key before it")):

            def late(each: _Sequence, lag: int = lag) -> _Late:
                return _Late(each.decoded, lag)

            if any(each.decoded < len(each.entries) for each in self._chosen):
                evidence = f"a run in which each decoded token does not see {words}"
                yield "cache one token late", evidence, self.predict(late)
        frequencies = next(
            (b for n, b in self.model.named_buffers() if n.endswith("inv_freq")), None
        )
        if frequencies is not None:
            for offset in _OFFSETS:
                turned = self.predict(lambda _, o=offset: _Turned(frequencies * o))  # type: ignore[misc]
                words = f"a run with queries turned by {offset:+d} positions against keys"
                yield "RoPE offset", words, turned

    def _precision(self) -> Iterator[tuple[str, str, Floats]]:
        """Run one layer in a coarser dtype: the first one that differs, or each of few."""
        layers = {
            f"{name}.{index}": layer
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and "." not in name.rpartition("layers")[2]
            for index, layer in module.named_children()
        }
        modules = dict(self.model.named_modules())
        name = "" if self.first is None else self.first.name
        while "." in name:  # what it is a part of, too; the largest part is no layer
            if name in modules and not isinstance(modules[name], torch.nn.ModuleList):
                layers[name] = modules[name]
            name = name.rpartition(".")[0]
        heads = [name for name in modules if name.endswith("lm_head")]
        layers |= {name: modules[name] for name in heads}
        for name, layer in list(layers.items())[:_LAYERS]:
            for dtype in (torch.bfloat16, torch.float16):
                words = f"a run with {name} in {str(dtype)[6:]}"
                change = functools.partial(_coarse, layer, dtype)
                try:
                    predicted = self.predict(lambda _: change())  # noqa: B023  called at once
                except (RuntimeError, TypeError):
                    continue  # the layer cannot compute in this dtype, so no engine did
                yield "one layer in another precision", words, predicted


@contextlib.contextmanager
def _coarse(module: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run a module in another dtype; it gets and returns what it did before."""
    kept = {name: each.data for name, each in (*module.named_parameters(), *module.named_buffers())}
    forward = module.forward

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
        return cast(forward(*cast(args, dtype), **options), before)

    try:
        module.to(dtype)
        module.forward = run
        yield
    finally:
        del module.forward
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, each in kept.items():
            named[name].data = each


class _Attention(TorchFunctionMode):  # type: ignore[misc]
    """Changes the arguments of every attention."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not _attention:
            return function(*args, **kwargs)
        names = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
        bound = dict(zip(names, args, strict=False))
        return function(**self.changed({**bound, **kwargs}))

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class _Scaled(_Attention):
    def __init__(self, factor: Callable[[int], float]) -> None:
        super().__init__()
        self._factor = factor

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        width = given["query"].shape[-1]
        scale = given.get("scale") or 1 / math.sqrt(width)
        return {**given, "scale": scale * self._factor(width)}


class _Late(_Attention):
    """Hides one key from decoded tokens."""

    def __init__(self, decoded: int, lag: int) -> None:
        super().__init__()
        self._decoded, self._lag = decoded, lag

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        size = given["query"].shape[-2]
        mask = torch.ones(size, size, dtype=torch.bool, device=given["query"].device).tril()
        rows = torch.arange(max(self._decoded, 1 + self._lag), size)
        mask[rows, rows - self._lag] = False
        return {**given, "attn_mask": mask[None, None], "is_causal": False}


class _Turned(_Attention):
    """Turns queries against keys, as rotary embeddings with an offset do."""

    def __init__(self, angles: torch.Tensor) -> None:
        super().__init__()
        self._angles = angles

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        query = given["query"]
        both = torch.cat([self._angles, self._angles]).to(query.dtype)
        if both.shape[0] != query.shape[-1]:
            return given
        half = query.shape[-1] // 2
        turned = torch.cat([-query[..., half:], query[..., :half]], -1)
        return {**given, "query": query * both.cos() + turned * both.sin()}
