/* portmm_gemm_s32_u8_s8_3x8x8_neon_smmla, made by portmm 0.1.0 for NEON with matrix products of integers (FEAT_I8MM) */
/* gemm neon_smmla: registers 3x8x1, L1 3x8x8, L2 9x8x8, L3 9x16x8; A packed, B packed, threads over tiles, expressions fused */
/* made again by: portmm emit --schedule 'gemm:neon_smmla:u8-s8-f32:3x8x1/3x8x8/9x8x8/9x16x8:2-3:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,kr=8,fused=f32.m f32.n f32.n | load 0; acc; load 1; mul 1 2; load 2; fma 0 3 4 | C 5,pack_a,pack_b' */

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
typedef long v2l __attribute__((vector_size(16)));
typedef long v2l_u __attribute__((vector_size(16), aligned(1), may_alias));
typedef long l_u __attribute__((aligned(1), may_alias));
typedef unsigned short v8h __attribute__((vector_size(16)));
typedef unsigned short h_u __attribute__((aligned(1), may_alias));

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

typedef long lanes_t __attribute__((vector_size(16)));

typedef int v4f_w __attribute__((vector_size(sizeof(v4f))));
typedef unsigned v4f_n __attribute__((vector_size(sizeof(v4f))));

/* to[k][rows] = A[rows][k], row layout */
static __attribute__((noinline)) void pack_a(long k, long elements, long rows, const unsigned char *a, long a_m, long a_k, long *to) {
  v2l t0_0, t0_1, t1_0, t1_1;
  if (1 < elements / 8) {
    if (2 < rows) {
      const long *a2 = (const long *)(a + min_(2, rows - 1) * a_m);
      const long *a3 = (const long *)(a + min_(3, rows - 1) * a_m);
      for (long q = 0; q < elements / 8; q += 2) {
        t0_0 = *(const v2l_u *)(a2 + min_(q, elements / 8 - 2));
        t0_1 = *(const v2l_u *)(a3 + min_(q, elements / 8 - 2));
        t1_0 = SHUFFLE(t0_0, t0_1, lanes_t, 0, 2);
        t1_1 = SHUFFLE(t0_0, t0_1, lanes_t, 1, 3);
        *(v2l_u *)(to + min_(q, elements / 8 - 2) * rows + 2) = t1_0;
        *(v2l_u *)(to + (min_(q, elements / 8 - 2) + 1) * rows + 2) = t1_1;
      }
    }
    if (0 < rows) {
      const long *a0 = (const long *)(a + min_(0, rows - 1) * a_m);
      const long *a1 = (const long *)(a + min_(1, rows - 1) * a_m);
      for (long q = 0; q < elements / 8; q += 2) {
        t0_0 = *(const v2l_u *)(a0 + min_(q, elements / 8 - 2));
        t0_1 = *(const v2l_u *)(a1 + min_(q, elements / 8 - 2));
        t1_0 = SHUFFLE(t0_0, t0_1, lanes_t, 0, 2);
        t1_1 = SHUFFLE(t0_0, t0_1, lanes_t, 1, 3);
        *(v2l_u *)(to + min_(q, elements / 8 - 2) * rows) = t1_0;
        *(v2l_u *)(to + (min_(q, elements / 8 - 2) + 1) * rows) = t1_1;
      }
    }
    unsigned char *parts = (unsigned char *)(to);
    for (long p = elements / 8; p < k; ++p) {
      for (long j = 0; j < rows; ++j) {
        for (long e = 0; e < 8; ++e) {
          if (p * 8 + e < elements) {
            *(parts + (p * rows + j) * 8 + e) = *(a + min_(j, rows - 1) * a_m + (p * 8 + e) * a_k);
          } else {
            *(parts + (p * rows + j) * 8 + e) = 0;
          }
        }
      }
    }
  } else {
    unsigned char *parts = (unsigned char *)(to);
    for (long p = 0; p < k; ++p) {
      for (long j = 0; j < rows; ++j) {
        for (long e = 0; e < 8; ++e) {
          if (p * 8 + e < elements) {
            *(parts + (p * rows + j) * 8 + e) = *(a + min_(j, rows - 1) * a_m + (p * 8 + e) * a_k);
          } else {
            *(parts + (p * rows + j) * 8 + e) = 0;
          }
        }
      }
    }
  }
}

