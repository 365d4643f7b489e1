/* portmm_gemm_f32_f32_f32_2x8x1_neon, made by portmm 0.1.0 for NEON (Advanced SIMD) */
/* gemm neon: registers 2x8x1, L1 2x8x320, L2 8x8x320, L3 8x32x320; A packed, B packed, threads over tiles */
/* made again by: portmm emit --schedule gemm:neon:f32:2x8x1/2x8x320/8x8x320/8x32x320:1-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,ahead */

typedef float v4f __attribute__((vector_size(16)));
typedef float v4f_u __attribute__((vector_size(16), aligned(4), may_alias));
typedef double v2d __attribute__((vector_size(16)));
typedef double v2d_u __attribute__((vector_size(16), aligned(8), may_alias));
typedef int v4i __attribute__((vector_size(16)));
typedef int v4i_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef unsigned v4u __attribute__((vector_size(16)));
typedef unsigned short v4h __attribute__((vector_size(8)));
typedef unsigned short v4h_u __attribute__((vector_size(8), aligned(1), may_alias));
typedef float f_u __attribute__((aligned(1), may_alias));
typedef double d_u __attribute__((aligned(1), may_alias));

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

typedef int lanes_t __attribute__((vector_size(16)));

/* to[k][rows] = A[rows][k], row layout */
static __attribute__((noinline)) void pack_a(long k, long rows, const float *a, long a_m, long a_k, float *to) {
  v4f t0_0, t0_1, t0_2, t0_3, t1_0, t1_1, t1_2, t1_3, t2_0, t2_1, t2_2, t2_3;
  if (3 < k) {
    if (0 < rows) {
      const float *a0 = a + min_(0, rows - 1) * a_m;
      const float *a1 = a + min_(1, rows - 1) * a_m;
      const float *a2 = a + min_(2, rows - 1) * a_m;
      const float *a3 = a + min_(3, rows - 1) * a_m;
      for (long q = 0; q < k; q += 4) {
        t0_0 = *(const v4f_u *)(a0 + min_(q, k - 4));
        t0_1 = *(const v4f_u *)(a1 + min_(q, k - 4));
        t0_2 = *(const v4f_u *)(a2 + min_(q, k - 4));
        t0_3 = *(const v4f_u *)(a3 + min_(q, k - 4));
        t1_0 = SHUFFLE(t0_0, t0_2, lanes_t, 0, 4, 1, 5);
        t1_1 = SHUFFLE(t0_0, t0_2, lanes_t, 2, 6, 3, 7);
        t1_2 = SHUFFLE(t0_1, t0_3, lanes_t, 0, 4, 1, 5);
        t1_3 = SHUFFLE(t0_1, t0_3, lanes_t, 2, 6, 3, 7);
        t2_0 = SHUFFLE(t1_0, t1_2, lanes_t, 0, 4, 1, 5);
        t2_1 = SHUFFLE(t1_0, t1_2, lanes_t, 2, 6, 3, 7);
        t2_2 = SHUFFLE(t1_1, t1_3, lanes_t, 0, 4, 1, 5);
        t2_3 = SHUFFLE(t1_1, t1_3, lanes_t, 2, 6, 3, 7);
        *(v4f_u *)(to + min_(q, k - 4) * rows) = t2_0;
        *(v4f_u *)(to + (min_(q, k - 4) + 1) * rows) = t2_1;
        *(v4f_u *)(to + (min_(q, k - 4) + 2) * rows) = t2_2;
        *(v4f_u *)(to + (min_(q, k - 4) + 3) * rows) = t2_3;
      }
    }
  } else {
    for (long p = 0; p < k; ++p) {
      for (long j = 0; j < rows; ++j) {
        *(to + p * rows + j) = *(a + min_(j, rows - 1) * a_m + p * a_k);
      }
    }
  }
}

