/* What the run time needs of Linux beyond POSIX: futexes, the affinity, and system calls. */
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>

/* pthread_atfork refers to it; crtbegin.o defines it, but -nostdlib leaves that out. */
__attribute__((visibility("hidden"))) void *__dso_handle = &__dso_handle;

/* Sleep while a word has a value; it may end early. */
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

/* Wake the thread that sleeps on a word, after its value has changed. */
static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

/* In a forked child, which has none of the sleepers. */
static void renew_sleep(void) {}

/* The processors that this process may use. */
static long processors(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return sysconf(_SC_NPROCESSORS_ONLN);
}

/* The processor that this thread runs on; -1 if it is not known. */
static long processor(void) { return sched_getcpu(); }

/* Let a thread run on the processors that this one may use, but for one of them; they stay as they are if no other is
 * left. */
static void keep_off(pthread_t thread, long one) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) || one >= CPU_SETSIZE) return;
  CPU_CLR(one, &set);
  if (CPU_COUNT(&set)) pthread_setaffinity_np(thread, sizeof set, &set);
}
