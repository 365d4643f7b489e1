/* The Python objects of the run time: Kernel, Route, Packed, and `execute`.
 * Follows host.c in one translation unit. NumPy's C interface is taken from its
 * capsule; the few fields and table indices used here are part of its binary
 * interface and equal in 1.x and 2.x.
 *
 * What is not on the way from arrays to a kernel is marked O0: a first call
 * waits for this file, and that saves a fifth of its compile time. */
#ifdef PORTMM_PYTHON

#ifdef __linux__
/* Python's own, which loads extensions by them: libdl, where they are in old C libraries, need not be loaded as well. */
#pragma weak dlopen
#pragma weak dlsym
#pragma weak dlclose
#pragma weak dlerror
#endif

enum { NUMPY_BYTE = 1, NUMPY_UBYTE = 2, NUMPY_INT = 5, NUMPY_FLOAT = 11, NUMPY_DOUBLE = 12, NUMPY_HALF = 23 };
enum { NUMPY_ALIGNED = 0x100, NUMPY_WRITEABLE = 0x400, MAX_ND = 8 };
enum { API_ARRAY_TYPE = 2, API_DESCR_FROM_TYPE = 45, API_RETURN = 76, API_NEW_FROM_DESCR = 94 };
/* What calls share, memos and races, is under the interpreter's lock. Where Python is built without one, it belongs to
 * one thread at a time, with what the lock does as well: a thread gives it up while it waits or runs Python's code that
 * does, and while a kernel runs for long. */
#ifdef Py_GIL_DISABLED
static PyObject *shared; /* the module */
#define BEGIN_SHARED Py_BEGIN_CRITICAL_SECTION(shared);
#define END_SHARED Py_END_CRITICAL_SECTION();
#else
#define BEGIN_SHARED {
#define END_SHARED }
#endif
#define RELEASE_GIL_FLOPS 1e5 /* about a microsecond of work; releasing costs 16 ns */

typedef struct {
  PyObject_HEAD
  PyTypeObject *typeobj;
  char kind, type, byteorder;
} descr_object;

typedef struct {
  PyObject_HEAD
  char *data;
  int nd;
  Py_ssize_t *shape, *strides;
  PyObject *base;
  descr_object *descr;
  int flags;
} array_object;

typedef PyObject *(*new_from_descr)(PyTypeObject *, void *, int, const Py_ssize_t *, const Py_ssize_t *, void *, int,
                                    PyObject *);
static PyTypeObject *array_type;
static new_from_descr new_array;
static PyObject *(*scalar_of)(PyObject *); /* takes the reference to an array without dimensions */

typedef struct {
  const char *name, *numpy;
  int number;
  long bytes;
  int shift; /* log2 of bytes */
  descr_object *descr;
  PyObject *text;
} element_type;
static element_type elements[] = {
    {"f32", "float32", NUMPY_FLOAT, 4, 2, NULL, NULL},
    {"f64", "float64", NUMPY_DOUBLE, 8, 3, NULL, NULL},
    {"f16", "float16", NUMPY_HALF, 2, 1, NULL, NULL},
    {"bf16", "bfloat16", -1, 2, 1, NULL, NULL}, /* another package's: see `register_dtype` */
    {"s8", "int8", NUMPY_BYTE, 1, 0, NULL, NULL},
    {"u8", "uint8", NUMPY_UBYTE, 1, 0, NULL, NULL},
    {"s32", "int32", NUMPY_INT, 4, 2, NULL, NULL},
};
/* Products of one of the first few with itself are of that type as well. */
enum { ELEMENTS = sizeof elements / sizeof *elements, CLOSED = 4 };
enum { F32, F64, F16, BF16, S8, U8, S32 };

