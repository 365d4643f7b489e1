"""PyTorch's own samples of its operators through the backend and through portmm's; PyTorch is the oracle.

The fast tier takes a few samples of each operator; PORTMM_TESTS=all takes all, in all types.
"""

from __future__ import annotations

import cover
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
pytest.importorskip("expecttest", reason="PyTorch's samples of operators need expecttest")
from torch.autograd import gradcheck  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import portmm.torch as pt  # noqa: E402
from portmm.torch import backend  # noqa: E402

QUICKLY = True
pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]
NAMES = (
    "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "matmul", "nn.functional.linear", "nn.functional.conv1d",
    "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose2d",
    "nn.functional.scaled_dot_product_attention", "nn.functional.layer_norm", "nn.functional.rms_norm",
    "nn.functional.batch_norm", "softmax", "log_softmax", "nn.functional.gelu", "nn.functional.silu", "transpose",
    "squeeze", "where", "mean", "amax", "clamp",
)  # fmt: skip
MOST = 2
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-7, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = [*TOLERANCE] if cover.ALL else [torch.float32]
INFOS = [x for x in op_db if x.name in NAMES and (cover.ALL or not x.variant_test_name)]


def samples(info, dtype, *, grad=False):
    """Samples of an operator: all, or the last ones, which have more options and numbers without dimensions."""
    every = [*info.sample_inputs("cpu", dtype, requires_grad=grad)]
    return every if cover.ALL else every[-MOST:]


def close(got, want, dtype):
    got, want = ([x for x in torch.utils._pytree.tree_leaves(y) if torch.is_tensor(x)] for y in (got, want))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def _called(info):
    """A function of Python's that calls an operator, as the samples of another may be compiled."""

    def run(*operands, **options):
        return info.op(*operands, **options)

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("info", INFOS, ids=lambda x: x.full_name)
def test_samples_through_the_backend(info, dtype):
    if dtype not in info.supported_dtypes("cpu"):
        pytest.skip("PyTorch has no such operator")
    for sample in samples(info, dtype):
        torch._dynamo.reset()
        torch.manual_seed(1)
        want = info.op(sample.input, *sample.args, **sample.kwargs)
        torch.manual_seed(1)
        run = torch.compile(_called(info), backend=backend.compile_graph)
        close(run(sample.input, *sample.args, **sample.kwargs), want, dtype)


@pytest.mark.skipif(not cover.ALL, reason="PORTMM_TESTS=all compares gradients of all samples")
@pytest.mark.parametrize("info", INFOS, ids=lambda x: x.full_name)
def test_gradients_of_samples(info):
    for sample in samples(info, torch.float32, grad=True):
        inputs = [x for x in (sample.input, *sample.args) if torch.is_tensor(x) and x.requires_grad]
        want = info.op(sample.input, *sample.args, **sample.kwargs)
        if not inputs or not want.requires_grad or "dropout_p" in sample.kwargs:
            continue
        weights = torch.randn_like(want)
        gradients = torch.autograd.grad(want, inputs, weights)  # a next call changes statistics of batch norms
        torch._dynamo.reset()
        run = torch.compile(_called(info), backend=backend.compile_graph)
        got = run(sample.input, *sample.args, **sample.kwargs)
        close(torch.autograd.grad(got, inputs, weights), gradients, torch.bfloat16)


OURS = {
    "matmul": pt.matmul, "mm": pt.matmul, "bmm": pt.matmul, "mv": pt.matmul, "nn.functional.linear": pt.linear,
    "nn.functional.conv1d": pt.conv, "nn.functional.conv2d": pt.conv, "nn.functional.conv3d": pt.conv,
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_samples_through_operators(name):
    (info,) = (x for x in op_db if x.name == name and not x.variant_test_name)
    for sample in samples(info, torch.float64, grad=True):
        tensors = [x for x in (sample.input, *sample.args) if torch.is_tensor(x)]
        others = [x for x in sample.args if not torch.is_tensor(x)]
        if others or ("padding" in sample.kwargs and isinstance(sample.kwargs["padding"], str)):
            continue  # options of convolutions are named, and padding is a number
        if tensors[0].ndim < tensors[1].ndim and pt.conv is OURS[name]:
            continue  # images without a batch
        want = info.op(*tensors, **sample.kwargs)
        close(OURS[name](*tensors, **sample.kwargs), want, torch.float64)
        if cover.ALL or sum(x.numel() for x in tensors) < 200:
            assert gradcheck(lambda *x: OURS[name](*x, **sample.kwargs), tensors)  # noqa: B023
