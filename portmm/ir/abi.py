"""C interface between an emitted kernel and the runtime.

Owns the one struct of both sides, and their common facts about memory. The text is
included in every emitted kernel and in the runtime's own source, so that
neither needs a header file and both always agree; `VERSION` is part of the cache
key of every artifact.
"""

VERSION = 5

ARGS = """\
typedef struct {
  void *p;
  long b, m, n, h;                   /* strides in elements along a batch, rows, columns, heads */
} portmm_operand;

typedef struct portmm_args {
  long m, n, k, batch;               /* C[batch][m][n] = A[batch][m][k] . B[batch][k][n] */
  const void *a; long a_m, a_k, a_batch;  /* strides in elements */
  const void *b; long b_k, b_n, b_batch;  /* a packed B lies in panels of columns */
  void *c; long c_m, c_n, c_batch;
  char *work;                        /* scratch, 64-byte aligned, Kernel.workspace() bytes */
  long workers;                      /* at most this many threads run tasks at once */
  void *pool;
  void (*parallel)(void *pool, void (*body)(const long *ctx, long task, long worker),
                   const long *ctx, long tasks, long workers);
  const portmm_operand *operands;    /* of fused expressions */
  const float *numbers;              /* their constants, by call */
} portmm_args;
"""
"""Argument block of a kernel. `parallel` runs body(ctx, t, w) for every t in [0, tasks),
each exactly once, with 0 <= w < workers and no two tasks at a time on the same
w; it returns when all are done. With workers == 1 it is a plain loop."""

HUGE_PAGE = 1 << 21
"""Bytes of a huge page. Linux clears such a page towards the byte that is touched first, upwards at 34 GB/s and
downwards at 13 (Zen 4, Linux 6.18): code that fills new memory touches the ends of its pages first."""