#pragma GCC push_options
#pragma GCC optimize("O0")
static int start_numpy(void) {
  PyObject *module = PyImport_ImportModule("numpy._core._multiarray_umath");
  if (!module) {
    PyErr_Clear();
    module = PyImport_ImportModule("numpy.core._multiarray_umath");
  }
  PyObject *capsule = module ? PyObject_GetAttrString(module, "_ARRAY_API") : NULL;
  void **table = capsule ? PyCapsule_GetPointer(capsule, NULL) : NULL;
  Py_XDECREF(module);
  Py_XDECREF(capsule);
  if (!table) return -1;
  array_type = (PyTypeObject *)table[API_ARRAY_TYPE];
  new_array = (new_from_descr)table[API_NEW_FROM_DESCR];
  scalar_of = (PyObject * (*)(PyObject *)) table[API_RETURN];
  for (int i = 0; i < ELEMENTS; i++) {
    elements[i].text = PyUnicode_InternFromString(elements[i].name);
    if (!elements[i].text) return -1;
    if (elements[i].number < 0) continue;
    elements[i].descr = ((descr_object * (*)(int)) table[API_DESCR_FROM_TYPE])(elements[i].number);
    if (!elements[i].descr) return -1;
  }
  return 0;
}

#pragma GCC pop_options

/* Position in `elements` of a native array's type, or -1. A descriptor that
 * came out of a pickle is another object of the same class. */
INLINE int element_of(const array_object *a) {
  for (int i = 0; i < ELEMENTS; i++) {
    if (a->descr == elements[i].descr) return i;
    if (elements[i].descr && Py_TYPE(a->descr) == Py_TYPE(elements[i].descr) && a->descr->byteorder == elements[i].descr->byteorder) return i;
  }
  return -1;
}

#pragma GCC push_options
#pragma GCC optimize("O0")
static int element_named(PyObject *name) {
  for (int i = 0; i < ELEMENTS; i++)
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, elements[i].name) == 0) return i;
  PyErr_Format(PyExc_ValueError, "dtype %R is unknown; use 'f32', 'f64', 'f16', 'bf16', 's8', 'u8' or 's32'", name);
  return -1;
}

/* The types of A, B and C from "f32" or "u8-s8-s32"; 0 with an exception. */
static int elements_named(PyObject *word, int *found) {
  const char *text = PyUnicode_Check(word) ? PyUnicode_AsUTF8(word) : NULL;
  if (!text) return PyErr_Format(PyExc_TypeError, "dtype is %R; need a string", word), 0;
  int count = 0;
  for (size_t size; count < 3; text += size + 1) {
    size = strcspn(text, "-");
    for (found[count] = ELEMENTS - 1; found[count] >= 0; found[count]--) {
      const char *name = elements[found[count]].name;
      if (strlen(name) == size && !memcmp(name, text, size)) break;
    }
    if (found[count++] < 0 || !text[size]) { text += size; break; }
  }
  if (count == 1) found[2] = found[1] = found[0];
  if (found[count - 1] >= 0 && count != 2 && !*text) return 1;
  return PyErr_Format(PyExc_ValueError, "dtype %R is unknown; name one type, or three with - between", word), 0;
}

/* Tell what arrays of a type look like that NumPy does not have itself. */
static PyObject *py_register_dtype(PyObject *module, PyObject *args) {
  PyObject *name, *descr;
  (void)module;
  if (!PyArg_ParseTuple(args, "OO:register_dtype", &name, &descr)) return NULL;
  const int element = element_named(name);
  if (element < 0) return NULL;
  if (elements[element].number >= 0) return PyErr_Format(PyExc_ValueError, "NumPy has %R itself", name);
  if (!elements[element].descr) elements[element].descr = (descr_object *)Py_NewRef(descr);
  return Py_NewRef(Py_None);
}

#pragma GCC pop_options

static PyObject *empty_array(int element, int nd, const Py_ssize_t *shape) {
  Py_INCREF(elements[element].descr);
  return new_array(array_type, elements[element].descr, nd, shape, NULL, NULL, 0, NULL);
}

#pragma GCC push_options
#pragma GCC optimize("O0")
/* Kernel: a function in a loaded library, which stays loaded as long. */
typedef struct {
  PyObject_HEAD
  void *library;
  kernel_function function;
  PyObject *path, *symbol;
} kernel_object;

static void kernel_dealloc(kernel_object *k) {
  if (k->library) dlclose(k->library);
  Py_XDECREF(k->path);
  Py_XDECREF(k->symbol);
  Py_TYPE(k)->tp_free((PyObject *)k);
}

