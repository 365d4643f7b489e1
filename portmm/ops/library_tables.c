struct kernel { kernel_function function; long (*workspace)(long, long, long, long, long);
  int swap, size; long least, most; };
struct row { const char *types; char a, b; int machine, kernel, one;
  long threads, least, most, n, k; long bytes[3]; };
struct packing { const char *types; int machine, by_rows, by_columns, sums; long nr, kr, bytes; };
{% for x in kernels %}
void portmm_kernel_{{ x.number }}(const portmm_args *args);
static long workspace_{{ x.number }}(long m, long n, long k, long batch, long workers) {
  (void)m, (void)n, (void)k, (void)batch, (void)workers;
  return {{ x.workspace }};
}
{% endfor %}
static const struct kernel kernels[] = {
{% for x in kernels %}
  {portmm_kernel_{{ x.number }}, workspace_{{ x.number }}, {{ x.swap }}, {{ x.size }}, {{ x.least }}, {{ x.most }}},
{% endfor %}
};
enum { MACHINES = {{ machines | length }} };
static const struct { const char *name; const char *const *features; } machines[] = {
{% for name, features in machines %}
  {"{{ name }}", (const char *const[]){ {%- for x in features %}"{{ x }}", {% endfor %}NULL}},
{% endfor %}
};
static const char *const unlisted[] = { {%- for x in unlisted %}"{{ x }}", {% endfor %}NULL};
static const struct row rows[] = {
{% for x in rows %}
  {{ x }},
{% endfor %}
};
enum { ROWS = sizeof rows / sizeof *rows };
static const struct packing packings[] = {
{% for x in packings %}
  {{ x }},
{% endfor %}
  {"", -1, 0, 0, 0, 0, 0, 0},
};
enum { PACKINGS = sizeof packings / sizeof *packings - 1 };
