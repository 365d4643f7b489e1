"""All modules of operators: importing this one fills in the table."""

from portmm.onnx import (
    elementwise_operators,
    product_operators,
    quantized_operators,
    reduction_operators,
    shape_operators,
    window_operators,
)

MODULES = (
    elementwise_operators, product_operators, quantized_operators, reduction_operators, shape_operators,
    window_operators,
)  # fmt: skip
