/* The memos: from the words that describe a call to what runs it.
 * Follows extension.c in one translation unit.
 *
 * Open addressing, linear probing, at most half full. A key is an array of
 * words; those that are addresses of strings are kept valid by `family`. */
typedef struct {
  uint64_t hash;
  PyObject *value; /* NULL: free */
  PyObject *family;
  long *words;
  size_t count;
} memo_slot;

typedef struct {
  memo_slot *slots;
  size_t size, used, most;
} memo_table;

enum { MEMO_MIN = 64 };
/* Past the largest, endless new shapes: start afresh. A route is shared by many
 * keys of 120 bytes; a plan has one key and takes up to some kilobytes. */
static memo_table routes = {.most = 1 << 16}, plans = {.most = 1 << 12};
static memo_table calls = {.most = 1 << 12}, read_names = {.most = 1 << 12}; /* see repeat.c */
static unsigned long memo_epoch; /* counts clearings */

INLINE uint64_t memo_hash(const long *words, size_t count) {
  uint64_t h = count;
  for (size_t i = 0; i < count; i++) {
    h = (h ^ (uint64_t)words[i]) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

/* The slot of a key, or the free one where it belongs. */
INLINE memo_slot *memo_find(const memo_table *t, uint64_t hash, const long *words, size_t count) {
  for (size_t i = (hash >> 32) & (t->size - 1);; i = (i + 1) & (t->size - 1)) {
    memo_slot *s = t->slots + i;
    if (!s->value || (s->hash == hash && s->count == count && !memcmp(s->words, words, count * sizeof *words))) return s;
  }
}

/* A borrowed reference to what is remembered, or NULL. */
INLINE PyObject *memo_get(const memo_table *t, const long *words, size_t count) {
  return t->size ? memo_find(t, memo_hash(words, count), words, count)->value : NULL;
}

/* Dropping a value may free it, and that may run Python code: detach first. */
static void memo_drop(memo_table *t) {
  memo_slot *slots = t->slots;
  size_t size = t->size;
  t->slots = NULL;
  t->size = t->used = 0;
  for (size_t i = 0; i < size; i++)
    if (slots[i].value) {
      Py_DECREF(slots[i].value);
      Py_DECREF(slots[i].family);
      PyMem_Free(slots[i].words);
    }
  PyMem_Free(slots);
}

static void memo_clear(void) {
  memo_epoch++;
  memo_drop(&routes);
  memo_drop(&plans);
}

static int memo_grow(memo_table *t) {
  memo_table larger = {.size = t->size ? 2 * t->size : MEMO_MIN, .used = t->used, .most = t->most};
  larger.slots = PyMem_Calloc(larger.size, sizeof *larger.slots);
  if (!larger.slots) return -1;
  for (size_t i = 0; i < t->size; i++) {
    const memo_slot *s = t->slots + i;
    if (s->value) *memo_find(&larger, s->hash, s->words, s->count) = *s;
  }
  PyMem_Free(t->slots);
  *t = larger;
  return 0;
}

/* Without memory nothing is remembered, and nothing is raised. */
static void memo_insert(memo_table *t, const long *words, size_t count, PyObject *value, PyObject *family) {
  if (t->used >= t->most) memo_drop(t);
  if (2 * (t->used + 1) > t->size && memo_grow(t)) return;
  uint64_t hash = memo_hash(words, count);
  memo_slot *s = memo_find(t, hash, words, count);
  if (s->value) return; /* another thread asked meanwhile */
  long *copy = PyMem_Malloc(count * sizeof *copy);
  if (!copy) return;
  memcpy(copy, words, count * sizeof *copy);
  *s = (memo_slot){.hash = hash, .value = Py_NewRef(value), .family = Py_NewRef(family), .words = copy, .count = count};
  t->used++;
}
