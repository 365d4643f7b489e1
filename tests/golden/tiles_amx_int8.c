/* portmm_tiles_s32_u8_s8_32x32x4_amx_int8, made by portmm 0.1.0 for AMX-INT8 */
/* tiles amx_int8: registers 32x32x1, L1 32x32x64, L2 64x32x64, L3 64x64x64; A packed, B prepacked, threads over tiles */
/* made again by: portmm emit --schedule tiles:amx_int8:u8-s8-s32:32x32x1/32x32x64/64x32x64/64x64x64:1-32:a=row,b=packed,panels=1,over=tiles,lanes=0,prefetch=0,kr=4,pack_a */

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
#ifndef TILE_ZERO
typedef struct {
  unsigned char palette, start, none[14];
  unsigned short bytes[16];
  unsigned char rows[16];
} tile_shapes;
#define TILE_CONFIGURE(...) \
  do { \
    tile_shapes shapes = {1, 0, {0}, {0}, {__VA_ARGS__}}; \
    for (int t = 0; t < 8; ++t) shapes.bytes[t] = shapes.rows[t] ? 64 : 0; /* none where there are no rows, or it faults */ \
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); \
  } while (0)
#define TILE_KEEP() \
  tile_shapes others; /* other code of this thread may rely on its tiles: llama.cpp configures them once */ \
  __asm__ volatile("sttilecfg %0" : "=m"(others))
#define TILE_RELEASE() \
  do { \
    if (others.palette) __asm__ volatile("ldtilecfg %0" : : "m"(others)); \
    else __asm__ volatile("tilerelease"); \
  } while (0)
