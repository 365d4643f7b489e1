"""A decoder of Llama's architecture on portmm: prefill, a cache of keys and values, greedy and sampled decoding.

    python examples/llama.py                         # random weights, one size after the other
    python examples/llama.py --kind int4 --size 1b --tokens 32

Weights are seeded random numbers, those of a module of `transformers`, as `from_module` takes them, or of a GGUF file,
whose int4 values are multiplied as they are (`from_gguf`). Each layer is a
product for queries, keys and values, attention over the cache, and a gated MLP; sums with their norms, rotary positions
and gates are kernels that `fuse` makes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

import portmm as pm

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("float32", "bfloat16", "int8", "int4", "int4-dynamic")
"""Of weights; activations are float32, bfloat16 where weights are, and have eight bits with int8 and int4-dynamic.

Those are int8 by row. With int4-dynamic, long prompts are rounded to bfloat16, which has eight bits as well, where a
machine has units for it: their step of k is a group of 32, that of int8 would be two.
"""
PROMPT = 64
"""Rows from which this is faster."""


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder."""

    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 8
    key_heads: int = 2
    inner: int = 704
    base: float = 10000.0
    epsilon: float = 1e-6

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


SIZES = {"tiny": Config(), "100m": Config(16384, 768, 12, 12, 4, 2048), "1b": Config(32000, 2048, 16, 32, 8, 8192)}


