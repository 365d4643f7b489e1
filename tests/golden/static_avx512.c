/* portmm_gemm_f32_f32_f32_4x16x1_avx512, made by portmm 0.1.0 for AVX-512 */
/* gemm avx512: registers 4x16x1, L1 4x16xall, L2 allx16xall, L3 allxallxall; A row in place, B row in place, threads over batch, static 4x16x8 */
/* made again by: portmm emit --schedule gemm:avx512:f32:4x16x1/4x16x0/0x16x0/0x0x0:4-4:a=row,b=row,panels=1,over=batch,lanes=0,prefetch=0,static=4x16x8 */

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

static inline long div_(long x, long y) { return y == 1 ? x : x / y; }

static inline long mod_(long x, long y) { return y == 1 ? 0 : x % y; }

typedef int lanes_t __attribute__((vector_size(64)));

/* C[4][columns] (+)= A[4][k] . B[k][16] */
static inline __attribute__((always_inline)) void ukr_4x16(long k, const float *a, long a_m, long a_k, const float *b, long b_k, float *c, long c_m, long columns, long accumulate) {
  v16f c0_0, c1_0, c2_0, c3_0, b0, before0, before1, before2, before3;
  float a0, a1;
  c0_0 = (v16f){0};
  c1_0 = (v16f){0};
  c2_0 = (v16f){0};
  c3_0 = (v16f){0};
  #pragma GCC unroll 8
  for (long p = 0; p < k; ++p) {
    b0 = *(const v16f_u *)(b + p * b_k);
    a0 = *(a + p * a_k);
    c0_0 += a0 * b0;
    a1 = *(a + a_m + p * a_k);
    c1_0 += a1 * b0;
    a0 = *(a + 2 * a_m + p * a_k);
    c2_0 += a0 * b0;
    a1 = *(a + 3 * a_m + p * a_k);
    c3_0 += a1 * b0;
  }
  if (accumulate) {
    before0 = *(const v16f_u *)(c);
    c0_0 += before0;
    before1 = *(const v16f_u *)(c + c_m);
    c1_0 += before1;
    before2 = *(const v16f_u *)(c + 2 * c_m);
    c2_0 += before2;
    before3 = *(const v16f_u *)(c + 3 * c_m);
    c3_0 += before3;
  }
  *(v16f_u *)(c) = c0_0;
  *(v16f_u *)(c + c_m) = c1_0;
  *(v16f_u *)(c + 2 * c_m) = c2_0;
  *(v16f_u *)(c + 3 * c_m) = c3_0;
}

/* A share of the batch, one item after the other */
static void items(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long m = 4;
  const long n = 16;
  const long k = 8;
  const long batch = g->batch;
  const long a_m = 8;
  const long a_batch = g->a_batch;
  const long b_k = 16;
  const long b_batch = g->b_batch;
  const long c_m = 16;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  const float *a = (const float *)g->a;
  const float *b = (const float *)g->b;
  float *c = (float *)g->c;
  for (long item = div_(batch * task, min_(batch, workers * 4)); item < div_(batch * (task + 1), min_(batch, workers * 4)); ++item) {
    for (long block = 0; block < 1; ++block) {
      const long row = 0;
      const long rows = m;
      const long first = 0;
      const long last = (n + 15) / 16;
      const long slices = (rows + 3) / 4;
      const long height = div_(rows, slices);
      const long taller = mod_(rows, slices);
      const long kd = k;
      for (long j = first; j < last; ++j) {
        const long column = j * 16;
        const long columns = min_(n - column, 16);
        const float *bp = b + item * b_batch + column;
        for (long i = 0; i < slices; ++i) {
          const long r = i * height + min_(i, taller);
          ukr_4x16(kd, a + item * a_batch + (row + r) * a_m, a_m, 1, bp, b_k, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0);
        }
      }
    }
  }
}

/* All products of the batch */
void portmm_gemm_f32_f32_f32_4x16x1_avx512(const portmm_args *g) {
  const long batch = g->batch;
  const long workers = g->workers;
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, items, task_ctx, min_(batch, workers * 4), workers);
  }
}
