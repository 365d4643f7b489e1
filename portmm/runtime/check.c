/* Runs kernels without Python. Arguments: pairs of a shared object and its symbol. For each, 20 longs on standard input:
 * m, n, k, batch, workers, bytes of A, B, C and scratch, the three strides of A, B and C, how many operands and numbers
 * expressions have; then A and B; of each operand 6 longs, its bytes, its strides along a batch, rows, columns and
 * heads, and whether it is a result, and its memory; and the numbers, as floats. C and results of expressions go to
 * standard output. Tasks run on one thread, last first. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static void spread(void *pool, void (*body)(const long *ctx, long task, long worker), const long *ctx, long tasks,
                   long workers) {
  (void)pool;
  for (long task = tasks - 1; task >= 0; task--) body(ctx, task, task % workers);
}

enum { MOST = 64 };

/* Memory with `bytes` of standard input, or with 0xff where there is none to read; ends the program without input. */
static char *place(long bytes, int read) {
  char *p = aligned_alloc(64, (bytes + 4096) / 64 * 64);
  if (!p || (read && fread(p, 1, bytes, stdin) != (size_t)bytes)) exit(91);
  return read ? p : memset(p, 0xff, bytes);
}

static void give(const void *p, long bytes) {
  if (fwrite(p, 1, bytes, stdout) != (size_t)bytes) exit(93);
}

int main(int argc, char **argv) {
#if defined(__x86_64__) && defined(__linux__)
  /* Linux gives a process the state of AMX when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). Where
   * there is none, nothing that needs it is run. */
  (void)syscall(SYS_arch_prctl, 0x1023, 18);
#endif
  for (int i = 1; i + 1 < argc; i += 2) {
    long s[20], about[MOST][6];
    portmm_operand operands[MOST];
    void *library = dlopen(argv[i], RTLD_NOW);
    void (*kernel)(const portmm_args *) = library ? dlsym(library, argv[i + 1]) : NULL;
    if (!kernel) return fprintf(stderr, "%s\n", dlerror()), 92;
    if (fread(s, sizeof s, 1, stdin) != 1 || s[18] > MOST) return 91;
    char *a = place(s[5], 1), *b = place(s[6], 1), *c = place(s[7], 0), *work = place(s[8], 0);
    for (long j = 0; j < s[18]; j++) {
      long *x = about[j];
      if (fread(x, sizeof about[j], 1, stdin) != 1) return 91;
      operands[j] = (portmm_operand){place(x[0], 1), x[1], x[2], x[3], x[4]};
    }
    float *numbers = (float *)place(s[19] * (long)sizeof *numbers, 1);
    portmm_args args = {s[0], s[1], s[2], s[3], a, s[9], s[10], s[11], b, s[12], s[13], s[14], c, s[15], s[16], s[17],
                        work, s[4], NULL, spread, operands, numbers};
    kernel(&args);
    give(c, s[7]);
    for (long j = 0; j < s[18]; j++) {
      if (about[j][5]) give(operands[j].p, about[j][0]);
      free(operands[j].p);
    }
    free(a), free(b), free(c), free(work), free(numbers);
  }
  return 0;
}
