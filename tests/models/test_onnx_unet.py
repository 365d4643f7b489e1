"""The graph that `bench/diffusion.py` writes is one of kernels, with results of onnx's evaluator."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from bench_scripts import script

import portmm.onnx

pytest.importorskip("onnx")
from onnx.reference import ReferenceEvaluator


@pytest.mark.rest("takes long for what it finds")
def test_a_step_of_few_channels_is_run_by_kernels(tmp_path):
    diffusion, path = script("diffusion"), tmp_path / "unet.onnx"
    diffusion.write(path, diffusion.SMALL)
    feeds = diffusion.feeds(diffusion.SMALL)
    (want,) = ReferenceEvaluator(str(path)).run(None, feeds)
    session = portmm.onnx.load(path)
    np.testing.assert_allclose(session.run(feeds)[0], want, rtol=1e-3, atol=1e-4)
    report = session.report(feeds)
    kinds = Counter(row.kind for row in report.rows)
    assert (kinds["norm"], kinds["conv"]) == (21, 20), kinds  # all of the graph, but convolutions of single pixels
    assert report.numpy.keys() == {"Cast", "Cos", "Sin"}  # of one number
