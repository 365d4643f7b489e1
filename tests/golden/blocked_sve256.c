/* portmm_gemm_f32_f32_f32_2x16x1_sve256, made by portmm 0.1.0 for SVE, 256-bit vectors */
/* gemm sve256: registers 2x16x1, L1 2x16x320, L2 8x16x320, L3 8x64x320; A packed, B packed, threads over tiles */
/* made again by: portmm emit --schedule gemm:sve256:f32:2x16x1/2x16x320/8x16x320/8x64x320:1-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,ahead */

#include <arm_sve.h>

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

/* to[k][rows] = A[rows][k], row layout */
static __attribute__((noinline)) void pack_a(long k, long rows, const float *a, long a_m, long a_k, float *to) {
  for (long p = 0; p < k; ++p) {
    for (long j = 0; j < rows; ++j) {
      *(to + p * rows + j) = *(a + min_(j, rows - 1) * a_m + p * a_k);
    }
  }
}

/* to[k][16] = B[k][columns], row layout, padded */
static __attribute__((noinline)) void pack_b(long k, long columns, const float *b, long b_k, long b_n, float *to) {
  svbool_t m0, m1;
  svfloat32_t v0, v1;
  if (columns < 16) {
    m0 = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(columns, 8))));
    m1 = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(columns - 8, 8))));
    for (long p = 0; p < k; ++p) {
      v0 = svld1_f32(m0, b + p * b_k);
      svst1_f32(svptrue_b32(), to + p * 16, v0);
      v1 = svld1_f32(m1, b + p * b_k + 8);
      svst1_f32(svptrue_b32(), to + p * 16 + 8, v1);
    }
  } else {
    #pragma GCC unroll 4
    for (long p = 0; p < k; ++p) {
      v0 = svld1_f32(svptrue_b32(), b + p * b_k);
      svst1_f32(svptrue_b32(), to + p * 16, v0);
      v1 = svld1_f32(svptrue_b32(), b + p * b_k + 8);
      svst1_f32(svptrue_b32(), to + p * 16 + 8, v1);
    }
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][16] */
static __attribute__((noinline)) void ukr_1x16(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  svbool_t m0, m1;
  svfloat32_t c0_0, c0_1, b0, b1, a0, before0, before1;
  __builtin_prefetch(c_next, 1, 3);
  m0 = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(columns, 8))));
  m1 = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(columns - 8, 8))));
  c0_0 = svdup_n_f32(0);
  c0_1 = svdup_n_f32(0);
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = svld1_f32(svptrue_b32(), b + p * 16);
    b1 = svld1_f32(svptrue_b32(), b + p * 16 + 8);
    a0 = svdup_n_f32(*(a + p));
    c0_0 = svmla_f32_x(svptrue_b32(), c0_0, a0, b0);
    c0_1 = svmla_f32_x(svptrue_b32(), c0_1, a0, b1);
  }
  if (columns < 16) {
    if (accumulate) {
      before0 = svld1_f32(m0, c);
      c0_0 = svadd_f32_x(svptrue_b32(), c0_0, before0);
      before1 = svld1_f32(m1, c + 8);
      c0_1 = svadd_f32_x(svptrue_b32(), c0_1, before1);
    }
    svst1_f32(m0, c, c0_0);
    svst1_f32(m1, c + 8, c0_1);
  } else {
    if (accumulate) {
      before0 = svld1_f32(svptrue_b32(), c);
      c0_0 = svadd_f32_x(svptrue_b32(), c0_0, before0);
      before1 = svld1_f32(svptrue_b32(), c + 8);
      c0_1 = svadd_f32_x(svptrue_b32(), c0_1, before1);
    }
    svst1_f32(svptrue_b32(), c, c0_0);
    svst1_f32(svptrue_b32(), c + 8, c0_1);
  }
}

