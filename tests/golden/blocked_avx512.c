/* portmm_gemm_f32_f32_f32_2x32x1_avx512, made by portmm 0.1.0 for AVX-512 */
/* gemm avx512: registers 2x32x1, L1 2x32x320, L2 8x32x320, L3 8x128x320; A packed, B packed, threads over tiles */
/* made again by: portmm emit --schedule gemm:avx512:f32:2x32x1/2x32x320/8x32x320/8x128x320:1-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,ahead */

typedef float v16f __attribute__((vector_size(64)));
typedef float v16f_u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float v8f __attribute__((vector_size(32)));
typedef float v8f_u __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4f __attribute__((vector_size(16)));
typedef float v4f_u __attribute__((vector_size(16), aligned(4), may_alias));
typedef double v8d __attribute__((vector_size(64)));
typedef double v8d_u __attribute__((vector_size(64), aligned(8), may_alias));
typedef double v4d __attribute__((vector_size(32)));
typedef double v4d_u __attribute__((vector_size(32), aligned(8), may_alias));
typedef double v2d __attribute__((vector_size(16)));
typedef double v2d_u __attribute__((vector_size(16), aligned(8), may_alias));
typedef int v16i __attribute__((vector_size(64)));
typedef int v16i_u __attribute__((vector_size(64), aligned(1), may_alias));
typedef unsigned v16u __attribute__((vector_size(64)));
typedef short v32s __attribute__((vector_size(64)));
typedef unsigned short v16h __attribute__((vector_size(32)));
typedef unsigned short v16h_u __attribute__((vector_size(32), aligned(1), may_alias));
typedef unsigned short v8h __attribute__((vector_size(16)));
typedef signed char v16c_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef unsigned char v16b_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef signed char v32c __attribute__((vector_size(32)));
typedef signed char v32c_u __attribute__((vector_size(32), aligned(1), may_alias));
typedef unsigned char v32b_u __attribute__((vector_size(32), aligned(1), may_alias));

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

typedef int lanes_t __attribute__((vector_size(64)));

