/* portmm_gemm_f32_f32_f32_2x16x1_avx2, made by portmm 0.1.0 for AVX2 and FMA */
/* gemm avx2: registers 2x16x1, L1 2x16x320, L2 8x16x320, L3 8x64x320; A packed, B packed once, threads over tiles */
/* made again by: portmm emit --schedule gemm:avx2:f32:2x16x1/2x16x320/8x16x320/8x64x320:2-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,once */

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

/* to[k][16] = B[k][columns], row layout, padded */
static __attribute__((noinline)) void pack_b(long k, long columns, const float *b, long b_k, long b_n, float *to) {
  v8i m0, m1;
  v8f v0, v1;
  if (columns < 16) {
    m0 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns, 8)));
    m1 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns - 8, 8)));
    for (long p = 0; p < k; ++p) {
      __asm__("vmaskmovps %1, %2, %0" : "=x"(v0) : "m"(*(const v8f_u *)(b + p * b_k)), "x"(m0));
      *(v8f_u *)(to + p * 16) = v0;
      __asm__("vmaskmovps %1, %2, %0" : "=x"(v1) : "m"(*(const v8f_u *)(b + p * b_k + 8)), "x"(m1));
      *(v8f_u *)(to + p * 16 + 8) = v1;
    }
  } else {
    #pragma GCC unroll 4
    for (long p = 0; p < k; ++p) {
      v0 = *(const v8f_u *)(b + p * b_k);
      *(v8f_u *)(to + p * 16) = v0;
      v1 = *(const v8f_u *)(b + p * b_k + 8);
      *(v8f_u *)(to + p * 16 + 8) = v1;
    }
  }
}

/* to[8][k][16] = B[k][128], row layout */
static __attribute__((noinline)) void pack_b_rows(long k, const float *b, long b_k, float *to, long panel_step) {
  v8f v0, v1, v2, v3;
  for (long p = 0; p < k; ++p) {
    __builtin_prefetch(b + p * b_k + b_k * 8);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 16);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 32);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 48);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 64);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 80);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 96);
    __builtin_prefetch(b + p * b_k + b_k * 8 + 112);
    v0 = *(const v8f_u *)(b + p * b_k);
    *(v8f_u *)(to + p * 16) = v0;
    v1 = *(const v8f_u *)(b + p * b_k + 8);
    *(v8f_u *)(to + p * 16 + 8) = v1;
    v2 = *(const v8f_u *)(b + p * b_k + 16);
    *(v8f_u *)(to + panel_step + p * 16) = v2;
    v3 = *(const v8f_u *)(b + p * b_k + 24);
    *(v8f_u *)(to + panel_step + p * 16 + 8) = v3;
    v0 = *(const v8f_u *)(b + p * b_k + 32);
    *(v8f_u *)(to + panel_step * 2 + p * 16) = v0;
    v1 = *(const v8f_u *)(b + p * b_k + 40);
    *(v8f_u *)(to + panel_step * 2 + p * 16 + 8) = v1;
    v2 = *(const v8f_u *)(b + p * b_k + 48);
    *(v8f_u *)(to + panel_step * 3 + p * 16) = v2;
    v3 = *(const v8f_u *)(b + p * b_k + 56);
    *(v8f_u *)(to + panel_step * 3 + p * 16 + 8) = v3;
    v0 = *(const v8f_u *)(b + p * b_k + 64);
    *(v8f_u *)(to + panel_step * 4 + p * 16) = v0;
    v1 = *(const v8f_u *)(b + p * b_k + 72);
    *(v8f_u *)(to + panel_step * 4 + p * 16 + 8) = v1;
    v2 = *(const v8f_u *)(b + p * b_k + 80);
    *(v8f_u *)(to + panel_step * 5 + p * 16) = v2;
    v3 = *(const v8f_u *)(b + p * b_k + 88);
    *(v8f_u *)(to + panel_step * 5 + p * 16 + 8) = v3;
    v0 = *(const v8f_u *)(b + p * b_k + 96);
    *(v8f_u *)(to + panel_step * 6 + p * 16) = v0;
    v1 = *(const v8f_u *)(b + p * b_k + 104);
    *(v8f_u *)(to + panel_step * 6 + p * 16 + 8) = v1;
    v2 = *(const v8f_u *)(b + p * b_k + 112);
    *(v8f_u *)(to + panel_step * 7 + p * 16) = v2;
    v3 = *(const v8f_u *)(b + p * b_k + 120);
    *(v8f_u *)(to + panel_step * 7 + p * 16 + 8) = v3;
  }
}