/* to[k][8] = B[k][columns], row layout, padded */
static __attribute__((noinline)) void pack_b(long k, long elements, long first, long columns, const signed char *b, long b_k, long b_n, long *to) {
  v2l v0, v2, v4, v6;
  #pragma GCC unroll 2
  for (long p = first; p < max_(first, (elements - div_(max_(0, 8 - columns) + max_(1, b_k) - 1, max_(1, b_k))) / 8); ++p) {
    {
  const unsigned char *r = (const unsigned char *)(b + p * (b_k * 8));
  const long s = b_k;
  const v8h x = {*(const h_u *)r, *(const h_u *)(r + s), *(const h_u *)(r + 2 * s), *(const h_u *)(r + 3 * s),
                 *(const h_u *)(r + 4 * s), *(const h_u *)(r + 5 * s), *(const h_u *)(r + 6 * s),
                 *(const h_u *)(r + 7 * s)};
  __asm__("uzp1 %0.16b, %1.16b, %2.16b" : "=w"(v0) : "w"(x), "w"(x >> 8));
}
    *(v2l_u *)(to + p * 8) = v0;
    {
  const unsigned char *r = (const unsigned char *)(b + p * (b_k * 8) + 2);
  const long s = b_k;
  const v8h x = {*(const h_u *)r, *(const h_u *)(r + s), *(const h_u *)(r + 2 * s), *(const h_u *)(r + 3 * s),
                 *(const h_u *)(r + 4 * s), *(const h_u *)(r + 5 * s), *(const h_u *)(r + 6 * s),
                 *(const h_u *)(r + 7 * s)};
  __asm__("uzp1 %0.16b, %1.16b, %2.16b" : "=w"(v2) : "w"(x), "w"(x >> 8));
}
    *(v2l_u *)(to + p * 8 + 2) = v2;
    {
  const unsigned char *r = (const unsigned char *)(b + p * (b_k * 8) + 4);
  const long s = b_k;
  const v8h x = {*(const h_u *)r, *(const h_u *)(r + s), *(const h_u *)(r + 2 * s), *(const h_u *)(r + 3 * s),
                 *(const h_u *)(r + 4 * s), *(const h_u *)(r + 5 * s), *(const h_u *)(r + 6 * s),
                 *(const h_u *)(r + 7 * s)};
  __asm__("uzp1 %0.16b, %1.16b, %2.16b" : "=w"(v4) : "w"(x), "w"(x >> 8));
}
    *(v2l_u *)(to + p * 8 + 4) = v4;
    {
  const unsigned char *r = (const unsigned char *)(b + p * (b_k * 8) + 6);
  const long s = b_k;
  const v8h x = {*(const h_u *)r, *(const h_u *)(r + s), *(const h_u *)(r + 2 * s), *(const h_u *)(r + 3 * s),
                 *(const h_u *)(r + 4 * s), *(const h_u *)(r + 5 * s), *(const h_u *)(r + 6 * s),
                 *(const h_u *)(r + 7 * s)};
  __asm__("uzp1 %0.16b, %1.16b, %2.16b" : "=w"(v6) : "w"(x), "w"(x >> 8));
}
    *(v2l_u *)(to + p * 8 + 6) = v6;
  }
  signed char *parts = (signed char *)(to);
  for (long p = max_(first, (elements - div_(max_(0, 8 - columns) + max_(1, b_k) - 1, max_(1, b_k))) / 8); p < k; ++p) {
    for (long j = 0; j < 8; ++j) {
      for (long e = 0; e < 8; ++e) {
        if (p * 8 + e < elements) {
          *(parts + (p * 8 + j) * 8 + e) = *(b + min_(j, columns - 1) * b_n + (p * 8 + e) * b_k);
        } else {
          *(parts + (p * 8 + j) * 8 + e) = 0;
        }
      }
    }
  }
}

