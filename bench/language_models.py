"""Encoders of PyTorch through `torch.compile`: portmm beside PyTorch and Inductor, in turns, and overheads of calls.

    python bench/language_models.py minilm --length 128 --rounds 25
    python bench/language_models.py bert --quantized
    python bench/language_models.py bert --others
    python bench/language_models.py overhead
    python bench/language_models.py quantize

Models are of `transformers`, with random weights. The first call of each model, with whatever the caches on disk hold,
is its time of compilation.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
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


def others(model, ids, mask, threads):
    """int8 models of ONNX Runtime, OpenVINO, which reads the same file, and CTranslate2, where they are installed."""
    folder = Path(mkdtemp())
    feed = {"ids": ids.numpy(), "mask": mask.numpy()}

    def onnx(path):
        import onnxruntime as ort
        from onnxruntime.quantization import QuantType, quantize_dynamic

        class First(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, ids, mask):
                return self.model(input_ids=ids, attention_mask=mask)[0]

        names = {"input_names": ["ids", "mask"], "output_names": ["y"]}
        torch.onnx.export(First().eval(), (ids, mask), folder / "f32.onnx", dynamo=False, opset_version=17, **names)
        quantize_dynamic(folder / "f32.onnx", path, weight_type=QuantType.QInt8)
        own = ort.SessionOptions()
        own.intra_op_num_threads, own.inter_op_num_threads = threads, 1
        session = ort.InferenceSession(path, own, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, feed)[0]

    def openvino(path):
        import openvino as ov

        numbers = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        request = ov.Core().compile_model(path, "CPU", numbers).create_infer_request()
        return lambda: next(iter(request.infer(feed).values()))

    def ctranslate2(_):
        import ctranslate2
        from transformers import BertTokenizer

        model.config.position_embedding_type = "absolute"
        model.save_pretrained(folder / "hf")
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(model.config.vocab_size - 5))]
        (folder / "hf/vocab.txt").write_text("\n".join(words))
        BertTokenizer(str(folder / "hf/vocab.txt")).save_pretrained(folder / "hf")
        converter = ctranslate2.converters.TransformersConverter(str(folder / "hf"))
        converter.convert(str(folder / "ct"), quantization="int8")
        own = {"compute_type": "int8", "intra_threads": threads, "inter_threads": 1}
        encoder = ctranslate2.Encoder(str(folder / "ct"), **own)
        return lambda: np.array(encoder.forward_batch(ids.tolist()).last_hidden_state)

    runs = {}
    for make in (onnx, openvino, ctranslate2):
        try:
            runs[f"{make.__name__} int8"] = make(folder / "int8.onnx")
        except ImportError as error:
            print(f"  {make.__name__} is left out: {error}")
    return {title: lambda run=run, **_: [torch.as_tensor(run())] for title, run in runs.items()}


def race(name, options):
    """Print the median time of each entrant, its error, and the time of its first call."""
    ids = torch.randint(0, 30000, (options.batch, options.length))
    mask = torch.ones_like(ids)
    mask[:, -options.length // 8 :] = options.others  # CTranslate2 takes no padded rows
    model = encoder(name)
    want = model(input_ids=ids, attention_mask=mask)[0]
    models, errors, first = entrants(model, quantized=options.quantized), {}, {}
    models |= others(model, ids, mask, options.threads) if options.others else {}
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


def quantizing(rounds=5, layers=22, hidden=2048, inner=5632):
    """Print the best rate of `quantize_` of the layers of a decoder, and those of copies of its weights.

    One copy is to memory that is as large as a quarter of the weights; the other to memory that stays in caches, as
    results of one layer do until the next one's, and so takes little more than to read the weights.
    """
    sizes = [(hidden, hidden)] * 2 + [(hidden, 256)] * 2 + [(hidden, inner)] * 2 + [(inner, hidden)]
    weights = [torch.empty(n, k).uniform_(-1, 1) for k, n in sizes * layers]
    read = sum(w.nbytes for w in weights)
    far, near = torch.zeros(read // 16), torch.zeros(hidden * inner)

    def copied(to):
        start, at = time.perf_counter(), 0
        for w in weights:
            at = at if at + w.numel() <= len(to) else 0
            to[at : at + w.numel()].copy_(w.view(-1))
            at += w.numel()
        return 2 * read / (time.perf_counter() - start)

    def quantized(kind):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes * layers])
        model.load_state_dict({f"{i}.weight": w for i, w in enumerate(weights)}, assign=True)
        _host_pages(read // 2)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = time.perf_counter()
        pt.quantize_(model, kind)
        seconds = time.perf_counter() - start
        result = sum(x.nbytes for x in model.buffers())
        return seconds, (read + result) / seconds, (_resident("VmHWM") - before) / result

    print(f"{read / 4e9:.2f} G values of float32")
    for kind in ("int8-dynamic", "int4", "bf16"):
        pt.quantize_(nn.Sequential(nn.Linear(hidden, 64)), kind)  # its kernels
        turns = [(copied(far), copied(near), quantized(kind)) for _ in range(rounds)]
        memory, caches, runs = zip(*turns, strict=True)
        seconds, rate, peak = min(runs)
        print(f"  {kind:13} {seconds:.2f} s, {rate / 1e9:.1f} GB/s, {rate / max(memory):.2f} of a copy's "
              f"{max(memory) / 1e9:.1f}, {rate / max(caches):.2f} of one's to caches {max(caches) / 1e9:.1f}; "
              f"peak {peak:.2f} of the result")  # fmt: skip


def _host_pages(size):
    """Let a guest's kernel have so many bytes of free pages that its host has given already.

    New ones of the host take 4 s a GB, whoever touches them first, where the kernel's take 0.05 to 0.4.
    """
    np.zeros(size, np.uint8)[::4096] = 1


def _resident(name):
    """A number of bytes of this process's memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


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
    parser.add_argument("what", choices=[*SIZES, "overhead", "quantize"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--others", action="store_true", help="int8 of ONNX Runtime, OpenVINO and CTranslate2, too")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    pm.set_num_threads(options.threads)
    with torch.no_grad():
        {"overhead": overhead, "quantize": quantizing}.get(options.what, partial(race, options.what, options))()


if __name__ == "__main__":
    main()