/* to[k][rows] = A[rows][k], row layout */
static __attribute__((noinline)) void pack_a(long k, long rows, const float *a, long a_m, long a_k, float *to) {
  v16f t0_0, t0_1, t0_2, t0_3, t0_4, t0_5, t0_6, t0_7, t0_8, t0_9, t0_10, t0_11, t0_12, t0_13, t0_14, t0_15, t1_0, t1_1, t1_2, t1_3, t1_4, t1_5, t1_6, t1_7, t1_8, t1_9, t1_10, t1_11, t1_12, t1_13, t1_14, t1_15, t2_0, t2_1, t2_2, t2_3, t2_4, t2_5, t2_6, t2_7, t2_8, t2_9, t2_10, t2_11, t2_12, t2_13, t2_14, t2_15, t3_0, t3_1, t3_2, t3_3, t3_4, t3_5, t3_6, t3_7, t3_8, t3_9, t3_10, t3_11, t3_12, t3_13, t3_14, t3_15, t4_0, t4_1, t4_2, t4_3, t4_4, t4_5, t4_6, t4_7, t4_8, t4_9, t4_10, t4_11, t4_12, t4_13, t4_14, t4_15;
  unsigned short few;
  if (15 < k) {
    if (0 < rows) {
      const float *a0 = a + min_(0, rows - 1) * a_m;
      const float *a1 = a + min_(1, rows - 1) * a_m;
      const float *a2 = a + min_(2, rows - 1) * a_m;
      const float *a3 = a + min_(3, rows - 1) * a_m;
      const float *a4 = a + min_(4, rows - 1) * a_m;
      const float *a5 = a + min_(5, rows - 1) * a_m;
      const float *a6 = a + min_(6, rows - 1) * a_m;
      const float *a7 = a + min_(7, rows - 1) * a_m;
      const float *a8 = a + min_(8, rows - 1) * a_m;
      const float *a9 = a + min_(9, rows - 1) * a_m;
      const float *a10 = a + min_(10, rows - 1) * a_m;
      const float *a11 = a + min_(11, rows - 1) * a_m;
      const float *a12 = a + min_(12, rows - 1) * a_m;
      const float *a13 = a + min_(13, rows - 1) * a_m;
      const float *a14 = a + min_(14, rows - 1) * a_m;
      const float *a15 = a + min_(15, rows - 1) * a_m;
      for (long q = 0; q < k; q += 16) {
        t0_0 = *(const v16f_u *)(a0 + min_(q, k - 16));
        t0_1 = *(const v16f_u *)(a1 + min_(q, k - 16));
        t0_2 = *(const v16f_u *)(a2 + min_(q, k - 16));
        t0_3 = *(const v16f_u *)(a3 + min_(q, k - 16));
        t0_4 = *(const v16f_u *)(a4 + min_(q, k - 16));
        t0_5 = *(const v16f_u *)(a5 + min_(q, k - 16));
        t0_6 = *(const v16f_u *)(a6 + min_(q, k - 16));
        t0_7 = *(const v16f_u *)(a7 + min_(q, k - 16));
        t0_8 = *(const v16f_u *)(a8 + min_(q, k - 16));
        t0_9 = *(const v16f_u *)(a9 + min_(q, k - 16));
        t0_10 = *(const v16f_u *)(a10 + min_(q, k - 16));
        t0_11 = *(const v16f_u *)(a11 + min_(q, k - 16));
        t0_12 = *(const v16f_u *)(a12 + min_(q, k - 16));
        t0_13 = *(const v16f_u *)(a13 + min_(q, k - 16));
        t0_14 = *(const v16f_u *)(a14 + min_(q, k - 16));
        t0_15 = *(const v16f_u *)(a15 + min_(q, k - 16));
        t1_0 = SHUFFLE(t0_0, t0_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_1 = SHUFFLE(t0_0, t0_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_2 = SHUFFLE(t0_1, t0_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_3 = SHUFFLE(t0_1, t0_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_4 = SHUFFLE(t0_2, t0_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_5 = SHUFFLE(t0_2, t0_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_6 = SHUFFLE(t0_3, t0_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_7 = SHUFFLE(t0_3, t0_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_8 = SHUFFLE(t0_4, t0_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_9 = SHUFFLE(t0_4, t0_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_10 = SHUFFLE(t0_5, t0_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_11 = SHUFFLE(t0_5, t0_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_12 = SHUFFLE(t0_6, t0_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_13 = SHUFFLE(t0_6, t0_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t1_14 = SHUFFLE(t0_7, t0_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t1_15 = SHUFFLE(t0_7, t0_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_0 = SHUFFLE(t1_0, t1_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_1 = SHUFFLE(t1_0, t1_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_2 = SHUFFLE(t1_1, t1_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_3 = SHUFFLE(t1_1, t1_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_4 = SHUFFLE(t1_2, t1_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_5 = SHUFFLE(t1_2, t1_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_6 = SHUFFLE(t1_3, t1_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_7 = SHUFFLE(t1_3, t1_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_8 = SHUFFLE(t1_4, t1_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_9 = SHUFFLE(t1_4, t1_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_10 = SHUFFLE(t1_5, t1_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_11 = SHUFFLE(t1_5, t1_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_12 = SHUFFLE(t1_6, t1_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_13 = SHUFFLE(t1_6, t1_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t2_14 = SHUFFLE(t1_7, t1_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t2_15 = SHUFFLE(t1_7, t1_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_0 = SHUFFLE(t2_0, t2_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_1 = SHUFFLE(t2_0, t2_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_2 = SHUFFLE(t2_1, t2_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_3 = SHUFFLE(t2_1, t2_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_4 = SHUFFLE(t2_2, t2_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_5 = SHUFFLE(t2_2, t2_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_6 = SHUFFLE(t2_3, t2_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_7 = SHUFFLE(t2_3, t2_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_8 = SHUFFLE(t2_4, t2_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_9 = SHUFFLE(t2_4, t2_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_10 = SHUFFLE(t2_5, t2_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_11 = SHUFFLE(t2_5, t2_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_12 = SHUFFLE(t2_6, t2_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_13 = SHUFFLE(t2_6, t2_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t3_14 = SHUFFLE(t2_7, t2_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t3_15 = SHUFFLE(t2_7, t2_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_0 = SHUFFLE(t3_0, t3_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_1 = SHUFFLE(t3_0, t3_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_2 = SHUFFLE(t3_1, t3_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_3 = SHUFFLE(t3_1, t3_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_4 = SHUFFLE(t3_2, t3_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_5 = SHUFFLE(t3_2, t3_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_6 = SHUFFLE(t3_3, t3_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_7 = SHUFFLE(t3_3, t3_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_8 = SHUFFLE(t3_4, t3_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_9 = SHUFFLE(t3_4, t3_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_10 = SHUFFLE(t3_5, t3_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_11 = SHUFFLE(t3_5, t3_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_12 = SHUFFLE(t3_6, t3_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_13 = SHUFFLE(t3_6, t3_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        t4_14 = SHUFFLE(t3_7, t3_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        t4_15 = SHUFFLE(t3_7, t3_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        *(v16f_u *)(to + min_(q, k - 16) * rows) = t4_0;
        *(v16f_u *)(to + (min_(q, k - 16) + 1) * rows) = t4_1;
        *(v16f_u *)(to + (min_(q, k - 16) + 2) * rows) = t4_2;
        *(v16f_u *)(to + (min_(q, k - 16) + 3) * rows) = t4_3;
        *(v16f_u *)(to + (min_(q, k - 16) + 4) * rows) = t4_4;
        *(v16f_u *)(to + (min_(q, k - 16) + 5) * rows) = t4_5;
        *(v16f_u *)(to + (min_(q, k - 16) + 6) * rows) = t4_6;
        *(v16f_u *)(to + (min_(q, k - 16) + 7) * rows) = t4_7;
        *(v16f_u *)(to + (min_(q, k - 16) + 8) * rows) = t4_8;
        *(v16f_u *)(to + (min_(q, k - 16) + 9) * rows) = t4_9;
        *(v16f_u *)(to + (min_(q, k - 16) + 10) * rows) = t4_10;
        *(v16f_u *)(to + (min_(q, k - 16) + 11) * rows) = t4_11;
        *(v16f_u *)(to + (min_(q, k - 16) + 12) * rows) = t4_12;
        *(v16f_u *)(to + (min_(q, k - 16) + 13) * rows) = t4_13;
        *(v16f_u *)(to + (min_(q, k - 16) + 14) * rows) = t4_14;
        *(v16f_u *)(to + (min_(q, k - 16) + 15) * rows) = t4_15;
      }
    }
  } else {
    few = (unsigned short)((1u << (max_(0, min_(k, 16)))) - 1);
    if (0 < rows) {
      const float *a0 = a + min_(0, rows - 1) * a_m;
      const float *a1 = a + min_(1, rows - 1) * a_m;
      const float *a2 = a + min_(2, rows - 1) * a_m;
      const float *a3 = a + min_(3, rows - 1) * a_m;
      const float *a4 = a + min_(4, rows - 1) * a_m;
      const float *a5 = a + min_(5, rows - 1) * a_m;
      const float *a6 = a + min_(6, rows - 1) * a_m;
      const float *a7 = a + min_(7, rows - 1) * a_m;
      const float *a8 = a + min_(8, rows - 1) * a_m;
      const float *a9 = a + min_(9, rows - 1) * a_m;
      const float *a10 = a + min_(10, rows - 1) * a_m;
      const float *a11 = a + min_(11, rows - 1) * a_m;
      const float *a12 = a + min_(12, rows - 1) * a_m;
      const float *a13 = a + min_(13, rows - 1) * a_m;
      const float *a14 = a + min_(14, rows - 1) * a_m;
      const float *a15 = a + min_(15, rows - 1) * a_m;
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_0) : "m"(*(const v16f_u *)(a0)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_1) : "m"(*(const v16f_u *)(a1)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_2) : "m"(*(const v16f_u *)(a2)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_3) : "m"(*(const v16f_u *)(a3)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_4) : "m"(*(const v16f_u *)(a4)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_5) : "m"(*(const v16f_u *)(a5)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_6) : "m"(*(const v16f_u *)(a6)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_7) : "m"(*(const v16f_u *)(a7)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_8) : "m"(*(const v16f_u *)(a8)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_9) : "m"(*(const v16f_u *)(a9)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_10) : "m"(*(const v16f_u *)(a10)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_11) : "m"(*(const v16f_u *)(a11)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_12) : "m"(*(const v16f_u *)(a12)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_13) : "m"(*(const v16f_u *)(a13)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_14) : "m"(*(const v16f_u *)(a14)), "Yk"(few));
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(t0_15) : "m"(*(const v16f_u *)(a15)), "Yk"(few));
      t1_0 = SHUFFLE(t0_0, t0_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_1 = SHUFFLE(t0_0, t0_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_2 = SHUFFLE(t0_1, t0_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_3 = SHUFFLE(t0_1, t0_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_4 = SHUFFLE(t0_2, t0_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_5 = SHUFFLE(t0_2, t0_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_6 = SHUFFLE(t0_3, t0_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_7 = SHUFFLE(t0_3, t0_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_8 = SHUFFLE(t0_4, t0_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_9 = SHUFFLE(t0_4, t0_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_10 = SHUFFLE(t0_5, t0_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_11 = SHUFFLE(t0_5, t0_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_12 = SHUFFLE(t0_6, t0_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_13 = SHUFFLE(t0_6, t0_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t1_14 = SHUFFLE(t0_7, t0_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t1_15 = SHUFFLE(t0_7, t0_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_0 = SHUFFLE(t1_0, t1_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_1 = SHUFFLE(t1_0, t1_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_2 = SHUFFLE(t1_1, t1_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_3 = SHUFFLE(t1_1, t1_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_4 = SHUFFLE(t1_2, t1_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_5 = SHUFFLE(t1_2, t1_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_6 = SHUFFLE(t1_3, t1_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_7 = SHUFFLE(t1_3, t1_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_8 = SHUFFLE(t1_4, t1_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_9 = SHUFFLE(t1_4, t1_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_10 = SHUFFLE(t1_5, t1_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_11 = SHUFFLE(t1_5, t1_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_12 = SHUFFLE(t1_6, t1_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_13 = SHUFFLE(t1_6, t1_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t2_14 = SHUFFLE(t1_7, t1_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t2_15 = SHUFFLE(t1_7, t1_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_0 = SHUFFLE(t2_0, t2_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_1 = SHUFFLE(t2_0, t2_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_2 = SHUFFLE(t2_1, t2_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_3 = SHUFFLE(t2_1, t2_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_4 = SHUFFLE(t2_2, t2_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_5 = SHUFFLE(t2_2, t2_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_6 = SHUFFLE(t2_3, t2_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_7 = SHUFFLE(t2_3, t2_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_8 = SHUFFLE(t2_4, t2_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_9 = SHUFFLE(t2_4, t2_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_10 = SHUFFLE(t2_5, t2_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_11 = SHUFFLE(t2_5, t2_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_12 = SHUFFLE(t2_6, t2_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_13 = SHUFFLE(t2_6, t2_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t3_14 = SHUFFLE(t2_7, t2_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t3_15 = SHUFFLE(t2_7, t2_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_0 = SHUFFLE(t3_0, t3_8, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_1 = SHUFFLE(t3_0, t3_8, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_2 = SHUFFLE(t3_1, t3_9, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_3 = SHUFFLE(t3_1, t3_9, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_4 = SHUFFLE(t3_2, t3_10, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_5 = SHUFFLE(t3_2, t3_10, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_6 = SHUFFLE(t3_3, t3_11, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_7 = SHUFFLE(t3_3, t3_11, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_8 = SHUFFLE(t3_4, t3_12, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_9 = SHUFFLE(t3_4, t3_12, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_10 = SHUFFLE(t3_5, t3_13, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_11 = SHUFFLE(t3_5, t3_13, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_12 = SHUFFLE(t3_6, t3_14, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_13 = SHUFFLE(t3_6, t3_14, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      t4_14 = SHUFFLE(t3_7, t3_15, lanes_t, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      t4_15 = SHUFFLE(t3_7, t3_15, lanes_t, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      if (0 < k) {
        *(v16f_u *)(to) = t4_0;
      }
      if (1 < k) {
        *(v16f_u *)(to + rows) = t4_1;
      }
      if (2 < k) {
        *(v16f_u *)(to + 2 * rows) = t4_2;
      }
      if (3 < k) {
        *(v16f_u *)(to + 3 * rows) = t4_3;
      }
      if (4 < k) {
        *(v16f_u *)(to + 4 * rows) = t4_4;
      }
      if (5 < k) {
        *(v16f_u *)(to + 5 * rows) = t4_5;
      }
      if (6 < k) {
        *(v16f_u *)(to + 6 * rows) = t4_6;
      }
      if (7 < k) {
        *(v16f_u *)(to + 7 * rows) = t4_7;
      }
      if (8 < k) {
        *(v16f_u *)(to + 8 * rows) = t4_8;
      }
      if (9 < k) {
        *(v16f_u *)(to + 9 * rows) = t4_9;
      }
      if (10 < k) {
        *(v16f_u *)(to + 10 * rows) = t4_10;
      }
      if (11 < k) {
        *(v16f_u *)(to + 11 * rows) = t4_11;
      }
      if (12 < k) {
        *(v16f_u *)(to + 12 * rows) = t4_12;
      }
      if (13 < k) {
        *(v16f_u *)(to + 13 * rows) = t4_13;
      }
      if (14 < k) {
        *(v16f_u *)(to + 14 * rows) = t4_14;
      }
    }
  }
}

/* to[k][32] = B[k][columns], row layout, padded */
static __attribute__((noinline)) void pack_b(long k, long columns, const float *b, long b_k, long b_n, float *to) {
  unsigned short m0, m1;
  v16f v0, v1;
  if (columns < 32) {
    m0 = (unsigned short)((1u << (max_(0, min_(columns, 16)))) - 1);
    m1 = (unsigned short)((1u << (max_(0, min_(columns - 16, 16)))) - 1);
    for (long p = 0; p < k; ++p) {
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(v0) : "m"(*(const v16f_u *)(b + p * b_k)), "Yk"(m0));
      *(v16f_u *)(to + p * 32) = v0;
      __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(v1) : "m"(*(const v16f_u *)(b + p * b_k + 16)), "Yk"(m1));
      *(v16f_u *)(to + p * 32 + 16) = v1;
    }
  } else {
    #pragma GCC unroll 4
    for (long p = 0; p < k; ++p) {
      v0 = *(const v16f_u *)(b + p * b_k);
      *(v16f_u *)(to + p * 32) = v0;
      v1 = *(const v16f_u *)(b + p * b_k + 16);
      *(v16f_u *)(to + p * 32 + 16) = v1;
    }
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][32] */
static __attribute__((noinline)) void ukr_1x32(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  unsigned short m0, m1;
  v16f c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  __builtin_prefetch(c_next, 1, 3);
  __builtin_prefetch(c_next + 16, 1, 3);
  m0 = (unsigned short)((1u << (max_(0, min_(columns, 16)))) - 1);
  m1 = (unsigned short)((1u << (max_(0, min_(columns - 16, 16)))) - 1);
  c0_0 = (v16f){0};
  c0_1 = (v16f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v16f_u *)(b + p * 32);
    b1 = *(const v16f_u *)(b + p * 32 + 16);
    a0 = *(a + p);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
  }
  if (accumulate) {
    __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(before0) : "m"(*(const v16f_u *)(c)), "Yk"(m0));
    c0_0 += before0;
    __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(before1) : "m"(*(const v16f_u *)(c + 16)), "Yk"(m1));
    c0_1 += before1;
  }
  __asm__("vmovups %1, %0%{%2%}" : "+m"(*(v16f_u *)(c)) : "v"(c0_0), "Yk"(m0));
  __asm__("vmovups %1, %0%{%2%}" : "+m"(*(v16f_u *)(c + 16)) : "v"(c0_1), "Yk"(m1));
}

/* C[2][columns] (+)= A[2][k] . B[k][32] */
static __attribute__((noinline)) void ukr_2x32(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  unsigned short m0, m1;
  v16f c0_0, c0_1, c1_0, c1_1, b0, b1, before0, before1, before2, before3;
  float a0, a1;
  __builtin_prefetch(c_next, 1, 3);
  __builtin_prefetch(c_next + 16, 1, 3);
  __builtin_prefetch(c_next + c_m, 1, 3);
  __builtin_prefetch(c_next + c_m + 16, 1, 3);
  m0 = (unsigned short)((1u << (max_(0, min_(columns, 16)))) - 1);
  m1 = (unsigned short)((1u << (max_(0, min_(columns - 16, 16)))) - 1);
  c0_0 = (v16f){0};
  c0_1 = (v16f){0};
  c1_0 = (v16f){0};
  c1_1 = (v16f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v16f_u *)(b + p * 32);
    b1 = *(const v16f_u *)(b + p * 32 + 16);
    a0 = *(a + p * 2);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
    a1 = *(a + p * 2 + 1);
    c1_0 += a1 * b0;
    c1_1 += a1 * b1;
  }
  if (accumulate) {
    __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(before0) : "m"(*(const v16f_u *)(c)), "Yk"(m0));
    c0_0 += before0;
    __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(before1) : "m"(*(const v16f_u *)(c + 16)), "Yk"(m1));
    c0_1 += before1;
    __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(before2) : "m"(*(const v16f_u *)(c + c_m)), "Yk"(m0));
    c1_0 += before2;
    __asm__("vmovups %1, %0%{%2%}%{z%}" : "=v"(before3) : "m"(*(const v16f_u *)(c + c_m + 16)), "Yk"(m1));
    c1_1 += before3;
  }
  __asm__("vmovups %1, %0%{%2%}" : "+m"(*(v16f_u *)(c)) : "v"(c0_0), "Yk"(m0));
  __asm__("vmovups %1, %0%{%2%}" : "+m"(*(v16f_u *)(c + 16)) : "v"(c0_1), "Yk"(m1));
  __asm__("vmovups %1, %0%{%2%}" : "+m"(*(v16f_u *)(c + c_m)) : "v"(c1_0), "Yk"(m0));
  __asm__("vmovups %1, %0%{%2%}" : "+m"(*(v16f_u *)(c + c_m + 16)) : "v"(c1_1), "Yk"(m1));
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
  const long shares = max_((n + 127) / 128, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8)));
  const long row = div_(m * div_(task, shares), blocks);
  const long rows = div_(m * (div_(task, shares) + 1), blocks) - row;
  const long first = div_((n + 31) / 32 * mod_(task, shares), shares);
  const long last = min_((n + 31) / 32, div_((n + 31) / 32 * (mod_(task, shares) + 1), shares));
  const long slices = (rows + 1) / 2;
  const long height = div_(rows, slices);
  const long taller = mod_(rows, slices);
  const long kb = (div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32;
  for (long pc = 0; pc < k; pc += kb) {
    const long kd = min_(kb, k - pc);
    float *ap = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 32 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 16 + 63) / 64 * 64) + ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 32 + 63) / 64 * 64;
    for (long i = 0; i < slices; ++i) {
      const long h = height + (i < taller);
      const long r = i * height + min_(i, taller);
      pack_a(kd, h, a + item * a_batch + (row + r) * a_m + pc * a_k, a_m, a_k, ap + r * kd);
    }
    for (long jg = first; jg < last; ++jg) {
      float *panels = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 32 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 16 + 63) / 64 * 64);
      for (long q = jg; q < min_(last, jg + 1); ++q) {
        pack_b(kd, min_(n - q * 32, 32), b + item * b_batch + pc * b_k + q * 32, b_k, b_n, panels + (q - jg) * (kd * 32));
      }
      for (long j = jg; j < min_(last, jg + 1); ++j) {
        const long column = j * 32;
        const long columns = min_(n - column, 32);
        const float *bp = work + worker * (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 * 32 + 63) / 64 * 64 + (min_(m, 8) * ((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32) + 16 + 63) / 64 * 64) + (j - jg) * (kd * 32);
        for (long i = 0; i < slices; ++i) {
          const long h = height + (i < taller);
          const long r = i * height + min_(i, taller);
          switch (h) {
            case 1:
              ukr_1x32(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < pc, c + item * c_batch + (row + (i + 1 < slices) * (r + 1)) * c_m + column + (1 - (i + 1 < slices)) * 32);
              break;
            case 2:
              ukr_2x32(kd, ap + r * kd, bp, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < pc, c + item * c_batch + (row + (i + 1 < slices) * (r + 2)) * c_m + column + (1 - (i + 1 < slices)) * 32);
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
void portmm_gemm_f32_f32_f32_2x32x1_avx512(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8) < 2));
    const long blocks = min_(m, div_((m + 7) / 8 + even - 1, even) * even);
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, block, task_ctx, blocks * max_((n + 127) / 128, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 7) / 8 - 1, (m + 7) / 8))), workers);
    }
  }
}
