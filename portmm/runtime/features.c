/* Features of this processor as words with a blank after each, by Linux's names: on x86-64 from CPUID and XCR0, also
 * vendor=NAME and family=NUMBER; on AArch64 from HWCAP. After the tables, which are those of host/features.py. */
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

static void read_features(char *text, size_t size) {
  size_t at = 0;
  text[0] = 0;
#if defined(__x86_64__)
  unsigned r[4], name[4] = {0}, most[2]; /* leaves: of the first range, and from 0x80000000 on */
  unsigned long state = 0;
  __cpuid(0, most[0], name[0], name[2], name[1]);
  __cpuid(0x80000000, most[1], r[1], r[2], r[3]);
  __cpuid(1, r[0], r[1], r[2], r[3]);
  unsigned read[2] = {1, 0}; /* the leaf in r */
  unsigned family = r[0] >> 8 & 15;
  if (family == 15) family += r[0] >> 20 & 255;
  at += (size_t)snprintf(text, size, "vendor=%.12s family=%u ", (const char *)name, family);
  if (r[2] >> 27 & 1) { /* OSXSAVE */
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    state = (unsigned long)high << 32 | low;
  }
  for (size_t i = 0; i < sizeof feature_bits / sizeof *feature_bits; i++) {
    const unsigned leaf = feature_bits[i].leaf, sub = feature_bits[i].sub;
    if (leaf != read[0] || sub != read[1]) { /* a virtual machine takes microseconds for each */
      read[0] = leaf, read[1] = sub;
      if (leaf <= most[leaf >> 31])
        __cpuid_count(leaf, sub, r[0], r[1], r[2], r[3]);
      else
        memset(r, 0, sizeof r);
    }
    if (r[feature_bits[i].word] >> feature_bits[i].bit & 1 && (state & feature_bits[i].state) == feature_bits[i].state)
      at += (size_t)snprintf(text + at, size - at, "%s ", feature_bits[i].name);
  }
#elif defined(__aarch64__)
  unsigned long bits[2] = {getauxval(AT_HWCAP), getauxval(AT_HWCAP2)};
  for (size_t i = 0; i < sizeof feature_bits / sizeof *feature_bits; i++)
    if (bits[feature_bits[i].word] >> feature_bits[i].bit & 1)
      at += (size_t)snprintf(text + at, size - at, "%s ", feature_bits[i].name);
  int length = bits[0] >> 22 & 1 ? prctl(51 /* PR_SVE_GET_VL */, 0, 0, 0, 0) : 0;
  if (length > 0) snprintf(text + at, size - at, "sve_vl%d ", 8 * (length & 0xffff));
#else
  (void)size, (void)at;
#endif
}
