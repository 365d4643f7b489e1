/* Elements of 16 bits of a kernel that is verified: numbers of expressions in a table of their own. To round to 16 bits
   is no operation of a field. What moves elements, in pairs or in vectors, moves their numbers. */
typedef unsigned short half_t;
static const half_t UNSET = 0xffff;
static const int FULL = 7;
static H half_values[1 << 16];
static unsigned half_count, half_room, *half_of;

/* The number of a value; 0 is zero, as the bits are. */
static half_t narrowed(F x) {
  if (x.h == POISON) return UNSET;
  if (x.h >= half_room) {
    half_of = (unsigned *)realloc(half_of, room * sizeof(unsigned));
    for (; half_room < room; ++half_room) half_of[half_room] = 0;
  }
  if (!half_of[x.h]) {
    if (half_count == UNSET) exit(FULL);
    half_values[half_count] = x.h, half_of[x.h] = ++half_count;
  }
  return (half_t)(half_of[x.h] - 1);
}
static F widened(half_t x) { return F::of(x == UNSET ? POISON : half_values[x]); }
