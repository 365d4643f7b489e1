"""Encoders of PyTorch through `torch.compile`: portmm beside PyTorch and Inductor, in turns, and overheads of calls.

    python bench/language_models.py minilm --length 128 --rounds 25
    python bench/language_models.py bert --quantized
    python bench/language_models.py overhead

Models are of `transformers`, with random weights. The first call of each model, with whatever the caches on disk hold,
is its time of compilation.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from functools import partial

import torch
from torch import nn

import portmm as pm
import portmm.torch as pt
from portmm.torch import backend

SIZES = {"minilm": (384, 6, 12, 1536), "bert": (768, 12, 12, 3072)}
"""Hidden size, layers, heads, and size of the inner layer."""


def encoder(name):
    """A model of BERT's architecture."""
    from transformers import BertConfig, BertModel

    hidden, layers, heads, inner = SIZES[name]
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )
    return BertModel(config).eval()


def entrants(model, *, quantized):
    """The model as PyTorch runs it, as Inductor and portmm compile it, and its quantized copies."""
    runs = {"PyTorch": model, "Inductor": torch.compile(copy.deepcopy(model), backend="inductor")}
    runs["portmm"] = torch.compile(model, backend=pt.compile_graph)
    for kind in ("int8-dynamic", "bf16", "int4-dynamic") if quantized else ():
        copied = pt.quantize_(copy.deepcopy(model), kind)
        runs[f"portmm {kind}"] = torch.compile(copied, backend=pt.compile_graph)
    return runs


def race(name, options):
    """Print the median time of each entrant, its error, and the time of its first call."""
    ids = torch.randint(0, 30000, (options.batch, options.length))
    mask = torch.ones_like(ids)
    mask[:, -options.length // 8 :] = 0
    model = encoder(name)
    want = model(input_ids=ids, attention_mask=mask)[0]
    models, errors, first = entrants(model, quantized=options.quantized), {}, {}
    for title, run in models.items():
        start = time.perf_counter()
        got = run(input_ids=ids, attention_mask=mask)[0]
        first[title] = time.perf_counter() - start
        errors[title] = float((got - want).norm() / want.norm())
    times = {title: [] for title in models}
    for _ in range(options.rounds):
        for title, run in models.items():
            start = time.perf_counter()
            run(input_ids=ids, attention_mask=mask)
            times[title].append(time.perf_counter() - start)
    print(f"{name}, batch {options.batch}, length {options.length}, {torch.get_num_threads()} threads")
    base = statistics.median(times["Inductor"])
    for title, x in times.items():
        middle = statistics.median(x)
        print(
            f"  {title:20} {middle * 1e3:9.3f} ms  {base / middle:5.2f} of Inductor  error {errors[title]:.1e}  "
            f"first call {first[title]:.2f} s"
        )


def overhead():
    """Print the time of a call of a compiled graph of tiny layers, without Dynamo's."""

    def seconds(function, calls=3000):
        best = 1.0
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best = min(best, (time.perf_counter() - start) / calls)
        return best * 1e6

    x = torch.randn(3, 4)
    for depth in (1, 10, 40):
        run = torch.compile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)]), backend=pt.compile_graph)
        backend._graphs.clear()  # noqa: SLF001
        run(x)
        (graph,) = backend._graphs.values()  # noqa: SLF001
        args = [None] * (2 * depth + 1)
        for i, source in zip(graph.fixed, graph.sources, strict=True):
            args[i] = source
        args[graph.varying[0]] = x
        inner, outer = seconds(partial(graph_call, graph, args)), seconds(partial(run, x))
        print(f"  {depth:3} layers: {inner:.2f} us a graph, {outer:.2f} us a call")


def graph_call(graph, args):
    """A call of a compiled graph, which empties the list of its inputs."""
    return graph([*args])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*SIZES, "overhead"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantized", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    pm.set_num_threads(options.threads)
    with torch.no_grad():
        overhead() if options.what == "overhead" else race(options.what, options)


if __name__ == "__main__":
    main()
