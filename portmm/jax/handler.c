/* A handler of XLA's foreign functions: the product of two buffers by the plan for their shapes.
 * Plans are asked for once for each kind of operands, and live as long as the process. */

#include "xla/ffi/api/c_api.h"
#include <stdlib.h>
#include <string.h>

#define MOST_WORDS 64

typedef int (*function)(const void *plan, const void *a, const void *b, void *c);
/* The function and plan for a key: flags, then of each buffer its type, its rank and its extents. */
typedef void (*resolve)(const int64_t *key, long words, function *run, const void **plan);

typedef struct entry {
  struct entry *next;
  function run;
  const void *plan;
  long words;
  int64_t key[];
} entry;

static entry *entries;
static resolve resolver;

__attribute__((visibility("default"))) void portmm_jax_resolver(resolve f) { resolver = f; }

static long add_buffer(int64_t *key, long words, const XLA_FFI_Buffer *x) {
  if (words + 2 + x->rank > MOST_WORDS) return MOST_WORDS + 1;
  key[words++] = x->dtype;
  key[words++] = x->rank;
  for (int64_t i = 0; i < x->rank; i++) key[words++] = x->dims[i];
  return words;
}

static const entry *find(const int64_t *key, long words) {
  for (const entry *e = __atomic_load_n(&entries, __ATOMIC_ACQUIRE); e; e = e->next)
    if (e->words == words && !memcmp(e->key, key, (size_t)words * sizeof *key)) return e;
  entry *e = malloc(sizeof *e + (size_t)words * sizeof *key);
  if (!e) return NULL;
  e->words = words;
  e->run = NULL;
  memcpy(e->key, key, (size_t)words * sizeof *key);
  resolver(key, words, &e->run, &e->plan);
  if (!e->run) return free(e), NULL;
  e->next = __atomic_load_n(&entries, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(&entries, &e->next, e, 0, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE)) {}
  return e;
}

static XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&args);
}

__attribute__((visibility("default"))) XLA_FFI_Error *portmm_jax_matmul(XLA_FFI_CallFrame *frame) {
  for (XLA_FFI_Extension_Base *x = frame->extension_start; x; x = x->next)
    if (x->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)x)->metadata;
      about->api_version.major_version = XLA_FFI_API_MAJOR;
      about->api_version.minor_version = XLA_FFI_API_MINOR;
      return NULL;
    }
  if (frame->args.size != 2 || frame->rets.size != 1 || frame->attrs.size != 1)
    return failed(frame, "portmm's product has two operands, one result and one attribute");
  const XLA_FFI_Buffer *a = frame->args.args[0], *b = frame->args.args[1], *c = frame->rets.rets[0];
  int64_t key[MOST_WORDS] = {*(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[0])->value};
  long words = add_buffer(key, 1, a);
  if (words <= MOST_WORDS) words = add_buffer(key, words, b);
  if (words <= MOST_WORDS) words = add_buffer(key, words, c);
  if (words > MOST_WORDS) return failed(frame, "operands of portmm's product have too many dimensions");
  const entry *e = find(key, words);
  if (!e) return failed(frame, "portmm cannot multiply these operands");
  return e->run(e->plan, a->data, b->data, c->data) ? failed(frame, "portmm has no memory for a product") : NULL;
}
