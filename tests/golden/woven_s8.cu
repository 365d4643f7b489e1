/* portmm_simt_s32_s8_s8_2x4x4_simt_dot4, made by portmm 0.1.0 for SIMT threads with dot products of four bytes */
/* simt simt_dot4: registers 2x4x1, warp 8x16x1, shared 8x32x8, L2 64xallxall; 32 threads, A row, B row, 4 x 4 x 4 elements at once, 2 stages */
/* made again by: portmm emit --schedule simt:simt_dot4:s8-s8-s32:2x4x1/8x16x1/8x32x8/64x0x0:2-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,kr=4,stages=2,split=1,vectors=4x4x4,cell=2x4 */

#ifdef __CUDACC__

static __device__ __forceinline__ int dot4_s8s8(int a, int b, int c) { return __dp4a(a, b, c); }

#endif

static __device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ int min_(int x, int y) { return x < y ? x : y; }

extern "C" __global__ void __launch_bounds__(32) portmm_simt_s32_s8_s8_2x4x4_simt_dot4(
    const int m,
    const int n,
    const int k,
    const signed char *__restrict__ a,
    const long a_m,
    const long a_batch,
    const signed char *__restrict__ b,
    const long b_k,
    const long b_batch,
    const int batch,
    int *c,
    const long c_m,
    const long c_batch) {
  const int thread = (int)threadIdx.x;
  const int block = (int)blockIdx.x;
  __shared__ __align__(16) int a_tile[128];
  __shared__ __align__(16) int b_tile[512];
  __align__(16) int acc[8];
  __align__(16) int a_part[2];
  __align__(16) int b_part[4];
  __align__(16) signed char a_next[8];
  __align__(16) signed char b_next[32];
  __align__(16) int b_wide[4];
  const int down = (m + 7) >> 3;
  const int across = (n + 31) >> 5;
  const int item = block / (down * across);
  const int tile = block % (down * across);
  const int first = tile / (across * 8) * 8;
  const int high = min_(down - first, 8);
  const int row_0 = (first + tile % (across * 8) % high) * 8;
  const int column_0 = tile % (across * 8) / high * 32;
  const signed char *a_item = a + item * a_batch;
  const signed char *b_item = b + item * b_batch;
  const int warp = thread >> 4;
  const int lane = thread & 15;
  const int cell_m = (warp >> 1) * 4 + (lane >> 2);
  const int cell_n = (warp & 1) * 4 + (lane & 3);
  const int k_0 = 0;
  const int k_end = k;
  const int steps = (k + 31) >> 5;
  #pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int a_piece = thread + turn * 32;
    const int a_row = a_piece >> 3;
    const int a_unit = a_piece & 7;
    const int a_at = k_0 + a_unit * 4;
    const signed char *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
    if (a_at < k_end) {
      *(unsigned *)(a_next + turn * 4) = *(const unsigned *)(a_from);
    } else {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        a_next[turn * 4 + e] = 0;
      }
    }
  }
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int b_piece = thread + turn * 32;
    const int b_row = (b_piece & 7) * 4;
    const int b_unit = b_piece >> 3;
    const int b_at = k_0 + b_unit * 4;
    const signed char *b_from = b_item + (min_(column_0 + b_row, n - 4) + b_at * b_k);
    if (b_at < k_end) {
      *(unsigned *)(b_next + turn * 16) = *(const unsigned *)(b_from);
    } else {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        b_next[turn * 16 + e] = 0;
      }
    }
    if (b_at + 1 < k_end) {
      *(unsigned *)(b_next + (turn * 16 + 4)) = *(const unsigned *)(b_from + b_k);
    } else {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        b_next[turn * 16 + 4 + e] = 0;
      }
    }
    if (b_at + 2 < k_end) {
      *(unsigned *)(b_next + (turn * 16 + 8)) = *(const unsigned *)(b_from + 2 * b_k);
    } else {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        b_next[turn * 16 + 8 + e] = 0;
      }
    }
    if (b_at + 3 < k_end) {
      *(unsigned *)(b_next + (turn * 16 + 12)) = *(const unsigned *)(b_from + 3 * b_k);
    } else {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        b_next[turn * 16 + 12 + e] = 0;
      }
    }
  }
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int a_piece = thread + turn * 32;
    const int a_row = a_piece >> 3;
    const int a_unit = a_piece & 7;
    int *a_words = (int *)(a_next + turn * 4);
    a_tile[a_unit * 8 + a_row] = a_words[0];
  }
  #pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int b_piece = thread + turn * 32;
    const int b_row = (b_piece & 7) * 4;
    const int b_unit = b_piece >> 3;
    int *b_words = (int *)(b_next + turn * 16);
    b_wide[0] = (int)(((unsigned)b_words[0] >> 0 & 255) << 0 | ((unsigned)b_words[1] >> 0 & 255) << 8 | ((unsigned)b_words[2] >> 0 & 255) << 16 | ((unsigned)b_words[3] >> 0 & 255) << 24);
    b_wide[1] = (int)(((unsigned)b_words[0] >> 8 & 255) << 0 | ((unsigned)b_words[1] >> 8 & 255) << 8 | ((unsigned)b_words[2] >> 8 & 255) << 16 | ((unsigned)b_words[3] >> 8 & 255) << 24);
    b_wide[2] = (int)(((unsigned)b_words[0] >> 16 & 255) << 0 | ((unsigned)b_words[1] >> 16 & 255) << 8 | ((unsigned)b_words[2] >> 16 & 255) << 16 | ((unsigned)b_words[3] >> 16 & 255) << 24);
    b_wide[3] = (int)(((unsigned)b_words[0] >> 24 & 255) << 0 | ((unsigned)b_words[1] >> 24 & 255) << 8 | ((unsigned)b_words[2] >> 24 & 255) << 16 | ((unsigned)b_words[3] >> 24 & 255) << 24);
    *(uint4 *)(b_tile + (b_unit * 32 + b_row)) = *(const uint4 *)(b_wide);
  }
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) {
      #pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int a_piece = thread + turn * 32;
        const int a_row = a_piece >> 3;
        const int a_unit = a_piece & 7;
        const int a_at = k_0 + (step + 1) * 32 + a_unit * 4;
        const signed char *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
        if (a_at < k_end) {
          *(unsigned *)(a_next + turn * 4) = *(const unsigned *)(a_from);
        } else {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            a_next[turn * 4 + e] = 0;
          }
        }
      }
      #pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int b_piece = thread + turn * 32;
        const int b_row = (b_piece & 7) * 4;
        const int b_unit = b_piece >> 3;
        const int b_at = k_0 + (step + 1) * 32 + b_unit * 4;
        const signed char *b_from = b_item + (min_(column_0 + b_row, n - 4) + b_at * b_k);
        if (b_at < k_end) {
          *(unsigned *)(b_next + turn * 16) = *(const unsigned *)(b_from);
        } else {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            b_next[turn * 16 + e] = 0;
          }
        }
        if (b_at + 1 < k_end) {
          *(unsigned *)(b_next + (turn * 16 + 4)) = *(const unsigned *)(b_from + b_k);
        } else {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            b_next[turn * 16 + 4 + e] = 0;
          }
        }
        if (b_at + 2 < k_end) {
          *(unsigned *)(b_next + (turn * 16 + 8)) = *(const unsigned *)(b_from + 2 * b_k);
        } else {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            b_next[turn * 16 + 8 + e] = 0;
          }
        }
        if (b_at + 3 < k_end) {
          *(unsigned *)(b_next + (turn * 16 + 12)) = *(const unsigned *)(b_from + 3 * b_k);
        } else {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            b_next[turn * 16 + 12 + e] = 0;
          }
        }
      }
    }
    const int stage = step & 1;
    #pragma unroll
    for (int unit = 0; unit < 8; ++unit) {
      #pragma unroll
      for (int g = 0; g < 1; ++g) {
        *(uint2 *)(a_part + g * 2) = *(const uint2 *)(a_tile + (stage * 64 + unit * 8 + cell_m * 2 + g * 8));
      }
      #pragma unroll
      for (int g = 0; g < 1; ++g) {
        *(uint4 *)(b_part + g * 4) = *(const uint4 *)(b_tile + (stage * 256 + unit * 32 + cell_n * 4 + g * 32));
      }
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc[i * 4 + j] = dot4_s8s8(a_part[i], b_part[j], acc[i * 4 + j]);
        }
      }
    }
    if (step + 1 < steps) {
      #pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int a_piece = thread + turn * 32;
        const int a_row = a_piece >> 3;
        const int a_unit = a_piece & 7;
        int *a_words = (int *)(a_next + turn * 4);
        a_tile[(1 - stage) * 64 + a_unit * 8 + a_row] = a_words[0];
      }
      #pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int b_piece = thread + turn * 32;
        const int b_row = (b_piece & 7) * 4;
        const int b_unit = b_piece >> 3;
        int *b_words = (int *)(b_next + turn * 16);
        b_wide[0] = (int)(((unsigned)b_words[0] >> 0 & 255) << 0 | ((unsigned)b_words[1] >> 0 & 255) << 8 | ((unsigned)b_words[2] >> 0 & 255) << 16 | ((unsigned)b_words[3] >> 0 & 255) << 24);
        b_wide[1] = (int)(((unsigned)b_words[0] >> 8 & 255) << 0 | ((unsigned)b_words[1] >> 8 & 255) << 8 | ((unsigned)b_words[2] >> 8 & 255) << 16 | ((unsigned)b_words[3] >> 8 & 255) << 24);
        b_wide[2] = (int)(((unsigned)b_words[0] >> 16 & 255) << 0 | ((unsigned)b_words[1] >> 16 & 255) << 8 | ((unsigned)b_words[2] >> 16 & 255) << 16 | ((unsigned)b_words[3] >> 16 & 255) << 24);
        b_wide[3] = (int)(((unsigned)b_words[0] >> 24 & 255) << 0 | ((unsigned)b_words[1] >> 24 & 255) << 8 | ((unsigned)b_words[2] >> 24 & 255) << 16 | ((unsigned)b_words[3] >> 24 & 255) << 24);
        *(uint4 *)(b_tile + ((1 - stage) * 256 + b_unit * 32 + b_row)) = *(const uint4 *)(b_wide);
      }
    }
    __syncthreads();
  }
  int *c_item = c + item * c_batch;
  __align__(16) int c_out[4];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row_0 + (i >> 1) * 8 + cell_m * 2 + (i & 1);
    if (row < m) {
      #pragma unroll
      for (int g = 0; g < 1; ++g) {
        #pragma unroll
        for (int h = 0; h < 1; ++h) {
          const int column = column_0 + g * 32 + cell_n * 4 + h * 4;
          if (column + 3 < n) {
            *(uint4 *)(c_item + (row * c_m + column)) = *(const uint4 *)(acc + (i * 4 + g * 4 + h * 4));
          } else {
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (column + j < n) {
                *(c_item + (row * c_m + column + j)) = acc[i * 4 + g * 4 + h * 4 + j];
              }
            }
          }
        }
      }
    }
  }
}