/* Some rows of a few panels of B */
static void pack_share(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  const long item = ctx[1];
  const long n = ctx[2];
  const long across = ctx[3];
  (void)g; (void)task; (void)worker;
  const long k = g->k;
  const long b_k = g->b_k;
  const long b_n = g->b_n;
  const long b_batch = g->b_batch;
  const float *b = (const float *)g->b;
  float *work = (float *)g->work;
  const long jg = div_(task, (k + 255) / 256) * 16;
  const long p_first = mod_(task, (k + 255) / 256) * 256;
  float *panels = work;
  for (long jp = jg; jp < min_((n + 15) / 16, jg + 16); jp += 8) {
    if (min_(min_((n + 15) / 16 * 16, n), min_(min_((n + 15) / 16, jg + 16), jp + 8) * 16) < (jp + 8) * 16) {
      for (long q = jp; q < min_(min_((n + 15) / 16, jg + 16), jp + 8); ++q) {
        pack_b(min_(k - p_first, 256), min_(n - q * 16, 16), b + item * b_batch + p_first * b_k + q * 16 + across, b_k, b_n, panels + p_first * 16 + q * (k * 16));
      }
    } else {
      pack_b_rows(min_(k - p_first, 256), b + item * b_batch + p_first * b_k + jp * 16 + across, b_k, panels + p_first * 16 + jp * (k * 16), k * 16);
    }
  }
}