/* to[k][8] = B[k][columns], row layout, padded */
static __attribute__((noinline)) void pack_b(long k, long columns, const float *b, long b_k, long b_n, float *to) {
  v4f v0, v1;
  if (columns < 8) {
    for (long p = 0; p < k; ++p) {
      for (long j = 0; j < 8; ++j) {
        *(to + p * 8 + j) = *(b + min_(j, columns - 1) * b_n + p * b_k);
      }
    }
  } else {
    #pragma GCC unroll 4
    for (long p = 0; p < k; ++p) {
      v0 = *(const v4f_u *)(b + p * b_k);
      *(v4f_u *)(to + p * 8) = v0;
      v1 = *(const v4f_u *)(b + p * b_k + 4);
      *(v4f_u *)(to + p * 8 + 4) = v1;
    }
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][8] */
static __attribute__((noinline)) void ukr_1x8(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  v4f c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  __builtin_prefetch(c_next, 1, 3);
  float tile[8] __attribute__((aligned(64)));
  c0_0 = (v4f){0};
  c0_1 = (v4f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v4f_u *)(b + p * 8);
    b1 = *(const v4f_u *)(b + p * 8 + 4);
    a0 = *(a + p);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
  }
  if (columns < 8) {
    if (accumulate) {
      for (long row = 0; row < 1; ++row) {
        for (long col = 0; col < columns; ++col) {
          *(tile + row * 8 + col) = *(c + row * c_m + col);
        }
      }
      before0 = *(const v4f_u *)(tile);
      c0_0 += before0;
      before1 = *(const v4f_u *)(tile + 4);
      c0_1 += before1;
    }
    *(v4f_u *)(tile) = c0_0;
    *(v4f_u *)(tile + 4) = c0_1;
    for (long row = 0; row < 1; ++row) {
      for (long col = 0; col < columns; ++col) {
        *(c + row * c_m + col) = *(tile + row * 8 + col);
      }
    }
  } else {
    if (accumulate) {
      before0 = *(const v4f_u *)(c);
      c0_0 += before0;
      before1 = *(const v4f_u *)(c + 4);
      c0_1 += before1;
    }
    *(v4f_u *)(c) = c0_0;
    *(v4f_u *)(c + 4) = c0_1;
  }
}

/* C[2][columns] (+)= A[2][k] . B[k][8] */
static __attribute__((noinline)) void ukr_2x8(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  v4f c0_0, c0_1, c1_0, c1_1, b0, b1, before0, before1, before2, before3;
  float a0, a1;
  __builtin_prefetch(c_next, 1, 3);
  __builtin_prefetch(c_next + c_m, 1, 3);
  float tile[16] __attribute__((aligned(64)));
  c0_0 = (v4f){0};
  c0_1 = (v4f){0};
  c1_0 = (v4f){0};
  c1_1 = (v4f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v4f_u *)(b + p * 8);
    b1 = *(const v4f_u *)(b + p * 8 + 4);
    a0 = *(a + p * 2);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
    a1 = *(a + p * 2 + 1);
    c1_0 += a1 * b0;
    c1_1 += a1 * b1;
  }
  if (columns < 8) {
    if (accumulate) {
      for (long row = 0; row < 2; ++row) {
        for (long col = 0; col < columns; ++col) {
          *(tile + row * 8 + col) = *(c + row * c_m + col);
        }
      }
      before0 = *(const v4f_u *)(tile);
      c0_0 += before0;
      before1 = *(const v4f_u *)(tile + 4);
      c0_1 += before1;
      before2 = *(const v4f_u *)(tile + 8);
      c1_0 += before2;
      before3 = *(const v4f_u *)(tile + 12);
      c1_1 += before3;
    }
    *(v4f_u *)(tile) = c0_0;
    *(v4f_u *)(tile + 4) = c0_1;
    *(v4f_u *)(tile + 8) = c1_0;
    *(v4f_u *)(tile + 12) = c1_1;
    for (long row = 0; row < 2; ++row) {
      for (long col = 0; col < columns; ++col) {
        *(c + row * c_m + col) = *(tile + row * 8 + col);
      }
    }
  } else {
    if (accumulate) {
      before0 = *(const v4f_u *)(c);
      c0_0 += before0;
      before1 = *(const v4f_u *)(c + 4);
      c0_1 += before1;
      before2 = *(const v4f_u *)(c + c_m);
      c1_0 += before2;
      before3 = *(const v4f_u *)(c + c_m + 4);
      c1_1 += before3;
    }
    *(v4f_u *)(c) = c0_0;
    *(v4f_u *)(c + 4) = c0_1;
    *(v4f_u *)(c + c_m) = c1_0;
    *(v4f_u *)(c + c_m + 4) = c1_1;
  }
}

