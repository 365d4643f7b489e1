/* portmm_gemm_f32_f32_f32_2x32x1_rvv512, made by portmm 0.1.0 for RISC-V V, 512-bit vectors */
/* gemm rvv512: registers 2x32x1, L1 2x32x320, L2 8x32x320, L3 8x128x320; A packed, B packed, threads over tiles */
/* made again by: portmm emit --schedule gemm:rvv512:f32:2x32x1/2x32x320/8x32x320/8x128x320:1-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,ahead */

#include <riscv_vector.h>
enum { W = 512 / 32, D = 512 / 64 };
#define INLINE static inline __attribute__((always_inline, unused))
INLINE vint32m1_t rvv_s32(vfloat32m1_t x) { return __riscv_vreinterpret_i32m1(x); }
INLINE vuint32m1_t rvv_u32(vfloat32m1_t x) { return __riscv_vreinterpret_u32m1(x); }
INLINE vfloat32m1_t rvv_f32(vuint32m1_t x) { return __riscv_vreinterpret_f32m1(x); }
INLINE vint8mf4_t rvv_some_s8(const signed char *p, unsigned long n) {
  return __riscv_vle8_v_i8mf4_tu(__riscv_vmv_v_x_i8mf4(0, W), p, n);
}
INLINE vuint8mf4_t rvv_some_u8(const unsigned char *p, unsigned long n) {
  return __riscv_vle8_v_u8mf4_tu(__riscv_vmv_v_x_u8mf4(0, W), p, n);
}
INLINE vuint16mf2_t rvv_some_u16(const unsigned short *p, unsigned long n) {
  return __riscv_vle16_v_u16mf2_tu(__riscv_vmv_v_x_u16mf2(0, W), p, n);
}
INLINE vint16mf2_t rvv_some_s16(const short *p, unsigned long n) {
  return __riscv_vle16_v_i16mf2_tu(__riscv_vmv_v_x_i16mf2(0, W), p, n);
}
INLINE vfloat32m1_t rvv_bf16(vuint16mf2_t h) { return rvv_f32(__riscv_vsll(__riscv_vzext_vf2(h, W), 16, W)); }
/* Rounding adds just under half of the last place, or just half to an odd one. */
INLINE vuint16mf2_t rvv_to_bf16(vfloat32m1_t x) {
  const vuint32m1_t u = rvv_u32(x), odd = __riscv_vand(__riscv_vsrl(u, 16, W), 1, W);
  const vuint32m1_t up = __riscv_vadd(__riscv_vadd(u, 0x7fff, W), odd, W);
  return __riscv_vnsrl(__riscv_vmerge(up, __riscv_vor(u, 0x400000, W), __riscv_vmfne(x, x, W), W), 16, W);
}
/* The exponents' biases differ by 112, and by as much again at the end, where infinity and NaN are. A subnormal
   is given the exponent of the least normal number, which is then taken away. */
INLINE vfloat32m1_t rvv_f16(vuint16mf2_t h) {
  const vuint32m1_t t = __riscv_vzext_vf2(h, W), rest = __riscv_vsll(__riscv_vand(t, 0x7fff, W), 13, W);
  const vbool32_t over = __riscv_vmsgtu(rest, 0x0f7fffff, W), under = __riscv_vmsltu(rest, 0x00800000, W);
  vuint32m1_t w = __riscv_vadd(rest, 0x38000000, W);
  w = __riscv_vadd_mu(over, w, w, 0x38000000, W);
  w = __riscv_vadd_mu(under, w, w, 0x00800000, W);
  const vfloat32m1_t f = __riscv_vfsub_mu(under, rvv_f32(w), rvv_f32(w), 0x1p-14f, W);
  return rvv_f32(__riscv_vor(rvv_u32(f), __riscv_vsll(__riscv_vand(t, 0x8000, W), 16, W), W));
}
/* A subnormal is what adding 0.5 leaves at the end of the sum, whose last bit weighs 2**-24; 0x47800000 is 2**16,
   which becomes infinity. */
