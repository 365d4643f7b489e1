"""Models in ONNX's format, run by kernels that are generated for this machine: `load`, and the session it returns."""

from portmm.onnx.model import NodeArg, OnnxError
from portmm.onnx.session import Session, load

__all__ = ["NodeArg", "OnnxError", "Session", "load"]