/* C[2][columns] (+)= A[2][k] . B[k][16] */
static __attribute__((noinline)) void ukr_2x16(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  svbool_t m0, m1;
  svfloat32_t c0_0, c0_1, c1_0, c1_1, b0, b1, a0, a1, before0, before1, before2, before3;
  __builtin_prefetch(c_next, 1, 3);
  __builtin_prefetch(c_next + c_m, 1, 3);
  m0 = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(columns, 8))));
  m1 = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(columns - 8, 8))));
  c0_0 = svdup_n_f32(0);
  c0_1 = svdup_n_f32(0);
  c1_0 = svdup_n_f32(0);
  c1_1 = svdup_n_f32(0);
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = svld1_f32(svptrue_b32(), b + p * 16);
    b1 = svld1_f32(svptrue_b32(), b + p * 16 + 8);
    a0 = svdup_n_f32(*(a + p * 2));
    c0_0 = svmla_f32_x(svptrue_b32(), c0_0, a0, b0);
    c0_1 = svmla_f32_x(svptrue_b32(), c0_1, a0, b1);
    a1 = svdup_n_f32(*(a + p * 2 + 1));
    c1_0 = svmla_f32_x(svptrue_b32(), c1_0, a1, b0);
    c1_1 = svmla_f32_x(svptrue_b32(), c1_1, a1, b1);
  }
  if (columns < 16) {
    if (accumulate) {
      before0 = svld1_f32(m0, c);
      c0_0 = svadd_f32_x(svptrue_b32(), c0_0, before0);
      before1 = svld1_f32(m1, c + 8);
      c0_1 = svadd_f32_x(svptrue_b32(), c0_1, before1);
      before2 = svld1_f32(m0, c + c_m);
      c1_0 = svadd_f32_x(svptrue_b32(), c1_0, before2);
      before3 = svld1_f32(m1, c + c_m + 8);
      c1_1 = svadd_f32_x(svptrue_b32(), c1_1, before3);
    }
    svst1_f32(m0, c, c0_0);
    svst1_f32(m1, c + 8, c0_1);
    svst1_f32(m0, c + c_m, c1_0);
    svst1_f32(m1, c + c_m + 8, c1_1);
  } else {
    if (accumulate) {
      before0 = svld1_f32(svptrue_b32(), c);
      c0_0 = svadd_f32_x(svptrue_b32(), c0_0, before0);
      before1 = svld1_f32(svptrue_b32(), c + 8);
      c0_1 = svadd_f32_x(svptrue_b32(), c0_1, before1);
      before2 = svld1_f32(svptrue_b32(), c + c_m);
      c1_0 = svadd_f32_x(svptrue_b32(), c1_0, before2);
      before3 = svld1_f32(svptrue_b32(), c + c_m + 8);
      c1_1 = svadd_f32_x(svptrue_b32(), c1_1, before3);
    }
    svst1_f32(svptrue_b32(), c, c0_0);
    svst1_f32(svptrue_b32(), c + 8, c0_1);
    svst1_f32(svptrue_b32(), c + c_m, c1_0);
    svst1_f32(svptrue_b32(), c + c_m + 8, c1_1);
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
  const long shares = max_((n + 63) / 64, min_((n + 15) / 16, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8)));
  const long row = div_(m * div_(task, shares), blocks);
  const long rows = div_(m * (div_(task, shares) + 1), blocks) - row;
  const long first = div_((n + 15) / 16 * mod_(task, shares), shares);
  const long last = min_((n + 15) / 16, div_((n + 15) / 16 * (mod_(task, shares) + 1), shares));
  const long slices = (rows + 1) / 2;
  const long height = div_(rows, slices);
  const long taller = mod_(rows, slices);
  const long kb = (div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32;
  for (long pc = 0; pc < k; pc += kb) {
    const long kd = min_(kb, k - pc);
    float *ap = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 16 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 8 + 63) / 64 * 64) + ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 16 + 63) / 64 * 64;
    for (long i = 0; i < slices; ++i) {
      const long h = height + (i < taller);
      const long r = i * height + min_(i, taller);
      pack_a(kd, h, a + item * a_batch + (row + r) * a_m + pc * a_k, a_m, a_k, ap + r * kd);
    }
    for (long jg = first; jg < last; ++jg) {
      float *panels = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 16 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 8 + 63) / 64 * 64);
      for (long q = jg; q < min_(last, jg + 1); ++q) {
        pack_b(kd, min_(n - q * 16, 16), b + item * b_batch + pc * b_k + q * 16, b_k, b_n, panels + (q - jg) * (kd * 16));
      }
      for (long j = jg; j < min_(last, jg + 1); ++j) {
        const long column = j * 16;
        const long columns = min_(n - column, 16);
        const float *bp = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 16 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 8 + 63) / 64 * 64) + (j - jg) * (kd * 16);
        for (long i = 0; i < slices; ++i) {
          const long h = height + (i < taller);
          const long r = i * height + min_(i, taller);
          switch (h) {
            case 1:
              ukr_1x16(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < pc, c + item * c_batch + (row + (i + 1 < slices) * (r + 1)) * c_m + column + (1 - (i + 1 < slices)) * 16);
              break;
            case 2:
              ukr_2x16(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < pc, c + item * c_batch + (row + (i + 1 < slices) * (r + 2)) * c_m + column + (1 - (i + 1 < slices)) * 16);
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
void portmm_gemm_f32_f32_f32_2x16x1_sve256(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8) < 2));
    const long blocks = min_(m, div_((m + 7) / 8 + even - 1, even) * even);
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, block, task_ctx, blocks * max_((n + 63) / 64, min_((n + 15) / 16, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8))), workers);
    }
  }
}
