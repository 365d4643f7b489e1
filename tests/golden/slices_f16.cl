/* portmm_slices_f32_f32_f32_2x4x1_simt, made by portmm 0.1.0 for SIMT threads */
/* simt simt: registers 2x4x1, warp 8x16x1, shared 8x32x8, L2 64xallxall; 32 threads, A row, B row, 1 x 1 x 1 elements at once, 2 stages, k split in 4 */
/* made again by: portmm emit --schedule simt:simt:f16:2x4x1/8x16x1/8x32x8/64x0x0:2-2:a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,stages=2,split=4,vectors=1x1x1,cell=2x4 */

static inline unsigned short f16_of_f32(float x) {
  unsigned short y;
  vstore_half_rte(x, 0, (half *)&y);
  return y;
}

__kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void portmm_slices_f32_f32_f32_2x4x1_simt(
    const int m,
    const int n,
    const int batch,
    const long work_batch,
    __global const float *restrict work_buffer,
    const long work_at,
    __global unsigned short *c_buffer,
    const long c_at,
    const long c_m,
    const long c_batch) {
  __global const float *work = work_buffer + work_at;
  __global unsigned short *c = c_buffer + c_at;
  const int thread = (int)get_local_id(0);
  const int block = (int)get_group_id(0);
  const int item = block / (m * ((n + 127) >> 7));
  const int row = block % (m * ((n + 127) >> 7)) / ((n + 127) >> 7);
  const int column = block % ((n + 127) >> 7) * 128 + thread;
  if (column < n) {
    float sum[1] __attribute__((aligned(16)));
    sum[0] = *(work + (item * work_batch + row * n + column));
    for (int i = 1; i < 4; ++i) {
      sum[0] += *(work + (item * work_batch + row * n + column + i * (batch * work_batch)));
    }
    *(c + (item * c_batch + row * c_m + column)) = f16_of_f32(sum[0]);
  }
}
