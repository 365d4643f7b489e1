/* Runs kernels without Python. Arguments: pairs of a shared object and its symbol. For each, 17 longs on standard input:
 * m, n, k, workers, bytes of A, B, C and scratch, the strides of A, B and C along rows and columns, 3 unused;
 * then A and B. C goes to standard output. Tasks run on one thread, last first. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void spread(void *pool, void (*body)(const long *ctx, long task, long worker), const long *ctx, long tasks,
                   long workers) {
  (void)pool;
  for (long task = tasks - 1; task >= 0; task--) body(ctx, task, task % workers);
}

static char *place(long bytes) { return aligned_alloc(64, (bytes + 4096) / 64 * 64); }

int main(int argc, char **argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    long s[17];
    void *library = dlopen(argv[i], RTLD_NOW);
    void (*kernel)(const portmm_args *) = library ? dlsym(library, argv[i + 1]) : NULL;
    if (!kernel) return fprintf(stderr, "%s\n", dlerror()), 92;
    if (fread(s, sizeof s, 1, stdin) != 1) return 91;
    char *a = place(s[4]), *b = place(s[5]), *c = place(s[6]), *work = place(s[7]);
    if (fread(a, 1, s[4], stdin) != (size_t)s[4] || fread(b, 1, s[5], stdin) != (size_t)s[5]) return 91;
    memset(c, 0xff, s[6]);
    memset(work, 0xff, s[7]);
    portmm_args args = {s[0], s[1], s[2], 1, a, s[8], s[9], 0, b, s[10], s[11], 0, c, s[12], s[13], 0,
                        work, s[3], NULL, spread, NULL, NULL};
    kernel(&args);
    if (fwrite(c, 1, s[6], stdout) != (size_t)s[6]) return 93;
    free(a), free(b), free(c), free(work);
  }
  return 0;
}
