// The types of elements that matrix products take, as they lie in memory or in a register.
#pragma once

#include <cstring>

#include "numbers.h"

namespace shim {

template <class T>
inline T loaded(const void *p) {
  T x;
  memcpy(&x, p, sizeof x);
  return x;
}

// A float product is summed in double and rounded once; a sum of integers wraps.
struct Float {
  using Sum = double;
};
struct Integer {
  using Sum = unsigned;
};

struct Bf16 : Float {
  static constexpr int bytes = 2;
  static float value(const void *p) { return float_of(unsigned(loaded<unsigned short>(p)) << 16); }
};
struct F16 : Float {
  static constexpr int bytes = 2;
  static float value(const void *p) { return of_f16(loaded<unsigned short>(p)); }
};
// The hardware looks at no bit that tf32 lacks.
struct Tf32 : Float {
  static constexpr int bytes = 4;
  static float value(const void *p) { return float_of(loaded<unsigned>(p) & ~0x1fffu); }
};
struct E4m3 : Float {
  static constexpr int bytes = 1;
  static float value(const void *p) { return of_e4m3(loaded<unsigned char>(p)); }
};
struct E5m2 : Float {
  static constexpr int bytes = 1;
  static float value(const void *p) { return of_e5m2(loaded<unsigned char>(p)); }
};
struct S8 : Integer {
  static constexpr int bytes = 1;
  static unsigned value(const void *p) { return unsigned(int(loaded<signed char>(p))); }
};
struct U8 : Integer {
  static constexpr int bytes = 1;
  static unsigned value(const void *p) { return loaded<unsigned char>(p); }
};

// D += A B of m x n x k elements, where a[m][k] and b[k][n] are stored in rows. `keep`: D counts at all.
template <class Sum, class D>
__attribute__((optimize("O3"))) void add_product(D *d, const Sum *a, const Sum *b, int m, int n, int k, bool keep = true) {
  constexpr int MOST = 256;
  Sum sums[MOST];
  for (int i = 0; i < m; i++) {
    for (int j = 0; j < n; j++) sums[j] = 0;
    for (int x = 0; x < k; x++) {
      const Sum factor = a[i * k + x];
      const Sum *const row = b + x * n;
      for (int j = 0; j < n; j++) sums[j] += factor * row[j];
    }
    for (int j = 0; j < n; j++) d[i * n + j] = D(keep ? sums[j] + Sum(d[i * n + j]) : sums[j]);
  }
}

}  // namespace shim
