// What the source of a CUDA kernel sees when it is compiled for a CPU: the words of the language, the
// vector types, the functions of the device, and the named primitives (device.h, numbers.h). The CUDA bodies
// of the primitives are inline PTX; these were written from the manuals and live in numbers.h and in the run
// time (runtime.cpp), which also owns barriers, shared memory and what watches them.
#pragma once

// -- words ---------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)  // a launch says how large clusters are
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// In a section of their own, so that the run time finds all of them; `used`, because it also writes them.
#define __shared__ static __attribute__((used, section("shim_shared")))
#define SHARED_BYTES(name) unsigned char *const name = shim_dynamic

// -- types ---------------------------------------------------------------------
#define SHIM_VECTORS(word, element, bytes)                                    \
  struct __align__(2 * bytes) word##2 { element x, y; };                      \
  struct word##3 { element x, y, z; };                                        \
  struct __align__(4 * bytes) word##4 { element x, y, z, w; };                \
  inline word##2 make_##word##2(element x, element y) { return {x, y}; }      \
  inline word##4 make_##word##4(element x, element y, element z, element w) { return {x, y, z, w}; }
SHIM_VECTORS(char, signed char, 1)
SHIM_VECTORS(uchar, unsigned char, 1)
SHIM_VECTORS(short, short, 2)
SHIM_VECTORS(ushort, unsigned short, 2)
SHIM_VECTORS(int, int, 4)
SHIM_VECTORS(uint, unsigned, 4)
SHIM_VECTORS(float, float, 4)
#undef SHIM_VECTORS
#define SHIM_LONG_VECTORS(word, element)                                      \
  struct __align__(16) word##2 { element x, y; };                             \
  inline word##2 make_##word##2(element x, element y) { return {x, y}; }
SHIM_LONG_VECTORS(long, long)
SHIM_LONG_VECTORS(ulong, unsigned long)
SHIM_LONG_VECTORS(double, double)
#undef SHIM_LONG_VECTORS
struct __align__(64) TensorMap { unsigned long words[16]; };
static_assert(sizeof(long) == 8, "a long of CUDA on Linux has 64 bits");

// Constants for a thread: the run time sets them each time that it goes on with another.
extern "C" const uint3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" unsigned char *shim_dynamic;  // of the block that runs

// -- functions of the device -----------------------------------------------------
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

#define SHIM_MIN_MAX(type)                                      \
  inline type min(type a, type b) { return b < a ? b : a; }     \
  inline type max(type a, type b) { return a < b ? b : a; }
SHIM_MIN_MAX(int)
SHIM_MIN_MAX(unsigned)
SHIM_MIN_MAX(long)
SHIM_MIN_MAX(unsigned long)
#undef SHIM_MIN_MAX

extern "C" {
float fmaf(float, float, float) noexcept;
float fabsf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float copysignf(float, float) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float tanhf(float) noexcept;
float erff(float) noexcept;
float powf(float, float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float truncf(float) noexcept;
float roundf(float) noexcept;
float rintf(float) noexcept;
double fma(double, double, double) noexcept;
double fabs(double) noexcept;
double sqrt(double) noexcept;
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }

#include "call.h"
#include "device.h"
#include "numbers.h"
