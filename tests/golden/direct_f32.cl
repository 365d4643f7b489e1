/* portmm_direct_f32_f32_f32_2x2x1_simt, made by portmm 0.1.0 for SIMT threads */
/* direct simt: registers 2x2x1, warp 2x32x1, shared 4x32x1, L2 32xallxall; 32 threads, A row, B any, 1 x 1 x 1 elements at once, 1 stages, expressions fused */
/* made again by: portmm emit --schedule 'direct:simt:f32:2x2x1/2x32x1/4x32x1/32x0x0:2-2:a=row,b=any,panels=1,over=tiles,lanes=0,prefetch=0,fused=f32.n | acc; load 0; add 0 1; const f32 0.0; max 2 3 | C 4,stages=1,split=1,vectors=1x1x1,cell=2x1' */

static inline float fma_f32(float a, float b, float c) { return fma(a, b, c); }

static inline int min_(int x, int y) { return x < y ? x : y; }

static inline int max_(int x, int y) { return x > y ? x : y; }

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void portmm_direct_f32_f32_f32_2x2x1_simt(
    const int m,
    const int n,
    const int k,
    __global const float *restrict a_buffer,
    const long a_at,
    const long a_m,
    const long a_batch,
    __global const float *restrict b_buffer,
    const long b_at,
    const long b_k,
    const long b_n,
    const long b_batch,
    const int batch,
    __global float *c_buffer,
    const long c_at,
    const long c_m,
    const long c_batch,
    __global const float *x0_all_buffer,
    const long x0_all_at) {
  __global const float *a = a_buffer + a_at;
  __global const float *b = b_buffer + b_at;
  __global float *c = c_buffer + c_at;
  __global const float *x0_all = x0_all_buffer + x0_all_at;
  const int thread = (int)get_local_id(0);
  const int block = (int)get_group_id(0);
  float a0, l1, t2, t3;
  float acc[4] __attribute__((aligned(16)));
  float run_acc[4] __attribute__((aligned(16)));
  float a_part[2] __attribute__((aligned(16)));
  float b_part[2] __attribute__((aligned(16)));
  const int down = (m + 3) >> 2;
  const int across = (n + 31) >> 5;
  const int item = block / (down * across);
  const int tile = block % (down * across);
  const int first = tile / (across * 8) * 8;
  const int high = min_(down - first, 8);
  const int row_0 = (first + tile % (across * 8) % high) * 4;
  const int column_0 = tile % (across * 8) / high * 32;
  __global const float *a_item = a + item * a_batch;
  __global const float *b_item = b + item * b_batch;
  const int warp = thread >> 4;
  const int lane = thread & 15;
  const int cell_m = warp;
  const int cell_n = lane;
  #pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = 0;
  if ((row_0 + 3 < m) * (column_0 + 31 < n)) {
    __global const float *a_0 = a_item + (row_0 + cell_m * 2) * a_m;
    __global const float *a_1 = a_item + (row_0 + 1 + cell_m * 2) * a_m;
    __global const float *b_0 = b_item + (column_0 + cell_n) * b_n;
    __global const float *b_1 = b_item + (column_0 + 16 + cell_n) * b_n;
    const int run = (((k + max_(1, (k + 319) / 320) - 1) / max_(1, (k + 319) / 320) + 31) >> 5) * 32;
    for (int run_begin = 0; run_begin < k; run_begin += run) {
      const int run_end = min_(run_begin + run, k);
      #pragma unroll
      for (int i = 0; i < 4; ++i) run_acc[i] = 0;
      for (int at = run_begin; at < run_end; ++at) {
        a_part[0] = *(a_0 + at);
        a_part[1] = *(a_1 + at);
        b_part[0] = *(b_0 + at * b_k);
        b_part[1] = *(b_1 + at * b_k);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          #pragma unroll
          for (int j = 0; j < 2; ++j) {
            run_acc[i * 2 + j] = fma_f32(a_part[i], b_part[j], run_acc[i * 2 + j]);
          }
        }
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[i] += run_acc[i];
      }
    }
  } else {
    __global const float *a_0 = a_item + min_(row_0 + cell_m * 2, m - 1) * a_m;
    __global const float *a_1 = a_item + min_(row_0 + 1 + cell_m * 2, m - 1) * a_m;
    __global const float *b_0 = b_item + min_(column_0 + cell_n, n - 1) * b_n;
    __global const float *b_1 = b_item + min_(column_0 + 16 + cell_n, n - 1) * b_n;
    const int run = (((k + max_(1, (k + 319) / 320) - 1) / max_(1, (k + 319) / 320) + 31) >> 5) * 32;
    for (int run_begin = 0; run_begin < k; run_begin += run) {
      const int run_end = min_(run_begin + run, k);
      #pragma unroll
      for (int i = 0; i < 4; ++i) run_acc[i] = 0;
      for (int at = run_begin; at < run_end; ++at) {
        a_part[0] = *(a_0 + at);
        a_part[1] = *(a_1 + at);
        b_part[0] = *(b_0 + at * b_k);
        b_part[1] = *(b_1 + at * b_k);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          #pragma unroll
          for (int j = 0; j < 2; ++j) {
            run_acc[i * 2 + j] = fma_f32(a_part[i], b_part[j], run_acc[i * 2 + j]);
          }
        }
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[i] += run_acc[i];
      }
    }
  }
  __global float *c_item = c + item * c_batch;
  float c_out[1] __attribute__((aligned(16)));
  float few_f32[1] __attribute__((aligned(16)));
  __global const float *x0 = x0_all;
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row_0 + (i >> 1) * 4 + cell_m * 2 + (i & 1);
    if (row < m) {
      #pragma unroll
      for (int g = 0; g < 2; ++g) {
        #pragma unroll
        for (int h = 0; h < 1; ++h) {
          const int column = column_0 + g * 16 + cell_n + h;
          if (column < n) {
            a0 = *(acc + (i * 2 + g + h));
            l1 = *(x0 + column);
            t2 = a0 + l1;
            t3 = 0.0f > t2 || 0.0f != 0.0f ? 0.0f : t2;
            *(c_out) = t3;
            *(c_item + (row * c_m + column)) = c_out[0];
          }
        }
      }
    }
  }
}
