"""Derive how a loss was computed from the gradient of the model's output.

The gradient of cross-entropy with respect to logits is ``scale * (softmax(logits) - target)``, with
a scale of its own for each row if classes or rows have weights. A gradient that fits tells how the
loss was computed, wherever that happened; one that does not fit tells nothing, because there are
many other losses.
"""

from __future__ import annotations

import torch

from tensortap.frameworks.steps import LossFacts

_MOST_VALUES = 1 << 18  # that are read
_FEWEST_ROWS = 4  # that prove something
_FEWEST_LABELS = 8
_VARIED = 0.05  # probabilities that differ so much do not fit another loss
_SATURATED = 6.0  # logits from which on a sigmoid is almost 0 or 1, whatever the loss is


class LossProbe:
    """Values of an output, until its gradient is known."""

    def __init__(self, output: torch.Tensor) -> None:
        self._shape = output.shape
        self._whole = output.numel() <= _MOST_VALUES
        self._values = self._rows(output).double()

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its classes last; of a large one only some rows."""
        tensor = tensor.detach()
        if self._whole:
            return tensor.clone()
        rows = tensor.reshape(-1, tensor.shape[-1])
        most = max(_MOST_VALUES // tensor.shape[-1], _FEWEST_ROWS)
        return rows[:: -(-len(rows) // most)].clone()

    def facts(self, gradient: torch.Tensor) -> LossFacts | None:
        """Return how the loss was computed, or None if that is not known."""
        tolerance = 1e-3 if gradient.element_size() >= 4 else 0.03
        count = gradient.numel()
        values, gradient = self._values, self._rows(gradient).double()
        if not values.isfinite().all() or not gradient.isfinite().all() or not gradient.any():
            return None
        if _is_sigmoid_twice(values, gradient, tolerance):
            return LossFacts("sigmoid", applied_twice=True)
        labels = _binary_labels(values, gradient, count, tolerance)
        if labels is not None:
            wrong = labels[(labels != 0) & (labels != 1)]
            twice = bool((values >= 0).all() and (values <= 1).all())
            label = float(wrong[0]) if len(wrong) else None
            return LossFacts("sigmoid", applied_twice=twice, wrong_label=label)
        for dim in dict.fromkeys((values.ndim - 1, 1)) if values.ndim > 1 else ():
            found = self._classes(values, gradient, dim, tolerance)
            if found is not None:
                return found
        return None

    def _classes(
        self, values: torch.Tensor, gradient: torch.Tensor, dim: int, tolerance: float
    ) -> LossFacts | None:
        """Return facts about a loss over classes along a dimension."""
        classes = values.shape[dim]
        x, g = (each.movedim(dim, -1).reshape(-1, classes) for each in (values, gradient))
        used = g.abs().amax(1) > 0  # others are ignored by the loss
        x, g = x[used], g[used]
        if classes < 2 or len(x) < _FEWEST_ROWS:
            return None
        chosen = torch.nn.functional.one_hot(g.argmin(1), classes).double()
        weight = _fit_rows(g, x.softmax(1), chosen, tolerance)
        if weight is not None:
            weight *= self._shape.numel() / values.numel()
            twice = bool((x >= 0).all() and ((x.sum(1) - 1).abs() < tolerance).all())
            return LossFacts("softmax", applied_twice=twice, weight=weight)
        if classes > 2 and _fit(g, _through_softmax(x, chosen), tolerance) is not None:
            return LossFacts("softmax", applied_twice=True)
        if classes > 2 and _fit(g, -chosen, tolerance) is not None:
            axis = self._normalized_axis(values)
            if axis is None:
                return LossFacts("none")
            return None if axis == dim else LossFacts("softmax", wrong_axis=axis)
        if not self._whole:
            return None
        chosen = torch.zeros_like(gradient).movedim(dim, -1).reshape(-1, classes)
        chosen[used] = torch.nn.functional.one_hot(g.argmin(1), classes).double()
        chosen = chosen.reshape(values.movedim(dim, -1).shape).movedim(-1, dim)
        for axis in range(values.ndim):
            # rows and columns of a square may both be classes, as in contrastive losses
            if values.shape[axis] < _FEWEST_ROWS or values.shape[axis] == classes:
                continue
            template = values.softmax(axis) * chosen.sum(axis, keepdim=True) - chosen
            if _fit(gradient, template, tolerance) is not None:
                return LossFacts("softmax", wrong_axis=axis)
        return None

    def _normalized_axis(self, values: torch.Tensor) -> int | None:
        """Return the dimension along which values are logarithms of probabilities."""
        axes = range(values.ndim) if self._whole else (values.ndim - 1,)
        return next((i for i in axes if bool((values.logsumexp(i).abs() < 1e-2).all())), None)


def _through_softmax(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the gradient of cross-entropy of probabilities, with respect to their logits."""
    probabilities = logits.softmax(1)
    error = probabilities.softmax(1) - chosen
    return probabilities * (error - (probabilities * error).sum(1, keepdim=True))


