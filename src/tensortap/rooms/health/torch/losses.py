"""The losses of a torch model: their values, their labels, and the graph that computed them.

They are the tensors on which `backward` is called. Their graph is read through `grad_fn` and
`next_functions`, and what its nodes have saved; nothing is computed anew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tensortap.rooms.health.steps import LossFacts
from tensortap.rooms.track.torch.reading import is_plain
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.tensors import quiet

_MOST_NODES = 64  # between the loss and what the model computed
_MOST_VALUES = 1 << 18  # of a tensor that is read
_PASSED = (  # nodes that change no value, or only its scale
    "Add", "Sub", "Mul", "Div", "Neg", "Mean", "Sum", "View", "UnsafeView", "Reshape", "Permute",
    "Transpose", "T", "Unsqueeze", "Squeeze", "Index", "Slice", "Select", "ToCopy", "Clone",
    "Expand", "Alias", "Stack", "Cat", "Pow", "Abs", "Where", "MaskedFill", "Gather", "Unbind",
    "Split", "Log", "IndexSelect", "Sqrt", "Masked", "MaskedSelect",
)  # fmt: skip
_SHAPED = (  # those that keep the values
    "View", "UnsafeView", "Reshape", "Permute", "Transpose", "T", "Unsqueeze", "Squeeze", "Index",
    "Slice", "Select", "ToCopy", "Clone", "Alias", "Gather", "MaskedSelect",
)  # fmt: skip
_CLASSES = ("NllLoss", "NllLoss2D")
_BINARY = ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy")
_DISTANCES = ("MseLoss", "SmoothL1Loss", "HuberLoss")
_DIFFERENCES = (*_DISTANCES, *_BINARY, "Sub", "Rsub")

_listeners: list[Callable[[Any], None]] = []
_original: Any = None


def on_backward(listener: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with the tensors of each backward pass before it; return what ends this."""
    global _original
    if not _listeners:
        _original = original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for listen in _listeners:
                listen(tensors)
            return original(tensors, *args, **kwargs)

        hide_from_compiler(backward)
        torch.autograd.backward = backward
    _listeners.append(listener)

    def undo() -> None:
        global _original
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners and _original is not None:
            torch.autograd.backward, _original = _original, None

    return undo


def read_loss(loss: torch.Tensor) -> LossFacts | None:
    """Return what the graph of a loss tells; None if a compiler hides it."""
    start = loss.grad_fn
    if start is None or type(loss) is not torch.Tensor:
        return None
    is_mean = _name(start) in (*_CLASSES, *_BINARY, *_DISTANCES)
    found = LossFacts(is_mean=is_mean and int(getattr(start, "_saved_reduction", 0)) == 1)
    with quiet():
        for node in _nodes(start):
            name = _name(node)
            if "Compiled" in name:
                return None
            if name in _DIFFERENCES and found.broadcast is None:
                found = found._replace(broadcast=_broadcast(node))
            if name in _CLASSES:
                found = _with_classes(found, node)
            elif name in _BINARY:
                found = _with_chance(found, node, binary=True)
                if name.endswith("Logits"):
                    before = _before(node)
                    found = found._replace(twice="sigmoid" if before == "Sigmoid" else found.twice)
                    found = found._replace(is_cut=before == "Relu")
            elif name == "Mul" and _is_divergence(node):
                found = found._replace(raw="kl_div")
            elif name in _DISTANCES:
                inner = [each for each, _ in node.next_functions]
                if len(inner) == 2 and None not in inner:
                    found = found._replace(target_needs_gradient=True)
                found = _with_chance(found, node, binary=False)
    return found


def _nodes(start: Any) -> Iterator[Any]:
    """Yield the nodes from a loss to what the model computed."""
    pending = [start]
    seen: set[Any] = set()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if _name(node) in _PASSED or _name(node) in _CLASSES:
            pending += [each for each, _ in node.next_functions]


def _name(node: Any) -> str:
    """Return the name of an operation.

    >>> _name(torch.ones(1, requires_grad=True).exp().grad_fn)
    'Exp'
    """
    return str(node.name()).rpartition("::")[2].partition("Backward")[0]


def _is_divergence(node: Any) -> bool:
    """Return whether probabilities are multiplied by others that need no gradient, in `kl_div`."""
    inner = [each for each, _ in node.next_functions if each is not None]
    factor = saved(node, "self") if len(inner) == 1 and _before(node) == "Softmax" else None
    if factor is None or not factor.ndim or not 8 <= factor.numel() <= _MOST_VALUES:
        return False
    sums = factor.detach().double().sum(-1)
    return bool((factor >= 0).all() and (factor < 1).any() and ((sums - 1).abs() < 1e-3).all())


def _before(node: Any) -> str:
    """Return the operation that made the first input of a node, through changes of shape."""
    for _ in range(8):
        inner = [each for each, _ in node.next_functions if each is not None]
        if not inner:
            return ""
        node = inner[0]
        if _name(node) not in _SHAPED:
            return _name(node)
    return ""


