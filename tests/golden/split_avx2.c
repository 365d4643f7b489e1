/* portmm_gemm_f32_f32_f32_1x16x1_avx2, made by portmm 0.1.0 for AVX2 and FMA */
/* gemm avx2: registers 1x16x1, L1 1x16x8, L2 allx16x8, L3 allxallx8; A row in place, B row in place, threads over k */
/* made again by: portmm emit --schedule gemm:avx2:f32:1x16x1/1x16x8/0x16x8/0x0x8:1-1:a=row,b=row,panels=1,over=k,lanes=0,prefetch=4 */

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

/* C[1][columns] (+)= A[1][k] . B[k][16] */
static inline __attribute__((always_inline)) void ukr_1x16_full(long k, const float *a, long a_m, long a_k, const float *b, long b_k, float *c, long c_m, long columns, long accumulate, float *kept, long kept_m, long add, long keep) {
  v8f c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  if (accumulate) {
    c0_0 = *(const v8f_u *)(c);
    c0_1 = *(const v8f_u *)(c + 8);
  } else {
    c0_0 = (v8f){0};
    c0_1 = (v8f){0};
  }
  #pragma GCC unroll 8
  for (long p = 0; p < k; ++p) {
    __builtin_prefetch(b + p * b_k + b_k * 4);
    b0 = *(const v8f_u *)(b + p * b_k);
    __builtin_prefetch(b + p * b_k + 8 + b_k * 4);
    b1 = *(const v8f_u *)(b + p * b_k + 8);
    a0 = *(a + p * a_k);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
  }
  if (add) {
    before0 = *(const v8f_u *)(kept);
    c0_0 += before0;
    before1 = *(const v8f_u *)(kept + 8);
    c0_1 += before1;
  }
  if (keep) {
    *(v8f_u *)(kept) = c0_0;
    *(v8f_u *)(kept + 8) = c0_1;
  } else {
    *(v8f_u *)(c) = c0_0;
    *(v8f_u *)(c + 8) = c0_1;
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][16] */
static inline __attribute__((always_inline)) void ukr_1x16_short(long k, const float *a, long a_m, long a_k, const float *b, long b_k, float *c, long c_m, long columns, long accumulate, float *kept, long kept_m, long add, long keep) {
  v8f c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  if (accumulate) {
    c0_0 = *(const v8f_u *)(c);
    c0_1 = *(const v8f_u *)(c + 8);
  } else {
    c0_0 = (v8f){0};
    c0_1 = (v8f){0};
  }
  for (long p = 0; p < k; ++p) {
    __builtin_prefetch(b + p * b_k + b_k * 4);
    b0 = *(const v8f_u *)(b + p * b_k);
    __builtin_prefetch(b + p * b_k + 8 + b_k * 4);
    b1 = *(const v8f_u *)(b + p * b_k + 8);
    a0 = *(a + p * a_k);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
  }
  if (add) {
    before0 = *(const v8f_u *)(kept);
    c0_0 += before0;
    before1 = *(const v8f_u *)(kept + 8);
    c0_1 += before1;
  }
  if (keep) {
    *(v8f_u *)(kept) = c0_0;
    *(v8f_u *)(kept + 8) = c0_1;
  } else {
    *(v8f_u *)(c) = c0_0;
    *(v8f_u *)(c + 8) = c0_1;
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][16] */
static __attribute__((noinline)) void ukr_1x16(long k, const float *a, long a_m, long a_k, const float *b, long b_k, float *c, long c_m, long columns, long accumulate, float *kept, long kept_m, long add, long keep) {
  v8i m0, m1;
  v8f c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  m0 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns, 8)));
  m1 = (v8i){0, 1, 2, 3, 4, 5, 6, 7} < (v8i){0} + (int)(max_(0, min_(columns - 8, 8)));
  if (accumulate) {
    __asm__("vmaskmovps %1, %2, %0" : "=x"(c0_0) : "m"(*(const v8f_u *)(c)), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "=x"(c0_1) : "m"(*(const v8f_u *)(c + 8)), "x"(m1));
  } else {
    c0_0 = (v8f){0};
    c0_1 = (v8f){0};
  }
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    __builtin_prefetch(b + p * b_k + b_k * 4);
    __asm__("vmaskmovps %1, %2, %0" : "=x"(b0) : "m"(*(const v8f_u *)(b + p * b_k)), "x"(m0));
    __builtin_prefetch(b + p * b_k + 8 + b_k * 4);
    __asm__("vmaskmovps %1, %2, %0" : "=x"(b1) : "m"(*(const v8f_u *)(b + p * b_k + 8)), "x"(m1));
    a0 = *(a + p * a_k);
    c0_0 += a0 * b0;
    c0_1 += a0 * b1;
  }
  if (add) {
    __asm__("vmaskmovps %1, %2, %0" : "=x"(before0) : "m"(*(const v8f_u *)(kept)), "x"(m0));
    c0_0 += before0;
    __asm__("vmaskmovps %1, %2, %0" : "=x"(before1) : "m"(*(const v8f_u *)(kept + 8)), "x"(m1));
    c0_1 += before1;
  }
  if (keep) {
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(kept)) : "x"(c0_0), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(kept + 8)) : "x"(c0_1), "x"(m1));
  } else {
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c)) : "x"(c0_0), "x"(m0));
    __asm__("vmaskmovps %1, %2, %0" : "+m"(*(v8f_u *)(c + 8)) : "x"(c0_1), "x"(m1));
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][columns] */
static __attribute__((noinline)) void sweep_1x8(long k, const float *a, long a_m, long a_k, const float *b, long b_k, float *c, long c_m, long columns, long accumulate, float *kept, long kept_m, long add, long keep) {
  const long width = columns / 16 * 16;
  if (k == 8) {
    for (long j = 0; j < width; j += 16) {
      ukr_1x16_full(8, a, a_m, a_k, b + j, b_k, c + j, c_m, 16, accumulate, kept + j, kept_m, add, keep);
    }
  } else {
    for (long j = 0; j < width; j += 16) {
      ukr_1x16_short(k, a, a_m, a_k, b + j, b_k, c + j, c_m, 16, accumulate, kept + j, kept_m, add, keep);
    }
  }
  if (width < columns) {
    const long j = width;
    ukr_1x16(k, a, a_m, a_k, b + j, b_k, c + j, c_m, columns - width, accumulate, kept + j, kept_m, add, keep);
  }
}