/* to[k][rows] = A[rows][k], row layout */
static __attribute__((noinline)) void pack_a(long k, long rows, const float *a, long a_m, long a_k, float *to) {
  v8f t0_0, t0_1, t0_2, t0_3, t0_4, t0_5, t0_6, t0_7, t1_0, t1_1, t1_2, t1_3, t1_4, t1_5, t1_6, t1_7, t2_0, t2_1, t2_2, t2_3, t2_4, t2_5, t2_6, t2_7, t3_0, t3_1, t3_2, t3_3, t3_4, t3_5, t3_6, t3_7;
  v8i few;
  if (7 < k) {
    if (0 < rows) {
      const float *a0 = a + min_(0, rows - 1) * a_m;
      const float *a1 = a + min_(1, rows - 1) * a_m;
      const float *a2 = a + min_(2, rows - 1) * a_m;
      const float *a3 = a + min_(3, rows - 1) * a_m;
      const float *a4 = a + min_(4, rows - 1) * a_m;
      const float *a5 = a + min_(5, rows - 1) * a_m;
      const float *a6 = a + min_(6, rows - 1) * a_m;
      const float *a7 = a + min_(7, rows - 1) * a_m;
      for (long q = 0; q < k; q += 8) {
        t0_0 = *(const v8f_u *)(a0 + min_(q, k - 8));
        t0_1 = *(const v8f_u *)(a1 + min_(q, k - 8));
        t0_2 = *(const v8f_u *)(a2 + min_(q, k - 8));
        t0_3 = *(const v8f_u *)(a3 + min_(q, k - 8));
        t0_4 = *(const v8f_u *)(a4 + min_(q, k - 8));
        t0_5 = *(const v8f_u *)(a5 + min_(q, k - 8));
        t0_6 = *(const v8f_u *)(a6 + min_(q, k - 8));
        t0_7 = *(const v8f_u *)(a7 + min_(q, k - 8));
        t1_0 = SHUFFLE(t0_0, t0_4, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t1_1 = SHUFFLE(t0_0, t0_4, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t1_2 = SHUFFLE(t0_1, t0_5, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t1_3 = SHUFFLE(t0_1, t0_5, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t1_4 = SHUFFLE(t0_2, t0_6, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t1_5 = SHUFFLE(t0_2, t0_6, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t1_6 = SHUFFLE(t0_3, t0_7, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t1_7 = SHUFFLE(t0_3, t0_7, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t2_0 = SHUFFLE(t1_0, t1_4, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t2_1 = SHUFFLE(t1_0, t1_4, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t2_2 = SHUFFLE(t1_1, t1_5, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t2_3 = SHUFFLE(t1_1, t1_5, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t2_4 = SHUFFLE(t1_2, t1_6, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t2_5 = SHUFFLE(t1_2, t1_6, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t2_6 = SHUFFLE(t1_3, t1_7, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t2_7 = SHUFFLE(t1_3, t1_7, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t3_0 = SHUFFLE(t2_0, t2_4, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t3_1 = SHUFFLE(t2_0, t2_4, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t3_2 = SHUFFLE(t2_1, t2_5, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t3_3 = SHUFFLE(t2_1, t2_5, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t3_4 = SHUFFLE(t2_2, t2_6, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t3_5 = SHUFFLE(t2_2, t2_6, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        t3_6 = SHUFFLE(t2_3, t2_7, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
        t3_7 = SHUFFLE(t2_3, t2_7, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
        *(v8f_u *)(to + min_(q, k - 8) * rows) = t3_0;
        *(v8f_u *)(to + (min_(q, k - 8) + 1) * rows) = t3_1;
        *(v8f_u *)(to + (min_(q, k - 8) + 2) * rows) = t3_2;
        *(v8f_u *)(to + (min_(q, k - 8) + 3) * rows) = t3_3;
        *(v8f_u *)(to + (min_(q, k - 8) + 4) * rows) = t3_4;
        *(v8f_u *)(to + (min_(q, k - 8) + 5) * rows) = t3_5;
        *(v8f_u *)(to + (min_(q, k - 8) + 6) * rows) = t3_6;
        *(v8f_u *)(to + (min_(q, k - 8) + 7) * rows) = t3_7;
      }
    }
  } else {
    few = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(k, 8)));
    if (0 < rows) {
      const float *a0 = a + min_(0, rows - 1) * a_m;
      const float *a1 = a + min_(1, rows - 1) * a_m;
      const float *a2 = a + min_(2, rows - 1) * a_m;
      const float *a3 = a + min_(3, rows - 1) * a_m;
      const float *a4 = a + min_(4, rows - 1) * a_m;
      const float *a5 = a + min_(5, rows - 1) * a_m;
      const float *a6 = a + min_(6, rows - 1) * a_m;
      const float *a7 = a + min_(7, rows - 1) * a_m;
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_0) : "m"(*(const v8f_u *)(a0)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_1) : "m"(*(const v8f_u *)(a1)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_2) : "m"(*(const v8f_u *)(a2)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_3) : "m"(*(const v8f_u *)(a3)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_4) : "m"(*(const v8f_u *)(a4)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_5) : "m"(*(const v8f_u *)(a5)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_6) : "m"(*(const v8f_u *)(a6)), "x"(few));
      __asm__("vmaskmovps %1, %2, %0" : "=x"(t0_7) : "m"(*(const v8f_u *)(a7)), "x"(few));
      t1_0 = SHUFFLE(t0_0, t0_4, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t1_1 = SHUFFLE(t0_0, t0_4, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t1_2 = SHUFFLE(t0_1, t0_5, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t1_3 = SHUFFLE(t0_1, t0_5, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t1_4 = SHUFFLE(t0_2, t0_6, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t1_5 = SHUFFLE(t0_2, t0_6, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t1_6 = SHUFFLE(t0_3, t0_7, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t1_7 = SHUFFLE(t0_3, t0_7, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t2_0 = SHUFFLE(t1_0, t1_4, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t2_1 = SHUFFLE(t1_0, t1_4, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t2_2 = SHUFFLE(t1_1, t1_5, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t2_3 = SHUFFLE(t1_1, t1_5, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t2_4 = SHUFFLE(t1_2, t1_6, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t2_5 = SHUFFLE(t1_2, t1_6, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t2_6 = SHUFFLE(t1_3, t1_7, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t2_7 = SHUFFLE(t1_3, t1_7, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t3_0 = SHUFFLE(t2_0, t2_4, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t3_1 = SHUFFLE(t2_0, t2_4, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t3_2 = SHUFFLE(t2_1, t2_5, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t3_3 = SHUFFLE(t2_1, t2_5, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t3_4 = SHUFFLE(t2_2, t2_6, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t3_5 = SHUFFLE(t2_2, t2_6, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      t3_6 = SHUFFLE(t2_3, t2_7, lanes_t, 0, 8, 1, 9, 2, 10, 3, 11);
      t3_7 = SHUFFLE(t2_3, t2_7, lanes_t, 4, 12, 5, 13, 6, 14, 7, 15);
      if (0 < k) {
        *(v8f_u *)(to) = t3_0;
      }
      if (1 < k) {
        *(v8f_u *)(to + rows) = t3_1;
      }
      if (2 < k) {
        *(v8f_u *)(to + 2 * rows) = t3_2;
      }
      if (3 < k) {
        *(v8f_u *)(to + 3 * rows) = t3_3;
      }
      if (4 < k) {
        *(v8f_u *)(to + 4 * rows) = t3_4;
      }
      if (5 < k) {
        *(v8f_u *)(to + 5 * rows) = t3_5;
      }
      if (6 < k) {
        *(v8f_u *)(to + 6 * rows) = t3_6;
      }
    }
  }
}

/* C[2][columns] (+)= A[2][k] . B[k][16] */
static __attribute__((noinline)) void ukr_2x16(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate) {
  v8i m0, m1;
  v8f c0_0, c0_1, c1_0, c1_1, b0, b1, before0, before1, before2, before3;
  float a0, a1;
  m0 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns, 8)));
  m1 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns - 8, 8)));
  c0_0 = (v8f){0};
  c0_1 = (v8f){0};
  c1_0 = (v8f){0};
  c1_1 = (v8f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v8f_u *)(b + p * 16);
    b1 = *(const v8f_u *)(b + p * 16 + 8);
    a0 = *(a + p * 2);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
    a1 = *(a + p * 2 + 1);
    c1_0 += a1 * b0;
    c1_1 += a1 * b1;
  }
  if (columns < 16) {
    if (accumulate) {
      __asm__("vmaskmovps %1, %2, %0" : "=x"(before0) : "m"(*(const v8f_u *)(c)), "x"(m0));
      c0_0 += before0;
      __asm__("vmaskmovps %1, %2, %0" : "=x"(before1) : "m"(*(const v8f_u *)(c + 8)), "x"(m1));
      c0_1 += before1;
      __asm__("vmaskmovps %1, %2, %0" : "=x"(before2) : "m"(*(const v8f_u *)(c + c_m)), "x"(m0));
      c1_0 += before2;
      __asm__("vmaskmovps %1, %2, %0" : "=x"(before3) : "m"(*(const v8f_u *)(c + c_m + 8)), "x"(m1));
      c1_1 += before3;
    }
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c)) : "x"(c0_0), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c + 8)) : "x"(c0_1), "x"(m1));
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c + c_m)) : "x"(c1_0), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c + c_m + 8)) : "x"(c1_1), "x"(m1));
  } else {
    if (accumulate) {
      before0 = *(const v8f_u *)(c);
      c0_0 += before0;
      before1 = *(const v8f_u *)(c + 8);
      c0_1 += before1;
      before2 = *(const v8f_u *)(c + c_m);
      c1_0 += before2;
      before3 = *(const v8f_u *)(c + c_m + 8);
      c1_1 += before3;
    }
    *(v8f_u *)(c) = c0_0;
    *(v8f_u *)(c + 8) = c0_1;
    *(v8f_u *)(c + c_m) = c1_0;
    *(v8f_u *)(c + c_m + 8) = c1_1;
  }
}

/* A block of rows by a share of the columns of C */
static void block(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  const long item = ctx[1];
  const long n = ctx[2];
  const long across = ctx[3];
  (void)g; (void)task; (void)worker;
  const long m = g->m;
  const long k = g->k;
  const long a_m = g->a_m;
  const long a_k = g->a_k;
  const long a_batch = g->a_batch;
  const long c_m = g->c_m;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  const float *a = (const float *)g->a;
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
    float *ap = work + (min_((n + 15) / 16, max_(1, div_(workers * 67108864, k * 1024)) * 16) * (k * 16) + 63) / 64 * 64 + worker * ((min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 8 + 63) / 64 * 64);
    for (long i = 0; i < slices; ++i) {
      const long h = height + (i < taller);
      const long r = i * height + min_(i, taller);
      pack_a(kd, h, a + item * a_batch + (row + r) * a_m + pc * a_k, a_m, a_k, ap + r * kd);
    }
    for (long j = first; j < last; ++j) {
      const long column = j * 16;
      const long columns = min_(n - column, 16);
      const float *bp = work + j * (k * 16) + pc * 16;
      for (long i = 0; i < slices; ++i) {
        const long r = i * height + min_(i, taller);
        ukr_2x16(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column + across, c_m, columns, 0 < pc);
      }
    }
  }
}

/* All products of the batch */
void portmm_gemm_f32_f32_f32_2x16x1_avx2(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long k = g->k;
  const long batch = g->batch;
  const long b_batch = g->b_batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    const long all = n;
    const long slab = (div_((n + 15) / 16 + div_((n + 15) / 16 + max_(1, div_(workers * 67108864, k * 1024)) * 16 - 1, max_(1, div_(workers * 67108864, k * 1024)) * 16) - 1, div_((n + 15) / 16 + max_(1, div_(workers * 67108864, k * 1024)) * 16 - 1, max_(1, div_(workers * 67108864, k * 1024)) * 16)) + 15) / 16 * 16 * 16;
    for (long across = 0; across < all; across += slab) {
      const long n = min_(slab, all - across);
      if (0 < (item == 0) + 1 - (b_batch == 0) + (slab < all)) {
        {
          const long task_ctx[] = {(long)g, item, n, across};
          g->parallel(g->pool, pack_share, task_ctx, ((n + 15) / 16 + 15) / 16 * ((k + 255) / 256), workers);
        }
      }
      const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8) < 2));
      const long blocks = min_(m, div_((m + 7) / 8 + even - 1, even) * even);
      {
        const long task_ctx[] = {(long)g, item, n, across};
        g->parallel(g->pool, block, task_ctx, blocks * max_((n + 63) / 64, min_((n + 15) / 16, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8))), workers);
      }
    }
  }
}