/* C[2][columns] (+)= A[2][k] . B[k][8] */
static __attribute__((noinline)) void ukr_2x8(long k, const long *a, const long *b, int *c, long c_m, long columns, long accumulate) {
  v4i c0_0, c0_1, c0_2, c0_3;
  v2l b0, b1, b2, b3, a0;
  int tile[16] __attribute__((aligned(64)));
  if (columns < 8) {
    if (accumulate) {
      for (long row = 0; row < 2; ++row) {
        for (long col = 0; col < columns; ++col) {
          *(tile + row * 8 + col) = *(c + row * c_m + col);
        }
      }
      c0_0 = (v4i)(v2l){*(const l_u *)(tile), *(const l_u *)(tile + 8)};
      c0_1 = (v4i)(v2l){*(const l_u *)(tile + 2), *(const l_u *)(tile + 2 + 8)};
      c0_2 = (v4i)(v2l){*(const l_u *)(tile + 4), *(const l_u *)(tile + 4 + 8)};
      c0_3 = (v4i)(v2l){*(const l_u *)(tile + 6), *(const l_u *)(tile + 6 + 8)};
    } else {
      c0_0 = (v4i){0};
      c0_1 = (v4i){0};
      c0_2 = (v4i){0};
      c0_3 = (v4i){0};
    }
  } else {
    if (accumulate) {
      c0_0 = (v4i)(v2l){*(const l_u *)(c), *(const l_u *)(c + c_m)};
      c0_1 = (v4i)(v2l){*(const l_u *)(c + 2), *(const l_u *)(c + 2 + c_m)};
      c0_2 = (v4i)(v2l){*(const l_u *)(c + 4), *(const l_u *)(c + 4 + c_m)};
      c0_3 = (v4i)(v2l){*(const l_u *)(c + 6), *(const l_u *)(c + 6 + c_m)};
    } else {
      c0_0 = (v4i){0};
      c0_1 = (v4i){0};
      c0_2 = (v4i){0};
      c0_3 = (v4i){0};
    }
  }
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = *(const v2l_u *)(b + p * 8);
    b1 = *(const v2l_u *)(b + p * 8 + 2);
    b2 = *(const v2l_u *)(b + p * 8 + 4);
    b3 = *(const v2l_u *)(b + p * 8 + 6);
    a0 = (v2l){*(const l_u *)(a + p * 2), *(const l_u *)(a + p * 2 + 1)};
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_0) : "w"(a0), "w"(b0));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_1) : "w"(a0), "w"(b1));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_2) : "w"(a0), "w"(b2));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_3) : "w"(a0), "w"(b3));
  }
  if (columns < 8) {
    *(l_u *)(tile) = ((v2l)c0_0)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 8)) : "w"(c0_0));
    *(l_u *)(tile + 2) = ((v2l)c0_1)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 2 + 8)) : "w"(c0_1));
    *(l_u *)(tile + 4) = ((v2l)c0_2)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 4 + 8)) : "w"(c0_2));
    *(l_u *)(tile + 6) = ((v2l)c0_3)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 6 + 8)) : "w"(c0_3));
    for (long row = 0; row < 2; ++row) {
      for (long col = 0; col < columns; ++col) {
        *(c + row * c_m + col) = *(tile + row * 8 + col);
      }
    }
  } else {
    *(l_u *)(c) = ((v2l)c0_0)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + c_m)) : "w"(c0_0));
    *(l_u *)(c + 2) = ((v2l)c0_1)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 2 + c_m)) : "w"(c0_1));
    *(l_u *)(c + 4) = ((v2l)c0_2)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 4 + c_m)) : "w"(c0_2));
    *(l_u *)(c + 6) = ((v2l)c0_3)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 6 + c_m)) : "w"(c0_3));
  }
}