#define TILE_ZERO(d) __asm__ volatile("tilezero %tmm" #d)
#define TILE_LOAD(d, p, step) \
  __asm__ volatile("tileloadd (%0,%1), %%tmm" #d : : "r"(p), "r"((step) * (long)sizeof(*(p))) : "memory")
#define TILE_STREAM(d, p, step) \
  __asm__ volatile("tileloaddt1 (%0,%1), %%tmm" #d : : "r"(p), "r"((step) * (long)sizeof(*(p))) : "memory")
#define TILE_STORE(d, p, step) \
  __asm__ volatile("tilestored %%tmm" #d ", (%0,%1)" : : "r"(p), "r"((step) * (long)sizeof(*(p))) : "memory")
#define TILE_MAC(op, d, a, b) __asm__ volatile(#op " %tmm" #b ", %tmm" #a ", %tmm" #d)
#endif

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

/* to[step][tall][64 bytes] = A[rows][elements], row layout */
static __attribute__((noinline)) void pack_lines(long elements, long rows, long tall, const unsigned char *a, long a_m, long a_k, int *to) {
  v16i x, z;
  unsigned char *parts = (unsigned char *)(to);
  int *zeros = (int *)(to);
  for (long i = 0; i < rows; ++i) {
    const int *line = (const int *)(a + i * a_m);
    #pragma GCC unroll 4
    for (long t = 0; t < elements / 64; ++t) {
      x = *(const v16i_u *)(line + t * 16);
      *(v16i_u *)(to + (t * tall + i) * 16) = x;
    }
    if (elements / 64 * 64 < elements) {
      const long t = elements / 64;
      z = (v16i){0};
      *(v16i_u *)(zeros + (t * tall + i) * 16) = z;
      for (long e = 0; e < elements - elements / 64 * 64; ++e) {
        *(parts + (t * tall + i) * 16 * 4 + e) = *(a + i * a_m + elements / 64 * 64 + e);
      }
    }
  }
}

/* to[u][32] = B[u][32] for u < count, then zeros */
static __attribute__((noinline)) void rest_1(long count, const int *b, int *to) {
  v16i x, z;
  for (long u = 0; u < count; ++u) {
    x = *(const v16i_u *)(b + u * 32);
    *(v16i_u *)(to + u * 32) = x;
    x = *(const v16i_u *)(b + u * 32 + 16);
    *(v16i_u *)(to + u * 32 + 16) = x;
  }
  int *zeros = (int *)(to);
  z = (v16i){0};
  for (long u = count; u < 16; ++u) {
    *(v16i_u *)(zeros + u * 32) = z;
    *(v16i_u *)(zeros + u * 32 + 16) = z;
  }
}

/* C[rows][columns] = sums,  as s32 */
static __attribute__((noinline)) void finish(long rows, long columns, int *sums, long wide, int *c, long c_m) {
  v16i x;
  unsigned short m;
  for (long i = 0; i < rows; ++i) {
    for (long j = 0; j < columns - columns % 16; j += 16) {
      x = *(const v16i_u *)(sums + i * wide + j);
      *(v16i_u *)(c + i * c_m + j) = x;
    }
    if (columns - columns % 16 < columns) {
      const long j = columns - columns % 16;
      m = (unsigned short)((1u << (max_(0, min_(columns - j, 16)))) - 1);
      x = *(const v16i_u *)(sums + i * wide + j);
      __asm__("vmovdqu32 %1, %0%{%2%}" : "+m"(*(v16i_u *)(c + i * c_m + j)) : "v"(x), "Yk"(m));
    }
  }
}

/* C[tall][32] (+)= A[tall][k] . B[k][32], in tiles */
static __attribute__((noinline)) void ukr_2x2(long k, const int *a, long tall, const int *b, const int *rest, int *c, long accumulate, long rows_done, long columns_done, int *sums_done, long wide_done, int *c_done, long c_m_done) {
  v16i zeros;
  if (accumulate) {
    TILE_LOAD(0, c, 32);
    TILE_LOAD(1, c + 16, 32);
    TILE_LOAD(2, c + (tall + 1) / 2 * 32, 32);
    TILE_LOAD(3, c + (tall + 1) / 2 * 32 + 16, 32);
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  const long part = max_(2, 2 * div_(tall + 2 * max_(1, k / 16) - 1, 2 * max_(1, k / 16)));
  const long busy = min_(k / 16, div_(rows_done + part - 1, part));
  for (long t = 0; t < busy; ++t) {
    TILE_STREAM(4, a + t * (tall * 16), 16);
    TILE_STREAM(5, a + t * (tall * 16) + (tall + 1) / 2 * 16, 16);
    TILE_LOAD(6, b + t * 512, 32);
    TILE_LOAD(7, b + t * 512 + 16, 32);
    TILE_MAC(tdpbusd, 0, 4, 6);
    TILE_MAC(tdpbusd, 2, 5, 6);
    TILE_MAC(tdpbusd, 1, 4, 7);
    TILE_MAC(tdpbusd, 3, 5, 7);
    if (t % 8 == 7) {
      zeros = (v16i){0};
      *(v16i_u *)(c) = zeros;
    }
    finish(min_(part, rows_done - t * part), columns_done, sums_done + t * part * wide_done, wide_done, c_done + t * part * c_m_done, c_m_done);
  }
  for (long t = busy; t < k / 16; ++t) {
    TILE_STREAM(4, a + t * (tall * 16), 16);
    TILE_STREAM(5, a + t * (tall * 16) + (tall + 1) / 2 * 16, 16);
    TILE_LOAD(6, b + t * 512, 32);
    TILE_LOAD(7, b + t * 512 + 16, 32);
    TILE_MAC(tdpbusd, 0, 4, 6);
    TILE_MAC(tdpbusd, 2, 5, 6);
    TILE_MAC(tdpbusd, 1, 4, 7);
    TILE_MAC(tdpbusd, 3, 5, 7);
    if (t % 8 == 7) {
      zeros = (v16i){0};
      *(v16i_u *)(c) = zeros;
    }
  }
  if (k / 16 * 16 < k) {
    TILE_LOAD(4, a + k / 16 * (tall * 16), 16);
    TILE_LOAD(5, a + k / 16 * (tall * 16) + (tall + 1) / 2 * 16, 16);
    TILE_LOAD(6, rest, 32);
    TILE_LOAD(7, rest + 16, 32);
    TILE_MAC(tdpbusd, 0, 4, 6);
    TILE_MAC(tdpbusd, 2, 5, 6);
    TILE_MAC(tdpbusd, 1, 4, 7);
    TILE_MAC(tdpbusd, 3, 5, 7);
  }
  if (busy * part < rows_done) {
    finish(min_(rows_done, rows_done - busy * part), columns_done, sums_done + busy * part * wide_done, wide_done, c_done + busy * part * c_m_done, c_m_done);
  }
  TILE_STORE(0, c, 32);
  TILE_STORE(1, c + 16, 32);
  TILE_STORE(2, c + (tall + 1) / 2 * 32, 32);
  TILE_STORE(3, c + (tall + 1) / 2 * 32 + 16, 32);
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
  const long b_n = g->b_n;
  const long b_batch = g->b_batch;
  const long c_m = g->c_m;
  const long c_batch = g->c_batch;
  const long workers = g->workers;
  const unsigned char *a = (const unsigned char *)g->a;
  const int *b = (const int *)g->b;
  int *c = (int *)g->c;
  int *work = (int *)g->work;
  const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64) < 2));
  const long blocks = min_(m, div_((m + 63) / 64 + even - 1, even) * even);
  const long shares = max_((n + 63) / 64, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64)));
  const long row = div_(m * div_(task, shares), blocks);
  const long rows = div_(m * (div_(task, shares) + 1), blocks) - row;
  const long first = div_((n + 31) / 32 * mod_(task, shares), shares);
  const long last = min_((n + 31) / 32, div_((n + 31) / 32 * (mod_(task, shares) + 1), shares));
  const long slices = (rows + 31) / 32;
  const long height = div_(rows, slices);
  const long taller = mod_(rows, slices);
  const long tall = max_(2, height + (0 < taller));
  TILE_KEEP(); TILE_CONFIGURE((tall + 1) / 2, (tall + 1) / 2, tall / 2, tall / 2, (tall + 1) / 2, tall / 2, 16, 16);
  const long kb = (div_((k + 3) / 4 + max_(1, ((k + 3) / 4 + 63) / 64) - 1, max_(1, ((k + 3) / 4 + 63) / 64)) + 15) / 16 * 16;
  int *cp = work + worker * (((min_(m, 64) + (min_(m, 64) + 31) / 32 + 2) * (((div_((k + 3) / 4 + max_(1, ((k + 3) / 4 + 63) / 64) - 1, max_(1, ((k + 3) / 4 + 63) / 64)) + 15) / 16 * 16 + 15) / 16 * 16) + 63) / 64 * 64 + (max_(2048, ((div_((k + 3) / 4 + max_(1, ((k + 3) / 4 + 63) / 64) - 1, max_(1, ((k + 3) / 4 + 63) / 64)) + 15) / 16 * 16 < (k + 3) / 4) * ((min_(m, 64) + (min_(m, 64) + 31) / 32 + 2) * (div_((n + 31) / 32 + max_((n + 63) / 64, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64))) - 1, max_((n + 63) / 64, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64)))) * 32))) + 63) / 64 * 64) + ((min_(m, 64) + (min_(m, 64) + 31) / 32 + 2) * (((div_((k + 3) / 4 + max_(1, ((k + 3) / 4 + 63) / 64) - 1, max_(1, ((k + 3) / 4 + 63) / 64)) + 15) / 16 * 16 + 15) / 16 * 16) + 63) / 64 * 64;
  const long deep = kb < (k + 3) / 4;
  for (long pc = 0; pc < (k + 3) / 4; pc += kb) {
    const long kd = min_(kb, (k + 3) / 4 - pc);
    int *ap = (int *)(work + worker * (((min_(m, 64) + (min_(m, 64) + 31) / 32 + 2) * (((div_((k + 3) / 4 + max_(1, ((k + 3) / 4 + 63) / 64) - 1, max_(1, ((k + 3) / 4 + 63) / 64)) + 15) / 16 * 16 + 15) / 16 * 16) + 63) / 64 * 64 + (max_(2048, ((div_((k + 3) / 4 + max_(1, ((k + 3) / 4 + 63) / 64) - 1, max_(1, ((k + 3) / 4 + 63) / 64)) + 15) / 16 * 16 < (k + 3) / 4) * ((min_(m, 64) + (min_(m, 64) + 31) / 32 + 2) * (div_((n + 31) / 32 + max_((n + 63) / 64, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64))) - 1, max_((n + 63) / 64, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64)))) * 32))) + 63) / 64 * 64));
    for (long i = 0; i < slices; ++i) {
      const long h = height + (i < taller);
      const long r = i * height + min_(i, taller);
      pack_lines(min_(k - pc * 4, kd * 4), h, tall, a + item * a_batch + (row + r) * a_m + pc * (a_k * 4), a_m, a_k, ap + i * (tall * ((kd + 15) / 16 * 16)));
    }
    if (first < last) {
      for (long j = first; j < last; ++j) {
        const int *bp = b + item * b_batch + j * b_n + pc * 32;
        const long c_wide = 32;
        int rest[512] __attribute__((aligned(64)));
        if (0 < kd % 16) {
          rest_1(kd % 16, bp + (kd - kd % 16) * 32, rest);
        }
        for (long i = 0; i < slices; ++i) {
          const long turn = ((j - first) * slices + i) % 2;
          const long i_done = i - 1 + (i == 0) * slices;
          const long j_done = j - (i == 0);
          const long h_done = height + (i_done < taller);
          const long r_done = i_done * height + min_(i_done, taller);
          const long column_done = j_done * 32;
          const long columns_done = min_(n - column_done, 32);
          const long rows_done = h_done * (pc + kd == (k + 3) / 4) * (1 - (i == 0) * (j == first));
          ukr_2x2(kd, ap + i * (tall * ((kd + 15) / 16 * 16)), tall, bp, rest, cp + deep * ((i * (last - first) + j - first) * (tall * 32)) + (1 - deep) * (turn * 1024), 0 < pc, rows_done, columns_done, cp + deep * ((i_done * (last - first) + j_done - first) * (tall * 32)) + (1 - deep) * ((1 - turn) * 1024), c_wide, c + item * c_batch + (row + r_done) * c_m + column_done, c_m);
        }
      }
      if (pc + kd == (k + 3) / 4) {
        const long turn = (last - first) * slices % 2;
        const long i_done = slices - 1;
        const long j_done = first + last - first - 1;
        const long h_done = height + (i_done < taller);
        const long r_done = i_done * height + min_(i_done, taller);
        const long column_done = j_done * 32;
        const long columns_done = min_(n - column_done, 32);
        const long rows_done = h_done;
        const long c_wide = 32;
        finish(rows_done, columns_done, cp + deep * ((i_done * (last - first) + j_done - first) * (tall * 32)) + (1 - deep) * ((1 - turn) * 1024), c_wide, c + item * c_batch + (row + r_done) * c_m + column_done, c_m);
      }
    }
  }
  TILE_RELEASE();
}

/* All products of the batch */
void portmm_tiles_s32_u8_s8_32x32x4_amx_int8(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64) < 2));
    const long blocks = min_(m, div_((m + 63) / 64 + even - 1, even) * even);
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, block, task_ctx, blocks * max_((n + 63) / 64, min_((n + 31) / 32, div_((workers - 1) * 4 + (m + 63) / 64 - 1, (m + 63) / 64))), workers);
    }
  }
}
