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

enum { APART_MAX = 16 };
/* Of each of the first workers: the processors that it may use, as far as others decide, and what it was given here. */
static struct {
  cpu_set_t own, given;
} kept_off[APART_MAX + 1];

/* Let a worker run on its processors, but for one of them; on all of them if no other is left. */
static void keep_off(long worker, pthread_t thread, long one) {
  cpu_set_t now, *own = &kept_off[worker].own, *given = &kept_off[worker].given;
  if (one >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof now, &now)) return;
  if (!CPU_EQUAL(&now, given)) *own = now; /* the first time, or somebody else has bound it meanwhile */
  *given = *own;
  CPU_CLR(one, given);
  if (!CPU_COUNT(given)) *given = *own;
  if (!CPU_EQUAL(&now, given)) pthread_setaffinity_np(thread, sizeof *given, given);
}

/* Threads of a new pool have the affinity of the thread that makes them. */
static void forget_kept_off(void) { memset(kept_off, 0, sizeof kept_off); }