/* C[3][columns] (+)= A[3][k] . B[k][8] */
static __attribute__((noinline)) void ukr_3x8(long k, const long *a, const long *b, int *c, long c_m, long columns, long accumulate) {
  v4i c0_0, c0_1, c0_2, c0_3, c2_0, c2_1, c2_2, c2_3;
  v2l b0, b1, b2, b3, a0, a1;
  int tile[24] __attribute__((aligned(64)));
  if (columns < 8) {
    if (accumulate) {
      for (long row = 0; row < 3; ++row) {
        for (long col = 0; col < columns; ++col) {
          *(tile + row * 8 + col) = *(c + row * c_m + col);
        }
      }
      c0_0 = (v4i)(v2l){*(const l_u *)(tile), *(const l_u *)(tile + 8)};
      c0_1 = (v4i)(v2l){*(const l_u *)(tile + 2), *(const l_u *)(tile + 2 + 8)};
      c0_2 = (v4i)(v2l){*(const l_u *)(tile + 4), *(const l_u *)(tile + 4 + 8)};
      c0_3 = (v4i)(v2l){*(const l_u *)(tile + 6), *(const l_u *)(tile + 6 + 8)};
      c2_0 = (v4i)(v2l){*(const l_u *)(tile + 16), *(const l_u *)(tile + 16 + 0)};
      c2_1 = (v4i)(v2l){*(const l_u *)(tile + 18), *(const l_u *)(tile + 18 + 0)};
      c2_2 = (v4i)(v2l){*(const l_u *)(tile + 20), *(const l_u *)(tile + 20 + 0)};
      c2_3 = (v4i)(v2l){*(const l_u *)(tile + 22), *(const l_u *)(tile + 22 + 0)};
    } else {
      c0_0 = (v4i){0};
      c0_1 = (v4i){0};
      c0_2 = (v4i){0};
      c0_3 = (v4i){0};
      c2_0 = (v4i){0};
      c2_1 = (v4i){0};
      c2_2 = (v4i){0};
      c2_3 = (v4i){0};
    }
  } else {
    if (accumulate) {
      c0_0 = (v4i)(v2l){*(const l_u *)(c), *(const l_u *)(c + c_m)};
      c0_1 = (v4i)(v2l){*(const l_u *)(c + 2), *(const l_u *)(c + 2 + c_m)};
      c0_2 = (v4i)(v2l){*(const l_u *)(c + 4), *(const l_u *)(c + 4 + c_m)};
      c0_3 = (v4i)(v2l){*(const l_u *)(c + 6), *(const l_u *)(c + 6 + c_m)};
      c2_0 = (v4i)(v2l){*(const l_u *)(c + 2 * c_m), *(const l_u *)(c + 2 * c_m + 0)};
      c2_1 = (v4i)(v2l){*(const l_u *)(c + 2 * c_m + 2), *(const l_u *)(c + 2 * c_m + 2 + 0)};
      c2_2 = (v4i)(v2l){*(const l_u *)(c + 2 * c_m + 4), *(const l_u *)(c + 2 * c_m + 4 + 0)};
      c2_3 = (v4i)(v2l){*(const l_u *)(c + 2 * c_m + 6), *(const l_u *)(c + 2 * c_m + 6 + 0)};
    } else {
      c0_0 = (v4i){0};
      c0_1 = (v4i){0};
      c0_2 = (v4i){0};
      c0_3 = (v4i){0};
      c2_0 = (v4i){0};
      c2_1 = (v4i){0};
      c2_2 = (v4i){0};
      c2_3 = (v4i){0};
    }
  }
  #pragma GCC unroll 2
  for (long p = 0; p < k; ++p) {
    b0 = *(const v2l_u *)(b + p * 8);
    b1 = *(const v2l_u *)(b + p * 8 + 2);
    b2 = *(const v2l_u *)(b + p * 8 + 4);
    b3 = *(const v2l_u *)(b + p * 8 + 6);
    a0 = (v2l){*(const l_u *)(a + p * 3), *(const l_u *)(a + p * 3 + 1)};
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_0) : "w"(a0), "w"(b0));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_1) : "w"(a0), "w"(b1));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_2) : "w"(a0), "w"(b2));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c0_3) : "w"(a0), "w"(b3));
    a1 = (v2l){*(const l_u *)(a + p * 3 + 2), *(const l_u *)(a + p * 3 + 2 + 0)};
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c2_0) : "w"(a1), "w"(b0));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c2_1) : "w"(a1), "w"(b1));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c2_2) : "w"(a1), "w"(b2));
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(c2_3) : "w"(a1), "w"(b3));
  }
  if (columns < 8) {
    *(l_u *)(tile) = ((v2l)c0_0)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 8)) : "w"(c0_0));
    *(l_u *)(tile + 2) = ((v2l)c0_1)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 2 + 8)) : "w"(c0_1));
    *(l_u *)(tile + 4) = ((v2l)c0_2)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 4 + 8)) : "w"(c0_2));
    *(l_u *)(tile + 6) = ((v2l)c0_3)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 6 + 8)) : "w"(c0_3));
    *(l_u *)(tile + 16) = ((v2l)c2_0)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 16 + 0)) : "w"(c2_0));
    *(l_u *)(tile + 18) = ((v2l)c2_1)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 18 + 0)) : "w"(c2_1));
    *(l_u *)(tile + 20) = ((v2l)c2_2)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 20 + 0)) : "w"(c2_2));
    *(l_u *)(tile + 22) = ((v2l)c2_3)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(tile + 22 + 0)) : "w"(c2_3));
    for (long row = 0; row < 3; ++row) {
      for (long col = 0; col < columns; ++col) {
        *(c + row * c_m + col) = *(tile + row * 8 + col);
      }
    }
  } else {
    *(l_u *)(c) = ((v2l)c0_0)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + c_m)) : "w"(c0_0));
    *(l_u *)(c + 2) = ((v2l)c0_1)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 2 + c_m)) : "w"(c0_1));
    *(l_u *)(c + 4) = ((v2l)c0_2)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 4 + c_m)) : "w"(c0_2));
    *(l_u *)(c + 6) = ((v2l)c0_3)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 6 + c_m)) : "w"(c0_3));
    *(l_u *)(c + 2 * c_m) = ((v2l)c2_0)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 2 * c_m + 0)) : "w"(c2_0));
    *(l_u *)(c + 2 * c_m + 2) = ((v2l)c2_1)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 2 * c_m + 2 + 0)) : "w"(c2_1));
    *(l_u *)(c + 2 * c_m + 4) = ((v2l)c2_2)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 2 * c_m + 4 + 0)) : "w"(c2_2));
    *(l_u *)(c + 2 * c_m + 6) = ((v2l)c2_3)[0];
