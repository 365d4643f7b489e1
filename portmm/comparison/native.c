/* Loops over calls of C libraries; those of floats twice, as this file includes itself for each type. */
#ifndef T
void loop_dnnl_sgemm(int (*f)(char, char, long, long, long, float, const float *, long, const float *, long, float, float *, long),
    long count, char ta, char tb, long m, long n, long k, const float *a, long lda, const float *b, long ldb, float *c, long ldc) {
  while (count-- > 0) f(ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, ldc);
}
void loop_dnnl_execute(int (*f)(void *, void *, int, const void *), int (*wait)(void *),
    long count, void *primitive, void *stream, int args, const void *arg) {
  while (count-- > 0) { f(primitive, stream, args, arg); wait(stream); }
}
void loop_dnnl_scaled(int (*f)(void *, void *, int, const void *), int (*wait)(void *),
    long count, void *primitive, void *stream, int args, const void *arg, long m, long n, const float *rows, float *c) {
  while (count-- > 0) {
    f(primitive, stream, args, arg);
    wait(stream);
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (long i = 0; i < m; i++)
      for (long j = 0; j < n; j++) c[i * n + j] *= rows[i];
  }
}
void loop_gemm_16(void (*f)(int, int, int, int, int, int, float, const void *, int, const void *, int, float, float *, int),
    long count, int order, int ta, int tb, int m, int n, int k, const void *a, int lda, const void *b, int ldb, float *c, int ldc) {
  while (count-- > 0) f(order, ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, ldc);
}
void loop_gemm_8(void (*f)(int, int, int, int, int, int, int, float, const void *, int, signed char, const void *, int,
    signed char, float, int *, int, const int *),
    long count, int order, int ta, int tb, int m, int n, int k, const void *a, int lda, const void *b, int ldb, int *c, int ldc, int zero) {
  int fixed = 173, offset = 0;
  while (count-- > 0) f(order, ta, tb, fixed, m, n, k, 1, a, lda, (signed char)zero, b, ldb, 0, 0, c, ldc, &offset);
}

void loop_plan(int (*f)(const void *, const void *, const void *, void *), long count, const void *plan,
    const void *a, const void *b, void *c) {
  while (count-- > 0) f(plan, a, b, c);
}

#define T float
#define LOOP(name) name##_s
#include "native.c"
#undef LOOP
#undef T
#define T double
#define LOOP(name) name##_d
#include "native.c"

#else
void LOOP(loop_gemm)(void (*f)(int, int, int, int, int, int, T, const T *, int, const T *, int, T, T *, int),
    long count, long batch, int order, int ta, int tb, int m, int n, int k,
    const T *a, int lda, long sa, const T *b, int ldb, long sb, T *c, int ldc, long sc) {
  while (count-- > 0)
    for (long i = 0; i < batch; i++)
      f(order, ta, tb, m, n, k, 1, a + i * sa, lda, b + i * sb, ldb, 0, c + i * sc, ldc);
}
void LOOP(loop_gemv)(void (*f)(int, int, int, int, T, const T *, int, const T *, int, T, T *, int),
    long count, int order, int trans, int m, int n, const T *a, int lda, const T *x, T *y) {
  while (count-- > 0) f(order, trans, m, n, 1, a, lda, x, 1, 0, y, 1);
}
void LOOP(loop_gemm_batch_strided)(void (*f)(int, int, int, int, int, int, T, const T *, int, int, const T *, int, int, T, T *, int, int, int),
    long count, int order, int ta, int tb, int m, int n, int k,
    const T *a, int lda, int sa, const T *b, int ldb, int sb, T *c, int ldc, int sc, int batch) {
  while (count-- > 0) f(order, ta, tb, m, n, k, 1, a, lda, sa, b, ldb, sb, 0, c, ldc, sc, batch);
}
void LOOP(loop_gemm_compute)(void (*f)(int, int, int, int, int, int, const T *, int, const T *, int, T, T *, int),
    long count, int order, int ta, int tb, int m, int n, int k, const T *a, int lda, const T *b, int ldb, T *c, int ldc) {
  while (count-- > 0) f(order, ta, tb, m, n, k, a, lda, b, ldb, 0, c, ldc);
}
void LOOP(loop_kernel)(void (*f)(const T *, const T *, T *), long count, long batch,
    const T *a, long sa, const T *b, long sb, T *c, long sc) {
  while (count-- > 0) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (long i = 0; i < batch; i++) f(a + i * sa, b + i * sb, c + i * sc);
  }
}
void LOOP(loop_jit)(void (*f)(void *, const T *, const T *, T *), void *jit, long count, long batch,
    const T *a, long sa, const T *b, long sb, T *c, long sc) {
  while (count-- > 0) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (long i = 0; i < batch; i++) f(jit, a + i * sa, b + i * sb, c + i * sc);
  }
}
#endif
