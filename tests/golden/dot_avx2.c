/* portmm_dot_f32_f32_f32_1x2x1_avx2, made by portmm 0.1.0 for AVX2 and FMA */
/* dot avx2: registers 1x2x8, L1 allx2xall, L2 allx2xall, L3 allx2xall; A row in place, B col in place, threads over tiles */
/* made again by: portmm emit --schedule dot:avx2:f32:1x2x8/0x2x0/0x2x0/0x2x0:1-1:a=row,b=col,panels=1,over=tiles,lanes=0,prefetch=0 */

typedef float v8f __attribute__((vector_size(32)));
typedef float v8f_u __attribute__((vector_size(32), aligned(4), may_alias));
typedef double v4d __attribute__((vector_size(32)));
typedef double v4d_u __attribute__((vector_size(32), aligned(8), may_alias));
typedef int v8i __attribute__((vector_size(32)));
typedef int v8i_u __attribute__((vector_size(32), aligned(1), may_alias));
typedef unsigned v8u __attribute__((vector_size(32)));
typedef long long v4l __attribute__((vector_size(32)));
typedef short v16s __attribute__((vector_size(32)));
typedef float v4f __attribute__((vector_size(16)));
typedef unsigned long long v2q __attribute__((vector_size(16)));
typedef unsigned short v8h __attribute__((vector_size(16)));
typedef unsigned short v8h_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef signed char v16c __attribute__((vector_size(16)));
typedef signed char v16c_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef unsigned short u16_u __attribute__((aligned(1), may_alias));
typedef unsigned u32_u __attribute__((aligned(1), may_alias));
typedef unsigned long long u64_u __attribute__((aligned(1), may_alias));

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

#if defined(__clang__)
#define SHUFFLE(x, y, ints, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ints, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif

static inline long min_(long x, long y) { return x < y ? x : y; }

static inline long max_(long x, long y) { return x > y ? x : y; }

static inline long div_(long x, long y) { return y == 1 ? x : x / y; }

static inline long mod_(long x, long y) { return y == 1 ? 0 : x % y; }

typedef int lanes_t __attribute__((vector_size(32)));

/* C[1][2] = A[1][k] . B[2][k] */
static __attribute__((noinline)) void dot_1x2(long k, const float *a, long a_m, const float *b, long b_n, float *c, long c_m) {
  v8f c0_0, c0_1, a0, b0, b1, t;
  v8i m0;
  c0_0 = (v8f){0};
  c0_1 = (v8f){0};
  float kept[16] __attribute__((aligned(64)));
  __asm__("" : "=m"(kept));
  for (long p_run = 0; p_run < k - k % 8; p_run += 2560) {
    #pragma GCC unroll 2
    for (long p = p_run; p < min_(k - k % 8, p_run + 2560); p += 8) {
      a0 = *(const v8f_u *)(a + p);
      __asm__("" : "+x"(a0));
      b0 = *(const v8f_u *)(b + p);
      c0_0 += a0 * b0;
      b1 = *(const v8f_u *)(b + b_n + p);
      c0_1 += a0 * b1;
    }
    if (p_run + 2560 < k - k % 8) {
      if (0 < p_run) {
        t = *(const v8f_u *)(kept);
        c0_0 += t;
        t = *(const v8f_u *)(kept + 8);
        c0_1 += t;
      }
      *(v8f_u *)(kept) = c0_0;
      *(v8f_u *)(kept + 8) = c0_1;
      c0_0 = (v8f){0};
      c0_1 = (v8f){0};
    }
  }
  if (0 < k % 8) {
    const long p = k - k % 8;
    m0 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(k - (k - k % 8));
    __asm__("vmaskmovps %1, %2, %0" : "=x"(a0) : "m"(*(const v8f_u *)(a + p)), "x"(m0));
    __asm__("" : "+x"(a0));
    __asm__("vmaskmovps %1, %2, %0" : "=x"(b0) : "m"(*(const v8f_u *)(b + p)), "x"(m0));
    c0_0 += a0 * b0;
    __asm__("vmaskmovps %1, %2, %0" : "=x"(b1) : "m"(*(const v8f_u *)(b + b_n + p)), "x"(m0));
    c0_1 += a0 * b1;
  }
  if (2560 < k - k % 8) {
    t = *(const v8f_u *)(kept);
    c0_0 += t;
    t = *(const v8f_u *)(kept + 8);
    c0_1 += t;
  }
  float sums[8] __attribute__((aligned(64)));
  t = SHUFFLE(c0_0, c0_1, lanes_t, 0, 2, 8, 10, 4, 6, 12, 14);
  c0_0 = SHUFFLE(c0_0, c0_1, lanes_t, 1, 3, 9, 11, 5, 7, 13, 15);
  c0_0 += t;
  t = SHUFFLE(c0_0, c0_0, lanes_t, 0, 2, 8, 10, 4, 6, 12, 14);
  c0_0 = SHUFFLE(c0_0, c0_0, lanes_t, 1, 3, 9, 11, 5, 7, 13, 15);
  c0_0 += t;
  t = SHUFFLE(c0_0, c0_0, lanes_t, 4, 5, 6, 7, 0, 1, 2, 3);
  c0_0 += t;
  *(v8f_u *)(sums) = c0_0;
  *(c) = *(sums);
  *(c + 1) = *(sums + 1);
}

