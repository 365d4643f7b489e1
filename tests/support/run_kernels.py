"""Shared parts of the tests of the run time: plain kernels that follow the ABI, and both run times."""

import functools

import numpy as np
import pytest

from portmm.build.shared_object import build
from portmm.ir.abi import ARGS
from portmm.runtime import cpu as cpu_runtime

_GEMM = """
static void gemm_row_{t}(const long *ctx, long task, long worker) {{
  const portmm_args *p = (const portmm_args *)ctx;
  long q = task / p->m, i = task % p->m;
  if (p->work) {{ /* each worker writes into its own line */
    volatile long *mine = (volatile long *)(p->work + 64 * worker);
    *mine = *mine + 1;
  }}
  for (long j = 0; j < p->n; j++) {{
    {t} sum = 0;
    for (long l = 0; l < p->k; l++)
      sum += ((const {t} *)p->a)[q * p->a_batch + i * p->a_m + l * p->a_k]
           * ((const {t} *)p->b)[q * p->b_batch + l * p->b_k + j * p->b_n];
    (({t} *)p->c)[q * p->c_batch + i * p->c_m + j * p->c_n] = sum;
  }}
}}
void gemm_{t}(const portmm_args *p) {{
  p->parallel(p->pool, gemm_row_{t}, (const long *)p, p->m * p->batch, p->workers);
}}
void nothing_{t}(const portmm_args *p) {{ (void)p; }}
"""

# C is counters: c[0] tasks run, c[1] tasks whose worker was out of range or not
# alone, c[2] most workers seen at once, c[3 + task] how often each task ran.
# m tasks, k rounds of work each; n != 0 nests a parallel call in each task.
_PROBE = """
static long inside[1024], now, nested;
static void inner(const long *ctx, long task, long worker) {
  (void)task;
  __atomic_fetch_add(&((long *)ctx)[0], worker == 0 ? 1 : 1000000, __ATOMIC_SEQ_CST);
}
static void task(const long *ctx, long t, long w) {
  const portmm_args *p = (const portmm_args *)ctx;
  long *c = (long *)p->c;
  int alone = w >= 0 && w < p->workers && __atomic_fetch_add(&inside[w], 1, __ATOMIC_SEQ_CST) == 0;
  if (!alone) __atomic_fetch_add(&c[1], 1, __ATOMIC_SEQ_CST);
  long many = __atomic_add_fetch(&now, 1, __ATOMIC_SEQ_CST), most = __atomic_load_n(&c[2], __ATOMIC_SEQ_CST);
  while (many > most && !__atomic_compare_exchange_n(&c[2], &most, many, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  for (volatile long i = 0; i < p->k; i++) {}
  if (p->n > 1) {
    long sum = 0;
    p->parallel(p->pool, inner, &sum, p->n, p->workers);
    if (sum != p->n) __atomic_fetch_add(&c[1], 1, __ATOMIC_SEQ_CST);
  }
  __atomic_fetch_add(&c[3 + t], 1, __ATOMIC_SEQ_CST);
  __atomic_fetch_add(&c[0], 1, __ATOMIC_SEQ_CST);
  __atomic_fetch_sub(&now, 1, __ATOMIC_SEQ_CST);
  __atomic_fetch_sub(&inside[w], 1, __ATOMIC_SEQ_CST);
}
void probe(const portmm_args *p) { p->parallel(p->pool, task, (const long *)p, p->m, p->workers); }
void aligned(const portmm_args *p) {
  *(long *)p->c = (unsigned long)p->work % 64;
  for (long i = 0; i < p->k; i += 4096) p->work[i] = 1;
}
"""

POOL_DRIVER = """
#include <sys/wait.h>
static _Atomic long sum, overlaps, inside[64];
static void inner(const long *ctx, long task, long worker) {
  (void)ctx, (void)task;
  atomic_fetch_add(&sum, worker == 0);
}
static void outer(const long *ctx, long task, long worker) {
  if (atomic_fetch_add(&inside[worker], 1) && !ctx[1]) atomic_fetch_add(&overlaps, 1);
  ((long *)ctx[0])[task]++;
  pool_parallel(NULL, inner, NULL, 3, 4);
  atomic_fetch_sub(&inside[worker], 1);
}
static void kernel(const portmm_args *p) {
  long ctx[2] = {(long)p->c, p->k > 1};
  for (long i = 0; i < p->workers * 64; i++) p->work[i] = 1;
  p->parallel(p->pool, outer, ctx, p->m, p->workers);
}
static void *caller(void *shared) {
  long counts[40] = {0}, offsets[6] = {0};
  launch r = {kernel, 64 * 8, 4, {8, 8, 8}};
  portmm_args p = {.m = 20, .n = 1, .k = shared ? 2 : 1, .batch = 1, .a = counts, .b = counts, .c = counts};
  for (int i = 0; i < 300; i++) {
    offsets[5] = 20 * (i & 1);
    if (i % 100 == 50) usleep(1000); /* let the workers fall asleep */
    if (run_launch(&r, &p, offsets, 2)) return (void *)1;
  }
  for (int i = 0; i < 40; i++)
    if (counts[i] != (i < 20 ? 450 : 150)) return (void *)1;
  return NULL;
}
int main(void) {
  pthread_t threads[4];
  void *bad = NULL;
  if (host_start()) return 2;
  atomic_store(&pool.limit, 4);
  if (caller(NULL) || overlaps || sum != 300 * 2 * 20 * 3) return 3;
  for (int i = 0; i < 4; i++) pthread_create(threads + i, NULL, caller, threads);
  for (int i = 0; i < 4; i++) {
    pthread_join(threads[i], &bad);
    if (bad) return 4;
  }
#ifdef FORKS
  pid_t child = fork();
  if (!child) _exit(caller(NULL) ? 5 : 0);
  int status = 1;
  if (waitpid(child, &status, 0) != child || status) return 6;
#endif
  puts("done");
  return 0;
}
"""
"""A program, to follow the Python-free source: one caller, four at once, and with FORKS one in a forked process."""


