/* Features of this processor as words with a blank after each, by Linux's names, as features.c writes them: by sysctl.
 * After the table, which is that of host/features.py. */
#include <sys/sysctl.h>

static void read_features(char *text, size_t size) {
  size_t at = (size_t)snprintf(text, size, ALWAYS);
  for (size_t i = 0; i < sizeof feature_names / sizeof *feature_names; i++) {
    int has = 0;
    size_t bytes = sizeof has;
    if (!sysctlbyname(feature_names[i].key, &has, &bytes, NULL, 0) && has)
      at += (size_t)snprintf(text + at, size - at, "%s ", feature_names[i].name);
  }
}
