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

// How an element is read: a float as a number, so that products are summed in double and rounded once, an
// integer so that its sums wrap.
struct Element {
  int bytes;
  double (*real)(const void *);
  unsigned (*whole)(const void *);
};

template <class Sum>
Sum value_of(const Element &element, const void *p) {
  if constexpr (sizeof(Sum) == 8) return element.real(p);
  else return element.whole(p);
}

constexpr Element Bf16 = {
    2, [](const void *p) -> double { return float_of(unsigned(loaded<unsigned short>(p)) << 16); }, nullptr};
constexpr Element F16 = {2, [](const void *p) -> double { return of_f16(loaded<unsigned short>(p)); }, nullptr};
// The hardware looks at no bit that tf32 lacks.
constexpr Element Tf32 = {
    4, [](const void *p) -> double { return float_of(loaded<unsigned>(p) & ~0x1fffu); }, nullptr};
constexpr Element E4m3 = {1, [](const void *p) -> double { return of_e4m3(loaded<unsigned char>(p)); }, nullptr};
constexpr Element E5m2 = {1, [](const void *p) -> double { return of_e5m2(loaded<unsigned char>(p)); }, nullptr};
constexpr Element S8 = {1, nullptr, [](const void *p) { return unsigned(int(loaded<signed char>(p))); }};
constexpr Element U8 = {1, nullptr, [](const void *p) { return unsigned(loaded<unsigned char>(p)); }};

// D += A B of m x n x k elements, where a[m][k] and b[k][n] are stored in rows. `keep`: D counts at all.
template <class Sum, class D>
__attribute__((optimize("O3"))) void add_product(D *d, const Sum *a, const Sum *b, int m, int n, int k,
                                                 bool keep = true) {
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
