/* portmm_rows_sve256_f32, made by portmm 0.1.0 for SVE, 256-bit vectors */
/* f32.bmn f32.bmn | const f32 0.00019630798; load 0; reduce max 1; sub 1 2; const f32 -87.33654; lt 3 4; const f32 89.0; lt 6 3; select 7 6 3; select 5 4 8; const f32 0.7213475; const f32 1.2583039e+07; fma 9 10 11; sub 12 11; const f32 -2.8572135e-06; const f32 -1.3862915; fma 13 15 9; fma 13 14 16; const f32 0.0014104752; fma 0 17 18; const f32 0.008335929; fma 19 17 20; const f32 0.04166123; fma 21 17 22; const f32 0.16666618; fma 23 17 24; const f32 0.50000036; fma 25 17 26; const f32 1.0; fma 27 17 28; fma 29 17 28; bits 12; const s32 23; shl 31 32; from_bits 33; mul 30 34; const f32 0.0; select 5 36 34; mul 35 37; reduce add 38; div 38 39 | 1 40 */
/* made again by: portmm.fuse on SVE, 256-bit vectors */

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

static inline float sum_8(const float *p) {
  typedef float h4 __attribute__((vector_size(16), aligned(4), may_alias));
  const h4 x4 = *(const h4 *)p + *(const h4 *)(p + 4);
  const h4 x2 = (h4){x4[0], x4[1], x4[0], x4[1]} + (h4){x4[2], x4[3], x4[2], x4[3]};
  const h4 x1 = (h4){x2[0], x2[0], x2[0], x2[0]} + (h4){x2[1], x2[1], x2[1], x2[1]};
  return x1[0];
}

static inline float most_8(const float *p) {
  typedef float h4 __attribute__((vector_size(16), aligned(4), may_alias));
  typedef int m4 __attribute__((vector_size(16)));
  const h4 a4 = *(const h4 *)p, b4 = *(const h4 *)(p + 4);
  const m4 t4 = (b4 > a4) | (b4 != b4);
  const h4 x4 = (h4)(((m4)b4 & t4) | ((m4)a4 & ~t4));
  const h4 a2 = (h4){x4[0], x4[1], x4[0], x4[1]}, b2 = (h4){x4[2], x4[3], x4[2], x4[3]};
  const m4 t2 = (b2 > a2) | (b2 != b2);
  const h4 x2 = (h4)(((m4)b2 & t2) | ((m4)a2 & ~t2));
  const h4 a1 = (h4){x2[0], x2[0], x2[0], x2[0]}, b1 = (h4){x2[1], x2[1], x2[1], x2[1]};
  const m4 t1 = (b1 > a1) | (b1 != b1);
  const h4 x1 = (h4)(((m4)b1 & t1) | ((m4)a1 & ~t1));
  return x1[0];
}

