/* Packed, and the product of two ordinary matrices: one look-up, then the kernel.
 * Follows memo.c in one translation unit.
 *
 * Routes are remembered by what schedules depend on: sizes, types, layouts and
 * density, but not leading strides; and, where the resolver says so, by the
 * class of M, so that another M of the class runs no Python. */

/* Packed: a weight laid out for one family of micro-kernels. */
typedef struct {
  PyObject_HEAD
  array_object *owner;
  PyObject *family, *shape;
  long k, n, b_k, b_n, b_batch;
  int element;
} packed_object;

#pragma GCC push_options
#pragma GCC optimize("O0")
/* A shape that ends with k and n; 0 with an exception. */
static int is_weight_shape(PyObject *shape, long k, long n) {
  const Py_ssize_t nd = PyTuple_GET_SIZE(shape);
  long last[2] = {-1, -1};
  for (Py_ssize_t i = 0; i < nd; i++) {
    last[0] = last[1];
    last[1] = PyLong_AsLong(PyTuple_GET_ITEM(shape, i));
    if (last[1] == -1 && PyErr_Occurred()) return 0;
  }
  if (last[0] == k && last[1] == n) return 1;
  return PyErr_Format(PyExc_ValueError, "shape %R does not end with k = %ld and n = %ld", shape, k, n), 0;
}

static PyObject *packed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"owner", "k", "n", "dtype", "family", "b_k", "b_n", "b_batch", "shape", NULL};
  PyObject *owner, *dtype, *family, *shape = NULL;
  long k, n, b_k, b_n, b_batch;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!llOUlll|O!:Packed", names, array_type, &owner, &k, &n, &dtype, &family,
                                   &b_k, &b_n, &b_batch, &PyTuple_Type, &shape))
    return NULL;
  int element = element_named(dtype);
  if (element < 0) return NULL;
  const array_object *data = (array_object *)owner;
  if (data->nd != 1 || element_of(data) != element || !(data->flags & NUMPY_ALIGNED) ||
      (data->shape[0] > 1 && data->strides[0] != elements[element].bytes) || k < 0 || n < 0)
    return PyErr_Format(PyExc_ValueError, "packed data must be a contiguous 1-D %s array and k, n >= 0 (got k = %ld, n = %ld)",
                        elements[element].numpy, k, n);
  if (shape && !is_weight_shape(shape, k, n)) return NULL;
  packed_object *p = (packed_object *)type->tp_alloc(type, 0);
  if (!p) return NULL;
  p->shape = shape ? Py_NewRef(shape) : Py_BuildValue("ll", k, n);
  if (!p->shape) return Py_DECREF(p), NULL;
  p->owner = (array_object *)Py_NewRef(owner);
  p->family = Py_NewRef(family);
  PyUnicode_InternInPlace(&p->family); /* compared by address */
  p->k = k;
  p->n = n;
  p->b_k = b_k;
  p->b_n = b_n;
  p->b_batch = b_batch;
  p->element = element;
  return (PyObject *)p;
}

static void packed_dealloc(packed_object *p) {
  Py_XDECREF(p->owner);
  Py_XDECREF(p->family);
  Py_XDECREF(p->shape);
  Py_TYPE(p)->tp_free((PyObject *)p);
}

static PyObject *packed_element(packed_object *p, void *unused) {
  (void)unused;
  return Py_NewRef(elements[p->element].text);
}

