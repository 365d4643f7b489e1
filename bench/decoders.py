"""Tokens per second of a decoder from one GGUF file: portmm (examples/llama.py) beside llama.cpp.

    taskset -c 1 python bench/decoders.py --size 1b --file 1b.gguf

Needs the packages `gguf` and `llama-cpp-python`, built for the machine. The file has seeded random weights of type Q4_0
and is written first if it is not there. Each library is a process of its own, and they run in turns. llama.cpp rounds
activations to int8 in blocks of 32, `int4-dynamic` by row; `int4` and `bfloat16` do not.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
LIBRARIES = ("llama.cpp", "int4-dynamic", "int4")
TASKS = {"decode": (1, 16, 32), "batch 8": (8, 16, 16), "prefill 512": (1, 512, 0)}
"""Prompts, their tokens, and tokens that are decoded in a step each."""


def write(path, size):
    """Write a file of Q4_0 weights, by the names and the order of outputs of llama.cpp."""
    import gguf
    import llama

    config = llama.SIZES[size]
    names = {theirs: ours for ours, theirs in llama.GGUF.items()}
    file = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    file.add_block_count(config.layers)
    file.add_context_length(4096)
    file.add_embedding_length(config.width)
    file.add_feed_forward_length(config.inner)
    file.add_head_count(config.heads)
    file.add_head_count_kv(config.key_heads)
    file.add_layer_norm_rms_eps(config.epsilon)
    file.add_rope_freq_base(config.base)
    file.add_rope_dimension_count(config.head)
    file.add_vocab_size(config.vocabulary)
    file.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType.Q4_0
    for name, weight in llama.random_weights(config).items():
        w = weight
        base = name.removesuffix(".weight")
        layer = f"blk.{base.split('.')[2]}." if base.startswith("model.layers.") else ""
        short = base.split(".", 3)[3] if layer else base
        if short in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.heads if "q_proj" in short else config.key_heads
            w = np.ascontiguousarray(w.reshape(heads, 2, -1, config.width).swapaxes(1, 2).reshape(w.shape))
        title = f"{layer}{names[short]}.weight"
        if w.ndim == 1:
            file.add_tensor(title, w)
        else:
            file.add_tensor(title, gguf.quants.quantize(w, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class Portmm:
    """The example's decoder."""

    def __init__(self, path, kind, threads):
        import llama

        import portmm as pm

        pm.set_num_threads(threads)
        self.llama, self.model = llama, llama.from_gguf(path, kind)

    def start(self, batch, most):
        self.cache = self.llama.Cache(self.model.config, batch, most, self.model.kind)

    def step(self, tokens):
        return self.model.logits(tokens, self.cache)


class LlamaCpp:
    """llama.cpp through its C interface."""

    def __init__(self, path, kind, threads):
        del kind
        import llama_cpp as lib

        self.lib, self.threads = lib, threads
        lib.llama_backend_init()
        self.log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.log, ctypes.c_void_p())
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.contexts = {}

    def start(self, batch, _most):
        lib = self.lib
        if batch not in self.contexts:
            options = lib.llama_context_default_params()
            options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 1024 * batch, 512, 512, batch
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts[batch] = lib.llama_init_from_model(self.model, options)
        self.context, self.filled = self.contexts[batch], 0
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def step(self, tokens):
        lib, (batch, count) = self.lib, tokens.shape
        call = lib.llama_batch_init(batch * count, 0, 1)
        call.n_tokens = batch * count
        for at, (b, i) in enumerate(np.ndindex(batch, count)):
            call.token[at], call.pos[at], call.n_seq_id[at] = int(tokens[b, i]), self.filled + i, 1
            call.seq_id[at][0], call.logits[at] = b, i == count - 1
        if lib.llama_decode(self.context, call):
            raise RuntimeError("llama_decode failed")
        rows = [lib.llama_get_logits_ith(self.context, (b + 1) * count - 1) for b in range(batch)]
        logits = np.stack([np.ctypeslib.as_array(row, (self.words,)) for row in rows])
        self.filled += count
        lib.llama_batch_free(call)
        return logits


def work(options):
    """Answer requests of the parent, a task in a line, by seconds of the prompt and of a token, and tokens."""
    maker = LlamaCpp if options.worker == "llama.cpp" else Portmm
    model = maker(options.file, options.worker, options.threads)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, prompt, count = TASKS[line.strip()]
        rng = np.random.default_rng(1)
        tokens = rng.integers(0, 1000, (batch, prompt))
        model.start(batch, prompt + count)
        start = time.perf_counter()
        logits = model.step(tokens)
        first, chosen, times = time.perf_counter() - start, [], []
        for _ in range(count):
            start = time.perf_counter()
            chosen.append(logits.argmax(-1))
            logits = model.step(chosen[-1][:, None])
            times.append(time.perf_counter() - start)
        rate = batch / statistics.median(times) if times else batch * prompt / first
        print(rate, *(int(x[0]) for x in chosen[:8]), flush=True)


def race(options):
    """Rates by task and library, from processes in turns, and the first tokens of each."""
    command = [sys.executable, __file__, "--file", str(options.file), "--threads", str(options.threads), "--worker"]
    workers = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in options.libraries
    }
    for worker in workers.values():
        assert worker.stdout.readline().strip() == "ready"
    rates, tokens = {}, {}
    for i, task, (name, worker) in itertools.product(range(options.rounds + 2), options.tasks, workers.items()):
        worker.stdin.write(f"{task}\n")
        worker.stdin.flush()
        rate, *tokens[task, name] = worker.stdout.readline().split()
        if i > 1:  # in the first two rounds kernels are compiled, and race
            rates.setdefault((task, name), []).append(float(rate))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return rates, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if not options.file.exists():
        write(options.file, options.size)
    rates, tokens = race(options)
    for task in options.tasks:
        base = statistics.median(rates[task, options.libraries[0]])
        for name in options.libraries:
            middle = statistics.median(rates[task, name])
            ratio = f"{middle / base:5.2f} of {options.libraries[0]}"
            print(f"{task:12} {name:14} {middle:9.2f} tokens/s  {ratio}  tokens {' '.join(tokens[task, name])}")


if __name__ == "__main__":
    main()