def saved(node: Any, name: str) -> torch.Tensor | None:
    """Return a tensor that a node has saved, unless a function of the user would unpack it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or raw.unpack_hook is not None:
        return None
    try:
        tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:  # it was freed, or changed in place
        return None
    return tensor if tensor is not None and is_plain(tensor) else None


def _shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the output of a node."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(map(int, metadata[0].shape)) if metadata else None


def _broadcast(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes before and after an (N, 1) became (N, N), as against a target of (N,)."""
    inner = [each for each, _ in node.next_functions if each is not None]
    if len(inner) != 1:
        return None  # both sides need gradients: distances of all pairs
    whole = _shape(inner[0]) if _name(inner[0]) == "Expand" else _shape(node)
    part = inner[0]
    while part is not None and _name(part) == "Expand":
        part = next((each for each, _ in part.next_functions if each is not None), None)
    own = None if part is None else _shape(part)
    if not own or not whole or own == whole or len(whole) < 2:
        return None
    n = max(own)
    square = whole[-2:] == (n, n) and n > 1 and sorted(own)[:-1] == [1] * (len(own) - 1)
    return (own, whole) if square else None


# -- labels ------------------------------------------------------------------------------------


def _with_classes(found: LossFacts, node: Any) -> LossFacts:
    """Add what a loss over classes tells: its labels, and whether it got log-probabilities."""
    before = _before(node)
    if before == "LogSoftmax":
        inner = node
        for _ in range(8):
            inner = next((each for each, _ in inner.next_functions if each is not None), None)
            if inner is None or _name(inner) == "LogSoftmax":
                break
        if inner is not None:
            twice = "softmax" if _before(inner) in ("Softmax", "LogSoftmax") else ""
            found = found._replace(twice=twice, is_cut=_before(inner) == "Relu")
    target, scores = saved(node, "target"), saved(node, "self")
    if target is None or target.numel() > _MOST_VALUES:
        return found
    ignored = int(getattr(node, "_saved_ignore_index", -100))
    if ignored >= 1 << 63:  # it is read as unsigned
        ignored -= 1 << 64
    labels = target.detach()
    kept = labels[labels != ignored]
    found = found._replace(labels=labels, ignored=ignored, kept=len(kept))
    if not len(kept):
        return found
    counts = torch.bincount(kept.flatten())
    share = counts[counts > 0].double() / len(kept)
    found = found._replace(counts=counts, only=int(kept[0]) if len(share) == 1 else None)
    if scores is None or getattr(node, "_raw_saved_weight", None) is None:
        return found
    dimension = 1 if scores.ndim > 1 else 0
    if scores.ndim > 1 and scores.shape[0] and before != "LogSoftmax":
        rows = scores.detach().movedim(1, -1).reshape(-1, scores.shape[1])[:64].double()
        if (rows.logsumexp(1).abs() > 0.01).all():
            found = found._replace(raw="nll_loss")
    if node._saved_weight is None and scores.ndim > 1:
        index = labels.clamp(0, scores.shape[dimension] - 1).unsqueeze(dimension)
        chosen = scores.detach().gather(dimension, index).squeeze(dimension)[labels != ignored]
        found = found._replace(value=-float(chosen.double().mean()))
    return found


def _with_chance(found: LossFacts, node: Any, *, binary: bool) -> LossFacts:
    """Add a loss over numbers, and that of the best constant answer."""
    target, given = saved(node, "target"), saved(node, "self")
    if target is None or given is None or not 8 <= target.numel() <= _MOST_VALUES:
        return found
    target, given = target.detach().double(), given.detach().double()
    if binary:
        share = float(target.mean())
        if not 0.0 < share < 1.0:
            return found
        chance = -share * math.log(share) - (1 - share) * math.log(1 - share)
        if _name(node).endswith("Logits"):
            value = torch.nn.functional.softplus(given) - given * target
        else:
            value = torch.nn.functional.binary_cross_entropy(
                given.clamp(0.0, 1.0), target, reduction="none"
            )
        return found._replace(value=float(value.mean()), chance=chance)
    centered = target - target.mean(0) if target.ndim > 1 or target.numel() > 1 else target
    column = target.reshape(len(target), -1)
    return found._replace(
        value=float((given - target).square().mean()), chance=float(centered.square().mean()),
        target=column[:, 0] if column.shape[1] == 1 else None,
    )  # fmt: skip


# -- a loss that is not finite -----------------------------------------------------------------


def _is_broken(loss: torch.Tensor) -> bool:
    with quiet():
        return is_plain(loss) and not math.isfinite(loss)


def _origin(start: Any) -> str:
    """Return the operation that turned finite numbers into a loss that is not."""
    pending: list[Any] = [start]
    seen: set[Any] = set()
    with quiet():
        while pending and len(seen) < 4 * _MOST_NODES:
            node = pending.pop(0)
            if node is None or node in seen:
                continue
            seen.add(node)
            if made := _made(node):
                return made
            pending += [each for each, _ in node.next_functions]
    return ""