@functools.cache
def library():
    """Path of the shared object with every test kernel."""
    source = ARGS + _GEMM.format(t="float") + _GEMM.format(t="double") + _PROBE
    return str(build(source, flags=(), name="run_tests").path)


@functools.cache
def extension():
    return cpu_runtime.load_extension()


@functools.cache
def twin():
    return cpu_runtime.load_cffi_runtime()


RUNTIMES = {"extension": extension, "twin": twin}
C_TYPE = {"f32": "float", "f64": "double"}
NUMPY = {"f32": np.float32, "f64": np.float64}


def gemm_route(rt, dtype="f32", *, work=0, workers=1):
    return rt.make_route(rt.load(library(), f"gemm_{C_TYPE[dtype]}"), work, workers, dtype)


def random(shape, dtype="f32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMPY[dtype])


def address(x):
    return x.__array_interface__["data"][0]


def strides_of(x):
    return tuple(s // x.itemsize for s in x.strides)


def plan_numbers(a, b, c):
    """Numbers of a plan for 2-D arrays, or 3-D ones with one batch dimension."""
    batch = a.shape[0] if a.ndim == 3 else 1
    each = [(strides_of(x)[-2:], strides_of(x)[0] if x.ndim == 3 else 0) for x in (a, b, c)]
    flat = [n for pair, outer in each for n in (*pair, outer)]
    return (a.shape[-2], b.shape[-1], a.shape[-1], batch, *flat)


def execute(rt, route, operands, outer=None):
    a, b, c = operands
    m, n, k, batch, *s = plan_numbers(a, b, c)
    rt.execute(route, m, n, k, batch, address(a), *s[:3], address(b), *s[3:6], address(c), *s[6:], outer)


def slow(a, b, out):
    """A slow path that can be told from a product."""
    return "slow", a, b, out


@pytest.fixture(params=list(RUNTIMES))
def rt(request):
    """A run time in its initial state; a test module binds it to a name of its own."""
    if request.param == "extension" and cpu_runtime.python_headers() is None:
        pytest.skip("Python.h is not installed")
    module = RUNTIMES[request.param]()
    threads = module.get_num_threads()
    module.set_resolver(lambda *_: None)
    module.set_planner(lambda *_: None)
    module.set_slow(slow)
    yield module
    module.set_override(False)
    module.set_num_threads(threads)
    module.clear_memo()


def use_gemm(rt, **options):
    """Resolve everything to the plain kernel; the list of questions asked."""
    asked = []

    def resolver(dtype, *rest):
        asked.append((dtype, *rest))
        return gemm_route(rt, dtype, **options)

    rt.set_resolver(resolver)
    return asked


def use_plans(rt):
    """Plan everything, one kernel call for each item; the list of shapes asked for."""
    asked = []

    def planner(a, b, out):
        asked.append((a.shape, b.shape, None if out is None else out.shape))
        return plan_any(rt, a, b, out)

    rt.set_planner(planner)
    return asked


def plan_any(rt, a, b, out=None):
    """A plan for whatever `numpy.matmul` accepts, or for an array and a `Packed` 2-D weight."""
    dtype = {v: k for k, v in NUMPY.items()}[a.dtype.type]
    data = b.owner.reshape(b.n, b.k).T if isinstance(b, rt.Packed) else b
    shape = np.matmul(np.zeros(a.shape), np.zeros(data.shape)).shape
    c = np.empty(shape, a.dtype) if out is None else out
    left, right = a[None] if a.ndim == 1 else a, data[:, None] if data.ndim == 1 else data
    into = c[..., None] if data.ndim == 1 else c
    into = into[..., None, :] if a.ndim == 1 else into
    batch = into.shape[:-2]
    whole = [np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (left, right)] + [into]
    outer = np.array([[np.dot(at, strides_of(x)[:-2]) for x in whole] for at in np.ndindex(*batch)], np.int64)
    numbers = plan_numbers(*(x[(0,) * len(batch)] for x in whole))
    panels = b.owner if isinstance(b, rt.Packed) else b
    return rt.make_plan(gemm_route(rt, dtype), form(a), form(panels), form(c), numbers, outer)


def close(got, a, b):
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert got.dtype == a.dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def pack(rt, b, family="plain"):
    """A `Packed` that is b itself, transposed."""
    dtype = {v: k for k, v in NUMPY.items()}[b.dtype.type]
    k, n = b.shape
    return rt.Packed(np.ascontiguousarray(b.T).ravel(), k, n, dtype, family, 1, k, 0)


def form(x):
    return x.shape, x.strides


def plan_for(rt, a, b, c):
    return rt.make_plan(gemm_route(rt), form(a), form(b), form(c), plan_numbers(a, b, c))