/* A block of rows by a share of the columns of C */
static void block(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  const long item = ctx[1];
  (void)g; (void)task; (void)worker;
  const long m = g->m;
  const long n = g->n;
  const long k = g->k;
  const long a_m = g->a_m;
  const long a_k = g->a_k;
  const long a_batch = g->a_batch;
  const long b_k = g->b_k;
  const long b_n = g->b_n;
  const long b_batch = g->b_batch;
  const long c_m = g->c_m;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  const float *a = (const float *)g->a;
  const float *b = (const float *)g->b;
  float *c = (float *)g->c;
  float *work = (float *)g->work;
  const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8) < 2));
  const long blocks = min_(m, div_((m + 7) / 8 + even - 1, even) * even);
  const long shares = max_((n + 31) / 32, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8)));
  const long row = div_(m * div_(task, shares), blocks);
  const long rows = div_(m * (div_(task, shares) + 1), blocks) - row;
  const long first = div_((n + 7) / 8 * mod_(task, shares), shares);
  const long last = min_((n + 7) / 8, div_((n + 7) / 8 * (mod_(task, shares) + 1), shares));
  const long slices = (rows + 1) / 2;
  const long height = div_(rows, slices);
  const long taller = mod_(rows, slices);
  const long kb = (div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32;
  for (long pc = 0; pc < k; pc += kb) {
    const long kd = min_(kb, k - pc);
    float *ap = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 8 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 4 + 63) / 64 * 64) + ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 8 + 63) / 64 * 64;
    for (long i = 0; i < slices; ++i) {
      const long h = height + (i < taller);
      const long r = i * height + min_(i, taller);
      pack_a(kd, h, a + item * a_batch + (row + r) * a_m + pc * a_k, a_m, a_k, ap + r * kd);
    }
    for (long jg = first; jg < last; ++jg) {
      float *panels = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 8 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 4 + 63) / 64 * 64);
      for (long q = jg; q < min_(last, jg + 1); ++q) {
        pack_b(kd, min_(n - q * 8, 8), b + item * b_batch + pc * b_k + q * 8, b_k, b_n, panels + (q - jg) * (kd * 8));
      }
      for (long j = jg; j < min_(last, jg + 1); ++j) {
        const long column = j * 8;
        const long columns = min_(n - column, 8);
        const float *bp = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 8 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 4 + 63) / 64 * 64) + (j - jg) * (kd * 8);
        for (long i = 0; i < slices; ++i) {
          const long h = height + (i < taller);
          const long r = i * height + min_(i, taller);
          switch (h) {
            case 1:
              ukr_1x8(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < pc, c + item * c_batch + (row + (i + 1 < slices) * (r + 1)) * c_m + column + (1 - (i + 1 < slices)) * 8);
              break;
            case 2:
              ukr_2x8(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < pc, c + item * c_batch + (row + (i + 1 < slices) * (r + 2)) * c_m + column + (1 - (i + 1 < slices)) * 8);
              break;
            default:
              __builtin_trap();
          }
        }
      }
    }
  }
}

/* All products of the batch */
void portmm_gemm_f32_f32_f32_2x8x1_neon(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8) < 2));
    const long blocks = min_(m, div_((m + 7) / 8 + even - 1, even) * even);
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, block, task_ctx, blocks * max_((n + 31) / 32, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8))), workers);
    }
  }
}
