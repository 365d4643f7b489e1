"""The tests of single operators that the package onnx has, run by `portmm.onnx`.

Random operators have no expected results. In float16 and bfloat16 kernels compute in float32 and round once where the
expected results were rounded after each step: an error of two units in the last place is counted apart.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from portmm import onnx as models

RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""A unit in the last place of 1."""


@dataclass(frozen=True)
class Outcome:
    """Result of a case: "passed", "rounded" (within two units of a narrow type), "failed" or "not offered"."""

    name: str
    operator: str
    verdict: str
    why: str = ""


@cache
def cases() -> tuple[Any, ...]:
    """All cases of single operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test import loader

        return tuple(x for x in loader.load_model_tests(kind="node") if x.model is not None)


def operator_of(case: Any) -> str:
    """The operator of a case: the one of its name in an expanded one."""
    found = {n.op_type.lower(): n.op_type for n in case.model.graph.node}
    if len(case.model.graph.node) == 1:
        return case.model.graph.node[0].op_type
    if case.name.endswith("_expanded"):
        return "expanded functions"
    words = case.name.removeprefix("test_").split("_")
    return next((found[w] for w in words if w in found), "several")


def array(x: Any) -> Any:
    """A value of a case: its tensors are arrays."""
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(x) if isinstance(x, TensorProto) else x


def difference(got: Any, want: Any, case: Any) -> str:
    """ "" if a result is right, "rounded", or what is wrong."""
    if isinstance(want, list):
        found = [difference(a, b, case) for a, b in zip(got, want, strict=True)]
        return next((x for x in found if x), "")
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape:
        return f"its shape is {a.shape}, not {b.shape}"
    if b.dtype.kind in "OUS":
        return "" if (a.astype(str) == b.astype(str)).all() else "other texts"
    return numbers(a, b, case) if a.dtype == b.dtype else f"its type is {a.dtype}, not {b.dtype}"


def numbers(a: Any, b: Any, case: Any) -> str:
    """ "" if numbers are those of a case, "rounded", or what is wrong."""
    unit = UNITS.get(b.dtype.name, 0.0)
    if b.dtype.kind == "V" or unit:
        a, b = a.astype(np.float32), b.astype(np.float32)
    if np.allclose(a, b, rtol=case.rtol, atol=case.atol, equal_nan=True):
        return ""
    within = unit and np.allclose(a, b, rtol=2 * unit, atol=case.atol, equal_nan=True)
    return "rounded" if within else "other values"


def outcome(case: Any) -> Outcome:
    """Run a case."""
    operator = operator_of(case)
    if any(n.op_type in RANDOM for n in case.model.graph.node):
        return Outcome(case.name, operator, "not offered", "results are random")
    try:
        session = models.load(case.model, progress=False, optimize=False)
    except models.OnnxError as error:
        return Outcome(case.name, operator, "not offered", str(error))
    for inputs, outputs in case.data_sets:
        got = session.run([array(x) for x in inputs])
        for a, b in zip(got, outputs, strict=True):
            why = difference(a, array(b), case)
            if why == "rounded":
                return Outcome(case.name, operator, why)
            if why:
                return Outcome(case.name, operator, "failed", why)
    return Outcome(case.name, operator, "passed")