static PyMemberDef packed_members[] = {
    {"owner", T_OBJECT, offsetof(packed_object, owner), READONLY, "the packed data, 1-D"},
    {"family", T_OBJECT, offsetof(packed_object, family), READONLY, "micro-kernel family that fixes the layout"},
    {"shape", T_OBJECT, offsetof(packed_object, shape), READONLY, "shape of the weight"},
    {"k", T_LONG, offsetof(packed_object, k), READONLY, "rows of the weight"},
    {"n", T_LONG, offsetof(packed_object, n), READONLY, "columns of the weight"},
    {"b_k", T_LONG, offsetof(packed_object, b_k), READONLY, "portmm_args.b_k"},
    {"b_n", T_LONG, offsetof(packed_object, b_n), READONLY, "portmm_args.b_n"},
    {"b_batch", T_LONG, offsetof(packed_object, b_batch), READONLY, "portmm_args.b_batch"},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef packed_getset[] = {{"element", (getter)packed_element, NULL, "portmm's name of the element type", NULL},
                                      {NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject packed_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "portmm.run.Packed",
    .tp_doc = "A weight laid out for one family of micro-kernels.",
    .tp_basicsize = sizeof(packed_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = packed_new,
    .tp_dealloc = (destructor)packed_dealloc,
    .tp_members = packed_members,
    .tp_getset = packed_getset,
};

#pragma GCC pop_options

typedef struct {
  long m, n, k, form; /* m: of a class of several, its last M, negated; form: element types, layouts, density */
  long family;        /* address of the packed family's name, "" when B is not packed */
  long batch;         /* of stacks by stacks: a word that keys of two matrices lack */
} route_key;
enum { STACK_WORDS = sizeof(route_key) / sizeof(long), ROUTE_WORDS = STACK_WORDS - 1 };
enum { CLASSES = 16 }; /* of M, from a power of two to the next: `row_classes.PER_OCTAVE` */

static PyObject *slow_path, *resolver, *planner, *no_family;
static int override, resolver_wants_density;

/* An operand: unit stride along the columns ("row"), or along the rows. */
typedef struct {
  char *data, *end;
  long rows, cols, s_row, s_col;
  int element;
  unsigned col, dense;
} matrix;

/* The dimensions up to `last` as one, where its steps are even; 0 if they are not. */
static int join_rows(const array_object *a, int last, long *rows, long *step) {
  *rows = 1;
  for (int i = last; i >= 0; i--) {
    if (a->shape[i] == 1) continue; /* whose stride means nothing */
    if (*rows == 1) *step = a->strides[i];
    else if (a->strides[i] % *rows || a->strides[i] / *rows != *step) return 0;
    *rows *= a->shape[i];
    if (*rows <= 0) return 0;
  }
  return 1;
}

/* A matrix whose last dimension is the array's: `rows` at steps of `s0` bytes, or columns where `cols_too`. */
INLINE int as_matrix(const array_object *a, long rows, long s0, int cols_too, matrix *v) {
  const int nd = a->nd;
  const int shift = elements[v->element].shift;
  const long bytes = 1L << shift, cols = a->shape[nd - 1], s1 = a->strides[nd - 1];
  if (rows <= 0 || cols <= 0) return 0;
  v->rows = rows;
  v->cols = cols;
  v->data = a->data;
  /* the stride of a dimension of extent 1 means nothing and is not looked at */
  if ((s1 == bytes || cols == 1) && (rows == 1 || (s0 >= cols * bytes && (s0 & (bytes - 1)) == 0))) {
    v->s_row = rows == 1 ? cols : s0 >> shift;
    v->s_col = 1;
    v->col = 0;
    v->dense = v->s_row == cols;
  } else if (cols_too && (s0 == bytes || rows == 1) && (cols == 1 || (s1 >= rows * bytes && (s1 & (bytes - 1)) == 0))) {
    v->s_row = 1;
    v->s_col = cols == 1 ? rows : s1 >> shift;
    v->col = 1;
    v->dense = v->s_col == rows;
  } else {
    return 0;
  }
  v->end = v->data + ((rows - 1) * v->s_row + (cols - 1) * v->s_col + 1) * bytes;
  return 1;
}

/* Whether kernels can read an array of at least two dimensions. */
INLINE int is_readable(const array_object *a, int *element) {
  return a->nd >= 2 && a->nd <= MAX_ND && (a->flags & NUMPY_ALIGNED) && (*element = element_of(a)) >= 0;
}

/* A matrix; or of more dimensions a stack of matrices by rows that follow each other, which is a taller one. */
INLINE int get_matrix(PyObject *object, matrix *v) {
  if (Py_TYPE(object) != array_type) return 0;
  const array_object *a = (const array_object *)object;
  if (!is_readable(a, &v->element)) return 0;
  long rows = a->shape[a->nd - 2], s0 = a->strides[a->nd - 2];
  if (a->nd > 2 && !join_rows(a, a->nd - 2, &rows, &s0)) return 0;
  return as_matrix(a, rows, s0, a->nd == 2, v);
}

/* Whether all extents but the last are equal. */
INLINE int same_rows(const array_object *x, const array_object *y) {
  int same = x->nd == y->nd;
  for (int i = 0; same && i < x->nd - 1; i++) same = x->shape[i] == y->shape[i];
  return same;
}

INLINE int overlap(const char *a, const char *a_end, const char *b, const char *b_end) {
  return a < a_end && b < b_end && a < b_end && b < a_end;
}

/* The type of a product of two types that needs no conversion first, or -1: `dtype.natural`. */
INLINE int product_of(int a, int b) {
  if (a == b && a < CLOSED) return a;
  if ((a == S8 || a == U8) && b == S8) return S32;
  return a < CLOSED && b < CLOSED && a != F64 && b != F64 ? F32 : -1;
}

/* The largest M of the class of m: `row_classes.row_class`. */
INLINE long last_of_class(long m) {
  if (m <= 2 * CLASSES) return m;
  const long step = 1L << (__builtin_clzl(CLASSES) - __builtin_clzl((unsigned long)(m - 1)));
  return (m + step - 1) & -step;
}

/* The types of a product as the resolver takes them: "f32", "u8-s8-s32". A borrowed reference. */
static PyObject *types_word(int a, int b) {
  static PyObject *words[ELEMENTS][ELEMENTS];
  const int c = product_of(a, b);
  if (a == b && b == c) return elements[a].text;
  if (!words[a][b]) words[a][b] = PyUnicode_FromFormat("%s-%s-%s", elements[a].name, elements[b].name, elements[c].name);
  return words[a][b];
}

static PyObject *layout_name(unsigned col) {
  static PyObject *names[2];
  if (!names[col]) names[col] = PyUnicode_InternFromString(col ? "col" : "row");
  return names[col];
}

/* A new reference to the route for `key`; Py_None sends the call the slow way;
 * NULL with an exception. */
static PyObject *resolve(route_key *key, size_t words, const matrix *a, const matrix *b, const matrix *c, int dense) {
  unsigned long epoch;
  int once = 0; /* the route is for this call only */
  PyObject *family = (PyObject *)key->family, *types, *layouts[3], *function;
  BEGIN_SHARED
  epoch = memo_epoch;
  function = Py_XNewRef(resolver);
  types = types_word(a->element, b->element);
  layouts[0] = layout_name(a->col);
  layouts[1] = layout_name(b->col);
  layouts[2] = layout_name(c->col);
  END_SHARED
  if (!function) return Py_NewRef(Py_None);
  if (!types) return Py_DECREF(function), NULL;
  PyObject *packed = family == no_family ? NULL : PyUnicode_InternFromString("packed");
  PyObject *route = PyObject_CallFunction(
      function, words > ROUTE_WORDS ? "OlllOOOOOl" : resolver_wants_density ? "OlllOOOOO" : "OlllOOOO", types, key->m,
      key->n, key->k, layouts[0], packed ? packed : layouts[1], layouts[2], family,
      dense ? Py_True : Py_False, key->batch);
  Py_DECREF(function);
  Py_XDECREF(packed);
  if (!route || route == Py_None) return route;
  if (PyTuple_CheckExact(route) && PyTuple_GET_SIZE(route) == 2) {
    once = PyTuple_GET_ITEM(route, 1) == Py_None;
    if (PyTuple_GET_ITEM(route, 1) == Py_True && key->m > 2 * CLASSES) key->m = -last_of_class(key->m);
    Py_SETREF(route, Py_NewRef(PyTuple_GET_ITEM(route, 0)));
  }
  const int *found = ((route_object *)route)->elements;
  if (Py_TYPE(route) != &route_type || found[0] != a->element || found[1] != b->element || found[2] != c->element) {
    PyErr_Format(PyExc_TypeError, "the resolver returned %R; need a Route for %U, or None", route, types);
    Py_DECREF(route);
    return NULL;
  }
  BEGIN_SHARED
  if (memo_epoch == epoch && !once) memo_insert(&routes, (const long *)key, words, route, family);
  END_SHARED
  return route;
}

/* A new reference to the route of a key without `m` and `form`; as `resolve`. */
INLINE PyObject *route_for(route_key *key, size_t words, const matrix *a, const matrix *b, const matrix *c) {
  const unsigned dense = a->dense & b->dense & c->dense & (unsigned)resolver_wants_density;
  key->m = a->rows > 2 * CLASSES ? -last_of_class(a->rows) : a->rows;
  key->form = (long)((unsigned)a->element << 8 | (unsigned)b->element << 4 | dense << 3 | a->col << 2 | b->col << 1 | c->col);
  PyObject *route;
  BEGIN_SHARED
  route = memo_get(&routes, (const long *)key, words);
  if (!route && a->rows > 2 * CLASSES) {
    key->m = a->rows;
    route = memo_get(&routes, (const long *)key, words);
  }
  Py_XINCREF(route);
  END_SHARED
  return route ? route : resolve(key, words, a, b, c, (int)dense);
}

/* A new array with the rows of `a`, or NULL with an exception. */
INLINE PyObject *result_of(const array_object *a, long columns, int element) {
  Py_ssize_t shape[MAX_ND];
  for (int i = 0; i < a->nd - 1; i++) shape[i] = a->shape[i];
  shape[a->nd - 1] = columns;
  return empty_array(element, a->nd, shape);
}

/* The arguments of a product without vectors, in `p`. One assignment each: a compound literal is cleared first, by a
 * `rep stos` of 224 bytes that takes longer than a product of 4 x 4 x 4. */
INLINE void set_product(portmm_args *p, const matrix *a, const matrix *b, const matrix *c, long batch) {
  p->m = a->rows;
  p->n = b->cols;
  p->k = a->cols;
  p->batch = batch;
  p->a = a->data;
  p->a_m = a->s_row;
  p->a_k = a->s_col;
  p->a_batch = 0;
  p->b = b->data;
  p->b_k = b->s_row;
  p->b_n = b->s_col;
  p->b_batch = 0;
  p->c = c->data;
  p->c_m = c->s_row;
  p->c_n = c->s_col;
  p->c_batch = 0;
  p->operands = NULL;
  p->numbers = NULL;
  p->work = NULL;
}

/* Two ordinary matrices, the first of which may be a stack: a new reference to the result, Py_NotImplemented
 * (borrowed) for other ways, NULL with an exception. */
static PyObject *multiply(PyObject *a_object, PyObject *b_object, PyObject *out) {
  matrix a, b, c;
  route_key key;
  const packed_object *packed = NULL;
  portmm_args p;
  /* B is one matrix: batches are soon told */
  if (override || (Py_TYPE(b_object) == array_type && ((array_object *)b_object)->nd != 2) || !get_matrix(a_object, &a))
    return Py_NotImplemented;
  if (Py_TYPE(b_object) != array_type && PyObject_TypeCheck(b_object, &packed_type)) {
    packed = (const packed_object *)b_object;
    if ((c.element = product_of(a.element, packed->element)) < 0 || packed->k != a.cols || packed->n <= 0 || PyTuple_GET_SIZE(packed->shape) != 2) return Py_NotImplemented;
    b.cols = packed->n;
    b.element = packed->element;
    b.col = 0;
    b.dense = 1;
    b.s_row = packed->b_k;
    b.s_col = packed->b_n;
    b.data = packed->owner->data;
    b.end = b.data + packed->owner->shape[0] * elements[b.element].bytes;
    key.family = (long)packed->family;
  } else {
    if (!get_matrix(b_object, &b) || (c.element = product_of(a.element, b.element)) < 0 || b.rows != a.cols)
      return Py_NotImplemented;
    key.family = (long)no_family;
  }
  if (out == Py_None) {
    c.s_row = b.cols;
    c.s_col = 1;
    c.col = 0;
    c.dense = 1;
  } else if (!get_matrix(out, &c) || c.element != product_of(a.element, b.element) || c.cols != b.cols ||
             !same_rows((array_object *)a_object, (array_object *)out) || !(((array_object *)out)->flags & NUMPY_WRITEABLE) || overlap(c.data, c.end, a.data, a.end) ||
             overlap(c.data, c.end, b.data, b.end)) {
    return Py_NotImplemented;
  }
  key.n = b.cols;
  key.k = a.cols;
  key.batch = 1;
  PyObject *route = route_for(&key, ROUTE_WORDS, &a, &b, &c);
  if (!route) return NULL;
  if (route == Py_None) {
    Py_DECREF(route);
    return Py_NotImplemented;
  }
  PyObject *result = out == Py_None ? result_of((array_object *)a_object, key.n, c.element) : Py_NewRef(out);
  if (result) {
    c.data = ((array_object *)result)->data;
    set_product(&p, &a, &b, &c, 1);
    if (packed) p.b_batch = packed->b_batch;
    if (run_route((route_object *)route, &p, origin, 1)) Py_CLEAR(result);
  }
  Py_DECREF(route);
  return result;
}

/* Positional and keyword arguments into found[0..count-1]; 0 with an exception. */
static int bind_arguments(const char *function, const char *const *names, int count, int needed, PyObject *const *args,
                          Py_ssize_t n, PyObject *kwnames, PyObject **found) {
  Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  if (n > count) {
    PyErr_Format(PyExc_TypeError, "%s takes at most %d arguments; got %zd", function, count, n);
    return 0;
  }
  for (Py_ssize_t i = 0; i < count; i++) found[i] = i < n ? args[i] : NULL;
  for (Py_ssize_t j = 0; j < keywords; j++) {
    PyObject *name = PyTuple_GET_ITEM(kwnames, j);
    int i = 0;
    while (i < count && PyUnicode_CompareWithASCIIString(name, names[i])) i++;
    if (i == count || found[i]) {
      PyErr_Format(PyExc_TypeError, "%s got %s argument %R", function, i == count ? "an unknown" : "twice the", name);
      return 0;
    }
    found[i] = args[n + j];
  }
  for (int i = 0; i < needed; i++)
    if (!found[i]) {
      PyErr_Format(PyExc_TypeError, "%s needs the argument '%s'", function, names[i]);
      return 0;
    }
  return 1;
}