__asm__("st1 {%1.d}[1], %0" : "=Q"(*(l_u *)(c + 2 * c_m + 6 + 0)) : "w"(c2_3));
  }
}

/* C[rows][columns] = expressions of sums,  as f32 */
static __attribute__((noinline)) void finish(long rows, long columns, int *sums, long wide, float *c, long c_m, long item, long row, long column, const float *x0, long x0_m, const float *x1, const float *x2) {
  float l0_one;
  v4f l0, x, l1, t2, l3, t4;
  float few_f32[4] __attribute__((aligned(64)));
  for (long i = 0; i < rows; ++i) {
    l0_one = *(x0 + i * x0_m);
    l0 = l0_one - (v4f){0};
    for (long j = 0; j < columns - columns % 4; j += 4) {
      x = __builtin_convertvector(*(const v4i_u *)(sums + i * wide + j), v4f);
      l1 = *(const v4f_u *)(x1 + j);
      t2 = x * l1;
      l3 = *(const v4f_u *)(x2 + j);
      t4 = l0 * t2 + l3;
      *(v4f_u *)(c + i * c_m + j) = t4;
    }
    if (columns - columns % 4 < columns) {
      const long j = columns - columns % 4;
      const long left = columns - j;
      x = __builtin_convertvector(*(const v4i_u *)(sums + i * wide + j), v4f);
      for (long e = 0; e < left; ++e) {
        *(few_f32 + e) = *(x1 + j + e);
      }
      l1 = *(const v4f_u *)(few_f32);
      t2 = x * l1;
      for (long e = 0; e < left; ++e) {
        *(few_f32 + e) = *(x2 + j + e);
      }
      l3 = *(const v4f_u *)(few_f32);
      t4 = l0 * t2 + l3;
      *(v4f_u *)(few_f32) = t4;
      for (long e = 0; e < left; ++e) {
        *(c + i * c_m + j + e) = *(few_f32 + e);
      }
    }
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
  const unsigned char *a = (const unsigned char *)g->a;
  const signed char *b = (const signed char *)g->b;
  float *c = (float *)g->c;
  int *work = (int *)g->work;
  const float *x0 = (const float *)g->operands[0].p;
  const long x0_m = g->operands[0].m;
  const float *x1 = (const float *)g->operands[1].p;
  const float *x2 = (const float *)g->operands[2].p;
  const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9) < 2));
  const long blocks = min_(m, div_((m + 8) / 9 + even - 1, even) * even);
  const long shares = max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9)));
  const long row = div_(m * div_(task, shares), blocks);
  const long rows = div_(m * (div_(task, shares) + 1), blocks) - row;
  const long first = div_((n + 7) / 8 * mod_(task, shares), shares);
  const long last = min_((n + 7) / 8, div_((n + 7) / 8 * (mod_(task, shares) + 1), shares));
  const long slices = (rows + 2) / 3;
  const long height = div_(rows, slices);
  const long taller = mod_(rows, slices);
  const long kb = div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8));
  int *cp = work + worker * ((div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) * 8 * 2 + 63) / 64 * 64 + ((min_(m, 9) * div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) + 2) * 2 + 63) / 64 * 64 + (max_(24, (div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) < (k + 7) / 8) * (min_(m, 9) * (div_((n + 7) / 8 + max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9))) - 1, max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9)))) * 8))) + 63) / 64 * 64) + (div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) * 8 * 2 + 63) / 64 * 64 + ((min_(m, 9) * div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) + 2) * 2 + 63) / 64 * 64;
  const long deep = kb < (k + 7) / 8;
  const long c_wide = deep * ((last - first) * 8) + (1 - deep) * 8;
  for (long pc = 0; pc < (k + 7) / 8; pc += kb) {
    const long kd = min_(kb, (k + 7) / 8 - pc);
    long *ap = (long *)(work + worker * ((div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) * 8 * 2 + 63) / 64 * 64 + ((min_(m, 9) * div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) + 2) * 2 + 63) / 64 * 64 + (max_(24, (div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) < (k + 7) / 8) * (min_(m, 9) * (div_((n + 7) / 8 + max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9))) - 1, max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9)))) * 8))) + 63) / 64 * 64) + (div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) * 8 * 2 + 63) / 64 * 64);
    for (long i = 0; i < slices; ++i) {
      const long h = height + (i < taller);
      const long r = i * height + min_(i, taller);
      pack_a(kd, min_(k - pc * 8, kd * 8), h, a + item * a_batch + (row + r) * a_m + pc * (a_k * 8), a_m, a_k, ap + r * kd);
    }
    for (long jg = first; jg < last; ++jg) {
      long *panels = (long *)(work + worker * ((div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) * 8 * 2 + 63) / 64 * 64 + ((min_(m, 9) * div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) + 2) * 2 + 63) / 64 * 64 + (max_(24, (div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) < (k + 7) / 8) * (min_(m, 9) * (div_((n + 7) / 8 + max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9))) - 1, max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9)))) * 8))) + 63) / 64 * 64));
      for (long q = jg; q < min_(last, jg + 1); ++q) {
        pack_b(kd, min_(k - pc * 8, kd * 8), 0, min_(n - q * 8, 8), b + item * b_batch + pc * (b_k * 8) + q * 8, b_k, b_n, panels + (q - jg) * (kd * 8));
      }
      for (long j = jg; j < min_(last, jg + 1); ++j) {
        const long column = j * 8;
        const long columns = min_(n - column, 8);
        const long *bp = (const long *)(work + worker * ((div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) * 8 * 2 + 63) / 64 * 64 + ((min_(m, 9) * div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) + 2) * 2 + 63) / 64 * 64 + (max_(24, (div_((k + 7) / 8 + max_(1, ((k + 7) / 8 + 7) / 8) - 1, max_(1, ((k + 7) / 8 + 7) / 8)) < (k + 7) / 8) * (min_(m, 9) * (div_((n + 7) / 8 + max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9))) - 1, max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9)))) * 8))) + 63) / 64 * 64) + (j - jg) * (kd * 8 * 2));
        for (long i = 0; i < slices; ++i) {
          const long h = height + (i < taller);
          const long r = i * height + min_(i, taller);
          switch (h) {
            case 2:
              ukr_2x8(kd, ap + r * kd, bp, cp + deep * ((row + r - row) * c_wide + column - first * 8), c_wide, columns, 0 < pc);
              break;
            case 3:
              ukr_3x8(kd, ap + r * kd, bp, cp + deep * ((row + r - row) * c_wide + column - first * 8), c_wide, columns, 0 < pc);
              break;
            default:
              __builtin_trap();
          }
          if (pc + kd == (k + 7) / 8) {
            finish(h, columns, cp + deep * ((row + r - row) * c_wide + column - first * 8), c_wide, c + item * c_batch + (row + r) * c_m + column, c_m, item, row + r, column, x0 + (row + r) * x0_m, x0_m, x1 + column, x2 + column);
          }
        }
      }
    }
  }
}

/* All products of the batch */
void portmm_gemm_s32_u8_s8_3x8x8_neon_smmla(const portmm_args *g) {
  const long m = g->m;
  const long n = g->n;
  const long batch = g->batch;
  const long workers = g->workers;
  for (long item = 0; item < batch; ++item) {
    const long even = max_(1, workers * (div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9) < 2));
    const long blocks = min_(m, div_((m + 8) / 9 + even - 1, even) * even);
    {
      const long task_ctx[] = {(long)g, item};
      g->parallel(g->pool, block, task_ctx, blocks * max_((n + 15) / 16, min_((n + 7) / 8, div_((workers - 1) * 4 + (m + 8) / 9 - 1, (m + 8) / 9))), workers);
    }
  }
}
