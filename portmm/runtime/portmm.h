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
/* Missing: the library has no kernel of these types and layouts for this processor. Invalid: a size or an address cannot
 * be. Memory: there is none for a workspace. Nothing is computed then. */

/* The machine of the library whose kernels run here; empty if there is none. */
const char *portmm_machine(void);

/* The most threads of a call; at first the processors of the process. */
long portmm_get_num_threads(void);
void portmm_set_num_threads(long threads);

/* C[m][n] = A[m][k] . B[k][n]; A and B are by rows or by columns. */
int portmm_matmul(const char *types, long m, long n, long k, const void *a, long a_m, long a_k, const void *b,
                  long b_k, long b_n, void *c, long c_m);

/* Bytes of a packed weight, -1 where there is no packing; its memory is aligned to 64 bytes. */
long portmm_packed_bytes(const char *types, long k, long n);
int portmm_pack(const char *types, long k, long n, const void *b, long b_k, long b_n, void *packed);
int portmm_matmul_packed(const char *types, long m, long n, long k, const void *a, long a_m, long a_k,
                         const void *packed, void *c, long c_m);

/* Weights of four bits, for types as "f32-u4-f32", which `portmm_matmul_packed` multiplies: a value is
 * codes[k][n] * scales[k / group][n] + offsets[k / group][n], with codes of 0 to 15 in a byte each, and
 * portmm_group(types) rows in a group. */
long portmm_group(const char *types);
int portmm_pack_int4(const char *types, long k, long n, const unsigned char *codes, const float *scales,
                     const float *offsets, void *packed);

/* softmax(scale * Q . K^T) . V for each item and head: q is [items][heads][queries][d], k [items][kv_heads][keys][d],
 * v [items][kv_heads][keys][dv], out as q with dv, all of `type`. The last query is at the last key: with `causal` a
 * query sees no later keys, with `window` > 0 none as far away. lse takes [items][heads][queries] logarithms of the sums,
 * or is NULL. Missing: there is no kernel of this type and these options, or d or dv is no multiple of what it takes. */
int portmm_attention(const char *type, long items, long heads, long kv_heads, long queries, long keys, long d, long dv,
                     const void *q, const void *k, const void *v, float scale, int causal, long window, void *out,
                     float *lse);

/* Functions of this library: dense arrays by rows, at multiples of 4 bytes; results share no memory with others. bf16 and
 * f16 are words of 16 bits. */
/* functions */

#ifdef __cplusplus
}
#endif
#endif