INLINE vuint16mf2_t rvv_to_f16(vfloat32m1_t x) {
  const vuint32m1_t u = __riscv_vand(rvv_u32(x), 0x7fffffff, W), cut = __riscv_vminu(u, 0x47800000, W);
  const vuint32m1_t odd = __riscv_vand(__riscv_vsrl(cut, 13, W), 1, W);
  const vuint32m1_t normal = __riscv_vsrl(__riscv_vadd(__riscv_vsub(cut, 0x38000000 - 0xfff, W), odd, W), 13, W);
  const vuint32m1_t least = __riscv_vsub(rvv_u32(__riscv_vfadd(rvv_f32(u), 0.5f, W)), 0x3f000000, W);
  const vuint32m1_t nan = __riscv_vor(__riscv_vand(__riscv_vsrl(u, 13, W), 0x3ff, W), 0x200, W);
  vuint32m1_t t = __riscv_vmerge(normal, least, __riscv_vmsltu(u, 0x38800000, W), W);
  t = __riscv_vor_mu(__riscv_vmsgtu(u, 0x7f800000, W), t, t, nan, W);
  t = __riscv_vor(t, __riscv_vand(__riscv_vsrl(rvv_u32(x), 16, W), 0x8000, W), W);
  return __riscv_vncvt_x(t, W);
}
INLINE vint8mf4_t rvv_bytes(vint32m1_t x) { return __riscv_vncvt_x(__riscv_vncvt_x(x, W), W); }
INLINE vint8mf4_t rvv_to_s8(vfloat32m1_t x) {
  return rvv_bytes(__riscv_vmin(__riscv_vmax(__riscv_vfcvt_x(x, W), -128, W), 127, W));
}
INLINE vuint8mf4_t rvv_to_u8(vfloat32m1_t x) {
  return __riscv_vreinterpret_u8mf4(rvv_bytes(__riscv_vmin(__riscv_vmax(__riscv_vfcvt_x(x, W), 0, W), 255, W)));
}
/* Towards zero; what does not fit becomes the least integer. QEMU before 8 ends at vfcvt.rtz. */
INLINE vint32m1_t rvv_whole(vfloat32m1_t x) {
  const vfloat32m1_t u = __riscv_vfabs(x, W);
  vint32m1_t t = __riscv_vfcvt_x(u, W);
  t = __riscv_vadd_mu(__riscv_vmfgt(__riscv_vfcvt_f(t, W), u, W), t, t, -1, W);
  t = __riscv_vneg_mu(__riscv_vmflt(x, 0, W), t, t, W);
  return __riscv_vmerge(__riscv_vmv_v_x_i32m1(-0x7fffffff - 1, W), t, __riscv_vmflt(u, 0x1p31f, W), W);
}
INLINE float rvv_number_bf16(unsigned u) { union { unsigned u; float f; } x = {u << 16}; return x.f; }
INLINE float rvv_number_f16(unsigned half) {
  const unsigned rest = (half & 0x7fff) << 13;
  union { float f; unsigned u; } w = {(float)(half & 0x3ff) * 0x1p-24f};
  if (half & 0x7c00) w.u = rest + (rest < 0x0f800000 ? 0x38000000 : 0x70000000);
  w.u |= (half & 0x8000) << 16;
  return w.f;
}

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

/* to[k][32] = B[k][columns], row layout, padded */
static __attribute__((noinline)) void pack_b(long k, long columns, const float *b, long b_k, long b_n, float *to) {
  unsigned long m0, m1;
  vfloat32m1_t v0, v1;
  if (columns < 32) {
    m0 = (unsigned long)(max_(0, min_(columns, 16)));
    m1 = (unsigned long)(max_(0, min_(columns - 16, 16)));
    for (long p = 0; p < k; ++p) {
      v0 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), b + p * b_k, m0);
      __riscv_vse32(to + p * 32, v0, W);
      v1 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), b + p * b_k + 16, m1);
      __riscv_vse32(to + p * 32 + 16, v1, W);
    }
  } else {
    #pragma GCC unroll 4
    for (long p = 0; p < k; ++p) {
      v0 = __riscv_vle32_v_f32m1(b + p * b_k, W);
      __riscv_vse32(to + p * 32, v0, W);
      v1 = __riscv_vle32_v_f32m1(b + p * b_k + 16, W);
      __riscv_vse32(to + p * 32 + 16, v1, W);
    }
  }
}

