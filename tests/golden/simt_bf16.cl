/* portmm_simt_f32_f32_f32_2x4x1_simt, made by portmm 0.1.0 for SIMT threads */
/* simt simt: registers 2x4x1, warp 8x16x1, shared 8x32x8, L2 64xallxall; 32 threads, A row, B col, 1 x 4 x 2 elements at once, 2 stages */
/* made again by: portmm emit --schedule simt:simt:bf16:2x4x1/8x16x1/8x32x8/64x0x0:2-2:a=row,b=col,panels=1,over=tiles,lanes=0,prefetch=0,stages=2,split=1,vectors=1x4x2,cell=2x4 */

static inline float fma_f32(float a, float b, float c) { return fma(a, b, c); }

static inline float f32_of_bf16(unsigned short x) { return as_float((unsigned)x << 16); }

static inline unsigned short bf16_of_f32(float x) {
  const unsigned u = as_uint(x);
  return (unsigned short)((x == x ? u + 0x7fff + (u >> 16 & 1) : u | 0x400000) >> 16);
}

static inline int min_(int x, int y) { return x < y ? x : y; }

static inline int max_(int x, int y) { return x > y ? x : y; }

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void portmm_simt_f32_f32_f32_2x4x1_simt(
    const int m,
    const int n,
    const int k,
    __global const unsigned short *restrict a_buffer,
    const long a_at,
    const long a_m,
    const long a_batch,
    __global const unsigned short *restrict b_buffer,
    const long b_at,
    const long b_n,
    const long b_batch,
    const int batch,
    __global unsigned short *c_buffer,
    const long c_at,
    const long c_m,
    const long c_batch) {
  __global const unsigned short *a = a_buffer + a_at;
  __global const unsigned short *b = b_buffer + b_at;
  __global unsigned short *c = c_buffer + c_at;
  const int thread = (int)get_local_id(0);
  const int block = (int)get_group_id(0);
  __local float a_tile[128] __attribute__((aligned(16)));
  __local float b_tile[512] __attribute__((aligned(16)));
  __local float totals[256] __attribute__((aligned(16)));
  float acc[8] __attribute__((aligned(16)));
  float a_part[2] __attribute__((aligned(16)));
  float b_part[4] __attribute__((aligned(16)));
  unsigned short a_next[2] __attribute__((aligned(16)));
  unsigned short b_next[8] __attribute__((aligned(16)));
  const int down = (m + 7) >> 3;
  const int across = (n + 31) >> 5;
  const int item = block / (down * across);
  const int tile = block % (down * across);
  const int first = tile / (across * 8) * 8;
  const int high = min_(down - first, 8);
  const int row_0 = (first + tile % (across * 8) % high) * 8;
  const int column_0 = tile % (across * 8) / high * 32;
  __global const unsigned short *a_item = a + item * a_batch;
  __global const unsigned short *b_item = b + item * b_batch;
  const int warp = thread >> 4;
  const int lane = thread & 15;
  const int cell_m = (warp >> 1) * 4 + (lane >> 2);
  const int cell_n = (warp & 1) * 4 + (lane & 3);
  const int k_0 = 0;
  const int k_end = k;
  const int steps = (k + 7) >> 3;
  #pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0;
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int a_piece = thread + turn * 32;
    const int a_row = a_piece >> 3;
    const int a_unit = a_piece & 7;
    const int a_at = k_0 + a_unit;
    __global const unsigned short *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
    if (a_at < k_end) {
      a_next[turn] = *(a_from);
    } else {
      a_next[turn] = 0;
    }
  }
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int b_piece = thread + turn * 32;
    const int b_row = b_piece >> 1;
    const int b_unit = (b_piece & 1) * 4;
    const int b_at = k_0 + b_unit;
    __global const unsigned short *b_from = b_item + (min_(column_0 + b_row, n - 1) * b_n + b_at);
    if (b_at < k_end) {
      *(uint2 *)(b_next + turn * 4) = *(__global const uint2 *)(b_from);
    } else {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        b_next[turn * 4 + e] = 0;
      }
    }
  }
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int a_piece = thread + turn * 32;
    const int a_row = a_piece >> 3;
    const int a_unit = a_piece & 7;
    a_tile[a_unit * 8 + a_row] = f32_of_bf16(a_next[turn]);
  }
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int b_piece = thread + turn * 32;
    const int b_row = b_piece >> 1;
    const int b_unit = (b_piece & 1) * 4;
    b_tile[b_unit * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4]);
    b_tile[(b_unit + 1) * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4 + 1]);
    b_tile[(b_unit + 2) * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4 + 2]);
    b_tile[(b_unit + 3) * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4 + 3]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  #pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0;
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    totals[i * 32 + thread] = acc[i];
  }
  const int run = max_(1, ((((k_end - k_0 + max_(1, (k_end - k_0 + 319) / 320) - 1) / max_(1, (k_end - k_0 + 319) / 320) + 31) >> 5) * 32) >> 3);
  for (int run_begin = 0; run_begin < steps; run_begin += run) {
    const int run_end = min_(run_begin + run, steps);
    #pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = 0;
    for (int step = run_begin; step < run_end; ++step) {
      if (step + 1 < steps) {
        #pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const int a_piece = thread + turn * 32;
          const int a_row = a_piece >> 3;
          const int a_unit = a_piece & 7;
          const int a_at = k_0 + (step + 1) * 8 + a_unit;
          __global const unsigned short *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
          if (a_at < k_end) {
            a_next[turn] = *(a_from);
          } else {
            a_next[turn] = 0;
          }
        }
        #pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const int b_piece = thread + turn * 32;
          const int b_row = b_piece >> 1;
          const int b_unit = (b_piece & 1) * 4;
          const int b_at = k_0 + (step + 1) * 8 + b_unit;
          __global const unsigned short *b_from = b_item + (min_(column_0 + b_row, n - 1) * b_n + b_at);
          if (b_at < k_end) {
            *(uint2 *)(b_next + turn * 4) = *(__global const uint2 *)(b_from);
          } else {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
              b_next[turn * 4 + e] = 0;
            }
          }
        }
      }
      const int stage = step & 1;
      #pragma unroll
      for (int unit = 0; unit < 8; ++unit) {
        #pragma unroll
        for (int g = 0; g < 1; ++g) {
          *(uint2 *)(a_part + g * 2) = *(__local const uint2 *)(a_tile + (stage * 64 + unit * 8 + cell_m * 2 + g * 8));
        }
        #pragma unroll
        for (int g = 0; g < 1; ++g) {
          *(uint4 *)(b_part + g * 4) = *(__local const uint4 *)(b_tile + (stage * 256 + unit * 32 + ((cell_n * 4 + g * 32) ^ (((unit >> 2) & 1) * 16))));
        }
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            acc[i * 4 + j] = fma_f32(a_part[i], b_part[j], acc[i * 4 + j]);
          }
        }
      }
      if (step + 1 < steps) {
        #pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const int a_piece = thread + turn * 32;
          const int a_row = a_piece >> 3;
          const int a_unit = a_piece & 7;
          a_tile[(1 - stage) * 64 + a_unit * 8 + a_row] = f32_of_bf16(a_next[turn]);
        }
        #pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const int b_piece = thread + turn * 32;
          const int b_row = b_piece >> 1;
          const int b_unit = (b_piece & 1) * 4;
          b_tile[(1 - stage) * 256 + b_unit * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4]);
          b_tile[(1 - stage) * 256 + (b_unit + 1) * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4 + 1]);
          b_tile[(1 - stage) * 256 + (b_unit + 2) * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4 + 2]);
          b_tile[(1 - stage) * 256 + (b_unit + 3) * 32 + (b_row ^ (((b_unit >> 2) & 1) * 16))] = f32_of_bf16(b_next[turn * 4 + 3]);
        }
      }
      barrier(CLK_LOCAL_MEM_FENCE);
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      acc[i] += totals[i * 32 + thread];
      totals[i * 32 + thread] = acc[i];
    }
  }
  __global unsigned short *c_item = c + item * c_batch;
  unsigned short c_out[2] __attribute__((aligned(16)));
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row_0 + (i >> 1) * 8 + cell_m * 2 + (i & 1);
    if (row < m) {
      #pragma unroll
      for (int g = 0; g < 1; ++g) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = column_0 + g * 32 + cell_n * 4 + h * 2;
          #pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (column + j < n) {
              c_out[j] = bf16_of_f32(acc[i * 4 + g * 4 + h * 2 + j]);
            }
          }
          if (column + 1 < n) {
            *(__global ushort2 *)(c_item + (row * c_m + column)) = *(const ushort2 *)(c_out);
          } else {
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
              if (column + j < n) {
                *(c_item + (row * c_m + column + j)) = c_out[j];
              }
            }
          }
        }
      }
    }
  }
}
