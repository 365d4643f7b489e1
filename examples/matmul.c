/* A product by the shared library of `portmm bundle --c`, with B as it is and packed.
 *
 *     printf '64 256 128\n64 256 128 f32 packed\n' > shapes.txt
 *     portmm bundle layers.bundle --shapes shapes.txt --c lib
 *     cc examples/matmul.c -Ilib -Llib -lportmm -Wl,-rpath,lib -lm -o matmul && ./matmul 64 256 128
 */
#include <math.h>
#include <portmm.h>
#include <stdio.h>
#include <stdlib.h>

static float *matrix(long rows, long columns, unsigned seed) {
  float *x = aligned_alloc(64, (size_t)(rows * columns * 4 + 63) / 64 * 64);
  for (long i = 0; x && i < rows * columns; i++) x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 28) - 8;
  return x;
}

/* Elements of C that differ from the sums: all are small integers, so that these are exact. */
static long wrong(const float *a, const float *b, const float *c, long m, long n, long k) {
  long count = 0;
  for (long i = 0; i < m; i++)
    for (long j = 0; j < n; j++) {
      double sum = 0;
      for (long l = 0; l < k; l++) sum += (double)a[i * k + l] * b[l * n + j];
      count += c[i * n + j] != (float)sum;
    }
  return count;
}

int main(int argc, char **argv) {
  long m = argc > 1 ? atol(argv[1]) : 64, n = argc > 2 ? atol(argv[2]) : 256, k = argc > 3 ? atol(argv[3]) : 128;
  float *a = matrix(m, k, 1), *b = matrix(k, n, 2), *c = matrix(m, n, 3), *d = matrix(m, n, 4);
  long bytes = portmm_packed_bytes("f32", k, n);
  void *packed = bytes > 0 ? aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64) : NULL;
  if (!a || !b || !c || !d) return 2;
  int status = portmm_matmul("f32", m, n, k, a, k, 1, b, n, 1, c, n);
  if (packed && !status) status = portmm_pack("f32", k, n, b, n, 1, packed);
  if (packed && !status) status = portmm_matmul_packed("f32", m, n, k, a, k, 1, packed, d, n);
  if (status == PORTMM_MISSING)
    fprintf(stderr, "the library lacks a kernel: have lines M N K and M N K f32 packed among its shapes\n");
  if (status) return fprintf(stderr, "status %d on %s\n", status, portmm_machine()), 1;
  long errors = wrong(a, b, c, m, n, k) + (packed ? wrong(a, b, d, m, n, k) : 0);
  printf("%ld x %ld x %ld by kernels of %s, %ld threads: %ld errors\n", m, n, k, portmm_machine(),
         portmm_get_num_threads(), errors);
  free(a), free(b), free(c), free(d), free(packed);
  return errors != 0;
}
