// The products of a warpgroup that kernels may call, by name: one function of the run time does them all.
#pragma once

// SHIM_WGMMAS(of): of(word, types of A and B, A along m, B along n, A from registers)
#define SHIM_WGMMAS(of)                                 \
  of(bf16_kk, Bf16, Bf16, false, false, false)          \
  of(bf16_kn, Bf16, Bf16, false, true, false)           \
  of(bf16_mk, Bf16, Bf16, true, false, false)           \
  of(bf16_mn, Bf16, Bf16, true, true, false)            \
  of(f16_kk, F16, F16, false, false, false)             \
  of(f16_kn, F16, F16, false, true, false)              \
  of(f16_mk, F16, F16, true, false, false)              \
  of(f16_mn, F16, F16, true, true, false)               \
  of(bf16_k, Bf16, Bf16, false, false, true)            \
  of(bf16_n, Bf16, Bf16, false, true, true)             \
  of(f16_k, F16, F16, false, false, true)               \
  of(f16_n, F16, F16, false, true, true)                \
  of(tf32_kk, Tf32, Tf32, false, false, false)          \
  of(e4m3_kk, E4m3, E4m3, false, false, false)          \
  of(e5m2_kk, E5m2, E5m2, false, false, false)          \
  of(e4m3e5m2_kk, E4m3, E5m2, false, false, false)      \
  of(e5m2e4m3_kk, E5m2, E4m3, false, false, false)      \
  of(s8s8_kk, S8, S8, false, false, false)              \
  of(u8s8_kk, U8, S8, false, false, false)

namespace shim {

#define SHIM_NAME(word, ...) word,
enum class Kind { SHIM_WGMMAS(SHIM_NAME) };
#undef SHIM_NAME

}  // namespace shim

void shim_wgmma(shim::Kind kind, const char *name, int n, void *d, const unsigned *a_registers, unsigned long a,
                unsigned long b, int keep, int line);

#define SHIM_OF_SHARED(n, depth, word, sum)                                                                       \
  inline void wgmma_m64n##n##k##depth##_##word(sum *d, unsigned long a, unsigned long b, int keep, SHIM_LINE) {  \
    shim_wgmma(shim::Kind::word, "wgmma_m64n" #n "k" #depth "_" #word, n, d, nullptr, a, b, keep, line);         \
  }
#define SHIM_OF_REGISTERS(n, word)                                                                               \
  inline void wgmma_rs_m64n##n##k16_##word(float *d, const unsigned *a, unsigned long b, int keep, SHIM_LINE) {  \
    shim_wgmma(shim::Kind::word, "wgmma_rs_m64n" #n "k16_" #word, n, d, a, 0, b, keep, line);                    \
  }
#define SHIM_FLOATS(n)                                                                                    \
  SHIM_OF_SHARED(n, 16, bf16_kk, float) SHIM_OF_SHARED(n, 16, bf16_kn, float)                             \
  SHIM_OF_SHARED(n, 16, bf16_mk, float) SHIM_OF_SHARED(n, 16, bf16_mn, float)                             \
  SHIM_OF_SHARED(n, 16, f16_kk, float) SHIM_OF_SHARED(n, 16, f16_kn, float)                               \
  SHIM_OF_SHARED(n, 16, f16_mk, float) SHIM_OF_SHARED(n, 16, f16_mn, float)                               \
  SHIM_OF_REGISTERS(n, bf16_k) SHIM_OF_REGISTERS(n, bf16_n)                                               \
  SHIM_OF_REGISTERS(n, f16_k) SHIM_OF_REGISTERS(n, f16_n)                                                 \
  SHIM_OF_SHARED(n, 8, tf32_kk, float) SHIM_OF_SHARED(n, 32, e4m3_kk, float)                              \
  SHIM_OF_SHARED(n, 32, e5m2_kk, float) SHIM_OF_SHARED(n, 32, e4m3e5m2_kk, float)                         \
  SHIM_OF_SHARED(n, 32, e5m2e4m3_kk, float)
#define SHIM_INTEGERS(n) SHIM_OF_SHARED(n, 32, s8s8_kk, int) SHIM_OF_SHARED(n, 32, u8s8_kk, int)

SHIM_FLOATS(8) SHIM_FLOATS(16) SHIM_FLOATS(24) SHIM_FLOATS(32) SHIM_FLOATS(40) SHIM_FLOATS(48) SHIM_FLOATS(56)
SHIM_FLOATS(64) SHIM_FLOATS(72) SHIM_FLOATS(80) SHIM_FLOATS(88) SHIM_FLOATS(96) SHIM_FLOATS(104) SHIM_FLOATS(112)
SHIM_FLOATS(120) SHIM_FLOATS(128) SHIM_FLOATS(136) SHIM_FLOATS(144) SHIM_FLOATS(152) SHIM_FLOATS(160)
SHIM_FLOATS(168) SHIM_FLOATS(176) SHIM_FLOATS(184) SHIM_FLOATS(192) SHIM_FLOATS(200) SHIM_FLOATS(208)
SHIM_FLOATS(216) SHIM_FLOATS(224) SHIM_FLOATS(232) SHIM_FLOATS(240) SHIM_FLOATS(248) SHIM_FLOATS(256)
SHIM_INTEGERS(8) SHIM_INTEGERS(16) SHIM_INTEGERS(24) SHIM_INTEGERS(32) SHIM_INTEGERS(48) SHIM_INTEGERS(64)
SHIM_INTEGERS(80) SHIM_INTEGERS(96) SHIM_INTEGERS(112) SHIM_INTEGERS(128) SHIM_INTEGERS(144) SHIM_INTEGERS(160)
SHIM_INTEGERS(176) SHIM_INTEGERS(192) SHIM_INTEGERS(208) SHIM_INTEGERS(224) SHIM_INTEGERS(240) SHIM_INTEGERS(256)
#undef SHIM_OF_SHARED
#undef SHIM_OF_REGISTERS
#undef SHIM_FLOATS
#undef SHIM_INTEGERS

void wgmma_fence(SHIM_LINE);
void wgmma_commit(SHIM_LINE);
void wgmma_wait_0(SHIM_LINE);
void wgmma_wait_1(SHIM_LINE);
void wgmma_wait_2(SHIM_LINE);
unsigned shared_address(const void *p, SHIM_LINE);

void shim_registers(const char *name, int line);
#define SHIM_REGISTERS(way, count) \
  inline void registers_##way##_##count(SHIM_LINE) { shim_registers("registers_" #way "_" #count, line); }
SHIM_REGISTERS(down, 24) SHIM_REGISTERS(down, 32) SHIM_REGISTERS(down, 40) SHIM_REGISTERS(down, 56)
SHIM_REGISTERS(up, 152) SHIM_REGISTERS(up, 160) SHIM_REGISTERS(up, 184) SHIM_REGISTERS(up, 208)
SHIM_REGISTERS(up, 216) SHIM_REGISTERS(up, 224) SHIM_REGISTERS(up, 232) SHIM_REGISTERS(up, 240)
SHIM_REGISTERS(up, 248)
#undef SHIM_REGISTERS