/* All of C over a run of k */
static void run_of_k(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  const long item = ctx[1];
  (void)g; (void)task; (void)worker;
  const long m = g->m;
  const long n = g->n;
  const long k = g->k;
  const long a_m = g->a_m;
  const long a_batch = g->a_batch;
  const long b_k = g->b_k;
  const long b_batch = g->b_batch;
  const long workers = g->workers;
  const float *a = (const float *)g->a;
  const float *b = (const float *)g->b;
  float *work = (float *)g->work;
  const long kb = 8;
  const long steps = div_(k + kb - 1, kb);
  const long runs = min_(workers, steps);
  const long k_first = div_(steps * task, runs) * kb;
  const long k_last = min_(k, div_(steps * (task + 1), runs) * kb);
  float *cp = work + (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 < k) * (m * ((n + 15) / 16 * 16)) + 63) / 64 * 64 * workers + task * (m * n);
  for (long block = 0; block < 1; ++block) {
    const long row = 0;
    const long rows = m;
    const long first = 0;
    const long last = (n + 15) / 16;
    const long slices = rows;
    const long height = div_(rows, slices);
    const long taller = mod_(rows, slices);
    float *kept = work + worker * ((((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 < k) * (m * ((n + 15) / 16 * 16)) + 63) / 64 * 64) + (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 < k) * (m * ((n + 15) / 16 * 16)) + 63) / 64 * 64 - (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 < k) * (m * ((n + 15) / 16 * 16)) + 63) / 64 * 64;
    const long run = (div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32;
    for (long run_start = k_first; run_start < k_last; run_start += run) {
      for (long pc = run_start; pc < min_(k_last, run_start + run); pc += kb) {
        const long kd = min_(kb, min_(k_last, run_start + run) - pc);
        if (first < last) {
          const long j = first;
          const long column = j * 16;
          const long columns = min_(n - column, (last - first) * 16);
          const float *bp = b + item * b_batch + pc * b_k + column;
          for (long i = 0; i < slices; ++i) {
            const long r = i * height + min_(i, taller);
            sweep_1x8(kd, a + item * a_batch + (row + r) * a_m + pc, a_m, 1, bp, b_k, cp + (row + r) * n + column, n, columns, run_start < pc, kept + (row + r - row) * ((last - first) * 16) + column - first * 16, (last - first) * 16, (pc + kd == min_(k_last, run_start + run)) * (k_first < run_start), (pc + kd == min_(k_last, run_start + run)) * (min_(k_last, run_start + run) < k_last));
          }
        }
      }
    }
  }
}

/* A piece of a row of C: the sum over runs */
static void sum_runs(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  const long item = ctx[1];
  (void)g; (void)task; (void)worker;
  const long m = g->m;
  const long n = g->n;
  const long k = g->k;
  const long c_m = g->c_m;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  float *c = (float *)g->c;
  float *work = (float *)g->work;
  const long i = div_(task, (n + 1023) / 1024);
  const long j_first = mod_(task, (n + 1023) / 1024) * 1024;
  const long j_last = min_(n, j_first + 1024);
  const long kb = 8;
  const long steps = div_(k + kb - 1, kb);
  const long runs = min_(workers, steps);
  for (long j = j_first; j < j_last; ++j) {
    *(c + item * c_batch + i * c_m + j) = *(work + (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 < k) * (m * ((n + 15) / 16 * 16)) + 63) / 64 * 64 * workers + i * n + j);
  }
  for (long run = 1; run < runs; ++run) {
    for (long j = j_first; j < j_last; ++j) {
      *(c + item * c_batch + i * c_m + j) += *(work + (((div_(k + max_(1, (k + 319) / 320) - 1, max_(1, (k + 319) / 320)) + 31) / 32 * 32 < k) * (m * ((n + 15) / 16 * 16)) + 63) / 64 * 64 * workers + i * n + j + run * (m * n));
    }
  }
}

/* All products of the batch */
void portmm_gemm_f32_f32_f32_1x16x1_avx2(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long k = g->k;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, run_of_k, task_ctx, min_(workers, (k + 7) / 8), workers);
    }
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, sum_runs, task_ctx, m * ((n + 1023) / 1024), workers);
    }
  }
}
