// The primitives that kernels call and the run time defines. The line of the source that calls says which
// barrier, shuffle or product it is: the defaults fill it in.
#pragma once

#define SHIM_LINE int line = __builtin_LINE()

// -- what threads do together ------------------------------------------------------
void __syncthreads(SHIM_LINE);
void __syncwarp(unsigned mask = 0xffffffffu, SHIM_LINE);
float shuffle_xor_f32(float x, int mask, SHIM_LINE);
float shuffle_down_f32(float x, int delta, SHIM_LINE);
int shuffle_xor_s32(int x, int mask, SHIM_LINE);
int shuffle_idx_s32(int x, int lane, SHIM_LINE);

// -- asynchronous copies -------------------------------------------------------------
void copy_async_16(void *shared, const void *global, int bytes, SHIM_LINE);
void copy_async_8(void *shared, const void *global, int bytes, SHIM_LINE);
void copy_async_4(void *shared, const void *global, int bytes, SHIM_LINE);
void copy_async_commit();
void copy_async_wait_0();
void copy_async_wait_1();
void copy_async_wait_2();
void copy_async_wait_3();
void copy_async_wait_4();
void copy_async_wait_5();
void copy_async_wait_6();
void copy_async_wait_7();

// -- products of fragments: each thread of a warp holds a part of each matrix ------------
// SHIM_FRAGMENTS(of): of(name, rows of A, registers of A, types of A, B and D)
#define SHIM_FRAGMENTS(of)                         \
  of(m16n8k16_bf16, 16, 4, Bf16, Bf16, float)      \
  of(m16n8k16_f16, 16, 4, F16, F16, float)         \
  of(m16n8k8_f16, 16, 2, F16, F16, float)          \
  of(m16n8k8_tf32, 16, 4, Tf32, Tf32, float)       \
  of(m16n8k32_e4m3, 16, 4, E4m3, E4m3, float)      \
  of(m16n8k32_e5m2, 16, 4, E5m2, E5m2, float)      \
  of(m16n8k32_e4m3e5m2, 16, 4, E4m3, E5m2, float)  \
  of(m16n8k32_e5m2e4m3, 16, 4, E5m2, E4m3, float)  \
  of(m16n8k32_s8s8, 16, 4, S8, S8, int)            \
  of(m16n8k32_u8s8, 16, 4, U8, S8, int)            \
  of(m8n8k16_s8s8, 8, 1, S8, S8, int)              \
  of(m8n8k16_u8s8, 8, 1, U8, S8, int)
#define SHIM_DECLARE(name, m, registers, A, B, D) \
  void mma_##name(D *d, const unsigned *a, const unsigned *b, SHIM_LINE);
SHIM_FRAGMENTS(SHIM_DECLARE)
#undef SHIM_DECLARE

// SHIM_MATRICES(of): of(suffix, matrices, transposed)
#define SHIM_MATRICES(of) \
  of(x1, 1, false) of(x2, 2, false) of(x4, 4, false) of(trans_x1, 1, true) of(trans_x2, 2, true) of(trans_x4, 4, true)
#define SHIM_DECLARE(suffix, count, transposed)                      \
  void ldmatrix_##suffix(unsigned *to, const void *row, SHIM_LINE);  \
  void stmatrix_##suffix(void *row, const unsigned *from, SHIM_LINE);
SHIM_MATRICES(SHIM_DECLARE)
#undef SHIM_DECLARE

// -- barriers ---------------------------------------------------------------------------------
void mbarrier_init(unsigned long *bar, int count, SHIM_LINE);
void mbarrier_init_fence();
void mbarrier_expect(unsigned long *bar, int bytes, SHIM_LINE);
void mbarrier_arrive(unsigned long *bar, SHIM_LINE);
void mbarrier_arrive_copied(unsigned long *bar, SHIM_LINE);
void mbarrier_arrive_at(unsigned long *bar, int rank, SHIM_LINE);
void mbarrier_wait(unsigned long *bar, int parity, SHIM_LINE);
void fence_async_shared();
void block_barrier_sync(int id, int threads, SHIM_LINE);
void block_barrier_arrive(int id, int threads, SHIM_LINE);
int cluster_rank();
void cluster_sync(SHIM_LINE);
void store_far_f32(float *to, const float *from, int rank, SHIM_LINE);
int atomic_ticket(int *counter, SHIM_LINE);
void memory_fence();

// -- boxes of tensors -----------------------------------------------------------------------------
struct TensorMap;
void tma_load(void *to, const TensorMap *map, unsigned long *bar, int x, int y, int z, SHIM_LINE);
void tma_load_4d(void *to, const TensorMap *map, unsigned long *bar, int x, int y, int z, int w, SHIM_LINE);
void tma_load_im2col(void *to, const TensorMap *map, unsigned long *bar, int c, int x, int y, int z, int dx, int dy,
                     SHIM_LINE);
void tma_load_multicast(void *to, const TensorMap *map, unsigned long *bar, int x, int y, int z, int mask, SHIM_LINE);
void tma_store(const TensorMap *map, const void *from, int x, int y, int z, SHIM_LINE);
void tma_store_commit();
void tma_store_read_0();
void tma_store_read_1();
void tma_store_wait_0();
void tma_prefetch(const TensorMap *map, SHIM_LINE);

#include "products.h"
