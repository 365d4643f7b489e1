/* Values of four bits, two in a byte. Follows tape.c in one translation unit. */

#pragma GCC push_options
#pragma GCC optimize("O2", "tree-vectorize")
static void join_codes(const unsigned short *restrict pairs, unsigned char *restrict to, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++) to[i] = (unsigned char)(pairs[i] | pairs[i] >> 4);
}
#pragma GCC pop_options

/* join_codes(values, to): a byte of `to` (rows, n / 2) is two values (rows, n), of which the first is in the low half. */
static PyObject *py_join_codes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  const array_object *values, *to;
  (void)module;
  if (count != 2) return PyErr_Format(PyExc_TypeError, "join_codes takes two arguments; got %zd", count);
  if (!(values = dense_matrix(args[0], U8)) || !(to = dense_matrix(args[1], U8))) return NULL;
  const Py_ssize_t rows = values->shape[0], n = values->shape[1];
  if (rows != to->shape[0] || n != 2 * to->shape[1] || !(to->flags & NUMPY_WRITEABLE) || (size_t)values->data % 2)
    return PyErr_Format(PyExc_ValueError, "values (rows, n) need an array (rows, n / 2) that can be written");
  join_codes((const unsigned short *)values->data, (unsigned char *)to->data, rows * to->shape[1]);
  Py_RETURN_NONE;
}