/* Expressions over one row */
static __attribute__((noinline)) void one_row(long m, long n, long item, long row, const float *x0, long x0_m, float *x1, long x1_m, float *kept0) {
  svfloat32_t all_r0_0, all_r0_1, all_r0_2, all_r0_3, l0, all_r0_0_kept, t1_one, t1, all_r1_0, all_r1_1, all_r1_2, all_r1_3, runs_r1_0, runs_r1_1, runs_r1_2, runs_r1_3, blocks_r1_0, blocks_r1_1, blocks_r1_2, blocks_r1_3, t2, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15, t16, t17, t20, t21, t22, t23, all_r1_0_kept, t24_one, t24, t25;
  svbool_t few, all_r0_0_there, t3, t4, all_r1_0_there;
  svint32_t all_r0_0_at, all_r0_0_count, t18, t19, all_r1_0_at, all_r1_0_count;
  float r0[1] __attribute__((aligned(64)));
  float r1[1] __attribute__((aligned(64)));
  float lane[8] __attribute__((aligned(64)));
  all_r0_0 = svdup_n_f32((-__builtin_inff()));
  all_r0_1 = svdup_n_f32((-__builtin_inff()));
  all_r0_2 = svdup_n_f32((-__builtin_inff()));
  all_r0_3 = svdup_n_f32((-__builtin_inff()));
  for (long j = 0; j < n - n % 32; j += 32) {
    l0 = svld1_f32(svptrue_b32(), x0 + j);
    all_r0_0 = svmax_f32_x(svptrue_b32(), all_r0_0, l0);
    l0 = svld1_f32(svptrue_b32(), x0 + j + 8);
    all_r0_1 = svmax_f32_x(svptrue_b32(), all_r0_1, l0);
    l0 = svld1_f32(svptrue_b32(), x0 + j + 16);
    all_r0_2 = svmax_f32_x(svptrue_b32(), all_r0_2, l0);
    l0 = svld1_f32(svptrue_b32(), x0 + j + 24);
    all_r0_3 = svmax_f32_x(svptrue_b32(), all_r0_3, l0);
  }
  for (long j = n - n % 32; j < n - n % 8; j += 8) {
    l0 = svld1_f32(svptrue_b32(), x0 + j);
    all_r0_0 = svmax_f32_x(svptrue_b32(), all_r0_0, l0);
  }
  if (n - n % 8 < n) {
    const long j = n - n % 8;
    const long left = n - (n - n % 8);
    few = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(n - (n - n % 8), 8))));
    l0 = svld1_f32(few, x0 + j);
    all_r0_0_at = svindex_s32((int)(0), 1);
    all_r0_0_count = svdup_n_s32((int)(left));
    all_r0_0_there = svcmplt_s32(svptrue_b32(), all_r0_0_at, all_r0_0_count);
    all_r0_0_kept = svsel_f32(all_r0_0_there, l0, svdup_n_f32((-__builtin_inff())));
    all_r0_0 = svmax_f32_x(svptrue_b32(), all_r0_0, all_r0_0_kept);
  }
  all_r0_0 = svmax_f32_x(svptrue_b32(), all_r0_0, all_r0_1);
  all_r0_0 = svmax_f32_x(svptrue_b32(), all_r0_0, all_r0_2);
  all_r0_0 = svmax_f32_x(svptrue_b32(), all_r0_0, all_r0_3);
  svst1_f32(svptrue_b32(), lane, all_r0_0);
  *(r0) = most_8(lane);
  t1_one = svdup_n_f32(*(r0));
  t1 = t1_one;
  all_r1_0 = svdup_n_f32(0.0f);
  all_r1_1 = svdup_n_f32(0.0f);
  all_r1_2 = svdup_n_f32(0.0f);
  all_r1_3 = svdup_n_f32(0.0f);
  runs_r1_0 = svdup_n_f32(0.0f);
  runs_r1_1 = svdup_n_f32(0.0f);
  runs_r1_2 = svdup_n_f32(0.0f);
  runs_r1_3 = svdup_n_f32(0.0f);
  blocks_r1_0 = svdup_n_f32(0.0f);
  blocks_r1_1 = svdup_n_f32(0.0f);
  blocks_r1_2 = svdup_n_f32(0.0f);
  blocks_r1_3 = svdup_n_f32(0.0f);
  for (long j_block = 0; j_block < n - n % 32; j_block += 131072) {
    for (long j_run = j_block; j_run < min_(n - n % 32, j_block + 131072); j_run += 2048) {
      for (long j = j_run; j < min_(n - n % 32, j_run + 2048); j += 32) {
        l0 = svld1_f32(svptrue_b32(), x0 + j);
        t2 = svsub_f32_x(svptrue_b32(), l0, t1);
        t3 = svcmplt_f32(svptrue_b32(), t2, svdup_n_f32((-87.33654f)));
        t4 = svcmplt_f32(svptrue_b32(), svdup_n_f32(89.0f), t2);
        t5 = svsel_f32(t4, svdup_n_f32(89.0f), t2);
        t6 = svsel_f32(t3, svdup_n_f32((-87.33654f)), t5);
        t7 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.2583039e+07f), t6, svdup_n_f32(0.7213475f));
        t8 = svsub_f32_x(svptrue_b32(), t7, svdup_n_f32(1.2583039e+07f));
        t9 = svmla_f32_x(svptrue_b32(), t6, t8, svdup_n_f32((-1.3862915f)));
        t10 = svmla_f32_x(svptrue_b32(), t9, t8, svdup_n_f32((-2.8572135e-06f)));
        t11 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.0014104752f), svdup_n_f32(0.00019630798f), t10);
        t12 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.008335929f), t11, t10);
        t13 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.04166123f), t12, t10);
        t14 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.16666618f), t13, t10);
        t15 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.50000036f), t14, t10);
        t16 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t15, t10);
        t17 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t16, t10);
        t18 = svreinterpret_s32_f32(t7);
        t19 = svlsl_n_s32_x(svptrue_b32(), t18, 23);
        t20 = svreinterpret_f32_s32(t19);
        t21 = svmul_f32_x(svptrue_b32(), t17, t20);
        t22 = svsel_f32(t3, svdup_n_f32(0.0f), t20);
        t23 = svmul_f32_x(svptrue_b32(), t21, t22);
        svst1_f32(svptrue_b32(), kept0 + j, t23);
        all_r1_0 = svadd_f32_x(svptrue_b32(), all_r1_0, t23);
        l0 = svld1_f32(svptrue_b32(), x0 + j + 8);
        t2 = svsub_f32_x(svptrue_b32(), l0, t1);
        t3 = svcmplt_f32(svptrue_b32(), t2, svdup_n_f32((-87.33654f)));
        t4 = svcmplt_f32(svptrue_b32(), svdup_n_f32(89.0f), t2);
        t5 = svsel_f32(t4, svdup_n_f32(89.0f), t2);
        t6 = svsel_f32(t3, svdup_n_f32((-87.33654f)), t5);
        t7 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.2583039e+07f), t6, svdup_n_f32(0.7213475f));
        t8 = svsub_f32_x(svptrue_b32(), t7, svdup_n_f32(1.2583039e+07f));
        t9 = svmla_f32_x(svptrue_b32(), t6, t8, svdup_n_f32((-1.3862915f)));
        t10 = svmla_f32_x(svptrue_b32(), t9, t8, svdup_n_f32((-2.8572135e-06f)));
        t11 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.0014104752f), svdup_n_f32(0.00019630798f), t10);
        t12 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.008335929f), t11, t10);
        t13 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.04166123f), t12, t10);
        t14 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.16666618f), t13, t10);
        t15 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.50000036f), t14, t10);
        t16 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t15, t10);
        t17 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t16, t10);
        t18 = svreinterpret_s32_f32(t7);
        t19 = svlsl_n_s32_x(svptrue_b32(), t18, 23);
        t20 = svreinterpret_f32_s32(t19);
        t21 = svmul_f32_x(svptrue_b32(), t17, t20);
        t22 = svsel_f32(t3, svdup_n_f32(0.0f), t20);
        t23 = svmul_f32_x(svptrue_b32(), t21, t22);
        svst1_f32(svptrue_b32(), kept0 + j + 8, t23);
        all_r1_1 = svadd_f32_x(svptrue_b32(), all_r1_1, t23);
        l0 = svld1_f32(svptrue_b32(), x0 + j + 16);
        t2 = svsub_f32_x(svptrue_b32(), l0, t1);
        t3 = svcmplt_f32(svptrue_b32(), t2, svdup_n_f32((-87.33654f)));
        t4 = svcmplt_f32(svptrue_b32(), svdup_n_f32(89.0f), t2);
        t5 = svsel_f32(t4, svdup_n_f32(89.0f), t2);
        t6 = svsel_f32(t3, svdup_n_f32((-87.33654f)), t5);
        t7 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.2583039e+07f), t6, svdup_n_f32(0.7213475f));
        t8 = svsub_f32_x(svptrue_b32(), t7, svdup_n_f32(1.2583039e+07f));
        t9 = svmla_f32_x(svptrue_b32(), t6, t8, svdup_n_f32((-1.3862915f)));
        t10 = svmla_f32_x(svptrue_b32(), t9, t8, svdup_n_f32((-2.8572135e-06f)));
        t11 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.0014104752f), svdup_n_f32(0.00019630798f), t10);
        t12 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.008335929f), t11, t10);
        t13 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.04166123f), t12, t10);
        t14 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.16666618f), t13, t10);
        t15 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.50000036f), t14, t10);
        t16 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t15, t10);
        t17 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t16, t10);
        t18 = svreinterpret_s32_f32(t7);
        t19 = svlsl_n_s32_x(svptrue_b32(), t18, 23);
        t20 = svreinterpret_f32_s32(t19);
        t21 = svmul_f32_x(svptrue_b32(), t17, t20);
        t22 = svsel_f32(t3, svdup_n_f32(0.0f), t20);
        t23 = svmul_f32_x(svptrue_b32(), t21, t22);
        svst1_f32(svptrue_b32(), kept0 + j + 16, t23);
        all_r1_2 = svadd_f32_x(svptrue_b32(), all_r1_2, t23);
        l0 = svld1_f32(svptrue_b32(), x0 + j + 24);
        t2 = svsub_f32_x(svptrue_b32(), l0, t1);
        t3 = svcmplt_f32(svptrue_b32(), t2, svdup_n_f32((-87.33654f)));
        t4 = svcmplt_f32(svptrue_b32(), svdup_n_f32(89.0f), t2);
        t5 = svsel_f32(t4, svdup_n_f32(89.0f), t2);
        t6 = svsel_f32(t3, svdup_n_f32((-87.33654f)), t5);
        t7 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.2583039e+07f), t6, svdup_n_f32(0.7213475f));
        t8 = svsub_f32_x(svptrue_b32(), t7, svdup_n_f32(1.2583039e+07f));
        t9 = svmla_f32_x(svptrue_b32(), t6, t8, svdup_n_f32((-1.3862915f)));
        t10 = svmla_f32_x(svptrue_b32(), t9, t8, svdup_n_f32((-2.8572135e-06f)));
        t11 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.0014104752f), svdup_n_f32(0.00019630798f), t10);
        t12 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.008335929f), t11, t10);
        t13 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.04166123f), t12, t10);
        t14 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.16666618f), t13, t10);
        t15 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.50000036f), t14, t10);
        t16 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t15, t10);
        t17 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t16, t10);
        t18 = svreinterpret_s32_f32(t7);
        t19 = svlsl_n_s32_x(svptrue_b32(), t18, 23);
        t20 = svreinterpret_f32_s32(t19);
        t21 = svmul_f32_x(svptrue_b32(), t17, t20);
        t22 = svsel_f32(t3, svdup_n_f32(0.0f), t20);
        t23 = svmul_f32_x(svptrue_b32(), t21, t22);
        svst1_f32(svptrue_b32(), kept0 + j + 24, t23);
        all_r1_3 = svadd_f32_x(svptrue_b32(), all_r1_3, t23);
      }
      if (j_run + 2048 < n - n % 32) {
        runs_r1_0 = svadd_f32_x(svptrue_b32(), runs_r1_0, all_r1_0);
        runs_r1_1 = svadd_f32_x(svptrue_b32(), runs_r1_1, all_r1_1);
        runs_r1_2 = svadd_f32_x(svptrue_b32(), runs_r1_2, all_r1_2);
        runs_r1_3 = svadd_f32_x(svptrue_b32(), runs_r1_3, all_r1_3);
        all_r1_0 = svdup_n_f32(0.0f);
        all_r1_1 = svdup_n_f32(0.0f);
        all_r1_2 = svdup_n_f32(0.0f);
        all_r1_3 = svdup_n_f32(0.0f);
      }
    }
    if (j_block + 131072 < n - n % 32) {
      blocks_r1_0 = svadd_f32_x(svptrue_b32(), blocks_r1_0, runs_r1_0);
      blocks_r1_1 = svadd_f32_x(svptrue_b32(), blocks_r1_1, runs_r1_1);
      blocks_r1_2 = svadd_f32_x(svptrue_b32(), blocks_r1_2, runs_r1_2);
      blocks_r1_3 = svadd_f32_x(svptrue_b32(), blocks_r1_3, runs_r1_3);
      runs_r1_0 = svdup_n_f32(0.0f);
      runs_r1_1 = svdup_n_f32(0.0f);
      runs_r1_2 = svdup_n_f32(0.0f);
      runs_r1_3 = svdup_n_f32(0.0f);
    }
  }
  all_r1_0 = svadd_f32_x(svptrue_b32(), runs_r1_0, all_r1_0);
  all_r1_1 = svadd_f32_x(svptrue_b32(), runs_r1_1, all_r1_1);
  all_r1_2 = svadd_f32_x(svptrue_b32(), runs_r1_2, all_r1_2);
  all_r1_3 = svadd_f32_x(svptrue_b32(), runs_r1_3, all_r1_3);
  all_r1_0 = svadd_f32_x(svptrue_b32(), blocks_r1_0, all_r1_0);
  all_r1_1 = svadd_f32_x(svptrue_b32(), blocks_r1_1, all_r1_1);
  all_r1_2 = svadd_f32_x(svptrue_b32(), blocks_r1_2, all_r1_2);
  all_r1_3 = svadd_f32_x(svptrue_b32(), blocks_r1_3, all_r1_3);
  for (long j = n - n % 32; j < n - n % 8; j += 8) {
    l0 = svld1_f32(svptrue_b32(), x0 + j);
    t2 = svsub_f32_x(svptrue_b32(), l0, t1);
    t3 = svcmplt_f32(svptrue_b32(), t2, svdup_n_f32((-87.33654f)));
    t4 = svcmplt_f32(svptrue_b32(), svdup_n_f32(89.0f), t2);
    t5 = svsel_f32(t4, svdup_n_f32(89.0f), t2);
    t6 = svsel_f32(t3, svdup_n_f32((-87.33654f)), t5);
    t7 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.2583039e+07f), t6, svdup_n_f32(0.7213475f));
    t8 = svsub_f32_x(svptrue_b32(), t7, svdup_n_f32(1.2583039e+07f));
    t9 = svmla_f32_x(svptrue_b32(), t6, t8, svdup_n_f32((-1.3862915f)));
    t10 = svmla_f32_x(svptrue_b32(), t9, t8, svdup_n_f32((-2.8572135e-06f)));
    t11 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.0014104752f), svdup_n_f32(0.00019630798f), t10);
    t12 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.008335929f), t11, t10);
    t13 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.04166123f), t12, t10);
    t14 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.16666618f), t13, t10);
    t15 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.50000036f), t14, t10);
    t16 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t15, t10);
    t17 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t16, t10);
    t18 = svreinterpret_s32_f32(t7);
    t19 = svlsl_n_s32_x(svptrue_b32(), t18, 23);
    t20 = svreinterpret_f32_s32(t19);
    t21 = svmul_f32_x(svptrue_b32(), t17, t20);
    t22 = svsel_f32(t3, svdup_n_f32(0.0f), t20);
    t23 = svmul_f32_x(svptrue_b32(), t21, t22);
    svst1_f32(svptrue_b32(), kept0 + j, t23);
    all_r1_0 = svadd_f32_x(svptrue_b32(), all_r1_0, t23);
  }
  if (n - n % 8 < n) {
    const long j = n - n % 8;
    const long left = n - (n - n % 8);
    few = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(n - (n - n % 8), 8))));
    l0 = svld1_f32(few, x0 + j);
    t2 = svsub_f32_x(svptrue_b32(), l0, t1);
    t3 = svcmplt_f32(svptrue_b32(), t2, svdup_n_f32((-87.33654f)));
    t4 = svcmplt_f32(svptrue_b32(), svdup_n_f32(89.0f), t2);
    t5 = svsel_f32(t4, svdup_n_f32(89.0f), t2);
    t6 = svsel_f32(t3, svdup_n_f32((-87.33654f)), t5);
    t7 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.2583039e+07f), t6, svdup_n_f32(0.7213475f));
    t8 = svsub_f32_x(svptrue_b32(), t7, svdup_n_f32(1.2583039e+07f));
    t9 = svmla_f32_x(svptrue_b32(), t6, t8, svdup_n_f32((-1.3862915f)));
    t10 = svmla_f32_x(svptrue_b32(), t9, t8, svdup_n_f32((-2.8572135e-06f)));
    t11 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.0014104752f), svdup_n_f32(0.00019630798f), t10);
    t12 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.008335929f), t11, t10);
    t13 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.04166123f), t12, t10);
    t14 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.16666618f), t13, t10);
    t15 = svmla_f32_x(svptrue_b32(), svdup_n_f32(0.50000036f), t14, t10);
    t16 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t15, t10);
    t17 = svmla_f32_x(svptrue_b32(), svdup_n_f32(1.0f), t16, t10);
    t18 = svreinterpret_s32_f32(t7);
    t19 = svlsl_n_s32_x(svptrue_b32(), t18, 23);
    t20 = svreinterpret_f32_s32(t19);
    t21 = svmul_f32_x(svptrue_b32(), t17, t20);
    t22 = svsel_f32(t3, svdup_n_f32(0.0f), t20);
    t23 = svmul_f32_x(svptrue_b32(), t21, t22);
    svst1_f32(svptrue_b32(), kept0 + j, t23);
    all_r1_0_at = svindex_s32((int)(0), 1);
    all_r1_0_count = svdup_n_s32((int)(left));
    all_r1_0_there = svcmplt_s32(svptrue_b32(), all_r1_0_at, all_r1_0_count);
    all_r1_0_kept = svsel_f32(all_r1_0_there, t23, svdup_n_f32(0.0f));
    all_r1_0 = svadd_f32_x(svptrue_b32(), all_r1_0, all_r1_0_kept);
  }
  all_r1_0 = svadd_f32_x(svptrue_b32(), all_r1_0, all_r1_1);
  all_r1_0 = svadd_f32_x(svptrue_b32(), all_r1_0, all_r1_2);
  all_r1_0 = svadd_f32_x(svptrue_b32(), all_r1_0, all_r1_3);
  svst1_f32(svptrue_b32(), lane, all_r1_0);
  *(r1) = sum_8(lane);
  t24_one = svdup_n_f32(*(r1));
  t24 = t24_one;
  for (long j = 0; j < n - n % 8; j += 8) {
    t23 = svld1_f32(svptrue_b32(), kept0 + j);
    t25 = svdiv_f32_x(svptrue_b32(), t23, t24);
    svst1_f32(svptrue_b32(), x1 + j, t25);
  }
  if (n - n % 8 < n) {
    const long j = n - n % 8;
    few = svwhilelt_b32_u32(0, (unsigned)(max_(0, min_(n - (n - n % 8), 8))));
    t23 = svld1_f32(svptrue_b32(), kept0 + j);
    t25 = svdiv_f32_x(svptrue_b32(), t23, t24);
    svst1_f32(few, x1 + j, t25);
  }
}

/* A share of the rows */
static void some_rows(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long m = g->m;
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  float *work = (float *)g->work;
  const float *x0 = (const float *)g->operands[0].p;
  const long x0_b = g->operands[0].b;
  const long x0_m = g->operands[0].m;
  float *x1 = (float *)g->operands[1].p;
  const long x1_b = g->operands[1].b;
  const long x1_m = g->operands[1].m;
  float *kept0 = work + worker * ((n + 63) / 64 * 64);
  for (long r = div_(m * batch * task, min_(m * batch, workers * 4)); r < div_(m * batch * (task + 1), min_(m * batch, workers * 4)); ++r) {
    const long item = div_(r, m);
    const long row = mod_(r, m);
    one_row(m, n, item, row, x0 + item * x0_b + row * x0_m, x0_m, x1 + item * x1_b + row * x1_m, x1_m, kept0);
  }
}

/* All rows */
void portmm_rows_sve256_f32(const portmm_args *g) {
  const long m = g->m;
  const long batch = g->batch;
  const long workers = g->workers;
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, some_rows, task_ctx, min_(m * batch, workers * 4), workers);
  }
}