def _made(node: Any) -> str:
    """Return in words how an operation made finite numbers infinite or NaN."""
    name, given, divisor, result = _name(node), *(saved(node, each) for each in _SAVED)
    numbers = next((each for each in (divisor, given, result) if each is not None), None)
    if numbers is None or not numbers.is_floating_point() or numbers.numel() > _MOST_VALUES:
        return "mean() of no values" if _is_empty_mean(node) else ""
    finite = bool(numbers.isfinite().all())
    zeros, negative = int((numbers == 0).sum()), int((numbers < 0).sum())
    if name in ("Log", "Log2", "Log10") and finite and zeros + negative:
        what = f"{zeros:,} zeros" if zeros else f"{negative:,} negative numbers"
        return f"log() of {what}, of {numbers.numel():,} numbers"
    if name == "Div" and divisor is not None and finite and zeros:
        return f"a division by 0, in {zeros:,} of {numbers.numel():,} numbers"
    infinite = int((numbers == math.inf).sum())
    # of NaN in what they return, the fault is that of an earlier operation
    if name in ("Rsqrt", "Exp") and given is None and infinite and not numbers.isnan().any():
        return f"{name.lower()}(), in {infinite:,} of {numbers.numel():,} numbers"
    return ""


_SAVED = "self", "other", "result"


def _is_empty_mean(node: Any) -> bool:
    return _name(node) == "Mean" and getattr(node, "_saved_self_sym_numel", 1) == 0


def relation_of(given: torch.Tensor | None, loss: LossFacts) -> str:
    """Return how labels relate to what the model was given.

    >>> tokens = torch.arange(24).reshape(2, 12)
    >>> shifted = LossFacts(labels=tokens[:, 1:].reshape(-1))
    >>> relation_of(tokens[:, :-1], shifted), relation_of(tokens, LossFacts(labels=tokens))
    ('shifted', 'equal')
    """
    if given is None or not is_plain(given):
        return ""
    labels = loss.labels if loss.labels is not None else loss.target
    if labels is None:
        return ""
    if given.is_floating_point():
        return _column(given, labels)
    if given.ndim != 2 or given.shape[1] < 3:
        return ""
    rows, length = given.shape
    if labels.numel() not in (rows * length, rows * (length - 1)):
        return ""
    labels = labels.reshape(rows, -1)
    width = labels.shape[1]
    is_equal = _agree(given[:, :width], labels, loss.ignored)
    is_shifted = _agree(given[:, 1:], labels[:, : length - 1], loss.ignored)
    if is_equal == is_shifted:  # also where all tokens are the same
        return ""
    return "equal" if is_equal else "shifted"


def _agree(given: torch.Tensor, labels: torch.Tensor, ignored: int) -> bool:
    kept = labels != ignored
    return bool(kept.sum() >= 8 and (given[kept] == labels[kept]).all())


def _column(given: torch.Tensor, labels: torch.Tensor) -> str:
    """Return the column of a matrix that labels are equal to."""
    if given.ndim != 2 or labels.ndim != 1 or len(labels) != len(given) or len(labels) < 8:
        return ""
    if given.numel() > _MOST_VALUES or bool((labels == labels[0]).all()):
        return ""
    same = (given.detach() == labels.to(given.dtype).unsqueeze(1)).all(0).nonzero()
    return f"column {int(same[0])}" if len(same) else ""


class LossWatch:
    """Reads the losses whose gradients reach a model, in some of its steps."""

    def __init__(self, entries: Callable[[], list[torch.Tensor]]) -> None:
        self._entries = entries  # returns what the model was given, and other tokens
        self._number = 0
        self._pending: list[LossFacts] = []
        self._found: list[LossFacts] = []
        self.values = self.hidden = False  # whether a loss was seen, or hidden by a compiler

    @property
    def looks(self) -> bool:
        number = self._number
        return number < 10 or number % (5 if number <= 100 else 20 if number <= 1000 else 100) == 0

    def on_backward(self, tensors: Any) -> None:
        self._pending = []
        for each in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if isinstance(each, torch.Tensor) and each.numel() == 1:
                self.values = True
                broken = _is_broken(each)
                if (self.looks or broken) and len(self._found) < 8:
                    found = read_loss(each)
                    if found is not None and broken:
                        found = found._replace(broken=_origin(each.grad_fn))
                    self.hidden |= found is None
                    if found is not None:
                        first, *others = self._entries() or [None]
                        relation = relation_of(first, found)
                        if any(relation_of(each, found) == "shifted" for each in others):
                            # a decoder has the labels; what goes to the encoder may be equal
                            relation = relation if relation == "shifted" else ""
                        self._pending.append(found._replace(relation=relation))

    def on_computed(self) -> None:
        """Note that gradients of the latest losses have reached the model."""
        self._found += self._pending
        self._pending = []

    def on_zeroed(self) -> None:
        """Note that gradients begin anew, as in a closure: losses do not add up."""
        self._found = [each._replace(is_mean=False) for each in self._found]

    def end_step(self) -> tuple[LossFacts, ...]:
        found, self._found, self._pending = self._found, [], []
        self._number += 1
        return tuple(found)
