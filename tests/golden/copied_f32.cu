/* portmm_simt_f32_f32_f32_2x4x1_simt, made by portmm 0.1.0 for SIMT threads */
/* simt simt: registers 2x4x1, warp 8x16x1, shared 8x32x8, L2 64xallxall; 32 threads, A row, B row, 2 x 4 x 4 elements at once, 3 stages of asynchronous copies */
/* made again by: portmm emit --schedule simt:simt:f32:2x4x1/8x16x1/8x32x8/64x0x0:2-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,copies,stages=3,split=1,vectors=2x4x4,cell=2x4,resident=4 */

#ifdef __CUDACC__

static __device__ __forceinline__ void copy_async_4(void *to, const void *src, int bytes) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(at), "l"(src), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void copy_async_16(void *to, const void *src, int bytes) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(src), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void copy_async_wait_1() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

static __device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

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

static __device__ __forceinline__ float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }

static __device__ __forceinline__ int min_(int x, int y) { return x < y ? x : y; }

static __device__ __forceinline__ int max_(int x, int y) { return x > y ? x : y; }

extern "C" __global__ void __launch_bounds__(32, 4) portmm_simt_f32_f32_f32_2x4x1_simt(
    const int m,
    const int n,
    const int k,
    const float *__restrict__ a,
    const long a_m,
    const long a_batch,
    const float *__restrict__ b,
    const long b_k,
    const long b_batch,
    const int batch,
    float *c,
    const long c_m,
    const long c_batch) {
  const int thread = (int)threadIdx.x;
  const int block = (int)blockIdx.x;
  __shared__ __align__(16) float a_tile[192];
  __shared__ __align__(16) float b_tile[768];
  __shared__ __align__(16) float totals[256];
  __align__(16) float acc[8];
  __align__(16) float a_part[2];
  __align__(16) float b_part[4];
  __align__(16) float a_next[2];
  __align__(16) float b_next[8];
  const int down = (m + 7) >> 3;
  const int across = (n + 31) >> 5;
  const int item = block / (down * across);
  const int tile = block % (down * across);
  const int first = tile / (across * 8) * 8;
  const int high = min_(down - first, 8);
  const int row_0 = (first + tile % (across * 8) % high) * 8;
  const int column_0 = tile % (across * 8) / high * 32;
  const float *a_item = a + item * a_batch;
  const float *b_item = b + item * b_batch;
  const int warp = thread >> 4;
  const int lane = thread & 15;
  const int cell_m = (warp >> 1) * 4 + (lane >> 2);
  const int cell_n = (warp & 1) * 4 + (lane & 3);
  const int k_0 = 0;
  const int k_end = k;
  const int steps = (k + 7) >> 3;
  #pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (0 < steps) {
    #pragma unroll
    for (int turn = 0; turn < 1; ++turn) {
      const int a_piece = thread + turn * 32;
      const int a_row = a_piece >> 2;
      const int a_unit = (a_piece & 3) * 2;
      const int a_at = k_0 + a_unit;
      const float *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
      copy_async_4(a_tile + (a_unit * 8 + a_row), a_from, (a_at < k_end) ? 4 : 0);
      copy_async_4(a_tile + ((a_unit + 1) * 8 + a_row), a_from + 1, (a_at + 1 < k_end) ? 4 : 0);
    }
    #pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int b_piece = thread + turn * 32;
      const int b_row = (b_piece & 7) * 4;
      const int b_unit = b_piece >> 3;
      const int b_at = k_0 + b_unit;
      const float *b_from = b_item + (min_(column_0 + b_row, n - 4) + b_at * b_k);
      copy_async_16(b_tile + (b_unit * 32 + b_row), b_from, (b_at < k_end) ? 16 : 0);
    }
  }
  copy_async_commit();
  if (1 < steps) {
    #pragma unroll
    for (int turn = 0; turn < 1; ++turn) {
      const int a_piece = thread + turn * 32;
      const int a_row = a_piece >> 2;
      const int a_unit = (a_piece & 3) * 2;
      const int a_at = k_0 + 8 + a_unit;
      const float *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
      copy_async_4(a_tile + (64 + a_unit * 8 + a_row), a_from, (a_at < k_end) ? 4 : 0);
      copy_async_4(a_tile + (64 + (a_unit + 1) * 8 + a_row), a_from + 1, (a_at + 1 < k_end) ? 4 : 0);
    }
    #pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int b_piece = thread + turn * 32;
      const int b_row = (b_piece & 7) * 4;
      const int b_unit = b_piece >> 3;
      const int b_at = k_0 + 8 + b_unit;
      const float *b_from = b_item + (min_(column_0 + b_row, n - 4) + b_at * b_k);
      copy_async_16(b_tile + (256 + b_unit * 32 + b_row), b_from, (b_at < k_end) ? 16 : 0);
    }
  }
  copy_async_commit();
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
      copy_async_wait_1();
      __syncthreads();
      if (step + 2 < steps) {
        #pragma unroll
        for (int turn = 0; turn < 1; ++turn) {
          const int a_piece = thread + turn * 32;
          const int a_row = a_piece >> 2;
          const int a_unit = (a_piece & 3) * 2;
          const int a_at = k_0 + (step + 2) * 8 + a_unit;
          const float *a_from = a_item + (min_(row_0 + a_row, m - 1) * a_m + a_at);
          copy_async_4(a_tile + ((step + 2) % 3 * 64 + a_unit * 8 + a_row), a_from, (a_at < k_end) ? 4 : 0);
          copy_async_4(a_tile + ((step + 2) % 3 * 64 + (a_unit + 1) * 8 + a_row), a_from + 1, (a_at + 1 < k_end) ? 4 : 0);
        }
        #pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const int b_piece = thread + turn * 32;
          const int b_row = (b_piece & 7) * 4;
          const int b_unit = b_piece >> 3;
          const int b_at = k_0 + (step + 2) * 8 + b_unit;
          const float *b_from = b_item + (min_(column_0 + b_row, n - 4) + b_at * b_k);
          copy_async_16(b_tile + ((step + 2) % 3 * 256 + b_unit * 32 + b_row), b_from, (b_at < k_end) ? 16 : 0);
        }
      }
      copy_async_commit();
      const int stage = step % 3;
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
            acc[i * 4 + j] = fma_f32(a_part[i], b_part[j], acc[i * 4 + j]);
          }
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      acc[i] += totals[i * 32 + thread];
      totals[i * 32 + thread] = acc[i];
    }
  }
  float *c_item = c + item * c_batch;
  __align__(16) float c_out[4];
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