static PyMemberDef kernel_members[] = {
    {"path", T_OBJECT, offsetof(kernel_object, path), READONLY, "file of the library"},
    {"symbol", T_OBJECT, offsetof(kernel_object, symbol), READONLY, "name of the function"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject kernel_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "portmm.runtime.Kernel",
    .tp_basicsize = sizeof(kernel_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)kernel_dealloc,
    .tp_members = kernel_members,
};

static void raise_build_error(PyObject *path, const char *why) {
  PyObject *errors = PyImport_ImportModule("portmm.errors");
  PyObject *error = errors ? PyObject_GetAttrString(errors, "BuildError") : NULL;
  if (error) PyErr_Format(error, "%U cannot be loaded: %s", path, why);
  Py_XDECREF(error);
  Py_XDECREF(errors);
}

static PyObject *py_load(PyObject *module, PyObject *args) {
  PyObject *path, *symbol, *file = NULL, *bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "OU|O:load", &path, &symbol, &file)) return NULL;
  if (!PyUnicode_FSConverter(file ? file : path, &bytes)) return NULL;
  kernel_object *k = PyObject_New(kernel_object, &kernel_type);
  if (!k) { Py_DECREF(bytes); return NULL; }
  k->path = PyOS_FSPath(path);
  k->symbol = Py_NewRef(symbol);
  k->library = dlopen(PyBytes_AS_STRING(bytes), RTLD_NOW | RTLD_LOCAL);
  const char *name = PyUnicode_AsUTF8(symbol);
  k->function = k->library && name ? (kernel_function)dlsym(k->library, name) : NULL;
  Py_DECREF(bytes);
  if (k->function) return (PyObject *)k;
  if (!PyErr_Occurred()) raise_build_error(k->path, dlerror());
  Py_DECREF(k);
  return NULL;
}

/* Route: a kernel that is ready to be launched. */
typedef struct {
  PyObject_HEAD
  launch launch;
  kernel_object *kernel;
  PyObject *dtype;
  int elements[3]; /* of A, B and C */
  struct race *race; /* NULL: it does not race */
} route_object;

static void free_race(route_object *r);
static int run_racing(route_object *r, portmm_args *p, const long *offsets, long count);

static void route_dealloc(route_object *r) {
  free_race(r);
  Py_XDECREF(r->kernel);
  Py_XDECREF(r->dtype);
  Py_TYPE(r)->tp_free((PyObject *)r);
}

