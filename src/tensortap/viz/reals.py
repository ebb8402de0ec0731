"""Any tensor as real numbers that can be drawn, and a large one made small, extremes kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.stats.values import check, parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NARROW = 2  # bytes of a whole number that float32 holds exactly


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether there is anything to draw."""
    try:
        check(dtype)
    except TypeError:
        return False
    return True


def reals(array: NDArray[Any]) -> NDArray[Any]:
    """The values as float32 or float64, whichever holds them; complex ones by their magnitude.

    >>> import numpy as np
    >>> reals(np.array([3 + 4j])), reals(np.array([True])).dtype
    (array([5.]), dtype('float32'))
    """
    import numpy as np

    dtype = array.dtype
    if dtype in (np.float32, np.float64):
        return array
    part = parts(dtype)
    with np.errstate(all="ignore"):
        if part is not None:
            if dtype.fields is not None:
                real, imag = (array[name].astype(np.float64) for name in ("real", "imag"))
                length: NDArray[Any] = np.hypot(real, imag)
                return length
            wide = array.astype(np.complex256 if dtype.itemsize > 16 else np.complex128)
            magnitude: NDArray[Any] = np.abs(wide).astype(np.float64, copy=False)
            return magnitude
        whole = dtype.kind in "iu" and dtype.itemsize > _NARROW
        wide_float = dtype.kind == "f" and dtype.itemsize > 4
        return array.astype(np.float64 if whole or wide_float else np.float32, copy=False)


def flattest(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its leading ones: ``[1, W, H]`` is a matrix.

    >>> flattest((1, 1, 3, 4)), flattest((1,)), flattest(())
    ((3, 4), (), ())
    """
    start = 0
    while start < len(shape) and shape[start] == 1:
        start += 1
    return shape[start:]


def shrink(matrix: NDArray[Any], rows: int, columns: int, middle: float) -> NDArray[Any]:
    """A matrix in at most so many cells: of each block the value farthest from `middle`.

    NaN wins over everything and the infinities over what is finite, so that none can hide.

    >>> import numpy as np
    >>> shrink(np.array([[1, -5, 0, np.nan], [2, 3, 1, 2]]), 1, 2, 0.0)
    array([[-5., nan]])
    """
    import numpy as np

    height, width = matrix.shape
    rows, columns = min(rows, height), min(columns, width)
    if (rows, columns) == (height, width):
        return reals(matrix)
    down = [height * i // rows for i in range(rows + 1)]
    across = np.array([width * i // columns for i in range(columns)])
    kind = reals(matrix[:1]).dtype
    high, low = np.empty((rows, columns), kind), np.empty((rows, columns), kind)
    with np.errstate(invalid="ignore"):
        for row in range(rows):
            # one band at a time stays in the cache, whatever its dtype has to become
            band = reals(matrix[down[row] : down[row + 1]])
            np.maximum.reduceat(np.maximum.reduce(band, axis=0), across, out=high[row])
            np.minimum.reduceat(np.minimum.reduce(band, axis=0), across, out=low[row])
        return np.where(middle - low > high - middle, low, high)
