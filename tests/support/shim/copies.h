// Asynchronous copies to shared memory (PTX ISA, cp.async). The hardware may write the destination at any
// time from the copy to the wait for its group: here it holds poison until the wait.
#pragma once

#include "shared.h"

namespace shim {

inline void copy_async(const char *what, int size, void *shared, const void *global, int bytes, int line) {
  const auto misaligned = [&](const void *p) { return reinterpret_cast<uintptr_t>(p) % uintptr_t(size) != 0; };
  if (misaligned(shared)) die("%s on line %d: the shared address is misaligned", what, line);
  if (misaligned(global)) die("%s on line %d: the global address is misaligned", what, line);
  if (bytes < 0 || bytes > size) die("%s on line %d: cannot read %d bytes", what, line, bytes);
  self->line = line;
  if (cell_of(shared, size, nullptr) == NOT_SHARED) die("%s on line %d: writes no shared memory", what, line);
  if (cell_of(global, size, nullptr) != NOT_SHARED) die("%s on line %d: reads shared memory", what, line);
  Copy copy = {static_cast<unsigned char *>(shared), size, self->group, {}};
  memcpy(copy.bytes, global, size_t(bytes));
  on_write(shared, size, nullptr);
  self->line = 0;
  memset(shared, 0xff, size_t(size));
  set_copying(shared, size, true);
  self->copies.push_back(copy);
}

// Lets the copies land that are committed and not in the last `pending` groups.
inline void copy_async_wait(unsigned pending) {
  std::vector<Copy> &copies = self->copies;
  const auto lands = [&](const Copy &copy) { return copy.group + pending < self->group; };
  for (const Copy &copy : copies) {
    if (!lands(copy)) continue;
    memcpy(copy.to, copy.bytes, size_t(copy.size));
    set_copying(copy.to, copy.size, false);
  }
  copies.erase(std::remove_if(copies.begin(), copies.end(), lands), copies.end());
}

}  // namespace shim

void copy_async_16(void *shared, const void *global, int bytes, int line) {
  shim::copy_async("copy_async_16", 16, shared, global, bytes, line);
}
void copy_async_8(void *shared, const void *global, int bytes, int line) {
  shim::copy_async("copy_async_8", 8, shared, global, bytes, line);
}
void copy_async_4(void *shared, const void *global, int bytes, int line) {
  shim::copy_async("copy_async_4", 4, shared, global, bytes, line);
}
void copy_async_commit() { shim::self->group++; }
void copy_async_wait_0() { shim::copy_async_wait(0); }
void copy_async_wait_1() { shim::copy_async_wait(1); }
void copy_async_wait_2() { shim::copy_async_wait(2); }
void copy_async_wait_3() { shim::copy_async_wait(3); }
void copy_async_wait_4() { shim::copy_async_wait(4); }
void copy_async_wait_5() { shim::copy_async_wait(5); }
void copy_async_wait_6() { shim::copy_async_wait(6); }
void copy_async_wait_7() { shim::copy_async_wait(7); }
