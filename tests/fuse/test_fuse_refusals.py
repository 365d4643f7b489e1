"""Operations that `fuse` leaves to NumPy or refuses: each message names the line."""

import math
from pathlib import Path

import numpy as np
import pytest
from test_fuse import agrees, line_of, mlp, some

import portmm as pm
from portmm.errors import TraceError
from portmm.spec import elementwise as v

pytestmark = pytest.mark.calls

QUICKLY = True

HERE = Path(__file__).name


def test_what_numpy_computes():
    @pm.fuse
    def f(x, w, ids):
        h = np.sort(x @ w, axis=-1)
        y = np.cumsum(h, axis=0) + h[ids]
        return v.relu(y) @ w, np.sum(y, axis=0)

    x, w = some(4, 6), some(6, 6)
    told = agrees(f, x, w, np.array([3, 1, 0, 2]))
    text = str(told)
    line = line_of("h = np.sort(x @ w, axis=-1)", __file__)
    assert f"{HERE}:{line}: np.sort" in text
    assert f"{HERE}:{line + 1}: np.cumsum" in text
    with pytest.raises(TraceError, match=f"line {line}.*np.sort"):
        pm.fuse(f.__wrapped__, on_unfusable="error")(x, w, np.array([3, 1, 0, 2]))


def test_results_of_numpy_may_change_their_shape():
    @pm.fuse
    def f(x):
        return np.unique(x) * 2.0

    for values in ([1, 2, 3], [1, 1, 3], [1, 1, 1], [2, 3, 4]):
        x = np.array(values, np.float32)
        np.testing.assert_array_equal(f(x), f.__wrapped__(x))


REFUSED = {
    "if": (lambda x: x if x.sum() > 0 else -x, "if"),  # refused: if
    "while": (lambda x: [0 for _ in range(3) if (x > 0).all()], "if"),  # refused: while
    "float": (lambda x: x * float(x.max()), "number"),  # refused: float
    "int": (lambda x: x[: int(x.max())], "number"),  # refused: int
    "item": (lambda x: x * x.max().item(), "item"),  # refused: item
    "method": (lambda x: x.sort(), "in place"),  # refused: method
    "out": (lambda x: np.add(x, 1, out=x), "in place"),  # refused: out
    "truth": (lambda x: np.allclose(x, 0), "data"),  # refused: truth
    "math": (lambda x: math.exp(x) + 1, "math"),  # refused: math
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_names_its_line(name):
    function, word = REFUSED[name]
    line = line_of(f"# refused: {name}", __file__)
    with pytest.raises(TraceError, match=f"{HERE}, line {line}: .*{word}"):
        pm.fuse(function)(some(3, 4))


def test_changes_in_place_name_their_line():
    @pm.fuse
    def item(x):
        x[0] = 1  # refused: an item
        return x

    @pm.fuse
    def added(x):
        y = x @ x
        y += 1  # refused: an increment
        return y

    for function, text in ((item, "# refused: an item"), (added, "# refused: an increment")):
        with pytest.raises(TraceError, match=f"line {line_of(text, __file__)}: .*in place"):
            function(some(4, 4))


def test_errors_are_numpys():
    with pytest.raises(ValueError, match="columns"):
        mlp(some(3, 4), some(5, 6), some(6), some(6, 2), some(2))
    with pytest.raises(ValueError, match="broadcast"):
        mlp(some(3, 4), some(4, 6), some(5), some(6, 2), some(2))
    with pytest.raises(ValueError, match="on_unfusable"):
        pm.fuse(lambda x: x, on_unfusable="maybe")