static PyMemberDef route_members[] = {
    {"kernel", T_OBJECT, offsetof(route_object, kernel), READONLY, "what is launched"},
    {"work_bytes", T_ULONG, offsetof(route_object, launch.work), READONLY, "bytes of workspace"},
    {"workers", T_LONG, offsetof(route_object, launch.workers), READONLY, "most threads"},
    {"dtype", T_OBJECT, offsetof(route_object, dtype), READONLY, "element types of A, B and C"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject route_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "portmm.runtime.Route",
    .tp_basicsize = sizeof(route_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)route_dealloc,
    .tp_members = route_members,
};

static PyObject *py_make_route(PyObject *module, PyObject *args) {
  PyObject *kernel, *dtype;
  Py_ssize_t work;
  long workers, unit = 1;
  int found[3];
  (void)module;
  if (!PyArg_ParseTuple(args, "O!nlO|l:make_route", &kernel_type, &kernel, &work, &workers, &dtype, &unit)) return NULL;
  if (!elements_named(dtype, found)) return NULL;
  if (work < 0 || workers < 1)
    return PyErr_Format(PyExc_ValueError, "work_bytes is %zd and workers %ld; need >= 0 and >= 1", work, workers);
  route_object *r = PyObject_New(route_object, &route_type);
  if (!r) return NULL;
  r->kernel = (kernel_object *)Py_NewRef(kernel);
  r->dtype = Py_NewRef(dtype);
  r->race = NULL;
  memcpy(r->elements, found, sizeof found);
  r->launch = (launch){r->kernel->function, (size_t)work, workers,
                       {elements[found[0]].bytes, elements[found[1]].bytes * unit, elements[found[2]].bytes}};
  return (PyObject *)r;
}

#pragma GCC pop_options

/* Launch in the caller's argument block, with the GIL released when the work is worth it. The caller holds a
 * reference to the route: another thread may drop it from the memo meanwhile. */
static int run_kernel(const route_object *r, portmm_args *p, const long *offsets, long count) {
  int failed;
  if (2.0 * (double)p->m * (double)p->n * (double)p->k * (double)p->batch * (double)count > RELEASE_GIL_FLOPS) {
    Py_BEGIN_ALLOW_THREADS
    failed = run_launch(&r->launch, p, offsets, count);
    Py_END_ALLOW_THREADS
  } else {
    failed = run_launch(&r->launch, p, offsets, count);
  }
  if (failed) PyErr_Format(PyExc_MemoryError, "no memory for a workspace of %zu bytes", r->launch.work);
  return failed;
}

/* The same by the kernel that a race has found, or tries. */
INLINE int run_route(route_object *r, portmm_args *p, const long *offsets, long count) {
  return __builtin_expect(r->race != NULL, 0) ? run_racing(r, p, offsets, count) : run_kernel(r, p, offsets, count);
}

enum { NUMBERS = 13, STEP_WORDS = 20 };
static const long origin[3] = {0, 0, 0}; /* the offsets of a call that has none */

#pragma GCC push_options
#pragma GCC optimize("O0")
/* m n k batch, a_m a_k a_batch, b_k b_n b_batch, c_m c_n c_batch */
static void set_numbers(portmm_args *p, const long *v) {
  *p = (portmm_args){.m = v[0], .n = v[1], .k = v[2], .batch = v[3],
                     .a_m = v[4], .a_k = v[5], .a_batch = v[6],
                     .b_k = v[7], .b_n = v[8], .b_batch = v[9],
                     .c_m = v[10], .c_n = v[11], .c_batch = v[12]};
}

/* Triples of element offsets from None (just the origin), bytes or an int64
 * array; 0 if wrong. */
static int get_offsets(PyObject *outer, Py_buffer *view) {
  *view = (Py_buffer){.buf = (void *)origin, .len = sizeof origin};
  if (!outer || outer == Py_None) return 1;
  if (PyObject_GetBuffer(outer, view, PyBUF_C_CONTIGUOUS)) return 0;
  if (view->len % (Py_ssize_t)(3 * sizeof(long)) == 0) return 1;
  PyErr_Format(PyExc_ValueError, "outer has %zd bytes; give triples of int64 offsets", view->len);
  PyBuffer_Release(view);
  return 0;
}

/* An integer, or where the first element of an array lies; None is no address. */
static void *address_in(PyObject *x) {
  if (PyObject_TypeCheck(x, array_type)) return ((array_object *)x)->data;
  return x == Py_None ? NULL : PyLong_AsVoidPtr(x);
}

/* Where the first element of an array lies, as an integer: ten times faster than __array_interface__. */
static PyObject *py_address(PyObject *module, PyObject *x) {
  (void)module;
  if (!PyObject_TypeCheck(x, array_type)) return PyErr_Format(PyExc_TypeError, "address takes an array");
  return PyLong_FromVoidPtr(((array_object *)x)->data);
}

/* The operands of a call: the rows of a template, an array, with the addresses of `count` arrays added; 0 if wrong:
 * it must have that many, as NumPy lays them out. */
static int get_operands(PyObject *template, PyObject *const *arrays, Py_ssize_t count, portmm_operand *to) {
  if (!PyObject_TypeCheck(template, array_type))
    return PyErr_Format(PyExc_TypeError, "execute got arrays without a table"), 0;
  const array_object *table = (array_object *)template;
  const portmm_operand *from = (const portmm_operand *)table->data;
  if (table->nd != 2 || table->shape[0] < count || table->strides[0] != sizeof *from)
    return PyErr_Format(PyExc_ValueError, "execute got %zd arrays; the table has no row for each", count), 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    char *p = address_in(arrays[i]);
    if (!p && PyErr_Occurred()) return 0;
    to[i] = from[i];
    to[i].p = p + (long)from[i].p;
  }
  return 1;
}

