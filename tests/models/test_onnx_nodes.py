"""ONNX's own tests of operators, each as a model of one operator, or of the function that defines it."""

import onnx_cases
import pytest

QUICKLY = True
SHARES = 24


@pytest.mark.slow
@pytest.mark.thin(6)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.filterwarnings("ignore")  # those of onnx's reference evaluator
def test_operators(share):
    found = [onnx_cases.outcome(x) for x in onnx_cases.cases()[share::SHARES]]
    failed = [x for x in found if x.verdict == "failed"]
    assert not failed
    assert sum(x.verdict in ("passed", "rounded") for x in found) > 0.97 * len(found)