/* C[1][columns] (+)= A[1][k] . B[k][32] */
static __attribute__((noinline)) void ukr_1x32(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  unsigned long m0, m1;
  vfloat32m1_t c0_0, c0_1, b0, b1, before0, before1;
  float a0;
  __builtin_prefetch(c_next, 1, 3);
  __builtin_prefetch(c_next + 16, 1, 3);
  m0 = (unsigned long)(max_(0, min_(columns, 16)));
  m1 = (unsigned long)(max_(0, min_(columns - 16, 16)));
  c0_0 = __riscv_vfmv_v_f_f32m1(0, W);
  c0_1 = __riscv_vfmv_v_f_f32m1(0, W);
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = __riscv_vle32_v_f32m1(b + p * 32, W);
    b1 = __riscv_vle32_v_f32m1(b + p * 32 + 16, W);
    a0 = *(a + p);
    c0_0 = __riscv_vfmacc(c0_0, a0, b0, W);
    c0_1 = __riscv_vfmacc(c0_1, a0, b1, W);
  }
  if (accumulate) {
    before0 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), c, m0);
    c0_0 = __riscv_vfadd(c0_0, before0, W);
    before1 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), c + 16, m1);
    c0_1 = __riscv_vfadd(c0_1, before1, W);
  }
  __riscv_vse32(c, c0_0, m0);
  __riscv_vse32(c + 16, c0_1, m1);
}

/* C[2][columns] (+)= A[2][k] . B[k][32] */
static __attribute__((noinline)) void ukr_2x32(long k, const float *a, const float *b, float *c, long c_m, long columns, long accumulate, float *c_next) {
  unsigned long m0, m1;
  vfloat32m1_t c0_0, c0_1, c1_0, c1_1, b0, b1, before0, before1, before2, before3;
  float a0, a1;
  __builtin_prefetch(c_next, 1, 3);
  __builtin_prefetch(c_next + 16, 1, 3);
  __builtin_prefetch(c_next + c_m, 1, 3);
  __builtin_prefetch(c_next + c_m + 16, 1, 3);
  m0 = (unsigned long)(max_(0, min_(columns, 16)));
  m1 = (unsigned long)(max_(0, min_(columns - 16, 16)));
  c0_0 = __riscv_vfmv_v_f_f32m1(0, W);
  c0_1 = __riscv_vfmv_v_f_f32m1(0, W);
  c1_0 = __riscv_vfmv_v_f_f32m1(0, W);
  c1_1 = __riscv_vfmv_v_f_f32m1(0, W);
  #pragma GCC unroll 4
  for (long p = 0; p < k; ++p) {
    b0 = __riscv_vle32_v_f32m1(b + p * 32, W);
    b1 = __riscv_vle32_v_f32m1(b + p * 32 + 16, W);
    a0 = *(a + p * 2);
    c0_0 = __riscv_vfmacc(c0_0, a0, b0, W);
    c0_1 = __riscv_vfmacc(c0_1, a0, b1, W);
    a1 = *(a + p * 2 + 1);
    c1_0 = __riscv_vfmacc(c1_0, a1, b0, W);
    c1_1 = __riscv_vfmacc(c1_1, a1, b1, W);
  }
  if (accumulate) {
    before0 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), c, m0);
    c0_0 = __riscv_vfadd(c0_0, before0, W);
    before1 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), c + 16, m1);
    c0_1 = __riscv_vfadd(c0_1, before1, W);
    before2 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), c + c_m, m0);
    c1_0 = __riscv_vfadd(c1_0, before2, W);
    before3 = __riscv_vle32_v_f32m1_tu(__riscv_vfmv_v_f_f32m1(0, W), c + c_m + 16, m1);
    c1_1 = __riscv_vfadd(c1_1, before3, W);
  }
  __riscv_vse32(c, c0_0, m0);
  __riscv_vse32(c + 16, c0_1, m1);
  __riscv_vse32(c + c_m, c1_0, m0);
  __riscv_vse32(c + c_m + 16, c1_1, m1);
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
void portmm_gemm_f32_f32_f32_2x32x1_rvv512(const portmm_args *g) {
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
