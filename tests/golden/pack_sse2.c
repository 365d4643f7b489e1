/* portmm_pack_f32_f32_f32_1x8x1_sse2, made by portmm 0.1.0 for SSE2 */
/* packs a col-major B into panels of 8 columns */
/* made again by: portmm.pack on SSE2 */

typedef float v4f __attribute__((vector_size(16)));
typedef float v4f_u __attribute__((vector_size(16), aligned(4), may_alias));
typedef double v2d __attribute__((vector_size(16)));
typedef double v2d_u __attribute__((vector_size(16), aligned(8), may_alias));
typedef int v4i __attribute__((vector_size(16)));
typedef int v4i_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef unsigned v4u __attribute__((vector_size(16)));
typedef short v8s __attribute__((vector_size(16)));
typedef unsigned long long v2q __attribute__((vector_size(16)));
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

static inline long div_(long x, long y) { return y == 1 ? x : x / y; }

static inline long mod_(long x, long y) { return y == 1 ? 0 : x % y; }

typedef int lanes_t __attribute__((vector_size(16)));

/* The end of a page of C */
static void touch_page(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long c_m = g->c_m;
  float *c = (float *)g->c;
  *(c + c_m + task * 524288) = 0;
}

/* to[k][8] = B[k][columns], col layout, padded */
static __attribute__((noinline)) void pack_b(long k, long columns, const float *b, long b_k, long b_n, float *to) {
  v4f t0_0, t0_1, t0_2, t0_3, t1_0, t1_1, t1_2, t1_3, t2_0, t2_1, t2_2, t2_3;
  if (3 < k) {
    const float *b0 = b + min_(0, columns - 1) * b_n;
    const float *b1 = b + min_(1, columns - 1) * b_n;
    const float *b2 = b + min_(2, columns - 1) * b_n;
    const float *b3 = b + min_(3, columns - 1) * b_n;
    for (long q = 0; q < k; q += 4) {
      t0_0 = *(const v4f_u *)(b0 + min_(q, k - 4));
      t0_1 = *(const v4f_u *)(b1 + min_(q, k - 4));
      t0_2 = *(const v4f_u *)(b2 + min_(q, k - 4));
      t0_3 = *(const v4f_u *)(b3 + min_(q, k - 4));
      t1_0 = SHUFFLE(t0_0, t0_2, lanes_t, 0, 4, 1, 5);
      t1_1 = SHUFFLE(t0_0, t0_2, lanes_t, 2, 6, 3, 7);
      t1_2 = SHUFFLE(t0_1, t0_3, lanes_t, 0, 4, 1, 5);
      t1_3 = SHUFFLE(t0_1, t0_3, lanes_t, 2, 6, 3, 7);
      t2_0 = SHUFFLE(t1_0, t1_2, lanes_t, 0, 4, 1, 5);
      t2_1 = SHUFFLE(t1_0, t1_2, lanes_t, 2, 6, 3, 7);
      t2_2 = SHUFFLE(t1_1, t1_3, lanes_t, 0, 4, 1, 5);
      t2_3 = SHUFFLE(t1_1, t1_3, lanes_t, 2, 6, 3, 7);
      *(v4f_u *)(to + min_(q, k - 4) * 8) = t2_0;
      *(v4f_u *)(to + (min_(q, k - 4) + 1) * 8) = t2_1;
      *(v4f_u *)(to + (min_(q, k - 4) + 2) * 8) = t2_2;
      *(v4f_u *)(to + (min_(q, k - 4) + 3) * 8) = t2_3;
    }
    const float *b4 = b + min_(4, columns - 1) * b_n;
    const float *b5 = b + min_(5, columns - 1) * b_n;
    const float *b6 = b + min_(6, columns - 1) * b_n;
    const float *b7 = b + min_(7, columns - 1) * b_n;
    for (long q = 0; q < k; q += 4) {
      t0_0 = *(const v4f_u *)(b4 + min_(q, k - 4));
      t0_1 = *(const v4f_u *)(b5 + min_(q, k - 4));
      t0_2 = *(const v4f_u *)(b6 + min_(q, k - 4));
      t0_3 = *(const v4f_u *)(b7 + min_(q, k - 4));
      t1_0 = SHUFFLE(t0_0, t0_2, lanes_t, 0, 4, 1, 5);
      t1_1 = SHUFFLE(t0_0, t0_2, lanes_t, 2, 6, 3, 7);
      t1_2 = SHUFFLE(t0_1, t0_3, lanes_t, 0, 4, 1, 5);
      t1_3 = SHUFFLE(t0_1, t0_3, lanes_t, 2, 6, 3, 7);
      t2_0 = SHUFFLE(t1_0, t1_2, lanes_t, 0, 4, 1, 5);
      t2_1 = SHUFFLE(t1_0, t1_2, lanes_t, 2, 6, 3, 7);
      t2_2 = SHUFFLE(t1_1, t1_3, lanes_t, 0, 4, 1, 5);
      t2_3 = SHUFFLE(t1_1, t1_3, lanes_t, 2, 6, 3, 7);
      *(v4f_u *)(to + min_(q, k - 4) * 8 + 4) = t2_0;
      *(v4f_u *)(to + (min_(q, k - 4) + 1) * 8 + 4) = t2_1;
      *(v4f_u *)(to + (min_(q, k - 4) + 2) * 8 + 4) = t2_2;
      *(v4f_u *)(to + (min_(q, k - 4) + 3) * 8 + 4) = t2_3;
    }
  } else {
    for (long p = 0; p < k; ++p) {
      for (long j = 0; j < 8; ++j) {
        *(to + p * 8 + j) = *(b + min_(j, columns - 1) * b_n + p * b_k);
      }
    }
  }
}

/* Some rows of a few panels of one item */
static void share_of_b(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long n = g->n;
  const long k = g->k;
  const long b_k = g->b_k;
  const long b_n = g->b_n;
  const long b_batch = g->b_batch;
  const long c_batch = g->c_batch;
  const float *b = (const float *)g->b;
  float *c = (float *)g->c;
  const long item = div_(task, (n + 7) / 8);
  const long row = 0;
  const long rows = k;
  const long panel = mod_(task, (n + 7) / 8);
  for (long q = panel; q < min_(panel + 1, (n + 7) / 8); ++q) {
    pack_b(rows, min_(n - q * 8, 8), b + item * b_batch + row * b_k + q * 8 * b_n, b_k, b_n, c + item * c_batch + q * (k * 8) + row * 8);
  }
}

/* Every panel */
void portmm_pack_f32_f32_f32_1x8x1_sse2(const portmm_args *g) {
  const long n = g->n;
  const long batch = g->batch;
  const long c_n = g->c_n;
  const long workers = g->workers;
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, touch_page, task_ctx, c_n, workers);
  }
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, share_of_b, task_ctx, (n + 7) / 8 * batch, workers);
  }
}