/* C[1][1] = A[1][k] . B[1][k] */
static __attribute__((noinline)) void dot_1x1(long k, const float *a, long a_m, const float *b, long b_n, float *c, long c_m) {
  v8f c0_0, a0, b0, t;
  v8i m0;
  c0_0 = (v8f){0};
  float kept[8] __attribute__((aligned(64)));
  __asm__("" : "=m"(kept));
  for (long p_run = 0; p_run < k - k % 8; p_run += 2560) {
    #pragma GCC unroll 2
    for (long p = p_run; p < min_(k - k % 8, p_run + 2560); p += 8) {
      a0 = *(const v8f_u *)(a + p);
      b0 = *(const v8f_u *)(b + p);
      c0_0 += a0 * b0;
    }
    if (p_run + 2560 < k - k % 8) {
      if (0 < p_run) {
        t = *(const v8f_u *)(kept);
        c0_0 += t;
      }
      *(v8f_u *)(kept) = c0_0;
      c0_0 = (v8f){0};
    }
  }
  if (0 < k % 8) {
    const long p = k - k % 8;
    m0 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(k - (k - k % 8));
    __asm__("vmaskmovps %1, %2, %0" : "=x"(a0) : "m"(*(const v8f_u *)(a + p)), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "=x"(b0) : "m"(*(const v8f_u *)(b + p)), "x"(m0));
    c0_0 += a0 * b0;
  }
  if (2560 < k - k % 8) {
    t = *(const v8f_u *)(kept);
    c0_0 += t;
  }
  {
    float sum;
    c0_0 += SHUFFLE(c0_0, c0_0, lanes_t, 1, 0, 3, 2, 5, 4, 7, 6);
    c0_0 += SHUFFLE(c0_0, c0_0, lanes_t, 2, 3, 0, 1, 6, 7, 4, 5);
    c0_0 += SHUFFLE(c0_0, c0_0, lanes_t, 4, 5, 6, 7, 0, 1, 2, 3);
    sum = c0_0[0];
    *(c) = (0 ? *(c) : 0) + sum;
  }
}

/* A share of the columns of C, all rows */
static void columns_of_c(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long m = g->m;
  const long n = g->n;
  const long k = g->k;
  const long a_m = g->a_m;
  const long a_batch = g->a_batch;
  const long b_n = g->b_n;
  const long b_batch = g->b_batch;
  const long c_m = g->c_m;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  const float *a = (const float *)g->a;
  const float *b = (const float *)g->b;
  float *c = (float *)g->c;
  const long chunks = max_(1, min_((n + 1) / 2, (workers - 1) * 4));
  const long item = div_(task, chunks);
  const long share = mod_(task, chunks);
  const long first = div_((n + 1) / 2 * share, chunks) * 2;
  const long last = min_(n, div_((n + 1) / 2 * (share + 1), chunks) * 2);
  for (long j = first; j < first + (last - first) / 2 * 2; j += 2) {
    for (long i = 0; i < m; ++i) {
      dot_1x2(k, a + item * a_batch + i * a_m, a_m, b + item * b_batch + j * b_n, b_n, c + item * c_batch + i * c_m + j, c_m);
    }
  }
  if (first < last - 2) {
    if (first + (last - first) / 2 * 2 < last) {
      const long j = last - 2;
      for (long i = 0; i < m; ++i) {
        dot_1x2(k, a + item * a_batch + i * a_m, a_m, b + item * b_batch + j * b_n, b_n, c + item * c_batch + i * c_m + j, c_m);
      }
    }
  } else {
    for (long j = first + (last - first) / 2 * 2; j < last; ++j) {
      for (long i = 0; i < m; ++i) {
        dot_1x1(k, a + item * a_batch + i * a_m, a_m, b + item * b_batch + j * b_n, b_n, c + item * c_batch + i * c_m + j, c_m);
      }
    }
  }
}

/* All products of the batch */
void portmm_dot_f32_f32_f32_1x2x1_avx2(const portmm_args *g) {
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, columns_of_c, task_ctx, max_(1, min_((n + 1) / 2, (workers - 1) * 4)) * batch, workers);
  }
}
