// Fibers: a stack each, and a switch from one to another in the same OS thread.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

#if !defined(__x86_64__)
#define SHIM_UCONTEXT
#endif
#ifdef SHIM_UCONTEXT
#include <ucontext.h>
#endif

namespace shim {

#ifdef SHIM_UCONTEXT

struct Context {
  ucontext_t saved;
};

inline void switch_to(Context &from, Context &to) { swapcontext(&from.saved, &to.saved); }

// Makes a context whose first switch calls `entry`, which must not return.
inline void begin_at(Context &context, char *stack, size_t bytes, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

#else

struct Context {
  void *stack_pointer;
};

// swapcontext asks the kernel for the signal mask twice; this saves what the System V ABI has a callee save.
extern "C" void shim_switch(void **from, void *to);
asm(R"(
    .text
    .globl shim_switch
    .hidden shim_switch
    .type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size shim_switch, . - shim_switch
)");

inline void switch_to(Context &from, Context &to) { shim_switch(&from.stack_pointer, to.stack_pointer); }

inline void begin_at(Context &context, char *stack, size_t bytes, void (*entry)()) {
  void **top = reinterpret_cast<void **>(stack + bytes);
  *--top = nullptr;  // a return address, so that the stack is aligned as after a call
  *--top = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  context.stack_pointer = top;
}

#endif

// Stacks of equal size, each above a page that cannot be touched.
class Stacks {
 public:
  static constexpr size_t BYTES = 128 << 10;

  ~Stacks() { release(); }

  bool take(int count) {
    release();
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), each = BYTES + page;
    void *found = mmap(nullptr, each * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    memory = static_cast<char *>(found), total = each * count, guard = page;
    for (int i = 0; i < count; i++)
      if (mprotect(memory + each * i, page, PROT_NONE)) return false;
    return true;
  }

  char *stack(int i) { return memory + (BYTES + guard) * i + guard; }

  bool hold(const void *address) const {
    const char *p = static_cast<const char *>(address);
    return memory && p >= memory && p < memory + total;
  }

  void release() {
    if (memory) munmap(memory, total);
    memory = nullptr;
  }

 private:
  char *memory = nullptr;
  size_t total = 0, guard = 0;
};

}  // namespace shim
