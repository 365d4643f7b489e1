/* portmm_gemm_f32_f32_f32_1x16x1_avx2, made by portmm 0.1.0 for AVX2 and FMA */
/* gemm avx2: registers 1x16x1, L1 1x16xall, L2 allx16xall, L3 allxallxall; A row in place, B prepacked, 2 panels a visit, threads over tiles */
/* made again by: portmm emit --schedule gemm:avx2:f32:1x16x1/1x16x0/0x16x0/0x0x0:1-1:a=row,b=packed,panels=2,over=tiles,lanes=0,prefetch=0 */

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

/* C[1][columns] (+)= A[1][k] . B[k][32] */
static __attribute__((noinline)) void ukr_1x32(long k, const float *a, long a_m, long a_k, const float *b, long b_panel, float *c, long c_m, long columns, long accumulate) {
  v8f c0_0, c0_1, c0_2, c0_3, b0, b1, b2, b3, before0, before1, before2, before3;
  float a0;
  c0_0 = (v8f){0};
  c0_1 = (v8f){0};
  c0_2 = (v8f){0};
  c0_3 = (v8f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v8f_u *)(b + p * 16);
    b1 = *(const v8f_u *)(b + p * 16 + 8);
    b2 = *(const v8f_u *)(b + b_panel + p * 16);
    b3 = *(const v8f_u *)(b + b_panel + p * 16 + 8);
    a0 = *(a + p * a_k);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
    c0_2 += a0 * b2;
    c0_3 += a0 * b3;
  }
  if (accumulate) {
    before0 = *(const v8f_u *)(c);
    c0_0 += before0;
    before1 = *(const v8f_u *)(c + 8);
    c0_1 += before1;
    before2 = *(const v8f_u *)(c + 16);
    c0_2 += before2;
    before3 = *(const v8f_u *)(c + 24);
    c0_3 += before3;
  }
  *(v8f_u *)(c) = c0_0;
  *(v8f_u *)(c + 8) = c0_1;
  *(v8f_u *)(c + 16) = c0_2;
  *(v8f_u *)(c + 24) = c0_3;
}

/* C[1][columns] (+)= A[1][k] . B[k][16] */
static __attribute__((noinline)) void ukr_1x16(long k, const float *a, long a_m, long a_k, const float *b, float *c, long c_m, long columns, long accumulate) {
  v8i m0, m1;
  v8f c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  m0 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns, 8)));
  m1 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns - 8, 8)));
  c0_0 = (v8f){0};
  c0_1 = (v8f){0};
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v8f_u *)(b + p * 16);
    b1 = *(const v8f_u *)(b + p * 16 + 8);
    a0 = *(a + p * a_k);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
  }
  if (columns < 16) {
    if (accumulate) {
      __asm__("vmaskmovps %1, %2, %0" : "=x"(before0) : "m"(*(const v8f_u *)(c)), "x"(m0));
      c0_0 += before0;
      __asm__("vmaskmovps %1, %2, %0" : "=x"(before1) : "m"(*(const v8f_u *)(c + 8)), "x"(m1));
      c0_1 += before1;
    }
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c)) : "x"(c0_0), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c + 8)) : "x"(c0_1), "x"(m1));
  } else {
    if (accumulate) {
      before0 = *(const v8f_u *)(c);
      c0_0 += before0;
      before1 = *(const v8f_u *)(c + 8);
      c0_1 += before1;
    }
    *(v8f_u *)(c) = c0_0;
    *(v8f_u *)(c + 8) = c0_1;
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
  const long a_batch = g->a_batch;
  const long b_n = g->b_n;
  const long b_batch = g->b_batch;
  const long c_m = g->c_m;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  const float *a = (const float *)g->a;
  const float *b = (const float *)g->b;
  float *c = (float *)g->c;
  const long shares = max_(1, min_((n + 31) / 32, (workers - 1) * 4));
  const long row = 0;
  const long rows = m;
  const long first = div_((n + 31) / 32 * mod_(task, shares), shares) * 2;
  const long last = min_((n + 15) / 16, div_((n + 31) / 32 * (mod_(task, shares) + 1), shares) * 2);
  const long slices = rows;
  const long height = div_(rows, slices);
  const long taller = mod_(rows, slices);
  const long run_count = max_(1, (k + 319) / 320);
  const long run = (div_(k + run_count - 1, run_count) + 31) / 32 * 32;
  const long kd = k;
  const long wide = first + max_(0, min_((last - first) / 2 * 2, (n / 16 - first) / 2 * 2));
  for (long j = first; j < wide; j += 2) {
    const long column = j * 16;
    const long columns = min_(n - column, 32);
    const float *bp = b + item * b_batch + j * b_n;
    for (long i = 0; i < slices; ++i) {
      const long r = i * height + min_(i, taller);
      for (long p_run = 0; p_run < kd; p_run += run) {
        ukr_1x32(min_(run, kd - p_run), a + item * a_batch + (row + r) * a_m + p_run, a_m, 1, bp + p_run * 16, b_n, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < p_run);
      }
    }
  }
  for (long j = wide; j < last; ++j) {
    const long column = j * 16;
    const long columns = min_(n - column, 16);
    const float *bp = b + item * b_batch + j * b_n;
    for (long i = 0; i < slices; ++i) {
      const long r = i * height + min_(i, taller);
      for (long p_run = 0; p_run < kd; p_run += run) {
        ukr_1x16(min_(run, kd - p_run), a + item * a_batch + (row + r) * a_m + p_run, a_m, 1, bp + p_run * 16, c + item * c_batch + (row + r) * c_m + column, c_m, columns, 0 < p_run);
      }
    }
  }
}

/* All products of the batch */
void portmm_gemm_f32_f32_f32_1x16x1_avx2(const portmm_args *g) {
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, block, task_ctx, max_(1, min_((n + 31) / 32, (workers - 1) * 4)), workers);
    }
  }
}
