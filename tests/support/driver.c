/* Runs built kernels without Python: jobs come on standard input, C goes out, and
 * the operands of fused expressions. Arguments are pairs of a shared object and its
 * symbol. A job is 33 longs (see tests/support/driver.py), then the bytes of A, B, C, six
 * vectors and the numbers, and for each operand six longs and its bytes. Every
 * operand and the scratch end where an inaccessible page starts, or lie in the
 * sanitizer's heap. Tasks run on one thread, last first, spread over the workers. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef SANITIZED
#define GUARDED 0
#else
#define GUARDED 1
#endif

enum { KERNEL, SIZES, A = SIZES + 5, B = A + 6, C = B + 6, WORK = C + 6, OPERANDS, NUMBERS, JOB };

static void spread(void *pool, void (*body)(const long *ctx, long task, long worker), const long *ctx, long tasks,
                   long workers) {
  (void)pool;
  for (long task = tasks - 1; task >= 0; task--) body(ctx, task, task % workers);
}

/* `bytes` of memory that ends at the guard. */
static char *place(long bytes, long align) {
  bytes = (bytes + align - 1) / align * align;
  if (!GUARDED) return align > 16 ? aligned_alloc(align, bytes) : malloc(bytes);
  long page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  char *p = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || mprotect(p + whole, page, PROT_NONE)) exit(90);
  return p + whole - bytes;
}

static void drop(char *p, long bytes) {
  if (!GUARDED) {
    free(p);
    return;
  }
  long page = sysconf(_SC_PAGESIZE), start = (long)p / page * page;
  munmap((void *)start, ((long)p + bytes + page - 1) / page * page + page - start);
}

static void take(void *to, long bytes) {
  if (bytes && fread(to, 1, bytes, stdin) != (size_t)bytes) exit(91);
}

/* An operand: bytes, byte offset of element zero, then its three strides. */
static char *operand(const long *job) {
  char *p = place(job[0], job[5]);
  take(p, job[0]);
  return p;
}

int main(int argc, char **argv) {
  long job[JOB];
  void (*kernels[1024])(const portmm_args *);
  for (int i = 1; i + 1 < argc; i += 2) {
    void *library = dlopen(argv[i], RTLD_NOW);
    if (!library || !(kernels[i / 2] = dlsym(library, argv[i + 1]))) return fprintf(stderr, "%s\n", dlerror()), 92;
  }
  while (fread(job, sizeof job, 1, stdin) == 1) {
    char *a = operand(job + A), *b = operand(job + B), *c = operand(job + C), *work = place(job[WORK], 64);
    memset(work, 0xff, job[WORK]); /* NaN */
    char *numbers = place(job[NUMBERS], 4), *extra[64];
    take(numbers, job[NUMBERS]);
    long heads[64][6];
    portmm_operand table[64];
    for (int i = 0; i < job[OPERANDS]; i++) {
      const long *h = heads[i];
      take(heads[i], sizeof heads[i]);
      extra[i] = operand(h);
      table[i] = (portmm_operand){extra[i] + h[1], .b = h[2], .m = h[3], .n = h[4]};
    }
    const long *s = job + SIZES;
    portmm_args args = {s[0], s[1], s[2], s[3],
                        a + job[A + 1], job[A + 2], job[A + 3], job[A + 4],
                        b + job[B + 1], job[B + 2], job[B + 3], job[B + 4],
                        c + job[C + 1], job[C + 2], job[C + 3], job[C + 4],
                        work, s[4], NULL, spread,
                        table, (float *)numbers};
    kernels[job[KERNEL]](&args);
    if (fwrite(c, 1, job[C], stdout) != (size_t)job[C]) return 93;
    for (int i = 0; i < job[OPERANDS]; i++) {
      if (fwrite(extra[i], 1, heads[i][0], stdout) != (size_t)heads[i][0]) return 94;
      drop(extra[i], heads[i][0]);
    }
    drop(numbers, job[NUMBERS]);
    drop(a, job[A]), drop(b, job[B]), drop(c, job[C]), drop(work, job[WORK]);
  }
  return 0;
}
