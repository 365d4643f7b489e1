// Calls a kernel with an array of the addresses of its arguments, as cuLaunchKernel does, and says what
// types they have. SHIM_KERNEL(name), after the kernel, makes both known to the run time.
#pragma once

namespace shim {

template <int... I>
struct Numbers {};
template <int N, int... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
  using Each = Numbers<I...>;
};

template <class T>
struct Letter;  // a kernel takes no other types
template <class T>
struct Letter<T *> {
  static constexpr char value = 'p';
};
template <>
struct Letter<int> {
  static constexpr char value = 'i';
};
template <>
struct Letter<long> {
  static constexpr char value = 'l';
};
template <>
struct Letter<float> {
  static constexpr char value = 'f';
};

template <>
struct Letter<TensorMap> {
  static constexpr char value = 'm';
};

template <class... A, int... I>
void call_each(void (*kernel)(A...), void **arguments, Numbers<I...>) {
  kernel(*static_cast<A *>(arguments[I])...);
}

template <class... A>
void call(void (*kernel)(A...), void **arguments) {
  call_each(kernel, arguments, typename CountTo<sizeof...(A)>::Each{});
}

template <class... A>
const char *signature(void (*)(A...)) {
  static const char letters[] = {Letter<A>::value..., 0};
  return letters;
}

}  // namespace shim

#define SHIM_KERNEL(kernel)                                                      \
  extern "C" void shim_call(void **arguments) { shim::call(kernel, arguments); } \
  extern "C" const char *shim_signature() { return shim::signature(kernel); }