class Product:
    """A weight (inputs, outputs) of a kind, packed; one that is quantized already has int4 values."""

    def __init__(self, w: Any, kind: str) -> None:
        self.kind, self.scales = kind, None
        if kind == "int8":
            self.scales = np.abs(w).max(0).astype(np.float32) / 127
            codes = np.rint(w / np.maximum(self.scales, np.float32(1e-30))).astype(np.int8)
            self.weight = pm.pack(codes, activations=np.int8)
        elif kind.startswith("int4"):
            self.weight = pm.pack(w if isinstance(w, pm.Quantized) else pm.quantize(w, bits=4, group=32))
        else:
            self.weight = pm.pack(w.astype(activations(kind)), activations=activations(kind))

    def __call__(self, x: Any, dtype: Any = None) -> Any:
        """Rows times the weight, of the type of the rows or of another."""
        if self.kind == "int8":
            return pm.linear(x, self.weight, w_scale=self.scales, dynamic=True)
        if self.kind == "int4-dynamic" and x.size // x.shape[-1] >= PROMPT and multiplies_bfloat16():
            return pm.matmul(as_bfloat16()(x), self.weight, dtype=np.float32)
        if self.kind == "int4-dynamic":
            return pm.linear(x, self.weight, dynamic=True)
        return pm.matmul(x, self.weight, dtype=dtype)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 by units of their own, several times as fast as float32."""
    narrow, wide = (pm.explain((512, 2048), (2048, 2048), dtype=dtype) for dtype in ("bf16", "f32"))
    return narrow.seconds * 4 < wide.seconds


@cache
def as_bfloat16() -> Any:
    """The function that rounds activations to bfloat16."""
    dtype = activations("bfloat16")
    return pm.fuse(lambda x: x.astype(dtype))


def activations(kind: str) -> Any:
    """The type of activations; sums of layers and norms are float32."""
    if kind == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(np.float32)


@dataclass
class Layer:
    """The weights of a layer."""

    norm: Any
    qkv: Product
    out: Product
    inner_norm: Any
    gate_up: Product
    down: Product


class Cache:
    """Keys and values of the positions so far, for each layer (batch, heads of keys, positions, elements).

    Attributes:
        turns: cosines and sines of the angles of all positions.
    """

    def __init__(self, config: Config, batch: int, most: int, kind: str = "float32") -> None:
        shape = (config.layers, batch, config.key_heads, most, config.head)
        self.keys, self.values, self.filled = np.zeros(shape, activations(kind)), np.zeros(shape, activations(kind)), 0
        self.turns = rotation(config, most)


class Llama:
    """A decoder."""

    def __init__(self, config: Config, layers: list[Layer], embedding: Any, norm: Any, head: Product) -> None:
        self.config, self.layers, self.embedding, self.norm, self.head = config, layers, embedding, norm, head
        self.kind = head.kind
        self.added = adder(config.epsilon, activations(self.kind))

    def logits(self, tokens: Any, cache: Cache) -> Any:
        """The logits after the last of some more tokens (batch, tokens); their keys and values join the cache."""
        c, start = self.config, cache.filled
        end, shape = start + tokens.shape[1], (*tokens.shape, c.heads + 2 * c.key_heads, c.head)
        x, turns = self.embedding[tokens], [angle[start:end] for angle in cache.turns]
        y = np.zeros(x.shape, activations(self.kind))
        for i, layer in enumerate(self.layers):
            x, normed = self.added(x, y, layer.norm)
            q, k, v = np.split(layer.qkv(normed).reshape(shape), (c.heads, c.heads + c.key_heads), 2)
            cache.keys[i, :, :, start:end] = rotated(k, *turns).swapaxes(1, 2)
            cache.values[i, :, :, start:end] = v.swapaxes(1, 2)
            keys, values = cache.keys[i, :, :, :end], cache.values[i, :, :, :end]
            # The last query is at the last key.
            y = pm.attention(rotated(q, *turns).swapaxes(1, 2), keys, values, causal=True)
            x, normed = self.added(x, layer.out(y.swapaxes(1, 2).reshape(x.shape)), layer.inner_norm)
            y = layer.down(gated(layer.gate_up(normed)))
        cache.filled = end
        return self.head(self.added(x[:, -1], y[:, -1], self.norm)[1], np.float32)

    def generate(self, prompt: Any, count: int, *, temperature: float = 0.0, seed: int = 0, progress: str = "") -> Any:
        """The next tokens of prompts (batch, tokens): the likeliest ones, or samples at a temperature.

        With a title `progress`, a terminal shows how many there are, and how many in a second.
        """
        most = prompt.shape[1] + count
        cache, rng = Cache(self.config, len(prompt), most, self.kind), np.random.default_rng(seed)
        tokens, chosen = prompt, []
        for _ in counted(range(count), progress, len(prompt)):
            scores = self.logits(tokens, cache)
            if temperature:  # the largest of scores with Gumbel noise is a sample of their softmax
                scores = scores / temperature + rng.gumbel(size=scores.shape)
            tokens = scores.argmax(-1)[:, None]
            chosen.append(tokens)
        return np.concatenate(chosen, 1)


def counted(steps: Any, title: str, each: int = 1) -> Iterator[Any]:
    """Steps one by one, and on a terminal, if there is a title, a bar of those that are done and their rate."""
    shown, whole, start = bool(title) and sys.stderr.isatty(), len(steps), time.perf_counter()
    for done, step in enumerate(steps, 1):
        yield step
        if shown:
            rate = done * each / (time.perf_counter() - start)
            bar = "#" * (30 * done // whole)
            end = "\n" if done == whole else ""
            print(f"\r{title:12} [{bar:30}] {done * each} of {whole * each}, {rate:.1f}/s", end=end, file=sys.stderr)


def adder(epsilon: float, dtype: Any) -> Any:
    """The function that adds two arrays, and scales rows of the sum by RMSNorm, as activations of a type."""

    @pm.fuse
    def added(x: Any, y: Any, weight: Any) -> tuple[Any, Any]:
        total = x + y
        return total, pm.rms_norm(total, weight, epsilon).astype(dtype)

    return added


@pm.fuse
def gated(joined: Any) -> Any:
    """The product of the second half of columns and the SiLU of the first."""
    half = joined.shape[-1] // 2
    return pm.silu(joined[..., :half]) * joined[..., half:]


@pm.fuse
def rotated(heads: Any, cosines: Any, sines: Any) -> Any:
    """Heads (batch, positions, heads, elements) turned by the angles of their positions."""
    halves = heads.reshape(*heads.shape[:-1], 2, heads.shape[-1] // 2)
    return (halves * cosines + halves[..., ::-1, :] * sines).reshape(heads.shape).astype(heads.dtype)


def rotation(config: Config, count: int) -> tuple[Any, Any]:
    """Cosines and sines of the angles of the first positions: (positions, 1, halves, elements of half a head)."""
    rates = 1 / config.base ** (np.arange(0, config.head, 2, dtype=np.float32) / np.float32(config.head))
    angles = np.arange(count, dtype=np.float32)[:, None, None] * rates.astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)
    return np.stack([cosines, cosines], 2), np.stack([-sines, sines], 2)


def random_weights(config: Config, seed: int = 0) -> dict[str, Any]:
    """Seeded weights by the names of `transformers`, each (outputs, inputs)."""
    rng, c = np.random.default_rng(seed), config
    rows = {"q_proj": c.width, "k_proj": c.key_heads * c.head, "v_proj": c.key_heads * c.head, "o_proj": c.width}
    shapes = {f"self_attn.{n}": (m, c.width) for n, m in rows.items()}
    shapes |= {
        "mlp.gate_proj": (c.inner, c.width),
        "mlp.up_proj": (c.inner, c.width),
        "mlp.down_proj": (c.width, c.inner),
    }
    names = {f"model.layers.{i}.{n}.weight": s for i in range(c.layers) for n, s in shapes.items()}
    names |= {"model.embed_tokens.weight": (c.vocabulary, c.width), "lm_head.weight": (c.vocabulary, c.width)}
    weights = {n: rng.standard_normal(s, np.float32) * np.float32(s[1] ** -0.5) for n, s in names.items()}
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in range(c.layers) for n in ("input", "post_attention")]
    return weights | {n: np.ones(c.width, np.float32) for n in (*norms, "model.norm.weight")}


def side_by_side(weights: list[Any]) -> Any:
    """One weight (inputs, outputs) of some (outputs, inputs), or of quantized ones (inputs, outputs), alike or not."""
    ways = {(w.values, w.group) if isinstance(w, pm.Quantized) else () for w in weights}
    if len(ways) > 1 or () in ways:
        return np.concatenate([pm.dequantize(w).T if isinstance(w, pm.Quantized) else w for w in weights]).T
    first, fields = weights[0], ("codes", "scales", "offsets")
    codes, scales, offsets = (np.concatenate([getattr(w, n) for w in weights], 1) for n in fields)
    return pm.Quantized(codes, scales, offsets, first.bits, first.group, first.values)


def build(config: Config, weights: dict[str, Any], kind: str, *, progress: str = "") -> Llama:
    """A decoder of weights by the names of `transformers`, packed as a kind; the embedding stays float32."""
    layers = []
    for i in counted(range(config.layers), progress):

        def joined(*names: str, at: str = f"model.layers.{i}.") -> Product:
            return Product(side_by_side([weights[f"{at}{n}.weight"] for n in names]), kind)

        at = f"model.layers.{i}."
        layers.append(
            Layer(
                weights[f"{at}input_layernorm.weight"],
                joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                joined("self_attn.o_proj"),
                weights[f"{at}post_attention_layernorm.weight"],
                joined("mlp.gate_proj", "mlp.up_proj"),
                joined("mlp.down_proj"),
            )
        )
    head = Product(side_by_side([weights["lm_head.weight"]]), kind)
    return Llama(config, layers, weights["model.embed_tokens.weight"], weights["model.norm.weight"], head)


def from_module(module: Any, kind: str) -> Llama:
    """A decoder of a `LlamaForCausalLM` of `transformers`."""
    c = module.config
    base = getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"]
    config = Config(
        c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
        c.intermediate_size, base, c.rms_norm_eps,
    )  # fmt: skip
    return build(config, {n: x.detach().float().numpy() for n, x in module.state_dict().items()}, kind)


GGUF = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Names of `transformers` by those of GGUF."""


