/* portmm_fold_s32_u4_u4_1x16x8_avx2, made by portmm 0.1.0 for AVX2 and FMA */
/* folds codes of four bits into panels of 16 columns, groups of 32 rows */
/* made again by: portmm.pack on AVX2 and FMA */

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

static inline long div_(long x, long y) { return y == 1 ? x : x / y; }

static inline long mod_(long x, long y) { return y == 1 ? 0 : x % y; }

typedef int lanes_t __attribute__((vector_size(32)));

/* The end of a page of C */
static void touch_page(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long c_m = g->c_m;
  int *c = (int *)g->c;
  *(c + c_m + task * 524288) = 0;
}

/* to[panel][16] = row[columns], padded with zeros */
static __attribute__((noinline)) void heads(long columns, const int *row, int *to, long panel_step) {
  v8i v0, v8;
  for (long q = 0; q < columns / 16; ++q) {
    v0 = *(const v8i_u *)(row + q * 16);
    *(v8i_u *)(to + q * panel_step) = v0;
    v8 = *(const v8i_u *)(row + q * 16 + 8);
    *(v8i_u *)(to + q * panel_step + 8) = v8;
  }
  for (long j = columns / 16 * 16; j < (columns + 15) / 16 * 16; ++j) {
    if (j < columns) {
      *(to + columns / 16 * panel_step + j - columns / 16 * 16) = *(row + j);
    } else {
      *(to + columns / 16 * panel_step + j - columns / 16 * 16) = 0;
    }
  }
}

/* to[panels][16] = words of codes[8][panels * 16] */
static __attribute__((noinline)) void words(long panels, const unsigned char *b, long b_k, int *to, long panel_step) {
  v8i word0, word8;
  for (long q = 0; q < panels; ++q) {
    {
  const unsigned char *r = b + q * 16;
  const long s = b_k;
  const v2q x0 = {*(const u64_u *)r | *(const u64_u *)(r + 4 * s) << 4};
  const v2q x1 = {*(const u64_u *)(r + s) | *(const u64_u *)(r + 5 * s) << 4};
  const v2q x2 = {*(const u64_u *)(r + 2 * s) | *(const u64_u *)(r + 6 * s) << 4};
  const v2q x3 = {*(const u64_u *)(r + 3 * s) | *(const u64_u *)(r + 7 * s) << 4};
  v16c low, high;
  v8u w, t;
  __asm__("vpunpcklbw %2, %1, %0" : "=x"(low) : "x"(x0), "x"(x1));
  __asm__("vpunpcklbw %2, %1, %0" : "=x"(high) : "x"(x2), "x"(x3));
  __asm__("vpmovzxwd %1, %0" : "=x"(w) : "x"(low));
  __asm__("vpmovzxwd %1, %0" : "=x"(t) : "x"(high));
  word0 = (v8i)(w | t << 16);
}
    *(v8i_u *)(to + q * panel_step) = word0;
    {
  const unsigned char *r = b + q * 16 + 8;
  const long s = b_k;
  const v2q x0 = {*(const u64_u *)r | *(const u64_u *)(r + 4 * s) << 4};
  const v2q x1 = {*(const u64_u *)(r + s) | *(const u64_u *)(r + 5 * s) << 4};
  const v2q x2 = {*(const u64_u *)(r + 2 * s) | *(const u64_u *)(r + 6 * s) << 4};
  const v2q x3 = {*(const u64_u *)(r + 3 * s) | *(const u64_u *)(r + 7 * s) << 4};
  v16c low, high;
  v8u w, t;
  __asm__("vpunpcklbw %2, %1, %0" : "=x"(low) : "x"(x0), "x"(x1));
  __asm__("vpunpcklbw %2, %1, %0" : "=x"(high) : "x"(x2), "x"(x3));
  __asm__("vpmovzxwd %1, %0" : "=x"(w) : "x"(low));
  __asm__("vpmovzxwd %1, %0" : "=x"(t) : "x"(high));
  word8 = (v8i)(w | t << 16);
}
    *(v8i_u *)(to + q * panel_step + 8) = word8;
  }
}

/* to[16] = words of codes[rows][columns], padded with zeros */
static __attribute__((noinline)) void edge(long rows, long columns, const unsigned char *b, long b_k, int *to) {
  unsigned char tile[128] __attribute__((aligned(64)));
  for (long i = 0; i < 128; ++i) {
    *(tile + i) = 0;
  }
  for (long e = 0; e < rows; ++e) {
    for (long j = 0; j < columns; ++j) {
      *(tile + e * 16 + j) = *(b + e * b_k + j);
    }
  }
  words(1, tile, 16, to, 16);
}

/* Some units of a few panels */
static void share_of_codes(const long *ctx, long task, long worker) {
  const portmm_args *g = (const portmm_args *)ctx[0];
  (void)g; (void)task; (void)worker;
  const long n = g->n;
  const long k = g->k;
  const long b_k = g->b_k;
  const unsigned char *b = (const unsigned char *)g->b;
  int *c = (int *)g->c;
  const int *x0 = (const int *)g->operands[0].p;
  const int *x1 = (const int *)g->operands[1].p;
  const long column = mod_(task, ((n + 15) / 16 + 63) / 64) * 1024;
  const long columns = min_(n - column, 1024);
  const long step = ((k + 31) / 32 * 2 + (k + 7) / 8) * 16;
  int *panels = c + mod_(task, ((n + 15) / 16 + 63) / 64) * 64 * step;
  const long first = div_(task, ((n + 15) / 16 + 63) / 64) * 32;
  for (long u = first; u < min_(first + 32, (k + 7) / 8); ++u) {
    if (u % 4 == 0) {
      heads(columns, x0 + u / 4 * n + column, panels + (u + 2 * (u / 4)) * 16, step);
      heads(columns, x1 + u / 4 * n + column, panels + (u + 2 * (u / 4)) * 16 + 16, step);
    }
    const unsigned char *codes = b + u * (b_k * 8) + column;
    int *to = panels + (u + 2 * (u / 4)) * 16 + 32;
    const long rows = min_(k - u * 8, 8);
    const long whole = (rows == 8) * (columns / 16);
    words(whole, codes, b_k, to, step);
    for (long q = whole; q < (columns + 15) / 16; ++q) {
      edge(rows, min_(columns - q * 16, 16), codes + q * 16, b_k, to + q * step);
    }
  }
}

/* Every panel */
void portmm_fold_s32_u4_u4_1x16x8_avx2(const portmm_args *g) {
  const long n = g->n;
  const long k = g->k;
  const long c_n = g->c_n;
  const long workers = g->workers;
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, touch_page, task_ctx, c_n, workers);
  }
  {
    const long task_ctx[] = {(long)g};
    g->parallel(g->pool, share_of_codes, task_ctx, ((k + 7) / 8 + 31) / 32 * (((n + 15) / 16 + 63) / 64), workers);
  }
}