static PyObject *py_execute(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  /* where in `args` each of the numbers is */
  static const int at[NUMBERS] = {1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16};
  static const int pointer_at[3] = {5, 9, 13};
  long v[NUMBERS];
  void *pointers[3], *table[2] = {NULL};
  portmm_operand operands[n > 20 ? n - 20 : 1];
  portmm_args p;
  Py_buffer outer;
  (void)module;
  if ((n != 17 && n != 18 && n < 20) || Py_TYPE(args[0]) != &route_type)
    return PyErr_Format(PyExc_TypeError,
                        "execute takes a Route, 16 integers, optional offsets, then a table of operands, numbers and "
                        "arrays; got %zd arguments", n);
  for (int i = 0; i < 2 && n > 18; i++)
    if (!(table[i] = address_in(args[18 + i])) && PyErr_Occurred()) return NULL;
  if (n > 20 && !get_operands(args[18], args + 20, n - 20, table[0] = operands)) return NULL;
  for (int i = 0; i < NUMBERS; i++)
    if ((v[i] = PyLong_AsLong(args[at[i]])) == -1 && PyErr_Occurred()) return NULL;
  for (int i = 0; i < 3; i++)
    if (!(pointers[i] = address_in(args[pointer_at[i]])) && PyErr_Occurred()) return NULL;
  if (!get_offsets(n > 17 ? args[17] : NULL, &outer)) return NULL;
  set_numbers(&p, v);
  p.a = pointers[0];
  p.b = pointers[1];
  p.c = pointers[2];
  p.operands = table[0];
  p.numbers = table[1];
  int failed = run_route((route_object *)args[0], &p, outer.buf, outer.len / (Py_ssize_t)(3 * sizeof(long)));
  if (outer.obj) PyBuffer_Release(&outer);
  return failed ? NULL : Py_NewRef(Py_None);
}
#pragma GCC pop_options

/* Several kernels, one after the other, each with the 16 numbers of `execute`, an address and count of offsets, and
 * the addresses of operands and numbers: words of 64 bits. */
static PyObject *py_execute_all(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  if (n != 2 || !PyTuple_CheckExact(args[0]))
    return PyErr_Format(PyExc_TypeError, "execute_all takes a tuple of routes and an address");
  const long *w = PyLong_AsVoidPtr(args[1]);
  if (!w) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "execute_all got no address");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); i++, w += STEP_WORDS) {
    route_object *route = (route_object *)PyTuple_GET_ITEM(args[0], i);
    if (Py_TYPE((PyObject *)route) != &route_type) return PyErr_Format(PyExc_TypeError, "execute_all takes routes");
    portmm_args p = {.m = w[0], .n = w[1], .k = w[2], .batch = w[3],
                           .a = (void *)w[4], .a_m = w[5], .a_k = w[6], .a_batch = w[7],
                           .b = (void *)w[8], .b_k = w[9], .b_n = w[10], .b_batch = w[11],
                           .c = (void *)w[12], .c_m = w[13], .c_n = w[14], .c_batch = w[15],
                           .operands = (void *)w[18], .numbers = (void *)w[19]};
    if (run_route(route, &p, w[16] ? (const long *)w[16] : origin, w[16] ? w[17] : 1)) return NULL;
  }
  return Py_NewRef(Py_None);
}

/* The largest number of a vector of f32, at least 0; -1 if any is negative or not finite. */
static PyObject *py_largest_scale(PyObject *module, PyObject *x) {
  const array_object *a = (array_object *)x;
  (void)module;
  if (Py_TYPE(x) != array_type || a->nd != 1 || element_of(a) < 0 || strcmp(elements[element_of(a)].name, "f32") ||
      !(a->flags & NUMPY_ALIGNED) || (a->shape[0] > 1 && a->strides[0] != sizeof(float)))
    return PyErr_Format(PyExc_TypeError, "scales must be a contiguous 1-D float32 array");
  const float *v = (const float *)a->data;
  int good = 1;
  float most = 0;
  for (Py_ssize_t i = 0; i < a->shape[0]; i++) {
    good &= v[i] >= 0 && v[i] <= FLT_MAX; /* a NaN is neither */
    most = v[i] > most ? v[i] : most;
  }
  return PyFloat_FromDouble(good ? most : -1);
}
