// What the compiler's checks and the processor's signals call. Each ends the launch with a message.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include "shared.h"

// -- hooks before each access to memory: what gcc's -fsanitize=thread calls ---------------
#define SHIM_HOOKS(bytes)                                                                                        \
  extern "C" void __tsan_read##bytes(void *p) { shim::on_read(p, bytes, __builtin_return_address(0)); }          \
  extern "C" void __tsan_write##bytes(void *p) { shim::on_write(p, bytes, __builtin_return_address(0)); }        \
  extern "C" __attribute__((alias("__tsan_read" #bytes))) void __tsan_unaligned_read##bytes(void *);             \
  extern "C" __attribute__((alias("__tsan_write" #bytes))) void __tsan_unaligned_write##bytes(void *);
SHIM_HOOKS(1)
SHIM_HOOKS(2)
SHIM_HOOKS(4)
SHIM_HOOKS(8)
SHIM_HOOKS(16)
#undef SHIM_HOOKS
extern "C" void __tsan_read_range(void *p, size_t bytes) { shim::on_read(p, int(bytes), __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void *p, size_t bytes) { shim::on_write(p, int(bytes), __builtin_return_address(0)); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}

// -- failed checks: what gcc's -fsanitize=bounds and others call, with these records -------
namespace shim {

struct Place {
  const char *file;
  unsigned line, column;
};

struct Type {
  unsigned short kind, size;
  char name[1];  // and more
};

struct Access {
  Place place;
  const Type *type;
  unsigned char alignment;  // its logarithm
  unsigned char what;
};

struct Bounds {
  Place place;
  const Type *array, *index;
};

}  // namespace shim

extern "C" void __ubsan_handle_type_mismatch_v1_abort(const shim::Access *access, uintptr_t address) {
  shim::failure.address = reinterpret_cast<const void *>(address);
  shim::die("misaligned: thread %d takes %#lx for the address of a %s, a multiple of %lu, on line %u",
            shim::self->number, (unsigned long)address, access->type->name, 1ul << access->alignment,
            access->place.line);
}

extern "C" void __ubsan_handle_out_of_bounds_abort(const shim::Bounds *bounds, long index) {
  shim::die("out of bounds: thread %d takes element %d of %s on line %u", shim::self->number, int(index),
            bounds->array->name, bounds->place.line);
}

extern "C" void __ubsan_handle_shift_out_of_bounds_abort(const shim::Place *place, long, long by) {
  shim::die("thread %d shifts by %d on line %u", shim::self->number, int(by), place->line);
}

extern "C" void __ubsan_handle_divrem_overflow_abort(const shim::Place *place, long, long) {
  shim::die("thread %d divides by zero on line %u", shim::self->number, place->line);
}

// -- signals ---------------------------------------------------------------------------------
namespace shim {

static sigjmp_buf landing;
static char signal_stack[64 << 10];
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

inline const void *code_at(const void *context) {
  const auto *machine = &static_cast<const ucontext_t *>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const void *>(machine->gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<const void *>(machine->pc);
#else
  return machine ? nullptr : nullptr;
#endif
}

// An access to a page that must not be touched. The stack of the thread that made it is abandoned.
inline void on_signal(int number, siginfo_t *info, void *context) {
  const int who = self ? self->number : -1;
  const bool memory = number == SIGSEGV || number == SIGBUS;
  note_place(self && self->line ? nullptr : code_at(context));
  if (memory && stacks.hold(info->si_addr)) {
    note("thread %d needs more than %zu bytes of stack", who, Stacks::BYTES);
  } else if (memory) {
    failure.address = info->si_addr;
    note("out of bounds: thread %d touches %p", who, info->si_addr);
  } else {
    note("thread %d is stopped by signal %d", who, number);
  }
  siglongjmp(landing, 1);
}

// Calls `work`, from which a signal returns.
template <class Function>
void caught(Function work) {
  stack_t stack = {}, old_stack;
  stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
  struct sigaction action = {}, old[4];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaltstack(&stack, &old_stack);
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &old[i]);
  if (sigsetjmp(landing, 1) == 0) work();
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
}

}  // namespace shim