def from_gguf(path: Any, kind: str) -> Llama:
    """A decoder of a GGUF file of architecture "llama"; matrices of four bits stay what they are in int4."""
    file = pm.open_gguf(path)
    about = {n.removeprefix("llama."): x for n, x in file.metadata.items()}
    heads, key_heads = about["attention.head_count"], about["attention.head_count_kv"]
    vocabulary = file.tensors["token_embd.weight"].shape[1]
    config = Config(
        vocabulary, about["embedding_length"], about["block_count"], heads, key_heads, about["feed_forward_length"],
        about.get("rope.freq_base", 10000.0), about["attention.layer_norm_rms_epsilon"],
    )  # fmt: skip
    weights: dict[str, Any] = {}
    for title, tensor in file.tensors.items():
        *block, name, _ = title.split(".")
        at = f"model.layers.{block[1]}." if block else ""
        keep = kind.startswith("int4") and tensor.kind in ("Q4_0", "Q4_1", "MXFP4") and name != "token_embd"
        w = tensor.quantized() if keep else tensor.dequantized()
        if name in ("attn_q", "attn_k"):
            w = _halves(w, heads if name == "attn_q" else key_heads)
        weights[f"{at}{GGUF[name]}.weight"] = w
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return build(config, weights, kind)


def _halves(w: Any, heads: int) -> Any:
    """Outputs of heads whose pairs to rotate are neighbours in a GGUF file, and here half a head apart."""
    outputs = w.shape[1] if isinstance(w, pm.Quantized) else w.shape[0]
    order = np.arange(outputs).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if not isinstance(w, pm.Quantized):
        return w[order]
    return pm.Quantized(w.codes[:, order], w.scales[:, order], w.offsets[:, order], w.bits, w.group, w.values)


def main() -> None:
    """Print tokens per second of prefill and of decoding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--kind", choices=KINDS, default="")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    config = SIZES[options.size]
    weights = random_weights(config)
    prompt = np.random.default_rng(1).integers(0, config.vocabulary, (options.batch, options.prompt))
    for kind in [options.kind] if options.kind else KINDS:
        model = build(config, weights, kind, progress="packing")
        model.generate(prompt, 4)  # kernels are compiled
        start = time.perf_counter()
        model.generate(prompt, 1)
        first = time.perf_counter() - start
        model.generate(prompt, options.tokens, temperature=options.temperature, progress="tokens")
        each = (time.perf_counter() - start - 2 * first) / max(options.tokens - 1, 1)
        rates = f"prefill {options.batch * options.prompt / first:9.1f}, decoding {options.batch / each:8.1f} tokens/s"
        print(f"{options.size} {kind:12} {rates}")


if __name__ == "__main__":
    main()
