/* Attention and a fused function by the shared library of `portmm bundle --c`, beside the same in double.
 *
 *     echo 'attention 33 40 16 f32 heads=4 kv_heads=2 causal' > shapes.txt
 *     echo 'mlp examples/layers.py:mlp 33x64 96' > functions.txt
 *     portmm bundle layers.bundle --shapes shapes.txt --functions functions.txt --c lib
 *     cc examples/layers.c -Ilib -Llib -lportmm -Wl,-rpath,lib -lm -o layers && ./layers
 */
#include <math.h>
#include <portmm.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 33, WIDTH = 64, INNER = 96, HEADS = 4, KV_HEADS = 2, KEYS = 40, D = 16 };

static float *numbers(long count, unsigned seed) {
  float *x = malloc((size_t)count * sizeof *x);
  if (!x) exit(2);
  for (long i = 0; i < count; i++) x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 20) / 2048 - 1;
  return x;
}

/* The weights of layers.py. */
static double weight(long i, long j) { return (double)((7 * i + 3 * j) % 13 - 6) / 16; }

static double mlp_error(const float *x, const float *bias, const float *y) {
  double worst = 0;
  for (long i = 0; i < ROWS; i++) {
    double inner[INNER];
    for (long j = 0; j < INNER; j++) {
      inner[j] = bias[j];
      for (long k = 0; k < WIDTH; k++) inner[j] += x[i * WIDTH + k] * weight(k, j);
      inner[j] = fmax(inner[j], 0);
    }
    for (long j = 0; j < WIDTH; j++) {
      double sum = x[i * WIDTH + j];
      for (long k = 0; k < INNER; k++) sum += inner[k] * weight(k, j);
      worst = fmax(worst, fabs(sum - y[i * WIDTH + j]));
    }
  }
  return worst;
}

static double attention_error(const float *q, const float *k, const float *v, const float *out) {
  double worst = 0;
  for (long h = 0; h < HEADS; h++)
    for (long i = 0; i < ROWS; i++) {
      const float *keys = k + h / (HEADS / KV_HEADS) * KEYS * D, *values = v + h / (HEADS / KV_HEADS) * KEYS * D;
      double total = 0, sums[D] = {0};
      for (long j = 0; j <= i + KEYS - ROWS; j++) { /* causal: the last query is at the last key */
        double score = 0;
        for (long l = 0; l < D; l++) score += (double)q[(h * ROWS + i) * D + l] * keys[j * D + l];
        score = exp(0.25 * score);
        total += score;
        for (long l = 0; l < D; l++) sums[l] += score * values[j * D + l];
      }
      for (long l = 0; l < D; l++) worst = fmax(worst, fabs(sums[l] / total - out[(h * ROWS + i) * D + l]));
    }
  return worst;
}

int main(void) {
  float *x = numbers(ROWS * WIDTH, 1), *bias = numbers(INNER, 2), *y = numbers(ROWS * WIDTH, 3);
  float *q = numbers(HEADS * ROWS * D, 4), *k = numbers(KV_HEADS * KEYS * D, 5), *v = numbers(KV_HEADS * KEYS * D, 6);
  float *out = numbers(HEADS * ROWS * D, 7);
  int status = portmm_mlp(x, bias, y);
  if (!status)
    status = portmm_attention("f32", 1, HEADS, KV_HEADS, ROWS, KEYS, D, D, q, k, v, 0.25f, 1, 0, out, NULL);
  if (status) return fprintf(stderr, "status %d on %s\n", status, portmm_machine()), 1;
  int refused = portmm_mlp(NULL, bias, y) == PORTMM_INVALID && portmm_mlp(x, bias, x) == PORTMM_INVALID &&
                portmm_attention("f64", 1, HEADS, KV_HEADS, ROWS, KEYS, D, D, q, k, v, 1, 1, 0, out, NULL) == PORTMM_MISSING;
  double errors[] = {mlp_error(x, bias, y), attention_error(q, k, v, out)};
  printf("by kernels of %s: errors %.1e and %.1e, wrong calls %s\n", portmm_machine(), errors[0], errors[1],
         refused ? "refused" : "not refused");
  free(x), free(bias), free(y), free(q), free(k), free(v), free(out);
  return !(errors[0] < 1e-4 && errors[1] < 1e-5 && refused);
}