def _fit(gradient: torch.Tensor, template: torch.Tensor, tolerance: float) -> float | None:
    """Return the positive factor of a template that is the gradient; None if there is none."""
    square = float((template * template).sum())
    scale = float((gradient * template).sum()) / square if square else 0.0
    error = float((gradient - scale * template).norm())
    return scale if scale > 0 and error <= tolerance * float(gradient.norm()) else None


def _fit_rows(
    gradient: torch.Tensor, softmax: torch.Tensor, chosen: torch.Tensor, tolerance: float
) -> float | None:
    """Return the sum of the weights of all rows in cross-entropy; None if the gradient is another.

    Weights and smooth labels are looked for among three classes and more: of two, anything fits.
    """
    template = softmax - chosen
    scale = _fit(gradient, template, tolerance)
    if scale is not None or chosen.shape[1] < 3:
        return None if scale is None else scale * len(gradient)
    weights = (gradient * template).sum(1) / (template * template).sum(1)
    error = float((gradient - weights[:, None] * template).norm())
    if error <= tolerance * float(gradient.norm()) and bool((weights > 0).all()):
        return float(weights.sum())
    parts = torch.stack([softmax, -chosen, -torch.ones_like(chosen)]).flatten(1)  # smooth labels
    normal = parts @ parts.T, (parts @ gradient.flatten())[:, None]
    factors = torch.linalg.lstsq(*normal).solution.flatten()
    scale, label, rest = factors.tolist()
    fits = scale > label > rest > tolerance * label  # all targets of a row sum to the scale
    if fits and _fit(gradient, (factors @ parts).view_as(gradient), tolerance) is not None:
        return float(scale * len(gradient))
    return None


def _is_sigmoid_twice(values: torch.Tensor, gradient: torch.Tensor, tolerance: float) -> bool:
    """Return whether the loss is binary cross-entropy of probabilities, as if of logits."""
    sigmoid, labels = values.sigmoid(), (gradient < 0).double()
    varied = float(sigmoid.max() - sigmoid.min()) > max(10 * tolerance, _VARIED)
    if not varied or not 0 < labels.mean() < 1 or values.numel() < _FEWEST_LABELS:
        return False
    template = (sigmoid.sigmoid() - labels) * sigmoid * (1 - sigmoid)
    return _fit(gradient, template, tolerance) is not None


def _binary_labels(
    values: torch.Tensor, gradient: torch.Tensor, count: int, tolerance: float
) -> torch.Tensor | None:
    """Return the labels of binary cross-entropy: 0 and 1, -1 and 1, or those of a mean of `count`.

    Labels that are not whole numbers prove nothing, and neither do those of large logits.
    """
    known = values.abs() < _SATURATED
    sigmoid, slope = values[known].sigmoid(), gradient[known]
    if len(slope) < _FEWEST_LABELS:
        return None
    if float(sigmoid.max() - sigmoid.min()) > 10 * tolerance:  # equal slopes fit many losses
        for low in (0.0, -1.0):
            labels = torch.where(slope < 0, 1.0, low)
            if _fit(slope, sigmoid - labels, tolerance) is not None:
                return labels
    labels = sigmoid - slope * count
    whole = labels.round()
    return whole if float((labels - whole).abs().max()) <= tolerance else None
