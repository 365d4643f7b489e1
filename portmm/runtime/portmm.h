/* Matrix products by kernels that portmm generated; the library needs libc, libm and threads.
 *
 * Types are those of A, B and C: "f32", "bf16", "f16", "f64", "u8-s8-s32", ... Strides are in elements, and C is by rows.
 * A product runs the kernel that was selected for the nearest size in the library. It serves any N and K; a kernel for
 * few rows has a register tile of as many, so that each M up to 12 or so must be among the shapes of the library. */
#ifndef PORTMM_H
#define PORTMM_H
#ifdef __cplusplus
extern "C" {
#endif

enum { PORTMM_OK = 0, PORTMM_MISSING = 1, PORTMM_INVALID = 2, PORTMM_MEMORY = 3 };
/* Missing: the library has no kernel of these types and layouts for this processor. */

/* The machine of the library whose kernels run here; empty if there is none. */
const char *portmm_machine(void);

/* The most threads of a call; at first the processors of the process. */
long portmm_get_num_threads(void);
void portmm_set_num_threads(long threads);

/* C[m][n] = A[m][k] . B[k][n]; A and B are by rows or by columns. */
int portmm_matmul(const char *types, long m, long n, long k, const void *a, long a_m, long a_k, const void *b,
                  long b_k, long b_n, void *c, long c_m);

/* Bytes of a packed weight, -1 where there is no packing; align its memory to 64 bytes. */
long portmm_packed_bytes(const char *types, long k, long n);
int portmm_pack(const char *types, long k, long n, const void *b, long b_k, long b_n, void *packed);
int portmm_matmul_packed(const char *types, long m, long n, long k, const void *a, long a_m, long a_k,
                         const void *packed, void *c, long c_m);

#ifdef __cplusplus
}
#endif
#endif
